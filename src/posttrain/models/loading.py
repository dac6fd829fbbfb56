"""Helpers for loading any model: its device, its dtype, and transformers without output."""

import os
import platform
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from threading import Condition, local
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from transformers.utils import logging as transformers_logging

from posttrain.types import Dtype as Dtype
from posttrain.types import UserError


def usable_device(name: str, where: str = "device") -> torch.device:
    """Return the device of that name; auto is the GPU if there is one, and cuda the rank's own GPU.

    Raises UserError, with the key `where`, for an unknown name and for a GPU that cannot be used.

    >>> usable_device("cpu")
    device(type='cpu')
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and "LOCAL_RANK" in os.environ:  # also set in child processes of a rank
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError(name)
    except RuntimeError:
        raise UserError(where, f"unknown device {name!r}", "auto, cpu, cuda or cuda:0") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(where, "there is no GPU that PyTorch can use", "set it to auto")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        fix = "start as many ranks on a machine as it has GPUs"
        raise UserError(where, f"there is no {device}, but {count} GPUs", fix)
    if device.type == "cuda" and not _built_for(torch.cuda.get_device_capability(device)):
        problem = f"this PyTorch has no kernels for {torch.cuda.get_device_name(device)}"
        fix = f"it has {', '.join(torch.cuda.get_arch_list())}: install one built for it, or set it to cpu"
        raise UserError(where, problem, fix)
    return device


def _built_for(capability: tuple[int, int]) -> bool:
    """Return whether this PyTorch runs on NVIDIA GPUs of this compute capability.

    A build sm_XY runs on capabilities X.Z with Z ≥ Y, compute_XY on all capabilities from X.Y on.
    """
    builds = re.findall(r"(sm|compute)_(\d+)(\d)", " ".join(torch.cuda.get_arch_list()))
    versions = ((kind, (int(major), int(minor))) for kind, major, minor in builds)
    runs = (v <= capability and (kind == "compute" or v[0] == capability[0]) for kind, v in versions)
    return not builds or any(runs)  # builds for AMD have other names


def hide_other_gpus(name: str) -> str:
    """Hide all GPUs but the one of that name from this process, and return its new name.

    For libraries that take the first GPU. The process must not have initialised CUDA before.

    >>> hide_other_gpus("cpu")
    'cpu'
    """
    if name == "cpu":
        return name
    index = name.partition(":")[2] or os.environ.pop("LOCAL_RANK", "0")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible != "":  # "" hides all GPUs, for example in an actor of Ray without a GPU
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[int(index)] if visible else index
    return name.partition(":")[0]


def on_device(numbers: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Return a tensor of these numbers on the device, int64 or float64.

    The copy to a GPU is asynchronous, from pinned memory, which PyTorch does not reuse before its end.

    >>> on_device([[1, 2], [3, 4]], torch.device("cpu"))
    tensor([[1, 2],
            [3, 4]])
    """
    x = torch.from_numpy(np.array(numbers))  # several times as fast as torch.tensor
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def multiplies_in_bfloat16(device: str = "cpu") -> bool:
    """Return whether the device of that name has instructions for bfloat16; others are several times slower.

    GPUs have them from Ampere on, CPUs with AVX512_BF16, AMX or Arm's BF16 if PyTorch supports these.
    """
    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        # Without such a GPU, loading the model raises the error.
        with suppress(RuntimeError, AssertionError):
            return torch.cuda.get_device_capability(None if device == "auto" else device) >= (8, 0)
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    # On x86 oneDNN reports bfloat16 for any CPU with AVX-512, and emulates it on most.
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    is_supported = torch.cpu._is_avx512_bf16_supported if x86 else torch.ops.mkldnn._is_mkldnn_bf16_supported
    return bool(is_supported())


def dtype_of(dtype: Dtype, device: str) -> Literal["bfloat16", "float32", "float64"]:
    """Return the dtype of that name; auto is bfloat16 on devices that multiply in it, and float32 on others.

    >>> dtype_of("float32", "cpu")
    'float32'
    """
    if dtype != "auto":
        return dtype
    return "bfloat16" if multiplies_in_bfloat16(device) else "float32"


class _Turns:
    """A lock with two uses: any number of threads compute, or one thread loads."""

    def __init__(self) -> None:
        self._changed, self._here = Condition(), local()
        self._computing, self._loading = 0, False

    def __call__(self, *, loads: bool) -> AbstractContextManager[None]:
        """Return a context of one use; inside it the same thread may enter either use again."""
        within: str | None = getattr(self._here, "within", None)
        return nullcontext() if within == "loads" or (within and not loads) else self._turn(loads, within)

    @contextmanager
    def _turn(self, loads: bool, within: str | None) -> Iterator[None]:
        entered = False  # Ctrl-C may interrupt the wait
        try:
            with self._changed:
                # While it waits to load, a computing thread does not count: two would wait for each other.
                self._computing -= within is not None
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._loading)
                self._loading, entered = loads, True
                self._computing += not loads
                if loads:
                    self._changed.wait_for(lambda: not self._computing)
            self._here.within = "loads" if loads else "computes"
            yield
        finally:
            self._here.within = within
            with self._changed:
                self._computing += (within is not None) - (entered and not loads)
                self._loading = self._loading and not (entered and loads)
                self._changed.notify_all()


_turns = _Turns()


@contextmanager
def computing() -> Iterator[None]:
    """Return a context in which no other thread loads a model, which changes the process's default dtype."""
    with _turns(loads=False):
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Return a context in which transformers shows no progress bars and no messages below errors.

    One thread at a time, while no thread is `computing`: while transformers loads, torch's default dtype is
    the model's, and transformers replaces functions such as tie_weights; a second thread that loads would
    restore the replacements for good.
    """
    with _turns(loads=True):
        verbosity = transformers_logging.get_verbosity()
        bars = transformers_logging.is_progress_bar_enabled()
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        try:
            yield
        finally:
            transformers_logging.set_verbosity(verbosity)
            if bars:
                transformers_logging.enable_progress_bar()


def stored_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the buffers in a model's files, such as the biases that select experts."""
    stored = model.state_dict().keys()
    return ((name, buffer) for name, buffer in model.named_buffers() if name in stored)
