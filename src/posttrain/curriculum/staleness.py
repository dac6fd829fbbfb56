"""Which groups may begin, and which are trained on next: the one place that bounds the staleness of data.

A state machine without threads, clocks and tensors. A group takes a slot when it is admitted. It frees the
slot when all samplers have the weights that were trained on it, so the next group in the slot is sampled with
these weights; or at once if selection drops it. With (max_lag + 1) slots for each group of an update, no
token is older than max_lag when it is trained on. No group is dropped for being late, which would be a bias
towards short answers.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, TypeVar

Group = TypeVar("Group")


@dataclass
class Admission(Generic[Group]):
    """The queue of groups from admission to the update that trains on them.

    groups: number per update. window: how far an update may reach past an unfinished group: at most
    window - 1 groups that were admitted later overtake it.

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
    """Groups admitted so far; the number of the next one."""
    queue: dict[int, Group | None] = field(default_factory=dict)
    """Groups admitted and not taken, in order: the finished group, or None while it is played."""
    slots: dict[int, int] = field(default_factory=dict)
    """Groups taken whose slot is still used: the version that was trained on them, or -1 before that."""
    passed: set[int] = field(default_factory=set)
    """Groups taken before the first of the queue, although they were admitted after it."""

    @property
    def bound(self) -> int:
        """The most versions by which a token may be older than the version that trains on it."""
        return self.max_lag + -(-(self.window - 1) // self.groups)

    @property
    def playing(self) -> int:
        """Number of unfinished groups in the queue."""
        return sum(group is None for group in self.queue.values())

    def room(self, needed: int | None = None) -> int:
        """Return how many groups may be admitted; needed: groups still to train on, with the queue."""
        free = (self.max_lag + 1) * self.groups - len(self.queue) - len(self.slots)
        return max(0, free if needed is None else min(free, needed - len(self.queue)))

    def admit(self) -> int:
        """Give a slot to another group; return its number."""
        number, self.admitted = self.admitted, self.admitted + 1
        self.queue[number] = None
        return number

    def finish(self, number: int, group: Group) -> bool:
        """Record a finished group; return False and change nothing if it was not awaited."""
        if number not in self.queue or self.queue[number] is not None:
            return False
        self.queue[number] = group
        return True

    def replay(self, number: int) -> None:
        """Mark a group as unfinished, since it is played again; do nothing if it has been taken."""
        if number in self.queue:
            self.queue[number] = None

    def take(self, count: int) -> list[tuple[int, Group]] | None:
        """Take the next groups to train on and return them by number; None while too few are finished."""
        if self.window == 1 and any(group is None for group in islice(self.queue.values(), count)):
            return None  # the most frequent case, answered without a copy
        queue, passed = dict(self.queue), set(self.passed)
        batch: dict[int, Group] = {}
        while len(batch) < count and queue:
            first = next(iter(queue))
            room = self.window - 1 - len(passed)
            number = next(
                (n for n, group in queue.items() if group is not None and (n == first or room > 0)), None
            )
            if number is None:
                return None
            group = queue.pop(number)
            assert group is not None
            batch[number] = group
            passed = {n for n in passed | {number} if queue and n > next(iter(queue))}
        if len(batch) < count:
            return None
        self.queue, self.passed = queue, passed
        self.slots |= dict.fromkeys(batch, -1)
        return sorted(batch.items(), key=lambda item: item[0])

    def drop(self, numbers: Iterable[int]) -> None:
        """Free the slots of groups that are not trained on."""
        for number in numbers:
            self.slots.pop(number, None)

    def hold(self, numbers: Iterable[int], version: int) -> None:
        """Keep the slots of groups until all samplers have this version, which was trained on them."""
        self.slots |= dict.fromkeys(numbers, version)

    def release(self, version: int) -> None:
        """Free the slots of groups trained on up to this version, which all samplers now have."""
        self.slots = {n: of for n, of in self.slots.items() if not 0 <= of <= version}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint without the groups; no group may be taken and untrained."""
        return {"admitted": self.admitted, "line": list(self.queue), "passed": sorted(self.passed)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state that state() returned; all groups of the queue are unfinished again."""
        self.admitted, self.passed = state["admitted"], set(state["passed"])
        self.queue, self.slots = dict.fromkeys(state["line"]), {}
