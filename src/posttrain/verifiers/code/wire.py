"""Encode values inside a box, as the text that `decoding.decode` reads.

This module imports nothing of posttrain; `inside.py` sets `channel` and `receive` when it loads the module.
"""

import os
import sys
from _collections_abc import Callable, Iterable

channel = -1
_MOST_DEPTH = 100


def receive(_channel: int) -> bytes:
    """Receive one message from the grader. `inside.py` replaces this function by its own."""
    raise OSError("this is not a box")


def send(text: str) -> None:
    """Send one message to the grader."""
    body = text.encode("ascii")
    view = memoryview(len(body).to_bytes(8, "big") + body)
    while len(view):
        view = view[os.write(channel, view) :]


def dump(value: object, depth: int = 0) -> str:
    """Encode a value by its builtin type. Subclasses are encoded as their builtin base class."""
    if depth > _MOST_DEPTH:
        return '["x","nested too deeply"]'
    if value is None:
        return "null"
    if value is True:
        return "true"
    if value is False:
        return "false"
    for kind in type(value).__mro__:
        write = _KINDS.get(kind)
        if write is not None:
            return write(value, depth + 1)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.generic, numpy.ndarray)):
        return dump(value.tolist(), depth + 1)
    name = "".join(c for c in type(value).__name__ if c.isalnum() and c.isascii())
    return f'["x","{name}"]'


def _many(mark: str, values: "Iterable[object]", depth: int) -> str:
    return f'["{mark}"{"".join("," + dump(v, depth) for v in values)}]'


_KINDS: "dict[type, Callable[..., str]]" = {
    int: lambda v, d: f'["i","{int.__format__(v, "x")}"]',
    float: lambda v, d: f'["f","{float.hex(v)}"]',
    complex: lambda v, d: f'["c","{float.hex(v.real)}","{float.hex(v.imag)}"]',
    str: lambda v, d: f'["s","{str.encode(v, "utf-8", "surrogatepass").hex()}"]',
    bytes: lambda v, d: f'["b","{bytes.hex(v)}"]',
    bytearray: lambda v, d: f'["b","{bytearray.hex(v)}"]',
    list: lambda v, d: _many("l", list.__iter__(v), d),
    tuple: lambda v, d: _many("t", tuple.__iter__(v), d),
    set: lambda v, d: _many("S", set.__iter__(v), d),
    frozenset: lambda v, d: _many("F", frozenset.__iter__(v), d),
    dict: lambda v, d: _many("d", (x for pair in dict.items(v) for x in pair), d),
}
