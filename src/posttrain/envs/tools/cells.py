"""Python and shell as tools with memory, in sandboxes without any.

The state of an episode is its cells. Each call makes a fresh sandbox, runs the earlier cells there without
output, and then the new one. So an episode can be resumed or replayed on any machine, and no sandbox outlives
a call. A cell that does not end, or that ends its interpreter, is removed from the state.
"""

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from posttrain.envs.tools.call import Bounds, Tool, ToolResult, text_tool
from posttrain.envs.tools.cell_runner import RAISED
from posttrain.errors import RunError
from posttrain.verifiers.code.grade import run_python
from posttrain.verifiers.code.talk import ProgramEndedError
from posttrain.verifiers.sandbox import Box, Level, Limits

_MOST_OUTPUT = 1 << 20
"""Maximum bytes that a cell writes; beyond them it is killed."""
_MOST_S = 3600.0


TOOLS = {
    "python": text_tool(
        "python",
        "code",
        "print(2 ** 10)",
        "Runs Python. Names stay for later calls; shows what is printed and the value of a last expression.",
    ),
    "shell": text_tool(
        "shell",
        "command",
        "ls -l",
        "Runs a command of bash. Files stay for later calls; shows what is written.",
    ),
}


@dataclass(frozen=True)
class Cells:
    """An interpreter whose state is the earlier cells."""

    language: Literal["python", "shell"]
    level: Level

    @property
    def tool(self) -> Tool:
        return TOOLS[self.language]

    @property
    def state_key(self) -> str:
        return self.language

    def ready(self) -> None: ...

    def __call__(
        self, arguments: Mapping[str, Any], state: Any, bounds: Bounds, seed: str
    ) -> tuple[ToolResult, Any]:
        """Return the output of the new cell, and the cells to keep. Raises RunError without a sandbox."""
        [cell] = arguments.values()
        cells = [*(state or ()), cell]
        limits = Limits(wall_s=_MOST_S, memory_mb=bounds.memory_mb, output_bytes=_MOST_OUTPUT)
        job = {"language": self.language, "seed": seed, "cells": cells, "deadline_s": bounds.deadline_s}
        box = Box(level=self.level, limits=limits)
        try:
            ran = run_python(box, _program(), json.dumps(job).encode(), bounds.deadline_s * len(cells))
        except ProgramEndedError as ended:  # of cell_runner.py, before it runs a cell
            raise RunError("run a cell", f"a box breaks: {ended.reason}") from None
        if ran.how == "timeout" or ran.status in (-signal.SIGPROF, 128 + signal.SIGPROF):
            return ToolResult(f"timeout: no end within {bounds.deadline_s:g} s", "timeout"), state
        result = bounds.cut(ran.outputs["stdout"].decode("utf-8", "replace"))
        if ran.how == "output":
            return ToolResult(result.text, "cut"), state
        if ran.out_of_memory or ran.status not in (0, RAISED):
            why = "it used too much memory" if ran.out_of_memory else f"it ended its process ({ran.status})"
            return ToolResult(f"died: {why}", "died"), state
        return ToolResult(result.text, "raised") if ran.status == RAISED else result, tuple(cells)


def python(level: Level) -> Cells:
    return Cells("python", level)


def shell(level: Level) -> Cells:
    return Cells("shell", level)


@cache
def _program() -> str:
    return Path(__file__).with_name("cell_runner.py").read_text(encoding="utf-8")
