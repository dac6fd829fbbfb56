"""Set the threads and the allocator of this process, and read its limits of processors and memory."""

import contextlib
import ctypes
import math
import os
import platform
import resource
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_LARGEST = 32 << 20
"""The largest threshold of glibc. Weights and moments are larger: they live as long as the run, and keep
their own mappings, so that they do not fragment the heap of the activations."""

_RANK_THREADS = 16
"""Threads of a rank that trains on a GPU: digests and moments on the host are no faster with more."""

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables of PyTorch's allocator on a GPU, which reads them when it is first used; the second is older."""

_PEAKS = {
    "B200": 2250,
    "H200": 989,
    "H200 NVL": 836,
    "GH200": 989,
    "H100": 989,
    "H100 NVL": 835,
    "H100 PCIe": 756,
    "H800": 989,
    "H20": 148,
    "A100": 312,
    "A800": 312,
    "A40": 150,
    "A10": 125,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "6000 Ada": 364,
    "5090": 209.5,
    "4090": 165,
    "3090": 71,
}
"""TFLOP/s of products in bfloat16 without sparsity, summed in float32, by words in a GPU's name. Source:
NVIDIA's data sheets, those of GeForce from its white papers on GA102, Ada and RTX Blackwell."""
_OTHER_CHIPS = {"Laptop", "MIG", "D"}
"""Words in the names of GPUs that are slower than the one after which they are named."""

_GIB = 1 << 30
_STATUS = Path("/proc/self/status")
_CGROUPS, _OURS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_MEMORY = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Files for limit and use of a control group, of versions 2 and 1."""


def configure(threads: int = 0) -> None:
    """Set the number of threads (0: as many as `cores`), and keep freed memory for the next tensor.

    glibc hands every large block back to the kernel, and asks for it again, page by page and
    zeroed, for the next tensor of the same size: a training step then spends more time in the kernel
    than in arithmetic. On a GPU segments of memory grow, unless PYTORCH_ALLOC_CONF sets something else.
    """
    torch.set_num_threads(threads or cores())
    if torch.cuda.is_available() and not any(name in os.environ for name in _ALLOCATOR):
        # Packs have every size: segments of fixed sizes would leave holes that no later tensor fits.
        os.environ[_ALLOCATOR[0]] = "expandable_segments:True"
    with contextlib.suppress(OSError, AttributeError):  # not glibc: nothing to set
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_M_TOP_PAD, 2 * _LARGEST)


@contextlib.contextmanager
def configured(threads: int = 0) -> Iterator[None]:
    """Configure the process within the block, and restore its number of threads afterwards."""
    with keep_threads():
        configure(threads)
        yield


@contextlib.contextmanager
def keep_threads(threads: int = 0) -> Iterator[None]:
    """Use this many threads within the block (0: as many as before), and restore the number afterwards."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads or before)
        yield
    finally:
        torch.set_num_threads(before)


def cores() -> int:
    """Return the processors that this process may use: the least of affinity mask, quotas, OMP_NUM_THREADS.

    A container's quota does not change the mask; with a thread for each processor of the host, most threads
    would wait for one that has used up its quota. torchrun sets OMP_NUM_THREADS to 1, which suits ranks that
    train on processors; with GPUs each may use its share of the machine's. run.threads sets another number.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    variable = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    if variable == "1" and ranks.isdecimal() and int(ranks) > 1 and torch.cuda.is_available():
        count = min(_RANK_THREADS, max(1, count // int(ranks)))
    elif variable.isdecimal() and int(variable) > 0:
        count = min(count, int(variable))
    for group in _groups("cpu"):
        quota, period = [*_words(group / "cpu.max"), "max", "max"][:2]
        if quota == "max":  # version 1 has two files
            [quota], [period] = (
                _words(group / f"cpu.cfs_{name}_us") or ["max"] for name in ("quota", "period")
            )
        if quota.isdecimal() and period.isdecimal() and int(period) > 0:
            count = min(count, max(1, math.ceil(int(quota) / int(period))))
    return count


def identity() -> str:
    """Return a name of this machine, the same in all processes that can open each other's memory."""
    try:  # a container has a namespace of its own, and sees no processes outside it
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
    except OSError:
        return platform.node()


def memory_left() -> float:
    """Return the bytes that the control groups of this process still allow, or infinity without a limit.

    Cached files count as used, but are freed when memory is needed.
    """
    free = math.inf
    for group in _groups("memory"):
        stat = _words(group / "memory.stat")
        cached = dict(zip(stat[::2], stat[1::2], strict=False)).get("inactive_file", "0")
        for limit, used in _MEMORY:
            bound, usage = "".join(_words(group / limit)), "".join(_words(group / used))
            if bound.isdecimal() and usage.isdecimal():
                free = min(free, int(bound) - int(usage) + int(cached))
    return free


def peak_memory() -> float:
    """Return the most memory that this process has used, in GiB.

    With GPUs: what PyTorch allocated on the fullest since the last call. Without: what was resident since the
    process began; 0 where the system does not say.

    >>> peak_memory() > 0.01
    True
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        gpus = range(torch.cuda.device_count())
        size = max(torch.cuda.max_memory_allocated(gpu) for gpu in gpus)
        for gpu in gpus:
            torch.cuda.reset_peak_memory_stats(gpu)
        return size / _GIB
    if _STATUS.exists():  # that of getrusage begins with the parent's
        lines = (line.split() for line in _STATUS.read_text().splitlines())
        return next((int(line[1]) * 1024 / _GIB for line in lines if line[:1] == ["VmHWM:"]), 0.0)
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size / _GIB if platform.system() == "Darwin" else size * 1024 / _GIB


@cache
def peak_tflops(device: torch.device) -> float | None:
    """Return the most TFLOP/s of products in bfloat16 on a GPU; None on other devices and if unknown."""
    has_driver = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return named_peak(torch.cuda.get_device_name(device)) if device.type == "cuda" and has_driver else None


def named_peak(name: str) -> float | None:
    """Return the most TFLOP/s of the GPU with this name; None if it is not in the table.

    >>> named_peak("NVIDIA H100 80GB HBM3"), named_peak("NVIDIA H100 PCIe"), named_peak("NVIDIA A10")
    (989, 756, 125)
    >>> named_peak("NVIDIA GeForce RTX 4090 Laptop GPU"), named_peak("NVIDIA GB200")
    (None, None)
    """
    words = set(name.replace("-", " ").split())
    fits = [key for key in _PEAKS if set(key.split()) <= words]
    return _PEAKS[max(fits, key=len)] if fits and not words & _OTHER_CHIPS else None


def _groups(controller: str) -> Iterator[Path]:
    """Yield the control groups of this process, of version 2 and of this controller's version 1.

    A container sees its own group as the root of the tree, and may see a path outside that tree.
    """
    for line in _OURS.read_text().splitlines() if _OURS.exists() else ():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUPS / controllers
        group = root / path.lstrip("/")
        yield from (group, *(parent for parent in group.parents if parent.is_relative_to(root)))
        if ".." in path:
            yield root


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []
