"""Decode the plain data that a box sends: text that stands for numbers, strings and containers.

Nothing is unpickled or evaluated, and each value has exactly the builtin type that the text names.
"""

import json
from collections import Counter
from typing import Any

_MOST_ALIKE = 100
"""Most members of a set or keys of a dictionary with one hash; more would make it slow on purpose."""


class Garbled(ValueError):  # noqa: N818
    """A message in a form that posttrain's own programs do not send."""


class Unplain(ValueError):  # noqa: N818
    """A value that is not plain data: an object, a generator, a function."""


def message(body: bytes) -> list[Any]:
    """Split a message into its parts, with values still encoded. Raises Garbled if it is not a message.

    >>> message(b'["returned","ab",["i","2a"]]')
    ['returned', 'ab', ['i', '2a']]
    """
    try:
        parts = json.loads(body)
    except (ValueError, RecursionError):
        raise Garbled("not a message") from None
    if not isinstance(parts, list) or not parts or not isinstance(parts[0], str):
        raise Garbled("not a message")
    return parts


def decode(encoded: object) -> Any:
    """Decode a value. Raises Unplain if it was not plain data, Garbled if the encoding is wrong.

    >>> decode(["t", ["i", "-2a"], ["s", "6869"], ["d", ["i", "1"], True]])
    (-42, 'hi', {1: True})
    """
    try:
        return _decode(encoded)
    except (ValueError, TypeError, IndexError, KeyError, RecursionError, OverflowError) as error:
        if isinstance(error, (Unplain, Garbled)):
            raise
        raise Garbled(f"not a value: {type(error).__name__}") from None


def _decode(encoded: Any) -> Any:
    if encoded is None or isinstance(encoded, bool):
        return encoded
    if not isinstance(encoded, list) or not encoded:
        raise Garbled("not a value")
    mark, rest = encoded[0], encoded[1:]
    if mark == "i":
        return int(rest[0], 16)
    if mark == "f":
        return float.fromhex(rest[0])
    if mark == "c":
        return complex(float.fromhex(rest[0]), float.fromhex(rest[1]))
    if mark == "s":
        return bytes.fromhex(rest[0]).decode("utf-8", "surrogatepass")
    if mark == "b":
        return bytes.fromhex(rest[0])
    if mark == "l":
        return [_decode(item) for item in rest]
    if mark == "t":
        return tuple(_decode(item) for item in rest)
    if mark in ("S", "F"):
        members = _check_hashes([_decode(item) for item in rest])
        return set(members) if mark == "S" else frozenset(members)
    if mark == "d":
        items = [_decode(item) for item in rest]
        return dict(zip(_check_hashes(items[::2]), items[1::2], strict=True))
    if mark == "x":
        raise Unplain(str(rest[0])[:60])
    raise Garbled("not a value")


def _check_hashes(values: list[Any]) -> list[Any]:
    if len(values) > _MOST_ALIKE and Counter(map(hash, values)).most_common(1)[0][1] > _MOST_ALIKE:
        raise Unplain("too many values of one hash")
    return values


def line(text: object, most: int = 200) -> str:
    """Make one printable line of a program's text, for a reason.

    >>> line("a\\n b\\ud800\\x07")
    'a b?'
    """
    clean = str(text)[: 4 * most].encode("utf-8", "replace").decode()
    return " ".join("".join(c if c.isprintable() else " " for c in clean).split())[:most]


def shown(value: object, most: int = 80) -> str:
    """Return the repr of a value as one printable line, for a reason.

    >>> shown(10**5000), shown([1, "a"])
    ('a value with a number too long to show', "[1, 'a']")
    """
    try:
        return line(repr(value), most)
    except ValueError:
        return "a value with a number too long to show"
    except RecursionError:
        return "a value nested too deeply to show"
