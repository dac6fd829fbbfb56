"""The protocol of families of tasks: the kinds that are tables below [task]."""

from dataclasses import dataclass
from typing import Protocol

from posttrain.types import Task


@dataclass(frozen=True, kw_only=True)
class Games:
    """Number of games to make for an environment of posttrain."""

    train: int = 1000
    held_out: int = 200

    def __post_init__(self) -> None:
        if self.train < 1 or self.held_out < 0:
            raise ValueError("train must be 1 or more and held_out 0 or more")


class Tasks(Protocol):
    """A family of tasks: a frozen dataclass whose fields are the keys of its table.

    A family with episodes of several turns is an environment too: it has `start` and `reply`, and takes its
    numbers of tasks from `games`. One with a judge of its own has `scorer()`, which returns a Verifier.
    """

    def make(self, limit: int, seed: int, games: Games) -> tuple[list[Task], list[Task]]:
        """Return the tasks to train on, and at most `limit` tasks for evaluation only.

        seed: the seed of the run, for families without one of their own. Raises UserError if there are no
        tasks.
        """
        ...
