"""Several sources in one run: whose task or record comes next, by their weights.

Each source has an order of its own, and the draws are dealt among the sources: with shares w_i that sum to 1,
source i has had between n w_i - 1 and n w_i + 1 of the first n draws, for every n. So any window of draws is
off by less than 2, and by less than 1 with two sources. No order can keep every window of three or more
arbitrary shares below 1: Fraenkel's conjecture, proved for small numbers of sources.

Source: earliest deadline first among the periodic tasks of Baruah, Cohen, Plaxton and Varvel 1996,
"Proportionate progress", on one processor.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Any, Generic, TypeVar

from posttrain.curriculum.curriculum import Supply
from posttrain.curriculum.stream import Rates, Stream, check_same
from posttrain.recipe.tasks import TaskChoice

Item = TypeVar("Item")


@dataclass(frozen=True)
class WeightedSource(Generic[Item]):
    """A source of a mixture: its name, its weight, and the order of its items."""

    name: str
    weight: float
    supply: Supply | Stream[Item]
    draws: int | None = None
    """Draws after which it has ended, and the others take over its share; None: no end."""


class Mixture(Generic[Item]):
    """Take items from several sources by their weights; one of weight 0 gives none.

    >>> a, b = Stream("xy", seed=0), Stream("z", seed=0)
    >>> mixture = Mixture([WeightedSource("a", 2.0, a), WeightedSource("b", 1.0, b)])
    >>> sorted(mixture.take()[1] for _ in range(3)), mixture.counts
    (['x', 'y', 'z'], [2, 1])
    """

    def __init__(self, sources: Sequence[WeightedSource[Item]]) -> None:
        self.sources = sources
        self.counts = [0] * len(sources)
        """Number of draws of each source."""
        self._since = [0] * len(sources)
        """The same when a source ended last: from there on the shares are those of the others."""

    @property
    def taken(self) -> int:
        return sum(self.counts)

    @taken.setter
    def taken(self, count: int) -> None:
        """Check that `restore` has set this number of draws."""
        check_same("draws", count, self.taken)

    def take(self) -> tuple[int, Item]:
        """Return (number of times it was taken before, next item)."""
        place = self._next()
        source = self.sources[place]
        self.counts[place] += 1
        if self.counts[place] == source.draws:
            self._since = list(self.counts)
        item: tuple[int, Any] = source.supply.take()
        return item

    def _next(self) -> int:
        """Return the source that must have its next draw soonest, among those that may have it now."""
        weights = {
            place: Fraction(source.weight)
            for place, source in enumerate(self.sources)
            if source.weight and (source.draws is None or self.counts[place] < source.draws)
        }
        total = sum(weights.values())
        now = self.taken - sum(self._since)
        deadlines = {}
        for place, weight in weights.items():
            count, period = self.counts[place] - self._since[place], total / weight
            if math.floor(count * period) <= now:
                deadlines[place] = math.ceil((count + 1) * period)
        return min(deadlines, key=lambda place: (deadlines[place], place))

    def observe(self, rates: Rates) -> dict[str, float]:
        """Give each source the results of its own tasks; return their metrics under task/NAME/."""
        metrics = {}
        for source in self.sources:
            results = [(task, rate) for task, rate in rates if task.dataset == source.name]
            for name, value in source.supply.observe(results).items():
                metrics[f"task/{source.name}/{name}"] = value
        return metrics

    def state(self) -> dict[str, Any]:
        """Return the draws of each source, and the states of their orders."""
        states = [source.supply.state() for source in self.sources]
        return {"counts": list(self.counts), "since": list(self._since), "sources": states}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state that state() returned; raise UserError if it has another number of sources."""
        check_same("sources", len(state.get("counts", ())), len(self.sources))
        self.counts, self._since = list(state["counts"]), list(state["since"])
        for source, count, supply_state in zip(self.sources, self.counts, state["sources"], strict=True):
            if supply_state:
                source.supply.restore(supply_state)
            source.supply.taken = count


def mix(
    choices: Sequence[TaskChoice], supplies: Sequence[Supply | Stream[Item]], counts: Sequence[int]
) -> Mixture[Item]:
    """Return the mixture of these sources. counts: the items of each."""
    return Mixture(
        [
            WeightedSource(choice.name, choice.weight, supply, math.ceil(choice.epochs * count) or None)
            for choice, supply, count in zip(choices, supplies, counts, strict=True)
        ]
    )


def mix_records(
    records: Sequence[Item], choices: Sequence[TaskChoice], sizes: Sequence[int], seed: int
) -> Mixture[Item] | Stream[Item]:
    """Return the order of the records of all sources. sizes: the records of each source, in turn."""
    if len(choices) == 1:
        return Stream(records, seed=seed)
    ends = list(accumulate(sizes))
    used = [n for n, size in enumerate(sizes) if size]
    supplies = [Stream(records[ends[n] - sizes[n] : ends[n]], seed=seed) for n in used]
    return mix([choices[n] for n in used], supplies, [sizes[n] for n in used])


class ByUpdate(Generic[Item]):
    """The same number of items for each update, which depend on its number and the seed alone.

    >>> answers = ByUpdate(lambda: Stream("abc", seed=0), 2)
    >>> sorted(answers(1) + answers(2)[:1]), answers(2) == answers(2), answers(1) == answers(2)
    (['a', 'b', 'c'], True, False)
    """

    def __init__(self, order: Callable[[], Mixture[Item] | Stream[Item]], count: int) -> None:
        """order: returns the order of all items, from its beginning."""
        self._begin, self.count = order, count
        self._order = order()

    def __call__(self, update: int) -> list[Item]:
        """Return the items of an update, counted from 1."""
        first = (update - 1) * self.count
        if self._order.taken > first:
            self._order = self._begin()
        while self._order.taken < first:
            self._order.take()
        return [self._order.take()[1] for _ in range(self.count)]
