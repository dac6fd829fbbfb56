"""One curve of a run in little memory, as a long run has many long curves."""

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterator, MutableMapping
from typing import Any


class Curve(MutableMapping[int, float | None]):
    """A mapping from update to value, in the order of updates: 16 bytes an entry, where a dict takes 80.

    None stands for a value that was not a number.

    >>> curve = Curve()
    >>> curve[1], curve[3], curve[2] = 0.5, None, 1.0
    >>> dict(curve), 4 in curve
    ({1: 0.5, 2: 1.0, 3: None}, False)
    """

    __slots__ = ("_at", "_values")

    def __init__(self) -> None:
        self._at, self._values = array("q"), array("d")

    def __setitem__(self, update: int, value: float | None) -> None:
        y = math.nan if value is None else value
        if not self._at or update > self._at[-1]:
            self._at.append(update)
            self._values.append(y)
        elif self._at[place := bisect_left(self._at, update)] == update:
            self._values[place] = y
        else:
            self._at.insert(place, update)
            self._values.insert(place, y)

    def _place(self, update: int) -> int:
        place = bisect_left(self._at, update)
        if place == len(self._at) or self._at[place] != update:
            raise KeyError(update)
        return place

    def __getitem__(self, update: int) -> float | None:
        y = self._values[self._place(update)]
        return None if math.isnan(y) else y

    def __delitem__(self, update: int) -> None:
        place = self._place(update)
        del self._at[place], self._values[place]

    def __iter__(self) -> Iterator[int]:
        return iter(self._at)

    def __len__(self) -> int:
        return len(self._at)

    def items(self) -> Any:
        """Return (update, value) pairs; unlike the inherited view it does not search for each value."""
        return zip(self._at, (None if math.isnan(y) else y for y in self._values), strict=True)
