"""Which groups may begin, and which are trained on next: the one place that knows how old data may be.

A state machine without threads, clocks and tensors. A group takes a slot when it is admitted. It gives it
back when weights that were trained on it are live in every sampler, so that what takes the slot next is drawn
by those weights, or at once when selection drops it. With (max_lag + 1) slots for each group of an update,
nothing is ever older than max_lag when it is trained on, and nothing is dropped for being late: that would be
a bias towards short answers.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, TypeVar

Group = TypeVar("Group")


@dataclass
class Admission(Generic[Group]):
    """The line of groups between admission and the update that trains on them.

    groups: of an update. window: how far an update may reach past a group that is not finished: one is passed
    by at most window - 1 groups that were admitted later.

    >>> line = Admission(groups=2, max_lag=1)
    >>> line.room(), [line.admit() for _ in range(4)], line.room()
    (4, [0, 1, 2, 3], 0)
    >>> line.finish(1, "b"), line.take(2), line.finish(0, "a"), line.take(2)
    (True, None, True, [(0, 'a'), (1, 'b')])
    >>> line.hold([0, 1], version=1), line.room(), line.release(1), line.room()
    (None, 0, None, 2)
    """

    groups: int
    max_lag: int = 0
    window: int = 1
    admitted: int = 0
    """Numbers given so far."""
    queue: dict[int, Group | None] = field(default_factory=dict)
    """Admitted and not taken, in order: what each came to, or None while it is played."""
    held: dict[int, int] = field(default_factory=dict)
    """Taken, and its slot not given back: the version that was trained on it, or -1 while there is none."""
    passed: set[int] = field(default_factory=set)
    """Taken before the first of the line, although they were admitted after it."""

    @property
    def bound(self) -> int:
        """How many versions older than the one that is trained any token may be."""
        return self.max_lag + -(-(self.window - 1) // self.groups)

    @property
    def playing(self) -> int:
        """How many groups of the line are not finished."""
        return sum(group is None for group in self.queue.values())

    def room(self, needed: int | None = None) -> int:
        """How many groups may be admitted; needed: how many will still be trained on, the line included."""
        free = (self.max_lag + 1) * self.groups - len(self.queue) - len(self.held)
        return max(0, free if needed is None else min(free, needed - len(self.queue)))

    def admit(self) -> int:
        """The number of another group, which now has a slot."""
        number, self.admitted = self.admitted, self.admitted + 1
        self.queue[number] = None
        return number

    def finish(self, number: int, group: Group) -> bool:
        """Whether this group was waited for: it is finished now. A second arrival changes nothing."""
        if number not in self.queue or self.queue[number] is not None:
            return False
        self.queue[number] = group
        return True

    def replay(self, number: int) -> None:
        """This group is played again; one that has been taken is no concern of the line's."""
        if number in self.queue:
            self.queue[number] = None

    def take(self, count: int) -> list[tuple[int, Group]] | None:
        """The next groups to be trained on, in the order of their numbers; None while they are not there."""
        if self.window == 1 and any(group is None for group in islice(self.queue.values(), count)):
            return None  # what is asked most often is answered without a copy
        left, passed = dict(self.queue), set(self.passed)
        taken: list[tuple[int, Group]] = []
        while len(taken) < count and left:
            first = next(iter(left))
            room = self.window - 1 - len(passed)
            found = next(
                (n for n, group in left.items() if group is not None and (n == first or room > 0)), None
            )
            if found is None:
                return None
            group = left.pop(found)
            assert group is not None
            taken.append((found, group))
            passed = {n for n in passed | {found} if left and n > next(iter(left))}
        if len(taken) < count:
            return None
        self.queue, self.passed = left, passed
        self.held |= {number: -1 for number, _ in taken}
        return sorted(taken, key=lambda each: each[0])

    def drop(self, numbers: Iterable[int]) -> None:
        """Gives back the slots of groups that nothing is trained on."""
        for number in numbers:
            self.held.pop(number, None)

    def hold(self, numbers: Iterable[int], version: int) -> None:
        """Keeps the slots of groups that were trained on until this version, or a newer one, is live."""
        self.held |= dict.fromkeys(numbers, version)

    def release(self, version: int) -> None:
        """Gives back the slots of what was trained on up to this version, which samplers now draw by."""
        self.held = {n: of for n, of in self.held.items() if of < 0 or of > version}

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold besides the groups of the line. Nothing may be held untrained."""
        return {"admitted": self.admitted, "line": list(self.queue), "passed": sorted(self.passed)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Puts back what state() gave: all of the line is to be played, or to arrive, again."""
        self.admitted, self.passed = state["admitted"], set(state["passed"])
        self.queue, self.held = dict.fromkeys(state["line"]), {}
