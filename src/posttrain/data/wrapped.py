"""Files that hold one JSON object with all records in it, which are read neither as lines nor as a list."""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, BinaryIO

from posttrain.types import UserError


def check_lines(first: bytes, rest: BinaryIO, name: str) -> None:
    """Raise UserError for one object over several lines, of a file that should have one a line.

    first: the first line that is not blank; rest: the file behind it, which is left where it was.
    """
    with suppress(ValueError, RecursionError):
        json.loads(first)
        return
    place = rest.tell()
    with suppress(ValueError, RecursionError):
        found = json.loads(first + rest.read())
        if isinstance(found, dict):
            fix = in_list(found) or "write one object a line, or a list of objects"
            raise UserError(name, "it is one object over several lines", fix)
    rest.seek(place)


def in_list(found: Mapping[str, Any]) -> str:
    """What to do where records stand in the one list of an object; nothing if there is no such list.

    >>> in_list({"version": 1, "data": [{"prompt": "1?"}]})
    "if its records are in 'data', write that list alone"
    """
    lists = [
        key for key, each in found.items() if isinstance(each, list) and each and isinstance(each[0], dict)
    ]
    return f"if its records are in {lists[0]!r}, write that list alone" if len(lists) == 1 else ""
