"""Which task comes next: in random order, easiest first, where the policy is undecided, or by a bandit.

    none     every task once an epoch, in random order          stream.py
    order    the same, easiest first within each epoch          stream.py, with a key
    band     tasks that are neither too easy nor too hard yet   band.py
    bandit   buckets of tasks, by how much they teach now       bandit.py

What is taken depends on the seed, the number taken before and what came of those, and on nothing else:
`state` is all that a checkpoint must hold besides `taken`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from posttrain.recipe.settings import Curriculum
from posttrain.runtime.tasks.band import Band
from posttrain.runtime.tasks.bandit import Bandit
from posttrain.runtime.tasks.difficulty import bucketed, difficulty
from posttrain.runtime.tasks.stream import Rates, Stream
from posttrain.types import Task


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
