"""How this process uses the machine."""

import contextlib
import ctypes
import os

import torch

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_LARGEST = 32 << 20
"""glibc takes no larger threshold. Weights and moments are larger, live as long as the run, and keep to
their own mappings, so that they do not fragment what activations come and go in."""


def settle(threads: int = 0) -> None:
    """Sets the number of threads (0: one a core that we may use) and keeps freed memory for the next tensor.

    glibc hands every large block back to the kernel, and asks for it again, page by page and
    zeroed, for the next tensor of the same size: a training step then spends more time in the kernel
    than in arithmetic.
    """
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    with contextlib.suppress(OSError, AttributeError):  # not glibc: nothing to set
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_M_TOP_PAD, 2 * _LARGEST)
