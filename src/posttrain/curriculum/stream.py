"""The order of tasks or rows: each once per epoch, in an order that the seed and the epoch fix."""

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Generic, TypeVar

from posttrain.types import Task, UserError

Item = TypeVar("Item")

Rates = Sequence[tuple[Task, float | None]]
"""Each group's task and the share of right answers; None if none could be judged."""


class Stream(Generic[Item]):
    """An endless sequence of items; its whole state is the number of items taken so far.

    With a key each epoch is sorted by it, with equal items in random order.

    >>> stream = Stream("abc", seed=0)
    >>> sorted(stream.take()[1] for _ in range(3)), stream.taken
    (['a', 'b', 'c'], 3)
    >>> upwards = Stream([5, -1, 3], seed=0, key=abs)
    >>> [upwards.take()[1] for _ in range(4)]
    [-1, 3, 5, -1]
    """

    def __init__(
        self, items: Sequence[Item], *, seed: int, key: Callable[[Item], float] | None = None
    ) -> None:
        if not items:
            raise ValueError("there is nothing to take")
        self.items, self.taken = items, 0

        def order(epoch: int) -> list[int]:
            places = _order(len(items), seed, epoch)
            return places if key is None else sorted(places, key=lambda place: key(items[place]))

        self._order = lru_cache(maxsize=2)(order)

    def take(self) -> tuple[int, Item]:
        """Return (epoch, next item)."""
        epoch, place = divmod(self.taken, len(self.items))
        self.taken += 1
        return epoch, self.items[self._order(epoch)[place]]

    def observe(self, rates: Rates) -> dict[str, float]:
        """Return no metrics: results do not change the order."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return an empty state: `taken` is everything."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Do nothing: the caller sets `taken`."""


def _order(n: int, seed: int, epoch: int) -> list[int]:
    order = list(range(n))
    dice(f"{seed}/{epoch}").shuffle(order)
    return order


def dice(key: str) -> random.Random:
    """Return a random generator that depends on this text alone, in every process."""
    return random.Random(int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big"))


def check_same(noun: str, there: int, here: int) -> None:
    """Raise UserError if a checkpoint has another number of these than the run."""
    if there != here:
        raise UserError(
            "curriculum",
            f"the checkpoint is of {there} {noun}, and there are {here}",
            "resume with the recipe and the tasks that it was made with",
        )
