"""Ranks that Ray starts, with samplers that rank 0 drives: the same run as in one process."""

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
from posttrain.loop import central, online
from posttrain.rollout.cluster import Cluster
from posttrain.rollout.ray import RayChannel
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
    """A cluster for all tests of this file; runs in this process join it."""
    joined = Cluster("", {"async.cpus": 4})
    yield
    joined.close()


@pytest.fixture(scope="module")
def place(able, tmp_path_factory):
    """A folder with a recipe, in which the tests run."""
    root = tmp_path_factory.mktemp("ranks")
    tables = {
        "model": {"path": str(able), "dtype": "float32", "device": "cpu"},
        "method": {"name": "grpo"},
        "task": {"arithmetic": {"low": 2, "high": 4, "held_out": 4, "template": "{a}+{b}="}},
        "verifier": {"number": {"where": "last"}},
        "sampling": {"max_new_tokens": 3},
        "rollout": {"groups": 5, "group_size": 4, "select": "varied"},
        # With a small eps Adam turns the rounding error of a gradient near 0 into a step of size lr.
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
    newest = max((path / "checkpoints").glob("step_*"))
    files = sorted((newest / "model").glob("model*.safetensors"))  # ranks with shares write one each
    return {name: x for file in files for name, x in load_file(file).items()}


def gap(a: Path, b: Path) -> float:
    x, y = weights(a), weights(b)
    return max(float((x[name] - y[name]).abs().max()) for name in x)


def episodes(path: Path) -> list[tuple]:
    """Return (file, task, sample, text, score) of the episodes of all ranks, sorted."""
    files = [*path.glob("samples/*.jsonl"), *path.glob("ranks/*/samples/*.jsonl")]
    rows = [(f.stem, json.loads(line)) for f in files for line in f.read_text().splitlines()]
    return sorted((name, r["task"], r["sample"], "".join(r["pieces"]), r["score"]) for name, r in rows)


@pytest.fixture(scope="module")
def one(place):
    assert run("--run-dir", "one", "--quiet") == 0
    return place / "one"


@pytest.mark.parametrize("design", DESIGNS)
def test_two_ranks_make_the_run_of_one_process(design, one, place, capfd):
    path = place / design
    assert run("--run-dir", str(path), *TWO, *DESIGNS[design]) == 0, capfd.readouterr().err
    assert gap(one, path) < 1e-5
    assert episodes(path) == episodes(one)
    for alone, together in zip(without_clock(one), without_clock(path), strict=True):
        assert together == pytest.approx(alone, rel=1e-3, abs=1e-5, nan_ok=True)


def test_shards_are_gathered_for_rank_0_to_publish(one, place, capfd):
    words = [*TWO, *DESIGNS["references"], "--set", "train.shard=true"]
    assert run("--run-dir", "shards", *words) == 0, capfd.readouterr().err
    assert gap(one, place / "shards") < 1e-5
    assert episodes(place / "shards") == episodes(one)


def start(*words: str) -> subprocess.Popen:
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
    """Return the processes of the ranks of a run, in the order of ranks."""
    processes = {}
    for process in psutil.process_iter():
        try:
            if path in process.cmdline() and "RANK" in (environment := process.environ()):
                processes[int(environment["RANK"])] = process
        except psutil.Error:
            continue
    return [processes[n] for n in sorted(processes)]


def until(condition) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def has_lines(path: Path, count: int) -> bool:
    return (path / "metrics.jsonl").exists() and len(lines(path)) > count


def test_killed_rank_is_named_and_the_run_can_resume(one, place):
    words = ["--run-dir", "killed", *TWO, *DESIGNS["references"]]
    process = start(*words, "--set", "run.updates=1000")
    until(lambda: has_lines(place / "killed", 2))
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
    process = start("--run-dir", "asked", *TWO, *DESIGNS["references"], "--set", "run.updates=1000")
    until(lambda: has_lines(place / "asked", 2))
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1, err
    assert "all of it is saved; go on with --resume" in err
    assert "Traceback" not in err
    until(lambda: not ranks_of("asked"))


def test_killed_command_leaves_no_rank(place):
    process = start("--run-dir", "left", *TWO, *DESIGNS["references"], "--set", "run.updates=1000")
    until(lambda: has_lines(place / "left", 1))
    process.kill()
    process.communicate(timeout=WAIT_S)
    until(lambda: not ranks_of("left"))


def test_ranks_with_too_many_gpus_are_refused(place, capfd):
    assert run("--run-dir", "much", *TWO, "--set", "train.gpus=1") == 2
    assert "train.gpus: 2 GPUs are asked for, and the cluster has 0" in capfd.readouterr().err.replace(
        "\n", " "
    )


# ---------------------------------------------------------------------- episodes that stay with their sampler


@pytest.fixture
def keeping(monkeypatch):
    """Make the samplers of one process store their episodes, as those of several ranks do."""
    make = RayChannel.__init__
    monkeypatch.setattr(online, "GroupSource", central.CentralSource)
    monkeypatch.setattr(RayChannel, "__init__", lambda *a, **k: make(*a, **{**k, "keeps": True}))


def exact(path: Path) -> bytes:
    newest = max((path / "checkpoints").glob("step_*"))
    return (newest / "model" / "model.safetensors").read_bytes()


def test_sampler_that_dies_with_episodes_changes_no_result(one, place, keeping, monkeypatch, capfd):
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
    assert episodes(place / "dies") == episodes(one)


def test_checkpoint_holds_episodes_stored_in_samplers(place, keeping, capfd):
    words = ["--quiet", "--set", "async.place=ray", "--set", "async.max_lag=1"]
    words += ["--set", "method.correction=token_truncated", "--set", "rollout.select=all"]
    assert run("--run-dir", "whole-1", *words, "--set", "run.updates=5") == 0, capfd.readouterr().err
    assert run("--run-dir", "parts-1", *words, "--set", "run.updates=2") == 0
    assert run("--run-dir", "parts-1", *words, "--set", "run.updates=5", "--resume") == 0
    # When weights arrive depends on the clock; which tasks are trained on does not: none is lost or repeated.
    resumed, whole = (
        [row[:3] for row in episodes(place / name) if row[0][0] != "e"] for name in ("parts-1", "whole-1")
    )
    assert resumed == whole
