"""A curriculum that keeps to tasks in a band of success rates: neither too easy nor too hard yet."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import numpy.typing

from posttrain.curriculum.stream import Rates, Stream, check_same, dice
from posttrain.types import Task


class Band:
    """Choose tasks whose success rate lies in [low, high], longest ago first.

    With `sweep` every task is sampled once first. After that the next task is one in the band, or, with
    probability `explore` or if the band is empty, any task. Tasks whose group is unfinished are skipped while
    others are left. Because the task sampled longest ago comes first, each comes up again after at most about
    tasks / explore others. A rate is a running mean: keep · before + (1 - keep) · now.

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
        """Value of `taken` when each task was last taken; without a sweep below 0 for tasks never taken."""
        self._order = Stream(range(len(tasks)), seed=seed)
        for place in range(-len(tasks), 0) if not sweep else ():
            self._last[self._order.take()[1]] = place
        self._rate = numpy.full(len(tasks), math.nan)
        """Success rates; NaN before the first."""
        self._running = numpy.zeros(len(tasks), numpy.bool_)

    def take(self) -> tuple[int, Task]:
        """Return (number of times it was taken before, task)."""
        place = self._next()
        epoch = int(self._times[place])
        self._times[place] += 1
        self.taken += 1
        self._last[place] = self.taken
        self._running[place] = True
        return epoch, self.tasks[place]

    def _next(self) -> int:
        if self.sweep and self.taken < len(self.tasks):
            self._order.taken = self.taken
            return self._order.take()[1]
        # A task is not sampled twice in an update while others are left.
        candidates = ~self._running
        if not candidates.any():
            candidates[:] = True
        explores = dice(f"band/{self.seed}/{self.taken}").random() < self.explore
        if not explores and (in_band := candidates & self._in_band()).any():
            candidates = in_band
        return int(numpy.where(candidates, self._last, numpy.iinfo(numpy.int64).max).argmin())

    def _in_band(self) -> numpy.typing.NDArray[numpy.bool_]:
        return (self._rate >= self.low) & (self._rate <= self.high)

    def observe(self, rates: Rates) -> dict[str, float]:
        """Update the rates of these tasks; return the metrics of all rates."""
        for task, now in rates:
            place = self._place[task.id]
            self._running[place] = False
            before = self._rate[place]
            if now is not None:
                self._rate[place] = now if math.isnan(before) else self.keep * before + (1 - self.keep) * now
        measured = self._rate[~numpy.isnan(self._rate)]
        if not len(measured):
            return {}
        return {
            "curriculum/success": float(measured.mean()),
            "curriculum/in_band": float(self._in_band().sum() / len(measured)),
        }

    def state(self) -> dict[str, Any]:
        """Return when and how often each task was taken, its rate, and which tasks are running."""
        return {
            "times": self._times.tolist(),
            "last": self._last.tolist(),
            "rate": [None if math.isnan(rate) else rate for rate in self._rate.tolist()],
            "under_way": self._running.nonzero()[0].tolist(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state that state() returned; raise UserError if it has another number of tasks."""
        check_same("tasks", len(state.get("rate", ())), len(self.tasks))
        self._times, self._last = (numpy.array(state[key], numpy.int64) for key in ("times", "last"))
        self._rate = numpy.array(state["rate"], numpy.float64)  # None becomes NaN
        self._running[:] = False
        self._running[state["under_way"]] = True
