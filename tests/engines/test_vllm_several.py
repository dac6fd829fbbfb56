"""Runs that sample from several vLLM servers, one for each sampler: stand-ins for them (conftest.py)."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from posttrain.loop import sampling
from posttrain.models.pretrained import silent
from posttrain.plan.plan import plan_run
from posttrain.recipe.config import read as read_config
from posttrain.rollout.remote import ThreadChannel

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
NAMES = ("version", "reward/mean", "length/mean", "loss", "grad_norm")


@pytest.fixture
def in_threads(monkeypatch) -> None:
    """Samplers of other processes run in threads of this one, with the same messages."""
    monkeypatch.setattr(sampling, "ProcessChannel", lambda make, log: ThreadChannel(make))


def weights(run: Path) -> dict[str, torch.Tensor]:
    """The trained weights at a run's end; ranks with shares write a file each."""
    files = sorted(run.glob("checkpoints/step_*/[am]*/*model*.safetensors"))
    assert files
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def updates(run: Path) -> list[list[float]]:
    """Some metrics of each update, the first evaluation left out."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [[line[name] for name in NAMES] for line in lines if line["update"] > 0]


def check_transfers(servers: Sequence[Any], count: int) -> None:
    """Fail unless each server was probed, drew after each of its loads, and no answer was broken off."""
    for server in servers:
        assert server.order == ["draw", *["load", "draw"] * count]
        assert not server.closed


@pytest.fixture
def alone(fleet, run_cli, write, tmp_path) -> Path:
    """A run with one sampler on one server."""
    [server], tables = fleet(1)
    said = run_cli("train", write(tables), "--run-dir", tmp_path / "alone", "--quiet")
    assert said.code == 0, said.err
    check_transfers([server], 3)
    return tmp_path / "alone"


def test_two_samplers_on_two_servers_do_what_one_does(
    fleet, run_cli, write, tmp_path, alone, in_threads
) -> None:
    servers, tables = fleet(2)
    file = write(tables, {"async": {"samplers": 2}})
    said = run_cli("train", file, "--run-dir", tmp_path / "two", "--quiet")
    assert said.code == 0, said.err
    check_transfers(servers, 3)
    assert updates(tmp_path / "two") == updates(alone)
    one, two = weights(alone), weights(tmp_path / "two")
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_flipped_bit_of_one_server_stops_the_run(fleet, run_cli, write, tmp_path, in_threads) -> None:
    servers, tables = fleet(2)
    reload = servers[1].reload

    def spoil(place: str) -> None:
        reload(place)
        if servers[1].order.count("load") == 2:
            [file] = Path(place).iterdir()
            named = load_file(file)
            named["model.norm.weight"].view(torch.int32)[3] ^= 1
            save_file(named, file)

    servers[1].reload = spoil
    file = write(tables, {"async": {"samplers": 2}})
    said = run_cli("train", file, "--run-dir", tmp_path / "run", "--quiet")
    assert (said.code, said.err.count("\n")) == (1, 1)
    assert "holds other weights than the learner sent as version 1" in said.err


@pytest.mark.parametrize(
    ("over", "problem"),
    [
        ({}, "async.samplers: each sampler replaces the weights of a server of its own"),
        (
            {"async": {"samplers": 2}, "engine": {"url": ["http://h:1", "http://h:1/"]}},
            "url names a server twice",
        ),
        ({"async": {"samplers": 2}, "engine": {"url": ["http://h:1", "h:2"]}}, "url must begin with http"),
        ({"engine": {"url": ["http://h:1", ""]}}, "url must begin with http:// or https://, not ''"),
        ({"engine": {"url": [""]}}, "url must begin with http:// or https://, not ''"),
        ({"async": {"samplers": 2, "place": "here"}}, "set place = 'process'"),
    ],
)
def test_servers_that_do_not_suit_samplers_are_refused(fleet, run_cli, write, over, problem) -> None:
    servers, tables = fleet(2)
    said = run_cli("validate", write(tables, over))
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert problem in said.err
    assert not any(server.calls for server in servers)


def test_a_server_of_several_that_is_away_is_named(fleet, run_cli, write) -> None:
    servers, tables = fleet(2)
    servers[1].__exit__()
    said = run_cli("validate", write(tables, {"async": {"samplers": 2}}))
    assert said.code == 2
    assert f"engine.url: the vLLM server at {servers[1].url}: is unreachable" in said.err


@pytest.mark.full
def test_processes_and_ranks_do_what_one_sampler_does(fleet, run_cli, write, tmp_path, alone) -> None:
    one = weights(alone)
    servers, tables = fleet(2)
    file = write(tables, {"async": {"samplers": 2}})
    said = run_cli("train", file, "--run-dir", tmp_path / "two", "--quiet")
    assert said.code == 0, said.err
    check_transfers(servers, 3)
    two = weights(tmp_path / "two")
    assert all(torch.equal(one[name], two[name]) for name in one)
    servers, tables = fleet(2)
    command = [*TORCHRUN, "2", "-m", "posttrain", "train", write(tables), "--run-dir", tmp_path / "ranks"]
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    check_transfers(servers, 3)
    both = weights(tmp_path / "ranks")
    assert all(torch.allclose(one[name], both[name], atol=1e-5) for name in one)
    assert updates(tmp_path / "ranks")[0][:3] == updates(alone)[0][:3]


RANK_RUNS = Path(__file__).parents[1] / "loop" / "rank_runs.py"
SHARED: dict[str, dict[str, Any]] = {
    "here": {},
    "adapter": {"lora": {"rank": 4}, "train": {"shard": True}},
    "asleep": {"engine": {"sleep": True}, "train": {"shard": True}},
    "ahead": {
        "async": {"max_lag": 1, "place": "thread"},
        "method": {"correction": "token_truncated"},
        "checkpoint": {"every": 1},
    },
}
"""Recipes whose servers are those of rank 0, which draws for all."""


def test_rank_0_alone_asks_servers_that_ranks_share(fleet, write, monkeypatch) -> None:
    [server], tables = fleet(1)
    recipe = read_config(write(tables)).recipe
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    for rank in (1, 0):
        monkeypatch.setenv("RANK", str(rank))
        plan = plan_run(recipe, silent, ranks=2, begins=True)
        assert bool(server.calls) == (rank == 0)
        assert plan.sections()["Each of the ranks"]["answers"] == "drawn by rank 0, for all"


@pytest.mark.full
def test_ranks_that_share_servers_do_what_one_does(lab, fleet, run_cli, write, tmp_path, in_threads) -> None:
    recipes = SHARED | {"pairs": lab.learns_from_pairs(tmp_path) | {"engine": {"sleep": True}}}
    used, commands = {}, []
    for name, over in recipes.items():
        how = {"lora": 4} if name == "adapter" else {}
        over = {"run": {"updates": 3}, "eval": {"every": 1}} | over
        for ranks in (1, 2):
            [used[name, ranks]], tables = fleet(1, **how)
            file = write(tables, over, name=f"{name}-{ranks}")
            words = ["train", str(file), "--run-dir", str(tmp_path / f"{name}-{ranks}"), "--quiet"]
            if ranks == 2:
                commands.append(words)
                continue
            said = run_cli(*words)
            assert said.code == 0, said.err
    (tmp_path / "commands.json").write_text(json.dumps(commands))
    words = [*TORCHRUN, "2", str(RANK_RUNS), str(tmp_path / "commands.json"), str(tmp_path / "codes")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=280)
    codes = [json.loads((tmp_path / f"codes.{rank}").read_text()) for rank in range(2)]
    assert codes == [[0] * len(commands)] * 2, done.stderr[-3000:]
    for name in recipes:
        one, both = used[name, 1], used[name, 2]
        # A weight sync is one load, and nothing is asked of a server meanwhile: it would refuse.
        assert sorted(both.calls) == sorted(one.calls), name
        if name != "ahead":
            assert both.order == one.order, name
        assert both.order.count("load") == {"adapter": 1, "pairs": 2}.get(name, 4)
        assert not both.closed
        one, both = weights(tmp_path / f"{name}-1"), weights(tmp_path / f"{name}-2")
        assert one.keys() == both.keys()
        assert all(torch.allclose(one[key], both[key], atol=1e-5) for key in one), name


@pytest.mark.full
def test_a_rank_that_draws_from_no_server_is_missed(fleet, write, tmp_path) -> None:
    [server], tables = fleet(1)
    file = write(tables, {"run": {"updates": 1000}})
    words = [*TORCHRUN, "2", "-m", "posttrain", "train", file, "--run-dir", tmp_path / "run", "--quiet"]
    run = subprocess.Popen([str(word) for word in words], stderr=subprocess.PIPE, text=True)
    while server.order.count("load") < 3:
        assert run.poll() is None, run.communicate()[1][-3000:]
        time.sleep(0.05)
    ranks = psutil.Process(run.pid).children()
    [other] = [rank for rank in ranks if rank.environ()["RANK"] == "1"]
    other.kill()
    _, err = run.communicate(timeout=120)
    assert run.returncode != 0
    assert "rank 1 of 2 was killed or stopped while the others waited for" in err
