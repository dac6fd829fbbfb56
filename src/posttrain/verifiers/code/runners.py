"""Languages of programs: how each is built and run.

Python runs in interpreters that are started in advance. Programs in other languages are built once and
started for each case, and solve stdio problems only.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class LanguageRunner:
    """A language. The commands run in the working directory of the box."""

    file: str
    """File name of the source."""
    run: tuple[str, ...]
    build: tuple[str, ...] = ()
    """Command that makes the executable `main`; empty for interpreted languages."""


PYTHON = "python"
RUNNERS: dict[str, LanguageRunner] = {
    "bash": LanguageRunner("main.sh", ("/bin/bash", "main.sh")),
    "c": LanguageRunner("main.c", ("./main",), ("gcc", "-O2", "-std=c17", "-o", "main", "main.c", "-lm")),
    "cpp": LanguageRunner("main.cpp", ("./main",), ("g++", "-O2", "-std=c++20", "-o", "main", "main.cpp")),
}
"""To add a language, add it here, and the names of its fenced blocks to TAGS."""
TAGS: dict[str, tuple[str, ...]] = {
    PYTHON: ("python", "python3", "py"),
    "bash": ("bash", "sh"),
    "c": ("c",),
    "cpp": ("cpp", "c++", "cc"),
}
