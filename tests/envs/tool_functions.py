"""Functions that tests give to policies as tools."""

import os
import time
from pathlib import Path
from typing import Literal

START = os.getpid()


def misbehave(
    how: Literal["well", "raise", "hang", "exit", "kill", "write", "memory", "fork", "leave", "away"],
) -> str:
    """Does what a tool should not.

    Args:
        how: In which way.
    """
    if how == "raise":
        raise ValueError("no such\nplace")
    if how == "hang":
        time.sleep(1000)
    if how == "exit":
        os._exit(3)
    if how == "kill":
        os.kill(os.getpid(), 9)
    if how == "write":
        return "x" * 50_000_000
    if how == "memory":
        return str(len(bytearray(3_000_000_000)))
    while how == "fork":
        os.fork()
    if how == "leave" and os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(0)
    if how == "away":
        os.chdir("/")
        os.environ.clear()
    return f"well, in {Path.cwd().name}"


def add(a: int, b: float = 0.5, *, words: list[str] | None = None) -> float:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
        words: Nothing.
    """
    return a + b


def nameless(*numbers: int) -> int:
    """Adds.

    Args:
        numbers: What.
    """
    return sum(numbers)


def foreign(path: Path) -> str:
    """Reads.

    Args:
        path: Which.
    """
    return str(path)


def silent(a: int) -> int:
    return a


async def later(a: int) -> int:
    """Waits.

    Args:
        a: What.
    """
    return a


def careful(response, tool, arguments, outcome, answer):
    """What a call earns."""
    assert (tool, answer, response != "99") == ("calculator", "7", True), arguments
    return float("nan") if response == "4" else {"ok": 0.25, "raised": -1}[outcome]


def of_a_group(completions, tool):
    """Takes a group, as no call is."""
    return [0.0 for _ in completions]
