"""Attention of decoding steps on a processor, by a kernel that is compiled where it is first used.

PyTorch's own attention takes several times as long as reading the cache does, since it multiplies matrices of
one to eight rows, and reads the padding of short rows. The kernel (decode.cpp) reads each row as far as it
goes, and keeps scores and sums in float32. It wants Linux and g++; elsewhere PyTorch does it.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from posttrain.models.attention import Heads, masked_attention
from posttrain.models.pretrained import cache_directory

_SOURCE = Path(__file__).with_name("decode.cpp")
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-march=native", "-ffp-contract=fast")
_BUILD_S = 120.0

Kernel = Callable[..., Heads]


def kernel_for(query: Heads, value: Heads, softcap: float | None) -> Kernel | None:
    """The kernel for heads of this shape, [B, H, 1, D] and [B, K, 1, D]; None where PyTorch must do it."""
    H, D = query.shape[1], query.shape[3]
    if query.device.type != "cpu" or softcap is not None or value.shape[3] != D or D % 8:
        return None
    return load(query.dtype, D, H // value.shape[1])


@cache
def load(dtype: torch.dtype, size: int, queries: int) -> Kernel | None:
    """The kernel for heads of this size, so many of which share a key head; built if need be.

    None where it cannot be had, or says what PyTorch does not.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++")) if sys.platform == "linux" else None
    if compiler is None or dtype not in (torch.bfloat16, torch.float32):
        return None
    shape = {"HALF": int(dtype == torch.bfloat16), "SIZE": size, "QUERIES": queries}
    try:
        library = _built(compiler, tuple(f"-D{name}={value}" for name, value in shape.items()))
        kernel = _Called(ctypes.CDLL(str(library)))
    except (OSError, subprocess.SubprocessError):
        return None
    return kernel if _agrees(kernel, dtype, size, queries) else None


class _Called:
    """The function of the library, called with tensors."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._decode = library.decode_attention
        pointer, whole = ctypes.c_void_p, ctypes.c_int64
        self._decode.argtypes = [*[pointer] * 7, *[whole] * 4, ctypes.c_float, ctypes.c_int]
        self._decode.restype = None

    def __call__(
        self,
        query: Heads,
        key: Heads,
        value: Heads,
        keys: Heads,
        values: Heads,
        lengths: torch.Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> Heads:
        """softmax(q kᵀ · scale) v over each row's keys and values, among which the new ones are written.

        query: [B, H, 1, D]; key, value: [B, K, 1, D], H a multiple of K; keys, values: [rows, K, columns, D],
        contiguous, at least B rows; lengths: [B], int64, the column of the new token; window: the latest
        columns that are seen.
        """
        B = query.shape[0]
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        out = torch.empty_like(query)
        tensors = (query, key, value, keys, values, out, lengths)
        self._decode(
            *(tensor.data_ptr() for tensor in tensors),
            *(B, key.shape[1], keys.shape[2], window or 0),
            scale,
            torch.get_num_threads(),
        )
        return out


def _built(compiler: str, shape: tuple[str, ...]) -> Path:
    """The library of this source by this compiler, from the cache directory if it is there."""
    asked = [compiler, "-dumpfullversion"]
    version = subprocess.run(asked, capture_output=True, check=True, timeout=_BUILD_S).stdout
    # A home that several machines share must not hand one what was made for another.
    about = Path("/proc/cpuinfo").read_bytes().splitlines()
    machine = next((line for line in about if line.startswith((b"flags", b"Features"))), b"")
    parts = [_SOURCE.read_bytes(), version, machine, *map(str.encode, (*_FLAGS, *shape))]
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()
    final = cache_directory() / f"decode-{key[:16]}.so"
    if final.is_file():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=final.parent) as scratch:
        made, library = Path(scratch) / "decode.o", Path(scratch) / "decode.so"
        # Linked without OpenMP: PyTorch's is in the process, and two would keep two sets of threads.
        for command in (
            [compiler, *_FLAGS, *shape, "-c", str(_SOURCE), "-o", str(made)],
            [compiler, "-shared", str(made), "-o", str(library)],
        ):
            subprocess.run(command, capture_output=True, check=True, timeout=_BUILD_S)
        library.replace(final)
    return final


def _agrees(kernel: Kernel, dtype: torch.dtype, size: int, queries: int) -> bool:
    """Whether it says on a small example what PyTorch's attention says, to rounding."""
    g = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, size, generator=g).to(dtype)

    query, key, value = drawn(3, 2 * queries, 1), drawn(3, 2, 1), drawn(3, 2, 1)
    keys, values, lengths = drawn(3, 2, 40), drawn(3, 2, 40), torch.tensor([0, 17, 39])
    scale = size**-0.5
    out = kernel(query, key, value, keys, values, lengths, scale=scale, window=None).float()
    mask = torch.zeros(3, 40).masked_fill(torch.arange(40) > lengths[:, None], -torch.inf)[:, None, None]
    shared = query.float().view(3, 2, queries, size)
    wanted = masked_attention(shared, keys.float(), values.float(), mask, scale=scale, softcap=None)
    return torch.allclose(
        out.view(wanted.shape), wanted, rtol=8e-3 if dtype.itemsize == 2 else 1e-4, atol=1e-5
    )
