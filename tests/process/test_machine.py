"""How many threads a run has, how they wait, and what memory a control group leaves."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from posttrain.process import machine


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """groups(membership, {file: text}) puts this process into control groups of these files."""
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "_OURS", tmp_path / "self")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)

    def make(membership: str, files: dict[str, str]) -> None:
        (tmp_path / "self").write_text(membership)
        for name, text in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return make


QUOTAS = {
    "none": ("0::/\n", {"cpu.max": "max 100000\n"}, 16),
    "of its own group": ("0::/app\n", {"app/cpu.max": "300000 100000\n"}, 3),
    "a part of a processor counts as one": ("0::/app\n", {"app/cpu.max": "50000 100000\n"}, 1),
    "rounded up": ("0::/app\n", {"app/cpu.max": "150000 100000\n"}, 2),
    "of a parent": ("0::/a/b/c\n", {"a/cpu.max": "200000 100000", "a/b/c/cpu.max": "max 100000"}, 2),
    "a container that sees its own root": ("0::/../../docker/x\n", {"cpu.max": "400000 100000\n"}, 4),
    "a path that is not in the tree": ("0::/host/only\n", {"cpu.max": "400000 100000\n"}, 4),
    "version 1": (
        "4:memory:/m\n3:cpu,cpuacct:/app\n",
        {"cpu,cpuacct/app/cpu.cfs_quota_us": "500000\n", "cpu,cpuacct/app/cpu.cfs_period_us": "100000\n"},
        5,
    ),
    "version 1 without": (
        "3:cpu:/\n",
        {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
        16,
    ),
    "more than there are": ("0::/\n", {"cpu.max": "9900000 100000\n"}, 16),
    "unreadable": ("nonsense\n", {"cpu.max": "?\n"}, 16),
}


@pytest.mark.parametrize("case", QUOTAS)
def test_threads_come_from_the_quota(groups, case):
    membership, files, cores = QUOTAS[case]
    groups(membership, files)
    assert machine.cores() == cores


@pytest.mark.parametrize(
    ("asked", "cores"), [("2", 2), ("2,1", 2), ("99", 16), ("0", 16), ("", 16), ("many", 16)]
)
def test_what_the_user_set_bounds_them(groups, monkeypatch, asked, cores):
    groups("", {})
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert machine.cores() == cores


@pytest.mark.parametrize(
    ("gpus", "size", "cores"), [(True, 4, 4), (True, 64, 1), (True, 1, 1), (False, 4, 1)]
)
def test_ranks_on_gpus_share_the_processors(groups, monkeypatch, gpus, size, cores):
    """torchrun sets OMP_NUM_THREADS=1 for several ranks."""
    groups("", {})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(size))
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: gpus)
    assert machine.cores() == cores


def test_without_masks_and_groups_all_processors_count(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_OURS", tmp_path / "none")
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert machine.cores() == 7


def test_memory_is_bounded_by_every_group_above(groups):
    groups(
        "0::/a/b\n",
        {
            "a/memory.max": "1000",
            "a/memory.current": "700",
            "a/memory.stat": "anon 200\ninactive_file 100\n",
            "a/b/memory.max": "max",
            "a/b/memory.current": "600",
        },
    )
    assert machine.memory_left() == 1000 - 700 + 100, "files that were read make room"
    groups("4:memory:/x\n", {"memory/x/memory.limit_in_bytes": "50", "memory/x/memory.usage_in_bytes": "20"})
    assert machine.memory_left() == 30
    groups("0::/elsewhere\n", {})
    assert machine.memory_left() == math.inf


def test_the_peak_is_the_systems_own_count(tmp_path, monkeypatch):
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmPeak:\t 9 kB\nVmHWM:\t 1572864 kB\nVmRSS:\t 5 kB\n")
    monkeypatch.setattr(machine, "_STATUS", status)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert machine.peak_memory() == 1.5
    monkeypatch.setattr(machine, "_STATUS", tmp_path / "none")
    assert 0.05 < machine.peak_memory() < 1000


def test_a_run_gives_the_threads_back():
    before, inside = torch.get_num_threads(), []

    @machine.configured(before + 1)
    def fail() -> None:
        inside.append(torch.get_num_threads())
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (inside, torch.get_num_threads()) == ([before + 1], before)


def spins(**setting: str) -> str:
    """How long OpenMP says that its threads spin, in a process that imports posttrain and then PyTorch."""
    unset = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    env = {k: v for k, v in os.environ.items() if k not in unset}
    env |= {"OMP_DISPLAY_ENV": "verbose", "PYTHONPATH": str(Path(machine.__file__).parents[2]), **setting}
    command = [sys.executable, "-c", "import posttrain, torch"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return next((line.split("'")[1] for line in done.stderr.splitlines() if "GOMP_SPINCOUNT" in line), "")


@pytest.mark.full
def test_threads_spin_briefly_unless_the_user_says_otherwise():
    usual = spins()
    if not usual:
        pytest.skip("this OpenMP does not say how it waits")
    assert usual == "2000"
    assert spins(OMP_WAIT_POLICY="PASSIVE") == "0"
    assert int(spins(OMP_WAIT_POLICY="ACTIVE")) > 2000
    assert spins(GOMP_SPINCOUNT="1000") == "1000"


@pytest.mark.parametrize(
    ("before", "gpu", "after"),
    [
        ({}, True, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({}, False, {}),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, True, {"PYTORCH_ALLOC_CONF": "backend:native"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": ""}, True, {"PYTORCH_CUDA_ALLOC_CONF": ""}),
    ],
)
def test_segments_grow_on_a_gpu_unless_the_user_set_others(before, gpu, after, monkeypatch) -> None:
    variables = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    monkeypatch.setattr(os, "environ", variables | before)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    with machine.configured(1):
        assert {name: value for name, value in os.environ.items() if "ALLOC_CONF" in name} == after
