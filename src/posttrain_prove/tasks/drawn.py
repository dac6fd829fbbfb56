"""Draw random theorems without end: a digest of each theorem's form decides its split, and no form repeats.

Of a generator only rng.random() is used, which gives the same numbers on every version of Python.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import ClassVar, Literal, TypeVar

from posttrain.types import UserError

Split = Literal["train", "held_out"]
_T = TypeVar("_T")

_SHARE = 8
"""One form in this many is held out."""
_TRIES = 2000
"""Consecutive draws without a new form, after which the search stops."""


@dataclass(frozen=True, kw_only=True)
class Theorems:
    """Number and sizes of the theorems of a kind, and their prompt."""

    low: int
    high: int
    template: str = "{theorem}"
    """{theorem} is the goal as Coq shows it: a line for each hypothesis, a line of =, what is to prove."""
    train: int = 2000
    """Number of theorems to train on."""
    held_out: int = 200
    """Number of theorems to evaluate on."""
    seed: int = 0
    """Seed of the theorems; it does not change which forms are held out."""
    least: ClassVar[int] = 1
    """The smallest value allowed for `low`."""

    def __post_init__(self) -> None:
        if not self.least <= self.low <= self.high:
            raise ValueError(f"{self.least} <= low <= high must hold, not low {self.low}, high {self.high}")
        if "{theorem}" not in self.template:
            raise ValueError("the template must use {theorem}")
        if self.train < 1 or self.held_out < 0:
            raise ValueError("train must be 1 or more and held_out 0 or more")

    @property
    def sizes(self) -> int:
        return self.high - self.low + 1

    def size(self, index: int) -> int:
        """Return the size of the theorem with this index: sizes alternate."""
        return self.low + index % self.sizes


_Spec = TypeVar("_Spec", bound=Theorems)


def held_out(digest: str) -> bool:
    """Return whether a form is held out, from its digest in hexadecimal: one form in eight.

    >>> held_out("00000008ff"), held_out("00000009ff")
    (True, False)
    """
    return int(digest[:8], 16) % _SHARE == 0


def draw_in_split(
    split: Split, rng: random.Random, draw: Callable[[random.Random], tuple[_T, str] | None]
) -> tuple[_T, str] | None:
    """Draw until a value belongs to the split; return it with the digest of its form, or None.

    `draw` returns a value with that digest, or None for a value to discard.
    """
    for _ in range(_TRIES):
        pair = draw(rng)
        if pair is not None and held_out(pair[1]) == (split == "held_out"):
            return pair
    return None


def collect_distinct(
    size: int, shares: int, at: Callable[[int], tuple[_T, str] | None], content: str
) -> list[tuple[int, _T]]:
    """Return (index, value) of the first `size` values of different forms, in turn from each of the shares.

    `at` returns the value of an index, of the share index mod `shares`, with the digest of its form; None if
    the share is empty. Raises UserError, which names the `content`, if a share has too few.

    >>> collect_distinct(4, 2, lambda index: (index, str(index // 3)), "numbers")
    [(0, 0), (3, 3), (6, 6), (9, 9)]
    """
    error = UserError("", f"there are not {size} {content}", "ask for fewer, or for larger ones")
    values: dict[str, tuple[int, _T]] = {}
    places = [count(share, shares) for share in range(shares)]
    for number in range(size):
        for index in islice(places[number % shares], _TRIES):
            pair = at(index)
            if pair is None:
                raise error
            if pair[1] not in values:
                values[pair[1]] = (index, pair[0])
                break
        else:
            raise error
    return list(values.values())


def collect_split(
    split: Split,
    spec: _Spec,
    limit: int | None,
    draw: Callable[[Split, _Spec, int], tuple[_T, str] | None],
    kind: str,
    content: str,
) -> list[tuple[int, _T]]:
    """Return (index, theorem) for a split, or for its first `limit` theorems (see collect_distinct).

    Raises UserError, which names their `kind`, if the split is empty or has fewer than `limit`.
    """
    size = spec.held_out if split == "held_out" else spec.train
    size = size if limit is None else min(size, limit)
    theorems = collect_distinct(size, spec.sizes, partial(draw, split, spec), content)
    if not theorems or (limit is not None and len(theorems) < limit):
        raise UserError(
            "",
            f"there are {len(theorems)} {kind} theorems in {split!r}, not {limit or 'any'}",
            f"raise task.{kind.lower()}.{split}, or ask for fewer",
        )
    return theorems


def pick(items: Sequence[_T], rng: random.Random) -> _T:
    """Return one of the items at random, all equally likely."""
    return items[int(rng.random() * len(items))]


def shuffle(items: Sequence[_T], rng: random.Random) -> list[_T]:
    """Return the items in random order."""
    return sorted(items, key=lambda _: rng.random())
