"""Which task comes next: in random order, easiest first, where the policy is undecided, or by a bandit.

    none     every task once an epoch, in random order          stream.py
    order    the same, easiest first within each epoch          stream.py, with a key
    band     tasks that are neither too easy nor too hard yet   band.py
    bandit   buckets of tasks, by how much they teach now       bandit.py

What is taken depends on the seed, the number taken before and what came of those, and on nothing else:
`state` is all that a checkpoint must hold besides `taken`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from posttrain.runtime.band import Band
from posttrain.runtime.bandit import Bandit
from posttrain.runtime.difficulty import bucketed, difficulty
from posttrain.runtime.stream import Rates, Stream
from posttrain.types import Task


@dataclass(frozen=True, kw_only=True)
class Curriculum:
    """Which task is asked next."""

    kind: Literal["none", "order", "band", "bandit"] = "none"
    """none: in random order. order: easiest first. band: those that are sometimes solved. bandit: from the
    bucket that teaches most."""
    field: str = "difficulty"
    """The field of a task that order and bandit go by."""
    low: float = 0.1
    """The lowest success rate within the band."""
    high: float = 0.8
    """The highest success rate within the band."""
    keep: float = 0.0
    """How much of a task's earlier success rate stays in it when it is asked again; 0 forgets it."""
    explore: float = 0.2
    """Share of the tasks that are taken from all alike; with a bandit also how fast it learns."""
    buckets: int = 4
    """How many buckets, of about as many tasks each; a field of no more values makes a bucket of each."""
    share: float = 0.005
    """What every bucket is given of the others' weight with each group, so that none is ever given up."""

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high <= 1:
            raise ValueError(f"low and high must lie in [0, 1] in this order, not {self.low} and {self.high}")
        if not 0 <= self.keep < 1:
            raise ValueError(f"keep must lie in [0, 1), not {self.keep}")
        if not 0 <= self.explore <= 1:
            raise ValueError(f"explore must lie in [0, 1], not {self.explore}")
        if self.kind == "bandit" and not self.explore:
            raise ValueError("explore must be above 0 for a bandit, which would never learn")
        if self.buckets < 2:
            raise ValueError(f"buckets must be 2 or more, not {self.buckets}")
        if not 0 <= self.share <= 0.1:
            raise ValueError(f"share must lie in [0, 0.1], not {self.share}")


READ_BY: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "order": ("field",),
    "band": ("low", "high", "keep", "explore"),
    "bandit": ("field", "explore", "buckets", "share"),
}
"""The keys besides its own that each kind reads."""


class Supply(Protocol):
    """Where the online loop takes its tasks from, and to whom it tells what came of them."""

    taken: int
    """Tasks taken so far; set by whoever resumes a run."""

    def take(self) -> tuple[int, Task]:
        """(epoch, task): the next one, and how often that task had been taken before."""
        ...

    def observe(self, rates: Rates) -> dict[str, float]:
        """Takes in what came of an update's groups, each time in the same order; metrics."""
        ...

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold besides `taken`, as JSON."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Puts back what state() gave; the state of a run that has just begun is empty."""
        ...


def supply(settings: Curriculum, tasks: Sequence[Task], *, seed: int) -> Supply:
    """The tasks in the order that the settings ask for.

    Raises UserError for a task that lacks the field, and for a field that tells no two tasks apart.
    """
    s = settings
    if s.kind == "band":
        return Band(tasks, seed=seed, low=s.low, high=s.high, keep=s.keep, explore=s.explore)
    if s.kind == "bandit":
        return Bandit(bucketed(tasks, s.field, s.buckets), seed=seed, explore=s.explore, share=s.share)
    if s.kind == "order":
        hard = {task.id: difficulty(task, s.field) for task in tasks}
        return Stream(tasks, seed=seed, key=lambda task: hard[task.id])
    return Stream(tasks, seed=seed)
