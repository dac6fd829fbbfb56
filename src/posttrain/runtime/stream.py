"""The order of tasks or rows: every one once per epoch, in an order that the seed and the epoch fix."""

import hashlib
import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Stream(Generic[Item]):
    """An endless sequence of items whose whole state is the number taken so far.

    >>> stream = Stream("abc", seed=0)
    >>> sorted(stream.take()[1] for _ in range(3)), stream.taken
    (['a', 'b', 'c'], 3)
    """

    def __init__(self, items: Sequence[Item], *, seed: int) -> None:
        if not items:
            raise ValueError("there is nothing to take")
        self.items, self.taken = items, 0
        self._order = lru_cache(maxsize=2)(lambda epoch: _order(len(items), seed, epoch))

    def take(self) -> tuple[int, Item]:
        """(epoch, item): the next one."""
        epoch, place = divmod(self.taken, len(self.items))
        self.taken += 1
        return epoch, self.items[self._order(epoch)[place]]


def _order(n: int, seed: int, epoch: int) -> list[int]:
    order = list(range(n))
    dice(f"{seed}/{epoch}").shuffle(order)
    return order


def dice(key: str) -> random.Random:
    """A generator that depends on this text alone, in every process."""
    return random.Random(int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big"))
