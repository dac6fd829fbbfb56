"""What a GPU must be for a model to be put there, how much of it is free, and who waits for who loads."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch

from posttrain.models import loading
from posttrain.models.loading import computing, quiet, usable_device
from posttrain.plan.memory import free_memory
from posttrain.types import UserError


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Within it there is one."""
    for name, found in {"is_available": True, "device_count": 1, "get_device_name": "V100"}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, found=found: found)
    return monkeypatch


@pytest.mark.parametrize(
    ("capability", "builds", "runs"),
    [
        ((7, 0), ["sm_75", "sm_80", "sm_86", "sm_90", "compute_90"], False),
        ((6, 1), ["sm_75", "sm_80"], False),
        ((7, 0), ["sm_70", "sm_80"], True),
        ((8, 9), ["sm_80", "sm_90a"], True),
        ((8, 0), ["sm_86"], False),
        ((12, 0), ["sm_90", "compute_90"], True),
        ((12, 0), ["sm_90", "sm_100"], False),
        ((12, 1), ["sm_120"], True),
        ((9, 0), ["gfx90a"], True),
    ],
)
def test_a_gpu_that_pytorch_has_no_kernels_for_is_told_before_one_fails(
    gpu: pytest.MonkeyPatch, capability: tuple[int, int], builds: list[str], runs: bool
) -> None:
    gpu.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    gpu.setattr(torch.cuda, "get_arch_list", lambda: builds)
    if runs:
        assert usable_device("cuda") == torch.device("cuda")
        return
    with pytest.raises(UserError) as caught:
        usable_device("auto", "model.device")
    line = "model.device: this PyTorch has no kernels for V100; it has " + ", ".join(builds)
    assert str(caught.value) == f"{line}: install one built for it, or set it to cpu"


def test_what_pytorch_keeps_unused_is_free(gpu: pytest.MonkeyPatch) -> None:
    sizes = {"mem_get_info": (30, 80), "memory_reserved": 40, "memory_allocated": 15}
    for name, found in sizes.items():
        gpu.setattr(torch.cuda, name, lambda _, found=found: found)
    assert free_memory(torch.device("cuda")) == 30 + 40 - 15


def test_many_compute_at_once_or_one_loads() -> None:
    """Of all pairs that are at work together both compute; each may begin again what it is within."""
    lock, at_work, worst = threading.Lock(), {"computing": 0, "loading": 0}, {"computing": 0, "loading": 0}
    both = threading.Barrier(2)

    def note(name: str, by: int) -> None:
        with lock:
            at_work[name] += by
            worst[name] = max(worst[name], at_work[name])
            assert not at_work["loading"] or sum(at_work.values()) == 1, at_work

    def load() -> None:
        with quiet(), quiet(), computing():
            note("loading", 1)
            time.sleep(0.001)
            note("loading", -1)

    def compute(n: int) -> None:
        with computing(), computing():
            if n < 2:
                both.wait(60)  # two are within it at once
            note("computing", 1)
            time.sleep(0.001)
            note("computing", -1)
            if n % 3 == 0:
                load()  # while it computes: others that do so may, too
                note("computing", 1)
                note("computing", -1)

    with ThreadPoolExecutor(6) as pool:
        jobs = [pool.submit(compute, n) for n in range(40)] + [pool.submit(load) for _ in range(20)]
        for job in jobs:
            job.result(120)
    assert worst["loading"] == 1


@pytest.mark.parametrize("waits", [1, 2])
@pytest.mark.parametrize("computes", [False, True])
def test_ctrl_c_while_it_waits_leaves_nobody_waiting(computes: bool, waits: int) -> None:
    turns, waited = loading._Turns(), iter(range(1, 9))

    def wait_for(ready: object) -> None:
        if next(waited) == waits:
            raise KeyboardInterrupt

    with turns(loads=False) if computes else nullcontext():
        turns._changed.wait_for = wait_for
        with pytest.raises(KeyboardInterrupt), turns(loads=True):
            pass
        assert turns._computing == computes
    assert (turns._computing, turns._loading) == (0, False)
