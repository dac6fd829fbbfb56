"""Plain data across a channel: what a box sends is text that means numbers, strings and containers of them.

Nothing is ever unpickled or evaluated, and a value has exactly the builtin type it says.
"""

import json
from collections import Counter
from typing import Any

_MOST_ALIKE = 100
"""Different values of one hash, beyond which a set of them is an attack on the time it takes."""


class Garbled(ValueError):  # noqa: N818
    """A message that nothing of ours has sent."""


class Unplain(ValueError):  # noqa: N818
    """A value that is not plain data: an object, a generator, a function."""


def message(body: bytes) -> list[Any]:
    """A message as its parts, with values still written; Garbled if it is none.

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


def decoded(written: object) -> Any:
    """The value that is written so. Unplain if it is no plain data, Garbled if it is not written right.

    >>> decoded(["t", ["i", "-2a"], ["s", "6869"], ["d", ["i", "1"], True]])
    (-42, 'hi', {1: True})
    """
    try:
        return _decoded(written)
    except (ValueError, TypeError, IndexError, KeyError, RecursionError, OverflowError) as error:
        if isinstance(error, (Unplain, Garbled)):
            raise
        raise Garbled(f"not a value: {type(error).__name__}") from None


def _decoded(written: Any) -> Any:
    if written is None or isinstance(written, bool):
        return written
    if not isinstance(written, list) or not written:
        raise Garbled("not a value")
    mark, rest = written[0], written[1:]
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
        return [_decoded(item) for item in rest]
    if mark == "t":
        return tuple(_decoded(item) for item in rest)
    if mark in ("S", "F"):
        members = _hashable([_decoded(item) for item in rest])
        return set(members) if mark == "S" else frozenset(members)
    if mark == "d":
        items = [_decoded(item) for item in rest]
        return dict(zip(_hashable(items[::2]), items[1::2], strict=True))
    if mark == "x":
        raise Unplain(str(rest[0])[:60])
    raise Garbled("not a value")


def _hashable(values: list[Any]) -> list[Any]:
    if len(values) > _MOST_ALIKE and Counter(map(hash, values)).most_common(1)[0][1] > _MOST_ALIKE:
        raise Unplain("too many values of one hash")
    return values


def line(text: object, most: int = 200) -> str:
    """What a program says, as it can stand in a reason: one line, and nothing that cannot be written.

    >>> line("a\\n b\\ud800\\x07")
    'a b?'
    """
    said = str(text)[: 4 * most].encode("utf-8", "replace").decode()
    return " ".join("".join(c if c.isprintable() else " " for c in said).split())[:most]


def shown(value: object, most: int = 80) -> str:
    """A value as it can stand in a reason.

    >>> shown(10**5000), shown([1, "a"])
    ('a value with a number too long to show', "[1, 'a']")
    """
    try:
        return line(repr(value), most)
    except ValueError:
        return "a value with a number too long to show"
    except RecursionError:
        return "a value nested too deeply to show"
