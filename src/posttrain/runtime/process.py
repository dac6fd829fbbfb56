"""How this process uses the machine."""

import contextlib
import ctypes
import os

import torch

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def settle(threads: int = 0) -> None:
    """Sets the number of threads (0: one a core that we may use) and keeps freed memory for the next tensor.

    glibc hands every large block back to the kernel, and asks for it again, page by page and
    zeroed, for the next tensor of the same size: a training step then spends more time in the kernel
    than in arithmetic.
    """
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    with contextlib.suppress(OSError, AttributeError):  # not glibc: nothing to set
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
