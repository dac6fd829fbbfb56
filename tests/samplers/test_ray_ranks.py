"""Ranks that Ray starts, with samplers that the first of them drives: the run of one process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from posttrain import cli
from posttrain.base.toml import dump
from posttrain.runtime import online
from posttrain.runtime.ranks import central
from posttrain.samplers.cluster import Cluster
from posttrain.samplers.ray import RayChannel
from posttrain.testing import repeatable

ray = pytest.importorskip("ray", reason="Ray is not installed: make test-ray has an environment with it")

WAIT_S = 200
DESIGNS = {
    "references": ["--set", "async.place=ray", "--set", "async.samplers=2"],
    "each its own": [],
}
TWO = ["--set", "train.ranks=2", "--quiet"]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """A cluster for all tests of this file; what is run in this process joins it."""
    found = Cluster("", {"async.cpus": 4})
    yield
    found.close()


@pytest.fixture(scope="module")
def place(able, tmp_path_factory):
    """A folder with a recipe that one process has run, and two ranks in each of the designs."""
    root = tmp_path_factory.mktemp("ranks")
    tables = {
        "model": {"path": str(able), "dtype": "float32", "device": "cpu"},
        "method": {"name": "grpo"},
        "task": {"arithmetic": {"low": 2, "high": 4, "held_out": 4, "template": "{a}+{b}="}},
        "verifier": {"number": {"where": "last"}},
        "sampling": {"max_new_tokens": 3},
        "rollout": {"groups": 5, "group_size": 4, "select": "varied"},
        # With eps a gradient that is hardly 0 does not move its weight by what it was rounded to.
        "optim": {"lr": 0.003, "eps": 1e-4},
        "run": {"updates": 3, "threads": 1},
        "checkpoint": {"every": 1},
        "record": {"tokens": 0},
        "train": {"check_every": 1, "deadline_s": 150.0},  # samplers start within it, on a busy machine too
    }
    (root / "recipe.toml").write_text(dump(tables))
    before = Path.cwd()
    os.chdir(root)
    yield root
    os.chdir(before)


def run(*words: str) -> int:
    return cli.run(["train", "recipe.toml", *words])


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def without_clock(path: Path) -> list[dict]:
    return repeatable(path / "metrics.jsonl")


def weights(path: Path) -> dict:
    return load_file(max((path / "checkpoints").glob("step_*")) / "model" / "model.safetensors")


def gap(a: Path, b: Path) -> float:
    x, y = weights(a), weights(b)
    return max(float((x[name] - y[name]).abs().max()) for name in x)


def said(path: Path) -> list[tuple]:
    """What was drawn, of all ranks."""
    files = [*path.glob("samples/*.jsonl"), *path.glob("ranks/*/samples/*.jsonl")]
    rows = [(f.stem, json.loads(line)) for f in files for line in f.read_text().splitlines()]
    return sorted((name, r["task"], r["sample"], "".join(r["pieces"]), r["score"]) for name, r in rows)


@pytest.fixture(scope="module")
def one(place):
    assert run("--run-dir", "one", "--quiet") == 0
    return place / "one"


@pytest.mark.parametrize("design", DESIGNS)
def test_two_ranks_under_ray_make_the_run_of_one_process(design, one, place, capfd):
    path = place / design
    assert run("--run-dir", str(path), *TWO, *DESIGNS[design]) == 0, capfd.readouterr().err
    assert gap(one, path) < 1e-5
    assert said(path) == said(one)
    for alone, together in zip(without_clock(one), without_clock(path), strict=True):
        assert together == pytest.approx(alone, rel=1e-3, abs=1e-5, nan_ok=True)


def test_shards_gather_the_weights_that_rank_0_publishes(one, place, capfd):
    words = [*TWO, *DESIGNS["references"], "--set", "train.shard=true"]
    assert run("--run-dir", "shards", *words) == 0, capfd.readouterr().err
    assert gap(one, place / "shards") < 1e-5
    assert said(place / "shards") == said(one)


def started(*words: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "posttrain", "train", "recipe.toml", *words]
    address = ray.get_runtime_context().gcs_address
    return subprocess.Popen(
        command,
        env=os.environ | {"RAY_ADDRESS": address},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ranks_of(path: str) -> list[psutil.Process]:
    """The processes of the ranks of a run, by their number."""
    found = {}
    for process in psutil.process_iter():
        try:
            if path in process.cmdline() and "RANK" in (environment := process.environ()):
                found[int(environment["RANK"])] = process
        except psutil.Error:
            continue
    return [found[n] for n in sorted(found)]


def until(so) -> None:
    end = time.monotonic() + WAIT_S
    while not so():
        assert time.monotonic() < end
        time.sleep(0.05)


def begun(path: Path, count: int) -> bool:
    return (path / "metrics.jsonl").exists() and len(lines(path)) > count


def test_a_killed_rank_is_named_and_the_run_goes_on_as_if_nothing_had_been(one, place):
    words = ["--run-dir", "killed", *TWO, *DESIGNS["references"]]
    process = started(*words, "--set", "run.updates=1000")
    until(lambda: begun(place / "killed", 2))
    ranks_of("killed")[1].kill()
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1, err
    assert "rank 1 of 2 was killed or stopped" in err
    assert "rank 1 was ended by SIGKILL" in err
    assert "Traceback" not in err
    until(lambda: not ranks_of("killed"))
    last = len(lines(place / "killed")) + 2
    for name in ("killed", "whole"):
        more = ["--resume"] if name == "killed" else []
        assert run("--run-dir", name, *words[2:], *more, "--set", f"run.updates={last}") == 0
    assert gap(place / "killed", place / "whole") == 0


def test_ctrl_c_saves_on_all_ranks(place):
    process = started("--run-dir", "asked", *TWO, *DESIGNS["references"], "--set", "run.updates=1000")
    until(lambda: begun(place / "asked", 2))
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1, err
    assert "all of it is saved, go on with --resume" in err
    assert "Traceback" not in err
    until(lambda: not ranks_of("asked"))


def test_of_a_command_that_is_killed_no_rank_is_left(place):
    process = started("--run-dir", "left", *TWO, *DESIGNS["references"], "--set", "run.updates=1000")
    until(lambda: begun(place / "left", 1))
    process.kill()
    process.communicate(timeout=WAIT_S)
    until(lambda: not ranks_of("left"))


def test_more_than_the_cluster_has_is_refused(place, capfd):
    assert run("--run-dir", "much", *TWO, "--set", "train.gpus=1") == 2
    assert "train.gpus: 2 GPUs are asked for, and the cluster has 0" in capfd.readouterr().err.replace(
        "\n", " "
    )


# ---------------------------------------------------------------------- episodes that stay with their sampler


@pytest.fixture
def keeping(monkeypatch):
    """One process whose samplers keep their episodes, as those of several ranks do."""
    make = RayChannel.__init__
    monkeypatch.setattr(online, "GroupSource", central.CentralSource)
    monkeypatch.setattr(RayChannel, "__init__", lambda *a, **k: make(*a, **{**k, "keeps": True}))


def exact(path: Path) -> bytes:
    newest = max((path / "checkpoints").glob("step_*"))
    return (newest / "model" / "model.safetensors").read_bytes()


def test_a_sampler_that_dies_with_what_it_keeps_costs_nothing_but_time(
    one, place, keeping, monkeypatch, capfd
):
    fetch, killed = central.fetch, []

    def fatal(groups):
        groups = list(groups)
        if groups and len(killed) < 2 and groups[0].number >= 5:
            actor = ray.get_actor(groups[0].place, namespace="posttrain")
            killed.append(groups[0].place)
            os.kill(ray.get(actor.__ray_call__.remote(lambda self: os.getpid())), signal.SIGKILL)
        return fetch(groups)

    monkeypatch.setattr(central, "fetch", fatal)
    assert run("--run-dir", "dies", "--quiet", *DESIGNS["references"]) == 0, capfd.readouterr().err
    assert len(set(killed)) == 2
    assert lines(place / "dies")[-1]["samplers/restarts"] == 2
    assert exact(place / "dies") == exact(one)
    assert said(place / "dies") == said(one)


def test_what_samplers_keep_while_a_run_is_saved_is_in_its_checkpoint(place, keeping, capfd):
    words = ["--quiet", "--set", "async.place=ray", "--set", "async.max_lag=1"]
    words += ["--set", "method.correction=token_truncated", "--set", "rollout.select=all"]
    assert run("--run-dir", "whole-1", *words, "--set", "run.updates=5") == 0, capfd.readouterr().err
    assert run("--run-dir", "parts-1", *words, "--set", "run.updates=2") == 0
    assert run("--run-dir", "parts-1", *words, "--set", "run.updates=5", "--resume") == 0
    # When weights arrive depends on the clock; which tasks are trained on does not: none is lost or repeated.
    asked = [[r[:3] for r in said(place / name) if r[0][0] != "e"] for name in ("parts-1", "whole-1")]
    assert asked[0] == asked[1]
