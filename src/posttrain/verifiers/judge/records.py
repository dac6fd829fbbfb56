"""Records in and out of what a judge teaches: lines of JSON, kept chunk by chunk as they are paid for."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from posttrain.types import UserError

CHUNK = 64
"""Records that are worked on together."""


def texts_of(record: Mapping[str, object], number: int, key: str, count: int) -> list[str]:
    """The prompt of a record, and the `count` texts under its key.

    Raises UserError with the record's number if they are not there.

    >>> texts_of({"prompt": "2 + 2?", "responses": ["4", "5"]}, 1, "responses", 2)
    ['2 + 2?', '4', '5']
    """
    found = record.get(key) if count else []
    texts = [record.get("prompt"), *(found if isinstance(found, list) else [found])]
    said = [text for text in texts if isinstance(text, str)]
    if len(said) != len(texts) or len(texts) != 1 + count:
        wanted = f" and {count} under {key!r}" if count else ""
        raise UserError(f"record {number}", f"needs a text as 'prompt'{wanted}")
    return said


def chunks(cases: Sequence[list[str]]) -> Iterator[Sequence[list[str]]]:
    """The cases, a few at a time."""
    return (cases[start : start + CHUNK] for start in range(0, len(cases), CHUNK))


def new_file(out: Path) -> IO[str]:
    """A new file, its directory too; UserError if it is there already."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        return out.open("x", encoding="utf-8")
    except FileExistsError:
        raise UserError(str(out), "is there already", "name another file") from None


def append(file: IO[str], records: Sequence[Any]) -> None:
    """Writes dataclasses as lines of JSON, so that they survive what follows."""
    for record in records:
        file.write(json.dumps(asdict(record), ensure_ascii=False) + "\n")
    file.flush()
    os.fsync(file.fileno())
