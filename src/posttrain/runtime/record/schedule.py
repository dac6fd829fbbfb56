"""What happened when, in a run that goes by the clock: a few bytes a step, from which it can be made again.

schedule/loop.jsonl   ["admit", UPDATE, COUNT]: so many groups were admitted, with so many updates behind
schedule/N.jsonl      what sampler N did, before which step of its engine (samplers/worker.py: Did)
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from posttrain.samplers.worker import Did
from posttrain.types import UserError

FOLDER = "schedule"


class Recorder:
    """Writes it down."""

    def __init__(self, run: Path) -> None:
        self.folder = run / FOLDER
        if self.folder.exists():
            self._write("loop", [("resumed",)])

    def admitted(self, update: int, count: int) -> None:
        """So many groups were admitted after this many updates."""
        self._write("loop", [("admit", update, count)])

    def did(self, number: int, log: Sequence[Did]) -> None:
        """What a sampler did."""
        self._write(str(number), log)

    def _write(self, name: str, lines: Sequence[Did]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{name}.jsonl").open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


class RecordedSchedule:
    """Reads it; UserError for a run that left none, or none that leads to it again."""

    def __init__(self, run: Path, samplers: int) -> None:
        if not (run / FOLDER / "loop.jsonl").exists():
            raise UserError(
                str(run),
                "it has no schedule",
                "a run whose sampler takes turns in the loop's thread is made again by training again",
            )
        self._admitted = list(_lines(run / FOLDER / "loop.jsonl"))
        self.logs: list[list[Did]] = [
            [tuple(did) for did in _lines(run / FOLDER / f"{n}.jsonl")] for n in range(samplers)
        ]
        for what, why in (("resumed", "it was resumed"), ("restart", "a sampler was started again")):
            if any(line[0] == what for lines in (self._admitted, *self.logs) for line in lines):
                raise UserError(str(run), f"{why}, and what was lost is in no record")

    def room(self, update: int) -> int:
        """How many groups were admitted by now, with so many updates behind; each is told once."""
        count = 0
        while self._admitted and self._admitted[0][1] <= update:
            count += self._admitted.pop(0)[2]
        return count


def _lines(path: Path) -> Iterator[Any]:
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            yield json.loads(line)
        except ValueError:  # a kill cut it, and what came after a resume stands behind
            yield ("resumed",)
