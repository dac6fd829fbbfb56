"""Tasks that the policy solves now and then: a band of success rates."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.runtime.tasks.stream import Rates, Stream, check_same, dice
from posttrain.types import Task


class Band:
    """Tasks whose success rate lies in [low, high], each asked again when it is longest ago.

    At first every task is asked once, if there is to be a sweep. Then, of the tasks that are not under way,
    the next is one within the band, and with chance `explore`, or if there is none, any one: always that
    which was asked longest ago, as its rate says least of the policy that there is now. So every task has its
    turn, at the latest after about tasks / explore others. A rate is a running one: keep · before +
    (1 - keep) · now.

    >>> tasks = [Task(id=name, messages=()) for name in "abc"]
    >>> band = Band(tasks, seed=0, explore=0.0)
    >>> rates = {"a": 0.0, "b": 0.5, "c": 1.0}
    >>> metrics = band.observe([(task, rates[task.id]) for _, task in (band.take() for _ in range(3))])
    >>> band.take()[1].id, metrics
    ('b', {'curriculum/success': 0.5, 'curriculum/in_band': 0.3333333333333333})
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        seed: int,
        low: float = 0.1,
        high: float = 0.8,
        keep: float = 0.0,
        explore: float = 0.2,
        sweep: bool = True,
    ) -> None:
        self.tasks, self.seed, self.taken = tasks, seed, 0
        self.low, self.high, self.keep, self.explore, self.sweep = low, high, keep, explore, sweep
        self._place = {task.id: place for place, task in enumerate(tasks)}
        self._times = [0] * len(tasks)
        self._last = [0] * len(tasks)
        """How many had been taken when each was last; without a sweep those that never were are below 0."""
        self._order = Stream(range(len(tasks)), seed=seed)
        for place in range(-len(tasks), 0) if not sweep else ():
            self._last[self._order.take()[1]] = place
        self._rate: list[float | None] = [None] * len(tasks)
        self._under_way: set[int] = set()

    def take(self) -> tuple[int, Task]:
        """(times it was taken before, task)."""
        place = self._next()
        epoch, self._times[place] = self._times[place], self._times[place] + 1
        self.taken += 1
        self._last[place] = self.taken
        self._under_way.add(place)
        return epoch, self.tasks[place]

    def _next(self) -> int:
        if self.sweep and self.taken < len(self.tasks):
            self._order.taken = self.taken
            return self._order.take()[1]
        # While others are left none is asked twice in an update; afterwards all are as free as before.
        free = [p for p in range(len(self.tasks)) if p not in self._under_way] or range(len(self.tasks))
        anyone = dice(f"band/{self.seed}/{self.taken}").random() < self.explore
        return min(free, key=lambda p: (not (anyone or self._within(self._rate[p])), self._last[p]))

    def _within(self, rate: float | None) -> bool:
        return rate is not None and self.low <= rate <= self.high

    def observe(self, rates: Rates) -> dict[str, float]:
        """Moves the rates of these tasks; how they stand."""
        for task, now in rates:
            place = self._place[task.id]
            self._under_way.discard(place)
            before = self._rate[place]
            if now is not None:
                keep = 0.0 if before is None else self.keep
                self._rate[place] = keep * (before or 0.0) + (1 - keep) * now
        known = [rate for rate in self._rate if rate is not None]
        if not known:
            return {}
        within = sum(map(self._within, known))
        return {
            "curriculum/success": math.fsum(known) / len(known),
            "curriculum/in_band": within / len(known),
        }

    def state(self) -> dict[str, Any]:
        """Of each task, in their order: how often and when it was taken, its rate; and those under way."""
        under_way = sorted(self._under_way)
        kept = {"times": list(self._times), "last": list(self._last), "rate": list(self._rate)}
        return {**kept, "under_way": under_way}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Puts back what state() gave; UserError if it is of other tasks."""
        check_same("tasks", len(state.get("rate", ())), len(self.tasks))
        self._times, self._last = list(state["times"]), list(state["last"])
        self._rate, self._under_way = list(state["rate"]), set(state["under_way"])
