"""JSON read strictly: what two readers could understand differently is refused (I-JSON, RFC 7493).

Refused are names that occur twice in an object, NaN and infinities, numbers beyond a double's range,
halves of surrogate pairs, nesting deeper than 64, more than 10,000 values and more than 1,000,000
characters. White space around the text is JSON's own: space, tab, line feed and carriage return.
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
    """Why a text is not JSON that all readers would understand alike."""


def read(text: str) -> Any:
    """The value that a text stands for; NotJsonError if it stands for none.

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
    """What is equal for equal JSON values alone: 1 and 1.0 are, 1 and true are not; names have no order.

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
    """Raise NotJsonError for too many or too deeply nested values, and for text that UTF-8 cannot write."""
    level, depth, count = [value], 0, 0
    while level:
        depth, count = depth + 1, count + len(level)
        nested = [inner for inner in level if isinstance(inner, list | dict)]
        if nested and depth > MOST_DEPTH:
            raise NotJsonError(f"it is nested deeper than {MOST_DEPTH}")
        if count > MOST_VALUES:
            raise NotJsonError(f"it has more than {MOST_VALUES} values")
        level = [inner for each in nested for inner in (each.values() if isinstance(each, dict) else each)]
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise NotJsonError("it holds half of a surrogate pair") from None
