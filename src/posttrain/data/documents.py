"""Documents: the text of files and of data sets of the Hub, one after the other or one at a time.

Text files and JSONL are read piece by piece, so that a corpus may be larger than memory; what lies
where is remembered by whoever asks. As everywhere, what cannot be read is an error with its line.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Protocol

from posttrain.base.name_hints import did_you_mean
from posttrain.data.records import Record, check_regular, decode, iterate_records, lines, of_line
from posttrain.types import UserError

SEPARATOR = b"<|endoftext|>"
"""Alone on a line of a text file it ends a document."""

Piece = tuple[int, int, int]
"""Where a document lies in its source: the first byte, the byte after the last, and the line."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """Which text to learn.

    >>> Text(path=("a.txt", "b.jsonl"), limit=1000).paths
    ('a.txt', 'b.jsonl')
    """

    path: str | tuple[str, ...]
    """One or several: a text file, documents parted by a line <|endoftext|>; a file of records with a field
    `text` (JSONL, JSON, Parquet, CSV, also gzipped; Arrow); or a data set of the Hub as owner/name."""
    split: str | None = None
    """Of a data set of the Hub; train if not given."""
    subset: str | None = None
    """Of a data set of the Hub, which calls it a configuration."""
    limit: int | None = None
    """Use only the first documents."""

    def __post_init__(self) -> None:
        if not self.paths or any(not path.strip() for path in self.paths):
            raise ValueError("path must not be empty")
        if twice := [path for path, count in Counter(self.paths).items() if count > 1]:
            raise ValueError(f"path names {twice[0]} twice")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be 1 or more, not {self.limit}")

    @property
    def paths(self) -> tuple[str, ...]:
        """The files and data sets in their order."""
        return (self.path,) if isinstance(self.path, str) else tuple(self.path)


class Source(Protocol):
    """What holds documents, and gives each of them again."""

    def documents(self) -> Iterator[tuple[Piece, str]]:
        """Every document with where it lies; UserError at the first fault."""
        ...

    def read(self, piece: Piece) -> str:
        """The document that lies there."""
        ...


@dataclass(frozen=True)
class TextFile:
    """Documents parted by a line that holds <|endoftext|> alone; a file without such a line is one.

    The newline that ends a document's last line is not part of it. A file may begin and end with the line.
    """

    path: str

    def documents(self) -> Iterator[tuple[Piece, str]]:
        """The documents between the separators."""
        held, start, line, seen = bytearray(), 0, 1, False
        for number, at, raw in _lines(self.path):
            if number == 1:
                start = at
            if raw.strip() != SEPARATOR:
                held += raw
                continue
            if held.strip():
                yield self._document(held, start, line)
                seen = True
            elif seen:
                where = f"{os.path.basename(self.path)}:{line}"
                raise UserError(where, "the document is empty", "take one of the separators out")
            held, start, line = bytearray(), at + len(raw), number + 1
        if held.strip():
            yield self._document(held, start, line)

    def _document(self, held: bytearray, start: int, line: int) -> tuple[Piece, str]:
        """What was read of it, without its last newline."""
        length = len(held)
        if held.endswith(b"\n"):
            length -= 2 if held.endswith(b"\r\n") else 1
        piece = (start, start + length, line)
        return piece, self._text(bytes(held[:length]), piece)

    def read(self, piece: Piece) -> str:
        """The document between these bytes."""
        return self._text(_bytes(self.path, piece), piece)

    def _text(self, raw: bytes, piece: Piece) -> str:
        return decode(raw, os.path.basename(self.path), piece[2])


@dataclass(frozen=True)
class JsonLines:
    """One record a line, whose field `text` is a document; blank lines and blank texts are skipped."""

    path: str

    def documents(self) -> Iterator[tuple[Piece, str]]:
        """The `text` of every line."""
        for number, at, raw in _lines(self.path):
            piece = (at, at + len(raw), number)
            text = self._text(raw, piece)
            if text.strip():
                yield piece, text

    def read(self, piece: Piece) -> str:
        """The `text` of the line between these bytes."""
        return self._text(_bytes(self.path, piece), piece)

    def _text(self, raw: bytes, piece: Piece) -> str:
        record = of_line(raw, os.path.basename(self.path), piece[2])
        return text_of(record) if record else ""


@dataclass(frozen=True)
class InMemoryDocuments:
    texts: Sequence[str]

    def documents(self) -> Iterator[tuple[Piece, str]]:
        """Every one of them; where it lies is its number."""
        for number, text in enumerate(self.texts):
            yield (number, number + 1, number + 1), text

    def read(self, piece: Piece) -> str:
        """The one of that number."""
        return self.texts[piece[0]]


def text_of(record: Record) -> str:
    """The field `text` of a record, which may be blank; UserError if there is none, or if it is no text."""
    if "text" not in record.fields:
        hint = did_you_mean("text", record.fields) or f"it has {', '.join(record.fields) or 'none'}"
        raise UserError(record.source, "there is no field 'text'", hint)
    text = record.cells.get("text", record.fields["text"])
    if not isinstance(text, str):
        kind = "null" if text is None else f"{text!r:.40}, not text"
        raise UserError(record.source, f"text is {kind}")
    return text


def sources(text: Text) -> list[Source]:
    """What the configuration names, in its order; UserError for a file that is not there.

    Text files and JSONL are read piece by piece; all else is held in memory.
    """
    return [_source(path, text) for path in text.paths]


def _source(path: str, text: Text) -> Source:
    file = Path(os.path.expanduser(path))
    check_regular(file, path)
    if text.split is None and text.subset is None and file.is_file():
        suffix = file.suffix.lower()
        if suffix in (".jsonl", ".ndjson", ".jsonlines"):
            return JsonLines(str(file))
        if suffix in (".zst", ".bz2", ".xz"):
            problem = f"a {suffix} file is neither text nor records that can be read"
            raise UserError(path, problem, "write it as JSONL with a field text")
        if suffix not in (".json", ".parquet", ".arrow", ".gz", ".csv", ".tsv"):
            return TextFile(str(file))
        if file.name.lower().endswith(".txt.gz"):
            raise UserError(path, "of gzipped files only records are read", "unpack it")
    texts = map(text_of, iterate_records(path, split=text.split, subset=text.subset))
    return InMemoryDocuments(list(islice(filter(str.strip, texts), text.limit)))


def documents(text: Text) -> Iterator[str]:
    """The documents one by one, none of them kept; UserError at the first fault, and if there is none."""
    return (document for _, _, document in limited(sources(text), text))


def limited(found: Sequence[Source], text: Text) -> Iterator[tuple[int, Piece, str]]:
    """(number of the source, where in it, document), up to the limit; UserError for a source without any."""

    def every() -> Iterator[tuple[int, Piece, str]]:
        for number, source in enumerate(found):
            empty = True
            for piece, document in source.documents():
                empty = False
                yield number, piece, document
            if empty:
                raise UserError(text.paths[number], "there is no text in it")

    return islice(every(), text.limit)


def _lines(path: str) -> Iterator[tuple[int, int, bytes]]:
    with _open(path) as file:
        yield from lines(file, os.path.basename(path))


def _open(path: str) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise UserError(path, f"it cannot be read: {error.strerror or error}") from None


def _bytes(path: str, piece: Piece) -> bytes:
    with _open(path) as file:
        file.seek(piece[0])
        return file.read(piece[1] - piece[0])
