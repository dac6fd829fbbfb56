"""Tasks drawn at random without end: splits that a digest of each task's form decides, and no form twice.

Only rng.random() is used of a generator, which gives the same numbers on every version of Python.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import ClassVar, Literal, TypeVar

from posttrain.types import UserError

Split = Literal["train", "held_out"]
_T = TypeVar("_T")

_SHARE = 8
"""One form in so many is held out."""
_TRIES = 2000
"""Draws in a row that find nothing new, after which there is taken to be nothing."""


@dataclass(frozen=True, kw_only=True)
class Theorems:
    """How many theorems of a kind there are, of which sizes, and how they are asked."""

    low: int
    high: int
    template: str = "{theorem}"
    """{theorem} is the goal as Coq shows it: a line for each hypothesis, a line of =, what is to prove."""
    train: int = 2000
    """How many theorems to train on."""
    held_out: int = 200
    """How many theorems to evaluate on."""
    seed: int = 0
    """Of the theorems that are drawn, not of which ones are held out."""
    least: ClassVar[int] = 1
    """Of `low`."""

    def __post_init__(self) -> None:
        if not self.least <= self.low <= self.high:
            raise ValueError(f"{self.least} <= low <= high must hold, not low {self.low}, high {self.high}")
        if "{theorem}" not in self.template:
            raise ValueError("the template must use {theorem}")
        if self.train < 1 or self.held_out < 0:
            raise ValueError("train must be 1 or more and held_out 0 or more")

    @property
    def sizes(self) -> int:
        """How many sizes there are."""
        return self.high - self.low + 1

    def size(self, index: int) -> int:
        """Of the theorem of that index: each in turn."""
        return self.low + index % self.sizes


def held_out(digest: str) -> bool:
    """Whether nobody may train on tasks of a form, given its digest in hexadecimal: of one form in eight.

    >>> held_out("00000008ff"), held_out("00000009ff")
    (True, False)
    """
    return int(digest[:8], 16) % _SHARE == 0


def in_split(
    split: Split, rng: random.Random, draw: Callable[[random.Random], tuple[_T, str] | None]
) -> tuple[_T, str] | None:
    """The first thing drawn that belongs to the split, with the digest of its form; None if none is found.

    `draw` gives a thing with that digest, or None for one that is not wanted.
    """
    for _ in range(_TRIES):
        found = draw(rng)
        if found is not None and held_out(found[1]) == (split == "held_out"):
            return found
    return None


def distinct(
    wanted: int, shares: int, at: Callable[[int], tuple[_T, str] | None], what: str
) -> list[tuple[int, _T]]:
    """Index and thing of the first `wanted` things of different forms, in turn from each of the shares.

    `at` gives the thing of an index, of the share index mod `shares`, with the digest of its form; None if
    that share has nothing. Raises UserError, which says `what` there is too little of, if one has no more.

    >>> distinct(4, 2, lambda index: (index, str(index // 3)), "numbers")
    [(0, 0), (3, 3), (6, 6), (9, 9)]
    """
    error = UserError("", f"there are not {wanted} {what}", "ask for fewer, or for larger ones")
    found: dict[str, tuple[int, _T]] = {}
    places = [count(share, shares) for share in range(shares)]
    for number in range(wanted):
        for index in islice(places[number % shares], _TRIES):
            made = at(index)
            if made is None:
                raise error
            if made[1] not in found:
                found[made[1]] = (index, made[0])
                break
        else:
            raise error
    return list(found.values())


def of_split(
    split: Split,
    spec: Theorems,
    limit: int | None,
    at: Callable[[int], tuple[_T, str] | None],
    *,
    kind: str,
    what: str,
) -> list[tuple[int, _T]]:
    """Index and theorem of the theorems of a split, or of the first `limit` of them (see distinct).

    Raises UserError, which says their `kind`, if the split is empty or holds fewer than `limit`.
    """
    given = spec.held_out if split == "held_out" else spec.train
    made = distinct(given if limit is None else min(given, limit), spec.sizes, at, what)
    if not made or (limit is not None and len(made) < limit):
        raise UserError(
            "",
            f"there are {len(made)} {kind} theorems in {split!r}, not {limit or 'any'}",
            f"raise task.{kind.lower()}.{split}, or ask for fewer",
        )
    return made


def picked(things: Sequence[_T], rng: random.Random) -> _T:
    """One of the things, each as likely as the others."""
    return things[int(rng.random() * len(things))]


def shuffled(things: Sequence[_T], rng: random.Random) -> list[_T]:
    """The things in random order."""
    return sorted(things, key=lambda _: rng.random())
