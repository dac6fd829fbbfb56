"""C++ libraries that are compiled at their first use, on Linux with g++."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from posttrain.models.pretrained import cache_directory

NUMBERS = Path(__file__).with_name("numbers.h")
_FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-fopenmp",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    f"-I{NUMBERS.parent}",
)
_BUILD_S = 600.0
_ARCH_PRCTL = 158


class Library:
    """Functions of a compiled library; the last argument of each is its number of threads."""

    def __init__(self, library: ctypes.CDLL, functions: Mapping[str, tuple[Any, ...]]) -> None:
        for name, arguments in functions.items():
            function = getattr(library, name)
            function.argtypes, function.restype = (*arguments, ctypes.c_int), None
        self._library = library

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function; tensors are passed by address and must be contiguous."""
        values = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]
        getattr(self._library, name)(*values, torch.get_num_threads())


def compiler() -> str | None:
    """Return the path of $CXX or g++; None if it does not exist, and on systems other than Linux."""
    return shutil.which(os.environ.get("CXX", "g++")) if sys.platform == "linux" else None


def library(source: Path, dtype: torch.dtype, **macros: int) -> ctypes.CDLL | None:
    """Return the library of a source with these macros, and HALF, 1 for bfloat16 and 0 for float32.

    It is built once and cached. None if it cannot be built or loaded.
    """
    command = compiler()
    if command is None or dtype not in (torch.bfloat16, torch.float32):
        return None
    values = {"HALF": int(dtype == torch.bfloat16), **macros}
    flags = [f"-D{name}={value}" for name, value in values.items()]
    try:
        return ctypes.CDLL(str(_build(command, source, (*flags, *_disabled_units()))))
    except subprocess.TimeoutExpired:
        warnings.warn(f"{source.name} was not compiled in {_BUILD_S:g} s; PyTorch computes it", stacklevel=2)
    except (OSError, subprocess.SubprocessError):
        pass
    return None


def _build(compiler: str, source: Path, macros: tuple[str, ...]) -> Path:
    flags = [*_FLAGS, *macros]
    parts = [source.read_bytes(), NUMBERS.read_bytes(), _version(compiler), _machine()]
    key = hashlib.sha256(b"\0".join([*parts, *(f.encode() for f in (*_FLAGS[:-1], *macros))])).hexdigest()
    final = cache_directory() / f"{source.stem}-{key[:16]}.so"
    if final.is_file():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=final.parent) as scratch:
        object_file, out = Path(scratch) / "made.o", Path(scratch) / "made.so"
        # Linked without OpenMP: PyTorch has already loaded one, and a second would have its own threads.
        compilation = [compiler, *flags, "-c", source, "-o", object_file]
        for command in (compilation, [compiler, "-shared", object_file, "-o", out]):
            subprocess.run([*map(str, command)], capture_output=True, check=True, timeout=_BUILD_S)
        out.replace(final)
    return final


@cache
def _disabled_units() -> tuple[str, ...]:
    """Return compiler flags for units of the CPU that may not be used.

    Linux grants a process the matrix unit (AMX) on request.
    """
    if b"amx_bf16" not in _machine().split():
        return ()
    request, registers = 0x1023, 18  # ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    granted = ctypes.CDLL(None).syscall(_ARCH_PRCTL, request, registers) == 0
    return () if granted else ("-mno-amx-bf16",)


@cache
def _version(compiler: str) -> bytes:
    command = [compiler, "-dumpfullversion"]
    return subprocess.run(command, capture_output=True, check=True, timeout=_BUILD_S).stdout


@cache
def _machine() -> bytes:
    """Return the CPU's features; as part of the cache key, machines that share a home do not share builds."""
    lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    return next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")
