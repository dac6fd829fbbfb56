"""A digest of a value that is equal for equal values, whichever objects and process they are in."""

import copyreg
import hashlib
from collections.abc import Iterable
from types import FunctionType, NoneType
from typing import Any


def value_digest(value: Any) -> int:
    """Return a positive number of 63 bits by which a value is recognised.

    A pickle would not do: its bytes depend on which equal parts are one object and on the order of sets,
    which unpickling changes. Objects are taken apart as pickle does (`__reduce_ex__`). Raises TypeError for
    what cannot be pickled, and RecursionError for a value that contains itself.

    >>> value_digest({"at": (1, 2), "seen": {3, 4}}) == value_digest({"seen": {4, 3}, "at": (1, 2)})
    True
    >>> value_digest([1, 2]) == value_digest([2, 1]), value_digest(1) == value_digest(True)
    (False, False)
    """
    return (int.from_bytes(_digest(value)[:8], "big") >> 1) or 1


def _digest(value: Any) -> bytes:
    kind = type(value)
    hashed = hashlib.blake2b(f"{kind.__module__}.{kind.__qualname__}\0".encode(), digest_size=16)
    for part in _parts(kind, value):
        hashed.update(part)
    return hashed.digest()


def _parts(kind: type, value: Any) -> Iterable[bytes]:
    if kind is int:
        return [format(value, "x").encode()]  # repr refuses numbers of thousands of digits
    if kind in (NoneType, bool, float, complex):
        return [repr(value).encode()]
    if kind is str:
        return [value.encode("utf-8", "surrogatepass")]
    if kind in (bytes, bytearray):
        return [value]
    if kind in (list, tuple):
        return map(_digest, value)
    if kind in (set, frozenset):
        return sorted(map(_digest, value))
    if kind is dict:
        return sorted(_digest(key) + _digest(item) for key, item in value.items())
    if isinstance(value, type | FunctionType):
        if "<" in value.__qualname__:  # several functions of one name, such as "f.<locals>.<lambda>"
            raise TypeError(f"{value!r:.100} cannot be pickled")
        return [f"{value.__module__}.{value.__qualname__}".encode()]
    reduced = (
        copyreg.dispatch_table[kind](value) if kind in copyreg.dispatch_table else value.__reduce_ex__(4)
    )
    if isinstance(reduced, str):
        return [f"{value.__module__}.{reduced}".encode()]
    function, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    return map(_digest, (function, arguments, state, [*(items or ())], [*(pairs or ())]))
