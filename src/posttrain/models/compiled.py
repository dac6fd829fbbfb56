"""Libraries of C++ that are compiled at their first use, on Linux and where there is g++."""

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
    """Functions of a compiled library, whose last argument is how many threads they may take."""

    def __init__(self, found: ctypes.CDLL, functions: Mapping[str, tuple[Any, ...]]) -> None:
        for name, arguments in functions.items():
            function = getattr(found, name)
            function.argtypes, function.restype = (*arguments, ctypes.c_int), None
        self._found = found

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function; tensors are given by where they lie, and must be contiguous."""
        given = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments]
        getattr(self._found, name)(*given, torch.get_num_threads())


def compiler() -> str | None:
    """What CXX names in the environment, otherwise g++; None where there is none, or no Linux."""
    return shutil.which(os.environ.get("CXX", "g++")) if sys.platform == "linux" else None


def library(source: Path, dtype: torch.dtype, **defined: int) -> ctypes.CDLL | None:
    """The library of this source with these macros, and HALF, 1 for bfloat16 and 0 for float32.

    From the cache directory if it was built before. None where it cannot be had.
    """
    by = compiler()
    if by is None or dtype not in (torch.bfloat16, torch.float32):
        return None
    given = {"HALF": int(dtype == torch.bfloat16), **defined}
    macros = [f"-D{name}={value}" for name, value in given.items()]
    try:
        built = _build(by, source, (*macros, *_without()))
        return ctypes.CDLL(str(built))
    except subprocess.TimeoutExpired:
        warnings.warn(f"{source.name} was not compiled in {_BUILD_S:g} s; PyTorch computes it", stacklevel=2)
    except (OSError, subprocess.SubprocessError):
        pass
    return None


def _build(by: str, source: Path, macros: tuple[str, ...]) -> Path:
    flags = [*_FLAGS, *macros]
    parts = [source.read_bytes(), NUMBERS.read_bytes(), _version(by), _machine()]
    key = hashlib.sha256(b"\0".join([*parts, *(f.encode() for f in (*_FLAGS[:-1], *macros))])).hexdigest()
    final = cache_directory() / f"{source.stem}-{key[:16]}.so"
    if final.is_file():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=final.parent) as scratch:
        made, out = Path(scratch) / "made.o", Path(scratch) / "made.so"
        # Linked without OpenMP: PyTorch's is in the process, and two would keep two sets of threads.
        for command in ([by, *flags, "-c", source, "-o", made], [by, "-shared", made, "-o", out]):
            subprocess.run([*map(str, command)], capture_output=True, check=True, timeout=_BUILD_S)
        out.replace(final)
    return final


@cache
def _without() -> tuple[str, ...]:
    """What of the processor must not be used. Linux grants a process its matrix unit (AMX) if it asks."""
    if b"amx_bf16" not in _machine().split():
        return ()
    request, registers = 0x1023, 18  # ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    granted = ctypes.CDLL(None).syscall(_ARCH_PRCTL, request, registers) == 0
    return () if granted else ("-mno-amx-bf16",)


@cache
def _version(by: str) -> bytes:
    asked = [by, "-dumpfullversion"]
    return subprocess.run(asked, capture_output=True, check=True, timeout=_BUILD_S).stdout


@cache
def _machine() -> bytes:
    """What the processor can do: a home that several machines share must not hand one what is another's."""
    about = Path("/proc/cpuinfo").read_bytes().splitlines()
    return next((line for line in about if line.startswith((b"flags", b"Features"))), b"")
