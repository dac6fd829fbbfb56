"""Languages that a program can be written in: how each is built and run.

Python runs in interpreters that are started ahead and wait in their boxes; the others are started
for each case, after one build, and take stdio problems only.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Runner:
    """One language. The commands run in the box's working directory."""

    file: str
    """What the source is called."""
    run: tuple[str, ...]
    build: tuple[str, ...] = ()
    """Makes `main` of the source; empty where nothing is built."""


PYTHON = "python"
RUNNERS: dict[str, Runner] = {
    "bash": Runner("main.sh", ("/bin/bash", "main.sh")),
    "c": Runner("main.c", ("./main",), ("gcc", "-O2", "-std=c17", "-o", "main", "main.c", "-lm")),
    "cpp": Runner("main.cpp", ("./main",), ("g++", "-O2", "-std=c++20", "-o", "main", "main.cpp")),
}
"""To add a language, add its line here, and how its blocks are called to TAGS."""
TAGS: dict[str, tuple[str, ...]] = {
    PYTHON: ("python", "python3", "py"),
    "bash": ("bash", "sh"),
    "c": ("c",),
    "cpp": ("cpp", "c++", "cc"),
}
