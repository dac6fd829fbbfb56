"""Theorems to prove in Coq, from `2 + 2 = 4` upward, some of which are set aside and never trained on.

A seed orders all theorems; the first `held_out` of this order are held out, for all difficulties alike, so
a run on hard theorems never trains on those that a run on easy ones is tested on.
"""

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from posttrain.data.protocol import Games
from posttrain.types import Task, UserError

Split = Literal["train", "held_out"]

_FILE = Path(__file__).with_suffix(".jsonl")
HARDEST = 6


@dataclass(frozen=True, kw_only=True)
class CoqExercises:
    """The theorems of difficulty low to high.

    >>> CoqExercises().size, CoqExercises(low=1, high=1).size
    (172, 23)
    """

    low: int = 1
    """The least difficulty: 1 takes a tactic or two."""
    high: int = 6
    """The greatest difficulty: 6 takes a lemma, a strengthened induction or the construction of a witness."""
    template: str = (
        "Prove this theorem in Coq.\n\n```coq\n{theorem}\n```\n\n"
        "Answer with the tactics that follow the statement, in one ```coq block."
    )
    """{theorem} is the file up to the statement: what it requires, its definitions, the statement."""
    held_out: int = 30
    """Number of theorems, over all difficulties, that are never trained on."""
    seed: int = 0
    """Seed of the order of theorems, and so of the held-out ones."""

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high <= HARDEST:
            raise ValueError(f"1 <= low <= high <= {HARDEST} must hold, not low {self.low}, high {self.high}")
        if "{theorem}" not in self.template:
            raise ValueError("the template must use {theorem}")
        if self.held_out < 0:
            raise ValueError(f"held_out must be 0 or more, not {self.held_out}")

    def make(self, limit: int, seed: int, games: Games) -> tuple[list[Task], list[Task]]:
        """Return the tasks to train on, and at most `limit` that are only evaluated on."""
        held_out = coq_exercises("held_out", self)[:limit] if limit and self.held_out else []
        return coq_exercises("train", self), held_out

    @property
    def size(self) -> int:
        """Number of theorems of these difficulties."""
        return sum(self.low <= row["difficulty"] <= self.high for row in _rows())


def coq_exercises(split: Split, spec: CoqExercises, *, limit: int | None = None) -> list[Task]:
    """Return the theorems of a split in the seed's order; the first `limit` if given.

    `fields` holds what the verifier `coq` needs, and a proof as `gold`, which no prompt shows. Raises
    UserError if the split is empty or has fewer than `limit`.

    >>> easy = coq_exercises("train", CoqExercises(high=1), limit=3)
    >>> [task.fields["name"] for task in easy]
    ['or_swap', 'imp_trans', 'succ_congr']
    """
    ordered = sorted(_rows(), key=lambda row: _order_key(row["id"], spec.seed))
    rows = ordered[: spec.held_out] if split == "held_out" else ordered[spec.held_out :]
    theorems = [row for row in rows if spec.low <= row["difficulty"] <= spec.high][:limit]
    if not theorems or (limit is not None and len(theorems) < limit):
        raise UserError(
            "",
            f"there are {spec.size} Coq exercises of difficulty {spec.low} to {spec.high}, and "
            f"{len(theorems)} of them are in {split!r}, not {limit or 'any'}",
            "widen low ... high, change held_out, or ask for fewer",
        )
    return [_task(row, spec) for row in theorems]


def _task(row: Mapping[str, Any], spec: CoqExercises) -> Task:
    parts = [
        row.get("header", ""),
        row.get("definitions", ""),
        f"Theorem {row['name']} : {row['statement']}.",
    ]
    theorem = "\n".join(part for part in parts if part)
    return Task(
        id=row["id"],
        messages=({"role": "user", "content": spec.template.replace("{theorem}", theorem)},),
        fields={key: value for key, value in row.items() if key not in ("id", "line")},
        source=f"{_FILE.name}:{row['line']}",
    )


@functools.cache
def _rows() -> tuple[Mapping[str, Any], ...]:
    lines = _FILE.read_text(encoding="utf-8").splitlines()
    return tuple({**json.loads(line), "line": number} for number, line in enumerate(lines, 1))


def _order_key(name: str, seed: int) -> bytes:
    return hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
