"""The order of tasks or rows: every one once per epoch, in an order that the seed and the epoch fix."""

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Generic, TypeVar

from posttrain.types import Task, UserError

Item = TypeVar("Item")

Rates = Sequence[tuple[Task, float | None]]
"""Each group's task and the share of its answers that were right; None where nobody could judge any."""


class Stream(Generic[Item]):
    """An endless sequence of items whose whole state is the number taken so far.

    With a key each epoch runs from the least to the greatest, equal ones in random order.

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
        """(epoch, item): the next one."""
        epoch, place = divmod(self.taken, len(self.items))
        self.taken += 1
        return epoch, self.items[self._order(epoch)[place]]

    def observe(self, rates: Rates) -> dict[str, float]:
        """No metrics: what came of the items changes nothing of an order that is fixed."""
        return {}

    def state(self) -> dict[str, Any]:
        """Nothing besides `taken`."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Nothing: `taken` is set by whoever resumes."""


def _order(n: int, seed: int, epoch: int) -> list[int]:
    order = list(range(n))
    dice(f"{seed}/{epoch}").shuffle(order)
    return order


def dice(key: str) -> random.Random:
    """A generator that depends on this text alone, in every process."""
    return random.Random(int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big"))


def check_same(what: str, there: int, here: int) -> None:
    """UserError where a checkpoint is of more or fewer of these than there are."""
    if there != here:
        raise UserError(
            "curriculum",
            f"the checkpoint is of {there} {what}, and there are {here}",
            "resume with the recipe and the tasks that it was made with",
        )
