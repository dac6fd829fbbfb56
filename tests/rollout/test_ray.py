"""Samplers on a Ray cluster: the same run as without, also if an actor dies; nothing leaks."""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from posttrain.commands import doctor
from posttrain.rollout.cluster import Cluster
from posttrain.rollout.pool import SamplerPool
from posttrain.rollout.protocol import GroupRequest
from posttrain.rollout.ray import ObjectStore, RayChannel
from posttrain.testing import repeatable
from posttrain.types import RunError, Sampling, Task

ray = pytest.importorskip("ray", reason="Ray is not installed: make test-ray has an environment with it")

ON_RAY = {"async": {"place": "ray"}}
WAIT_S = 100


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """A cluster for all tests of this file; runs in this process join it."""
    joined = Cluster("", {"async.cpus": 2})
    yield
    joined.close()


@pytest.fixture
def sums(able, online):
    """A recipe whose model answers some tasks right, so that its groups have advantages."""
    over = {"low": 2, "high": 4, "held_out": 2}
    arithmetic = online["task"]["arithmetic"] | over
    return online | {"model": online["model"] | {"path": str(able)}, "task": {"arithmetic": arithmetic}}


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def without_clock(run: Path) -> list[dict]:
    return repeatable(run / "metrics.jsonl")


def weights(run: Path) -> bytes:
    return (run / "checkpoints" / "step_000004" / "model" / "model.safetensors").read_bytes()


def samples(run: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in sorted((run / "samples").glob("*.jsonl"))}


def trained(run: Path) -> list[tuple[int, str, int, int]]:
    """Return (update, task, group, sample) of each episode that was trained on."""
    rows = [
        json.loads(line)
        for name, text in samples(run).items()
        if not name.startswith("eval")
        for line in text.splitlines()
    ]
    return [(row["update"], row["task"], row["group"], row["sample"]) for row in rows]


def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds, at most WAIT_S."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def pid(actor) -> int:
    return ray.get(actor.__ray_call__.remote(lambda self: os.getpid()))


# ---------------------------------------------------------------------- the same run


def test_ray_without_lag_makes_the_weights_of_a_local_run(sums, able, write, run_cli, tmp_path):
    assert run_cli("train", write(sums), "--run-dir", tmp_path / "here", "--quiet").code == 0
    done = run_cli("train", write(sums, ON_RAY), "--run-dir", tmp_path / "ray", "--quiet")
    assert done.code == 0, done.err
    assert weights(tmp_path / "ray") == weights(tmp_path / "here")
    assert weights(tmp_path / "ray") != (able / "model.safetensors").read_bytes(), "nothing was learnt"
    assert samples(tmp_path / "ray") == samples(tmp_path / "here")
    assert without_clock(tmp_path / "ray") == without_clock(tmp_path / "here")


