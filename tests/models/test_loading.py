"""What a GPU must be for a model to be put there, and how much of it is free."""

import pytest
import torch

from posttrain.models.loading import usable_device
from posttrain.runtime.memory import free_memory
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
