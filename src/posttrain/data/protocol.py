"""What a family of tasks is: the protocol of the kinds that stand as tables below [task]."""

from dataclasses import dataclass
from typing import Protocol

from posttrain.types import Task


@dataclass(frozen=True, kw_only=True)
class Games:
    """How many games to make for an environment of ours."""

    train: int = 1000
    held_out: int = 200

    def __post_init__(self) -> None:
        if self.train < 1 or self.held_out < 0:
            raise ValueError("train must be 1 or more and held_out 0 or more")


class Tasks(Protocol):
    """A family of tasks: a frozen dataclass whose fields are the keys of its table.

    A family that is played in several turns is an environment too: it has `start` and `reply`, and takes its
    numbers of tasks from `games`. One that brings its own judge has `scorer()`, which returns a Verifier.
    """

    def make(self, limit: int, seed: int, games: Games) -> tuple[list[Task], list[Task]]:
        """Return the tasks to train on, and at most `limit` that are only evaluated on.

        seed: of the run, for families without one of their own. Raises UserError if there are none.
        """
        ...
