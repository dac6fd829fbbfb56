"""Files that hold one JSON object with all records in it, which are read neither as lines nor as a list."""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from posttrain.types import UserError


def check_lines(data: bytes, name: str) -> None:
    """UserError for one object that goes over several lines, as of a file that was to have one a line."""
    with suppress(ValueError, RecursionError):
        json.loads(data.lstrip().partition(b"\n")[0])
        return
    with suppress(ValueError, RecursionError):
        found = json.loads(data)
        if isinstance(found, dict):
            mend = in_list(found) or "write one object a line, or a list of objects"
            raise UserError("it is one object over several lines", where=name, mend=mend)


def in_list(found: Mapping[str, Any]) -> str:
    """What to do where records stand in the one list of an object; nothing if there is no such list.

    >>> in_list({"version": 1, "data": [{"prompt": "1?"}]})
    "if its records are in 'data', write that list alone"
    """
    lists = [
        key for key, each in found.items() if isinstance(each, list) and each and isinstance(each[0], dict)
    ]
    return f"if its records are in {lists[0]!r}, write that list alone" if len(lists) == 1 else ""
