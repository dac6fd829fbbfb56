"""Tasks that the policy solves now and then: a band of success rates."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import numpy.typing

from posttrain.curriculum.stream import Rates, Stream, check_same, dice
from posttrain.types import Task


class Band:
    """Tasks whose success rate lies in [low, high], each asked again when it is longest ago.

    At first every task is asked once, if there is to be a sweep. Then, of the tasks that are not running,
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
        self._times = numpy.zeros(len(tasks), numpy.int64)
        self._last = numpy.zeros(len(tasks), numpy.int64)
        """How many had been taken when each was last; without a sweep those that never were are below 0."""
        self._order = Stream(range(len(tasks)), seed=seed)
        for place in range(-len(tasks), 0) if not sweep else ():
            self._last[self._order.take()[1]] = place
        self._rate = numpy.full(len(tasks), math.nan)
        """NaN where nothing is known yet."""
        self._under_way = numpy.zeros(len(tasks), numpy.bool_)

    def take(self) -> tuple[int, Task]:
        """(times it was taken before, task)."""
        place = self._next()
        epoch = int(self._times[place])
        self._times[place] += 1
        self.taken += 1
        self._last[place] = self.taken
        self._under_way[place] = True
        return epoch, self.tasks[place]

    def _next(self) -> int:
        if self.sweep and self.taken < len(self.tasks):
            self._order.taken = self.taken
            return self._order.take()[1]
        # While others are left none is asked twice in an update; afterwards all are as free as before.
        among = ~self._under_way
        if not among.any():
            among[:] = True
        anyone = dice(f"band/{self.seed}/{self.taken}").random() < self.explore
        if not anyone and (within := among & self._within()).any():
            among = within
        return int(numpy.where(among, self._last, numpy.iinfo(numpy.int64).max).argmin())

    def _within(self) -> numpy.typing.NDArray[numpy.bool_]:
        return (self._rate >= self.low) & (self._rate <= self.high)

    def observe(self, rates: Rates) -> dict[str, float]:
        """Moves the rates of these tasks; how they stand."""
        for task, now in rates:
            place = self._place[task.id]
            self._under_way[place] = False
            before = self._rate[place]
            if now is not None:
                self._rate[place] = now if math.isnan(before) else self.keep * before + (1 - self.keep) * now
        known = self._rate[~numpy.isnan(self._rate)]
        if not len(known):
            return {}
        return {
            "curriculum/success": float(known.mean()),
            "curriculum/in_band": float(self._within().sum() / len(known)),
        }

    def state(self) -> dict[str, Any]:
        """Of each task, in their order: how often and when it was taken, its rate; and those running."""
        kept = {"times": self._times.tolist(), "last": self._last.tolist()}
        rate = [None if math.isnan(each) else each for each in self._rate.tolist()]
        return {**kept, "rate": rate, "under_way": self._under_way.nonzero()[0].tolist()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Puts back what state() gave; UserError if it is of other tasks."""
        check_same("tasks", len(state.get("rate", ())), len(self.tasks))
        self._times, self._last = (numpy.array(state[key], numpy.int64) for key in ("times", "last"))
        self._rate = numpy.array(state["rate"], numpy.float64)  # None becomes NaN
        self._under_way[:] = False
        self._under_way[state["under_way"]] = True
