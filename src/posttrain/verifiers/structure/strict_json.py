"""Read JSON strictly: refuse what two parsers could read differently (I-JSON, RFC 7493).

Refused are duplicate names in an object, NaN and infinities, numbers beyond a double's range, unpaired
surrogates, nesting deeper than 64, more than 10,000 values and more than 1,000,000 characters. The text may
be surrounded by JSON's own white space: space, tab, line feed and carriage return.
"""

import json
import math
from collections.abc import Hashable
from typing import Any

from posttrain.data.records import STRICT

MOST_CHARACTERS = 1_000_000
MOST_DEPTH = 64
MOST_VALUES = 10_000


class NotJsonError(ValueError):
    """The text is not strict JSON; the message says why."""


def read(text: str) -> Any:
    """Parse strict JSON. Raises NotJsonError.

    >>> read(' {"a": [1, true]} ')
    {'a': [1, True]}
    >>> read('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    posttrain.verifiers.structure.strict_json.NotJsonError: the key 'a' is given twice
    """
    if len(text) > MOST_CHARACTERS:
        raise NotJsonError(f"{len(text)} characters are more than {MOST_CHARACTERS}")
    try:
        value = json.loads(text, parse_int=_whole_number, **STRICT)
    except json.JSONDecodeError as error:
        raise NotJsonError(f"{error.msg}, at line {error.lineno}, column {error.colno}") from None
    except ValueError as error:
        raise NotJsonError(str(error)) from None
    except RecursionError:
        raise NotJsonError(f"it is nested deeper than {MOST_DEPTH}") from None
    _bound(value)
    return value


def identity(value: Any) -> Hashable:
    """Return a key that is equal for equal JSON values alone: 1 equals 1.0, but not true.

    >>> identity({"a": 1, "b": 2}) == identity({"b": 2.0, "a": 1}), identity([1]) == identity([True])
    (True, False)
    """
    if isinstance(value, bool):
        return ("boolean", value)
    if isinstance(value, dict):
        return ("object", frozenset((name, identity(inner)) for name, inner in value.items()))
    if isinstance(value, list):
        return ("array", tuple(identity(inner) for inner in value))
    return value  # type: ignore[no-any-return]  # a number, a text or None


def _whole_number(text: str) -> int:
    if len(text) > 310 or math.isinf(float(text)):
        raise NotJsonError("a number is beyond a double's range")
    return int(text)


def _bound(value: Any) -> None:
    """Raise NotJsonError for too many or too deeply nested values, and for text that UTF-8 cannot encode."""
    level, depth, count = [value], 0, 0
    while level:
        depth, count = depth + 1, count + len(level)
        nested = [inner for inner in level if isinstance(inner, list | dict)]
        if nested and depth > MOST_DEPTH:
            raise NotJsonError(f"it is nested deeper than {MOST_DEPTH}")
        if count > MOST_VALUES:
            raise NotJsonError(f"it has more than {MOST_VALUES} values")
        level = [
            inner
            for container in nested
            for inner in (container.values() if isinstance(container, dict) else container)
        ]
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise NotJsonError("it holds half of a surrogate pair") from None