def test_actor_killed_within_an_update_changes_no_result(sums, write, run_cli, tmp_path, monkeypatch):
    send, admitted = RayChannel.send, []

    def fatal(channel, message):
        number = pid(channel._actor) if message[0] == "admit" and len(admitted) == 1 else 0
        send(channel, message)
        if message[0] == "admit":
            admitted.append([each.number for each in message[1]])
        if number:
            os.kill(number, signal.SIGKILL)

    assert run_cli("train", write(sums), "--run-dir", tmp_path / "here", "--quiet").code == 0
    monkeypatch.setattr(RayChannel, "send", fatal)
    done = run_cli("train", write(sums, ON_RAY), "--run-dir", tmp_path / "ray", "--quiet")
    assert done.code == 0, done.err
    assert admitted == [[0, 1, 2], [3, 4, 5], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert weights(tmp_path / "ray") == weights(tmp_path / "here")
    assert samples(tmp_path / "ray") == samples(tmp_path / "here")
    assert lines(tmp_path / "ray")[-1]["samplers/restarts"] == 1


def test_actor_killed_ahead_of_training_loses_no_group(sums, write, run_cli, tmp_path, monkeypatch):
    send, kinds = RayChannel.send, []

    def fatal(channel, message):
        kinds.append(message[0])
        if kinds.count("admit") == 3 and message[0] == "admit":
            os.kill(pid(channel._actor), signal.SIGKILL)
        send(channel, message)

    monkeypatch.setattr(RayChannel, "send", fatal)
    over = {
        "async": {"place": "ray", "samplers": 2, "max_lag": 1},
        "method": {"correction": "token_truncated"},
    }
    done = run_cli("train", write(sums, over), "--run-dir", tmp_path / "ray", "--quiet")
    assert done.code == 0, done.err
    last = lines(tmp_path / "ray")[-1]
    assert (last["update"], last["samplers/restarts"]) == (4, 1)
    assert max(line.get("lag/max", 0) for line in lines(tmp_path / "ray")) <= 1
    assert run_cli("train", write(sums), "--run-dir", tmp_path / "here", "--quiet").code == 0
    assert trained(tmp_path / "ray") == trained(tmp_path / "here")


# ---------------------------------------------------------------------- weights


def used() -> int:
    """Return the bytes of all objects in the store of this machine."""
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    return get_memory_info_reply(get_state_from_address(None)).store_stats.object_store_bytes_used


def test_object_store_does_not_grow_over_50_updates(sums, write, run_cli, tmp_path, monkeypatch):
    gc.collect()  # reference cycles of runs before this one hold their last version
    put, copied, before = ObjectStore.put, [], used()

    def spied(store, version, tensors):
        place = put(store, version, tensors)
        copied.append(store.bytes)
        until(lambda: used() - before < 5 * copied[0])
        return place

    monkeypatch.setattr(ObjectStore, "put", spied)
    over = {"async": {"place": "ray", "max_lag": 1}, "run": {"updates": 50}, "eval": {"limit": 0}}
    over |= {"method": {"correction": "token_truncated"}, "checkpoint": {"every": 0}}
    done = run_cli("train", write(sums, over), "--run-dir", tmp_path / "run", "--quiet")
    assert done.code == 0, done.err
    assert copied == [n * copied[0] for n in range(1, len(copied) + 1)]
    assert len(copied) == 51, "every update publishes, and the start"


def test_object_store_refuses_a_version_with_a_flipped_bit(sums, write, run_cli, tmp_path, monkeypatch):
    put = ObjectStore.put

    def damaging(store, version, tensors):
        place = put(store, version, tensors)
        if version != 2:
            return place
        whole = ray.get(place.ref).copy()
        whole[1000] ^= 1
        return replace(place, ref=ray.put(whole))

    monkeypatch.setattr(ObjectStore, "put", damaging)
    done = run_cli("train", write(sums, ON_RAY), "--run-dir", tmp_path / "run", "--quiet")
    assert done.code == 1
    assert "the weights of version 2 are damaged where they lie" in done.err
    assert "version 1 is kept" in done.err
    assert "Traceback" not in done.err


# ---------------------------------------------------------------------- a worker that hangs


class Stuck:
    """A worker whose first step never ends."""

    live = -1

    def __init__(self):
        self.rollouts, self.idle = self, True

    def admit(self, requests):
        self.idle = False

    def turn(self):
        threading.Event().wait()


def test_actor_that_hangs_is_reported_with_its_place(tmp_path):
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    pool = SamplerPool(
        lambda n: RayChannel(Stuck, tmp_path / f"{n}.log", cpus=1, gpus=0), 1, deadline_s=60, max_restarts=0
    )
    try:
        while not pool.workers[0].ready:
            pool.poll(1.0)
        number, pool.deadline_s = pid(pool.workers[0].channel._actor), 3.0
        task = Task(id="1", messages=({"role": "user", "content": "1+1="},))
        pool.admit([GroupRequest(number=0, task=task, size=1, sampling=Sampling())])
        with pytest.raises(RunError, match=r"no sign of life for 3 s; it is at .*\bwait\b"):
            until(lambda: bool(pool.poll(1.0)))
    finally:
        pool.close()
    until(lambda: not psutil.pid_exists(number))


# ---------------------------------------------------------------------- the cluster


def test_cluster_without_enough_gpus_is_refused(sums, write, run_cli, tmp_path):
    over = {"async": {"place": "ray", "gpus": 3}}
    done = run_cli("train", write(sums, over), "--run-dir", tmp_path / "run", "--quiet")
    assert done.code == 2
    assert "3 GPUs are asked for, and the cluster has 0" in done.err


def test_cluster_that_cannot_be_joined_is_named(sums, write, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    path = write(sums, {"async": {"place": "ray", "address": address}})
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "posttrain",
            "train",
            str(path),
            "--run-dir",
            str(tmp_path / "run"),
            "--quiet",
        ],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 2
    assert f"cannot join {address!r}" in done.stderr
    assert not (tmp_path / "run").exists()


def test_doctor_reports_ray():
    [fact] = [fact for fact in doctor.examine() if fact.name == "ray"]
    assert fact.good


@pytest.mark.parametrize("ending", ["end", "ctrl-c"])
def test_started_cluster_leaves_no_process_and_no_file(ending, sums, write, tmp_path):
    updates = 4 if ending == "end" else 100_000
    path, run = write(sums, ON_RAY | {"run": {"updates": updates}}), tmp_path / "run"
    mark = f"{os.getpid()}-{ending}"
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "posttrain", "train", str(path), "--run-dir", str(run), "--quiet"],
            env=os.environ | {"RAY_TMPDIR": folder, "POSTTRAIN_TEST_MARK": mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            if ending == "ctrl-c":
                until(lambda: (run / "metrics.jsonl").exists() and len(lines(run)) > 3)
                assert len(marked(mark)) > 1
                os.killpg(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
        assert process.returncode == (0 if ending == "end" else 1), err
        assert "Traceback" not in out + err
        assert "ray" not in out.lower().replace(str(run), "")
        until(lambda: not marked(mark))
        assert not os.listdir(folder)


def marked(mark: str) -> list[str]:
    """Return the names of processes with this mark in their environment."""
    names = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("POSTTRAIN_TEST_MARK") == mark:
                names.append(process.name())
        except psutil.Error:
            continue
    return names
