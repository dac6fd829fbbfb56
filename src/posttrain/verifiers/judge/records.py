"""Read and write records of judge-made training data: lines of JSON, written chunk by chunk."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from posttrain.types import UserError

CHUNK = 64
"""Records that are processed together."""


def texts_of(record: Mapping[str, object], number: int, key: str, count: int) -> list[str]:
    """Return the prompt of a record, and the `count` texts under its key.

    Raises UserError with the record's number if one is missing.

    >>> texts_of({"prompt": "2 + 2?", "responses": ["4", "5"]}, 1, "responses", 2)
    ['2 + 2?', '4', '5']
    """
    value = record.get(key) if count else []
    texts = [record.get("prompt"), *(value if isinstance(value, list) else [value])]
    valid = [text for text in texts if isinstance(text, str)]
    if len(valid) != len(texts) or len(texts) != 1 + count:
        expected = f" and {count} under {key!r}" if count else ""
        raise UserError(f"record {number}", f"needs a text as 'prompt'{expected}")
    return valid


def chunks(cases: Sequence[list[str]]) -> Iterator[Sequence[list[str]]]:
    """Split the cases into chunks of CHUNK."""
    return (cases[start : start + CHUNK] for start in range(0, len(cases), CHUNK))


def new_file(out: Path) -> IO[str]:
    """Create a file, and its directory. Raises UserError if the file exists."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        return out.open("x", encoding="utf-8")
    except FileExistsError:
        raise UserError(str(out), "is there already", "name another file") from None


def append(file: IO[str], records: Sequence[Any]) -> None:
    """Write dataclasses as lines of JSON, and flush them to the disk."""
    for record in records:
        file.write(json.dumps(asdict(record), ensure_ascii=False) + "\n")
    file.flush()
    os.fsync(file.fileno())
