"""Documents: the text of files and of data sets of the Hub, in order or by position.

Text files and JSONL are read piece by piece, so a corpus may be larger than memory; the caller remembers the
positions. A fault is an error with its line.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Protocol

from posttrain.base.name_hints import did_you_mean
from posttrain.data.records import Record, check_regular, decode, iterate_lines, iterate_records, parse_line
from posttrain.types import UserError

SEPARATOR = b"<|endoftext|>"
"""Ends a document, alone on a line of a text file."""

Piece = tuple[int, int, int]
"""The position of a document in its source: first byte, byte after the last, and line."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """Which text to learn.

    >>> Text(path=("a.txt", "b.jsonl"), limit=1000).paths
    ('a.txt', 'b.jsonl')
    """

    path: str | tuple[str, ...]
    """One or several: a text file, with documents separated by a line <|endoftext|>; a file of records with a
    field `text` (JSONL, JSON, Parquet, CSV, also gzipped; Arrow); or a data set of the Hub as owner/name."""
    split: str | None = None
    """The split of a data set of the Hub; by default train."""
    subset: str | None = None
    """The subset of a data set of the Hub, which calls it a configuration."""
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
        """The files and data sets in order."""
        return (self.path,) if isinstance(self.path, str) else tuple(self.path)


class Source(Protocol):
    """A source of documents, each of which can be read again."""

    def documents(self) -> Iterator[tuple[Piece, str]]:
        """Yield every document with its position. Raises UserError at the first fault."""
        ...

    def read(self, piece: Piece) -> str:
        """Return the document at this position."""
        ...


@dataclass(frozen=True)
class TextFile:
    """A file of documents separated by lines <|endoftext|>; without such a line the file is one document.

    The newline that ends the last line of a document is not part of the document. A file may begin and end
    with a separator.
    """

    path: str

    def documents(self) -> Iterator[tuple[Piece, str]]:
        """Yield the documents between the separators."""
        buffer, start, line, has_documents = bytearray(), 0, 1, False
        for number, at, raw in _lines(self.path):
            if number == 1:
                start = at
            if raw.strip() != SEPARATOR:
                buffer += raw
                continue
            if buffer.strip():
                yield self._document(buffer, start, line)
                has_documents = True
            elif has_documents:
                where = f"{os.path.basename(self.path)}:{line}"
                raise UserError(where, "the document is empty", "take one of the separators out")
            buffer, start, line = bytearray(), at + len(raw), number + 1
        if buffer.strip():
            yield self._document(buffer, start, line)

    def _document(self, buffer: bytearray, start: int, line: int) -> tuple[Piece, str]:
        """Return the position and the text of a document, without its last newline."""
        length = len(buffer)
        if buffer.endswith(b"\n"):
            length -= 2 if buffer.endswith(b"\r\n") else 1
        piece = (start, start + length, line)
        return piece, self._text(bytes(buffer[:length]), piece)

    def read(self, piece: Piece) -> str:
        """Return the document between these bytes."""
        return self._text(_read_piece(self.path, piece), piece)

    def _text(self, raw: bytes, piece: Piece) -> str:
        return decode(raw, os.path.basename(self.path), piece[2])


@dataclass(frozen=True)
class JsonLines:
    """One record per line, whose field `text` is a document; blank lines and blank texts are skipped."""

    path: str

    def documents(self) -> Iterator[tuple[Piece, str]]:
        """Yield the `text` of every line."""
        for number, at, raw in _lines(self.path):
            piece = (at, at + len(raw), number)
            text = self._text(raw, piece)
            if text.strip():
                yield piece, text

    def read(self, piece: Piece) -> str:
        """Return the `text` of the line between these bytes."""
        return self._text(_read_piece(self.path, piece), piece)

    def _text(self, raw: bytes, piece: Piece) -> str:
        record = parse_line(raw, os.path.basename(self.path), piece[2])
        return text_field(record) if record else ""


@dataclass(frozen=True)
class InMemoryDocuments:
    """Texts in memory; the position of a text is its number."""

    texts: Sequence[str]

    def documents(self) -> Iterator[tuple[Piece, str]]:
        for number, text in enumerate(self.texts):
            yield (number, number + 1, number + 1), text

    def read(self, piece: Piece) -> str:
        return self.texts[piece[0]]


def text_field(record: Record) -> str:
    """Return the field `text` of a record, which may be blank. Raises UserError if it is not text."""
    if "text" not in record.fields:
        hint = did_you_mean("text", record.fields) or f"it has {', '.join(record.fields) or 'none'}"
        raise UserError(record.source, "there is no field 'text'", hint)
    text = record.cells.get("text", record.fields["text"])
    if not isinstance(text, str):
        kind = "null" if text is None else f"{text!r:.40}, not text"
        raise UserError(record.source, f"text is {kind}")
    return text


def open_sources(text: Text) -> list[Source]:
    """Return the sources that the configuration names, in order. Raises UserError for a missing file.

    Text files and JSONL are read piece by piece; all others are loaded into memory.
    """
    return [_open_source(path, text) for path in text.paths]


def _open_source(path: str, text: Text) -> Source:
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
    texts = map(text_field, iterate_records(path, split=text.split, subset=text.subset))
    return InMemoryDocuments(list(islice(filter(str.strip, texts), text.limit)))


def documents(text: Text) -> Iterator[str]:
    """Yield the documents without keeping them. Raises UserError at a fault, and if there are none."""
    return (document for _, _, document in iterate_documents(open_sources(text), text))


def iterate_documents(origins: Sequence[Source], text: Text) -> Iterator[tuple[int, Piece, str]]:
    """Yield (number of the source, position, document) up to the limit.

    Raises UserError for a source without documents.
    """

    def every() -> Iterator[tuple[int, Piece, str]]:
        for number, source in enumerate(origins):
            empty = True
            for piece, document in source.documents():
                empty = False
                yield number, piece, document
            if empty:
                raise UserError(text.paths[number], "there is no text in it")

    return islice(every(), text.limit)


def _lines(path: str) -> Iterator[tuple[int, int, bytes]]:
    with _open(path) as file:
        yield from iterate_lines(file, os.path.basename(path))


def _open(path: str) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise UserError(path, f"it cannot be read: {error.strerror or error}") from None


def _read_piece(path: str, piece: Piece) -> bytes:
    with _open(path) as file:
        file.seek(piece[0])
        return file.read(piece[1] - piece[0])
