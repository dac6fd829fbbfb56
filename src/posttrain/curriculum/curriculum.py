"""Which task comes next: in random order, easiest first, where the policy is undecided, or by a bandit.

    none     every task once an epoch, in random order          stream.py
    order    the same, easiest first within each epoch          stream.py, with a key
    band     tasks that are neither too easy nor too hard yet   band.py
    bandit   buckets of tasks, by how much they teach now       bandit.py
    FILE.py:NAME   one of your own, called with the tasks and seed=...

What is taken depends on the seed, the number taken before and what came of those, and on nothing else:
`state` is all that a checkpoint must hold besides `taken`.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from posttrain.base.usercode import cause, load_edited
from posttrain.curriculum.band import Band
from posttrain.curriculum.bandit import Bandit
from posttrain.curriculum.difficulty import bucketed, difficulty
from posttrain.curriculum.stream import Rates, Stream
from posttrain.recipe.settings import Curriculum
from posttrain.types import RunError, Task, UserError


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
        """Puts back what state() gave, if that was anything."""
        ...


def supply(settings: Curriculum, tasks: Sequence[Task], *, seed: int) -> Supply:
    """The tasks in the order that the settings ask for.

    Raises UserError for a task that lacks the field, for a field that tells no two tasks apart, and for a
    curriculum of one's own that is none.
    """
    s = settings
    if ":" in s.kind:
        return Own(s.kind, tasks, seed=seed)
    if s.kind == "band":
        return Band(tasks, seed=seed, low=s.low, high=s.high, keep=s.keep, explore=s.explore, sweep=s.sweep)
    if s.kind == "bandit":
        return Bandit(bucketed(tasks, s.field, s.buckets), seed=seed, explore=s.explore, share=s.share)
    if s.kind == "order":
        hard = {task.id: difficulty(task, s.field) for task in tasks}
        return Stream(tasks, seed=seed, key=lambda task: hard[task.id])
    return Stream(tasks, seed=seed)


class Own:
    """A supply that a function or a class of the user's makes; what it raises ends the run with its name.

    Raises UserError if it cannot be made, or lacks what a supply has.
    """

    def __init__(self, name: str, tasks: Sequence[Task], *, seed: int) -> None:
        self.name, where = name, "curriculum.kind"
        make = load_edited(name, where)
        try:
            self.made: Any = make(tasks, seed=seed)
        except Exception as error:
            raise UserError(where, f"{name} fails: {cause(error)}") from None
        needed = ("taken", "take", "observe", "state", "restore")
        if lacks := [each for each in needed if not hasattr(self.made, each)]:
            raise UserError(where, f"what {name} gives has no {', '.join(lacks)}")

    @property
    def taken(self) -> int:
        """Tasks taken so far."""
        return int(self.made.taken)

    @taken.setter
    def taken(self, count: int) -> None:
        """Set by whoever resumes a run."""
        self.made.taken = count

    def take(self) -> tuple[int, Task]:
        """The next task, and how often it had been taken before."""
        given = self._asked("take")
        if not (isinstance(given, tuple) and [type(each) for each in given] == [int, Task]):
            raise RunError(self.name, f"take gave {given!r:.60}, not (times taken before, task)")
        return given

    def observe(self, rates: Rates) -> dict[str, float]:
        """What came of an update's groups; metrics."""
        found: dict[str, float] = self._asked("observe", rates) or {}
        return found

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold, as JSON."""
        found: dict[str, Any] = self._asked("state") or {}
        return copy.deepcopy(found)  # it may be what goes on to change

    def restore(self, state: Mapping[str, Any]) -> None:
        self._asked("restore", state)

    def _asked(self, verb: str, *given: object) -> Any:
        try:
            return getattr(self.made, verb)(*given)
        except Exception as error:
            raise RunError(self.name, f"{verb} fails: {cause(error)}") from None
