"""Which task comes next: in random order, easiest first, where the policy is undecided, or by a bandit.

    none     every task once an epoch, in random order          stream.py
    order    the same, easiest first within each epoch          stream.py, with a key
    band     tasks that are neither too easy nor too hard yet   band.py
    bandit   buckets of tasks, by how much they teach now       bandit.py
    FILE.py:NAME   your function or class, called with the tasks and seed=...

The next task depends on the seed, the number of tasks taken and their results alone, so a checkpoint needs
`taken` and `state` to continue.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from posttrain.base.usercode import cause, load_edited
from posttrain.curriculum.band import Band
from posttrain.curriculum.bandit import Bandit
from posttrain.curriculum.difficulty import difficulty, split_buckets
from posttrain.curriculum.stream import Rates, Stream
from posttrain.recipe.settings import Curriculum
from posttrain.types import RunError, Task, UserError


class Supply(Protocol):
    """The source of tasks of the online loop, which reports their results back to it."""

    taken: int
    """Tasks taken so far; set when a run is resumed."""

    def take(self) -> tuple[int, Task]:
        """Return (number of times it was taken before, next task)."""
        ...

    def observe(self, rates: Rates) -> dict[str, float]:
        """Take in the results of an update's groups, in a fixed order; return metrics."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold besides `taken`, as JSON."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state that state() returned, unless it was empty."""
        ...


def build_supply(settings: Curriculum, tasks: Sequence[Task], *, seed: int) -> Supply:
    """Return the supply of tasks that the settings choose.

    Raises UserError for a task that lacks the field, for a field with the same value in all tasks, and for a
    user's curriculum that is not a supply.
    """
    s = settings
    if ":" in s.kind:
        return UserSupply(s.kind, tasks, seed=seed)
    if s.kind == "band":
        return Band(tasks, seed=seed, low=s.low, high=s.high, keep=s.keep, explore=s.explore, sweep=s.sweep)
    if s.kind == "bandit":
        return Bandit(split_buckets(tasks, s.field, s.buckets), seed=seed, explore=s.explore, share=s.share)
    if s.kind == "order":
        hard = {task.id: difficulty(task, s.field) for task in tasks}
        return Stream(tasks, seed=seed, key=lambda task: hard[task.id])
    return Stream(tasks, seed=seed)


class UserSupply:
    """A supply built by a user's function or class; what it raises becomes a RunError with its name.

    Raises UserError if building it fails, or if it lacks a member of Supply.
    """

    def __init__(self, name: str, tasks: Sequence[Task], *, seed: int) -> None:
        self.name, where = name, "curriculum.kind"
        make = load_edited(name, where)
        try:
            self.supply: Any = make(tasks, seed=seed)
        except Exception as error:
            raise UserError(where, f"{name} fails: {cause(error)}") from None
        members = ("taken", "take", "observe", "state", "restore")
        if lacks := [member for member in members if not hasattr(self.supply, member)]:
            raise UserError(where, f"what {name} gives has no {', '.join(lacks)}")

    @property
    def taken(self) -> int:
        return int(self.supply.taken)

    @taken.setter
    def taken(self, count: int) -> None:
        self.supply.taken = count

    def take(self) -> tuple[int, Task]:
        result = self._call("take")
        if not (isinstance(result, tuple) and [type(x) for x in result] == [int, Task]):
            raise RunError(self.name, f"take gave {result!r:.60}, not (times taken before, task)")
        return result

    def observe(self, rates: Rates) -> dict[str, float]:
        metrics: dict[str, float] = self._call("observe", rates) or {}
        return metrics

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._call("state") or {}
        return copy.deepcopy(state)  # the user's object may change it later

    def restore(self, state: Mapping[str, Any]) -> None:
        self._call("restore", state)

    def _call(self, verb: str, *arguments: object) -> Any:
        try:
            return getattr(self.supply, verb)(*arguments)
        except Exception as error:
            raise RunError(self.name, f"{verb} fails: {cause(error)}") from None
