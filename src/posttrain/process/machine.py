"""How this process uses the machine."""

import contextlib
import ctypes
import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_LARGEST = 32 << 20
"""glibc takes no larger threshold. Weights and moments are larger, live as long as the run, and keep to
their own mappings, so that they do not fragment what activations come and go in."""

_CGROUPS, _OURS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_MEMORY = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Limit and use of a control group, as versions 2 and 1 call them."""


def configure(threads: int = 0) -> None:
    """Sets the number of threads (0: as many as `cores`) and keeps freed memory for the next tensor.

    glibc hands every large block back to the kernel, and asks for it again, page by page and
    zeroed, for the next tensor of the same size: a training step then spends more time in the kernel
    than in arithmetic.
    """
    torch.set_num_threads(threads or cores())
    with contextlib.suppress(OSError, AttributeError):  # not glibc: nothing to set
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_M_TOP_PAD, 2 * _LARGEST)


@contextlib.contextmanager
def configured(threads: int = 0) -> Iterator[None]:
    """Within it the process is as `configure` makes it; then it has the threads that it had before."""
    with as_before():
        configure(threads)
        yield


@contextlib.contextmanager
def as_before(threads: int = 0) -> Iterator[None]:
    """Use this many threads within (0: as many as before), and afterwards as many as before."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads or before)
        yield
    finally:
        torch.set_num_threads(before)


def cores() -> int:
    """Processors that this process may use: the fewest of its affinity mask, quotas and OMP_NUM_THREADS.

    A container's quota leaves the mask alone; with a thread for each processor of the host most of them
    would wait for one that has used up its share.
    """
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if first.isdecimal() and int(first) > 0:
        found = min(found, int(first))
    for group in _groups("cpu"):
        quota, period = [*_words(group / "cpu.max"), "max", "max"][:2]
        if quota == "max":  # version 1 has two files
            [quota], [period] = (
                _words(group / f"cpu.cfs_{name}_us") or ["max"] for name in ("quota", "period")
            )
        if quota.isdecimal() and period.isdecimal() and int(period) > 0:
            found = min(found, max(1, math.ceil(int(quota) / int(period))))
    return found


def memory_left() -> float:
    """Bytes that the control groups of this process still allow; infinite where they set no limit.

    What files were read is kept in memory and counted, but given up when memory is asked for.
    """
    left = math.inf
    for group in _groups("memory"):
        stat = _words(group / "memory.stat")
        kept = dict(zip(stat[::2], stat[1::2], strict=False)).get("inactive_file", "0")
        for limit, used in _MEMORY:
            most, now = "".join(_words(group / limit)), "".join(_words(group / used))
            if most.isdecimal() and now.isdecimal():
                left = min(left, int(most) - int(now) + int(kept))
    return left


def _groups(controller: str) -> Iterator[Path]:
    """The control groups that this process is in, of version 2 and of this controller's version 1.

    A container sees its own group as the root of the tree, and may be told a path that is not in it.
    """
    for line in _OURS.read_text().splitlines() if _OURS.exists() else ():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUPS / controllers
        own = root / path.lstrip("/")
        yield from (own, *(parent for parent in own.parents if parent.is_relative_to(root)))
        if ".." in path:
            yield root


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []
