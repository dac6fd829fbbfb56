"""What loading a model takes, whoever loads one: a device, a dtype, and a quiet library."""

import os
import platform
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from threading import Condition, local
from typing import Any, Literal

import numpy as np
import torch
from transformers.utils import logging as transformers_logging

from posttrain.types import Dtype as Dtype
from posttrain.types import UserError


def usable_device(name: str, where: str = "device") -> torch.device:
    """The device of that name, auto being the GPU if there is one; of several ranks each has its own.

    Raises UserError, with this key, for another name and for a GPU that cannot be used here.

    >>> usable_device("cpu")
    device(type='cpu')
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and "LOCAL_RANK" in os.environ:  # which processes that a rank starts have too
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
    """Whether this PyTorch runs on NVIDIA GPUs of this compute capability.

    A build sm_XY runs on its own major version from its minor one on, and compute_XY on all that came later.
    """
    builds = re.findall(r"(sm|compute)_(\d+)(\d)", " ".join(torch.cuda.get_arch_list()))
    known = ((kind, (int(major), int(minor))) for kind, major, minor in builds)
    runs = (v <= capability and (kind == "compute" or v[0] == capability[0]) for kind, v in known)
    return not builds or any(runs)  # AMD's are called otherwise


def see_only(name: str) -> str:
    """Leaves this process one GPU, the one of that name, and says what it is called then.

    For libraries that take the first they see. Nothing in the process may have asked for GPUs before.

    >>> see_only("cpu")
    'cpu'
    """
    if name == "cpu":
        return name
    index = name.partition(":")[2] or os.environ.pop("LOCAL_RANK", "0")
    known = os.environ.get("CUDA_VISIBLE_DEVICES")
    if known != "":  # it may see none, as an actor of Ray that asked for none
        os.environ["CUDA_VISIBLE_DEVICES"] = known.split(",")[int(index)] if known else index
    return name.partition(":")[0]


def on_device(numbers: Sequence[Any], device: torch.device) -> torch.Tensor:
    """A tensor of these numbers on the device, int64 or float64.

    Nobody waits for a GPU: it fetches them from pinned memory, which is not used again before it has.

    >>> on_device([[1, 2], [3, 4]], torch.device("cpu"))
    tensor([[1, 2],
            [3, 4]])
    """
    here = torch.from_numpy(np.array(numbers))  # several times as fast as torch.tensor
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here.to(device)


def multiplies_in_bfloat16(device: str = "cpu") -> bool:
    """Whether the device of that name has instructions for bfloat16, without which it takes times as long.

    GPUs have them from Ampere on, processors with AVX512_BF16, AMX or Arm's BF16, of which PyTorch must know.
    """
    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        # Without a GPU, or one of that number: that is said where the model is loaded.
        with suppress(RuntimeError, AssertionError):
            return torch.cuda.get_device_capability(None if device == "auto" else device) >= (8, 0)
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    # On x86 oneDNN says yes to all of AVX-512, and emulates it on most.
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    known = torch.cpu._is_avx512_bf16_supported() if x86 else torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return bool(known)


def dtype_of(dtype: Dtype, device: str) -> Literal["bfloat16", "float32"]:
    """The dtype of that name, auto being bfloat16 where the device multiplies in it, and float32 elsewhere.

    >>> dtype_of("float32", "cpu")
    'float32'
    """
    if dtype != "auto":
        return dtype
    return "bfloat16" if multiplies_in_bfloat16(device) else "float32"


class _Turns:
    """Any number of threads compute, or one loads."""

    def __init__(self) -> None:
        self._changed, self._here = Condition(), local()
        self._computing, self._loading = 0, False

    def __call__(self, *, loads: bool) -> AbstractContextManager[None]:
        """A thread that is within one of the two may begin either again."""
        within: str | None = getattr(self._here, "within", None)
        return nullcontext() if within == "loads" or (within and not loads) else self._turn(loads, within)

    @contextmanager
    def _turn(self, loads: bool, within: str | None) -> Iterator[None]:
        begun = False  # Ctrl-C may come while it waits
        try:
            with self._changed:
                self._computing -= within is not None  # two that compute and want to load would wait for ever
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._loading)
                self._loading, begun = loads, True
                self._computing += not loads
                if loads:
                    self._changed.wait_for(lambda: not self._computing)
            self._here.within = "loads" if loads else "computes"
            yield
        finally:
            self._here.within = within
            with self._changed:
                self._computing += (within is not None) - (begun and not loads)
                self._loading = self._loading and not (begun and loads)
                self._changed.notify_all()


_turns = _Turns()


@contextmanager
def computing() -> Iterator[None]:
    """Within it no other thread loads a model, which changes the process's default dtype for that long."""
    with _turns(loads=False):
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Within it transformers shows no bar and says nothing short of an error.

    One thread at a time, and while none is `computing`: while transformers loads, torch's default dtype is
    the model's and functions of its own, as tie_weights, are replaced; a second thread that loads would put
    the replacements back for good.
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
