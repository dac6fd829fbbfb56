"""Read records from a file or a data set of the Hub, each with its place in the source.

JSON is read strictly: what Python's reader accepts (NaN, duplicate keys, half of a surrogate pair) is an
error with its line, because otherwise it would surface hours later or never.
"""

import csv
import gzip
import io
import json
import logging
import math
import os
import re
import stat
import zlib
from bisect import bisect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast

from posttrain.base.name_hints import did_you_mean
from posttrain.base.usercode import cause
from posttrain.types import UserError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet", ".arrow", ".gz", ".csv", ".tsv", ".txt")
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_SAVED = ("dataset_dict.json", "dataset_info.json", "state.json")
"""Files that `save_to_disk` writes into a directory; one of these is there."""
MOST_LINE = 1 << 27
"""Maximum bytes of a line: more tokens than any model reads."""
_ROWS = 1024
"""Rows of a Parquet file that are read at once."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Some editors write it at the beginning of a file."""
_JSON_SPACE = " \t\r\n"
_SPACES = re.compile(f"[{_JSON_SPACE}]*")
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_NUMBER = re.compile(r"-?(0|[1-9]\d{0,17})(\.\d+)?")
_BOOLEAN = re.compile(r"true|false|True|False")


@dataclass(frozen=True, slots=True)
class Record:
    """The fields of a record, and its place "file:line"."""

    fields: dict[str, Any]
    source: str
    cells: Mapping[str, str] = field(default_factory=dict)
    """By column: the text of a CSV cell that was parsed to a number or boolean, for uses as text."""
    typed: Container[str] = ()
    """Columns with one type for all rows, as in Arrow: in their objects null may stand for a missing key."""


def read_records(
    path: str, *, split: str | None = None, subset: str | None = None, whole: bool = True
) -> list[Record]:
    """Return the records of `iterate_records` as a list."""
    return list(iterate_records(path, split=split, subset=subset, whole=whole))


def iterate_records(
    path: str, *, split: str | None = None, subset: str | None = None, whole: bool = True
) -> Iterator[Record]:
    """Yield the records of a file, of a directory that `datasets` saved, or of a data set "owner/name".

    A file has lines of JSON, a JSON array, Parquet, Arrow or CSV, and may be gzipped. The kind is detected
    from the content, that of CSV and TSV from the name. Most files are read while records are taken, so a
    caller that stops early reads no more; arrays and CSV are read to their end first, CSV because a column
    has one type for all its cells. `split` and `subset` are for data sets only. With whole = False texts may
    contain halves of surrogate pairs, which also stand for bytes that are not UTF-8. Raises UserError if the
    source cannot be read or has no records.
    """
    file = Path(os.path.expanduser(path))  # os.path raises for no path at all, unlike pathlib
    if not os.path.exists(file) and _is_hub_name(path, file):
        return _iterate_hub(path, split=split or "train", subset=subset)
    if os.path.isdir(file) and any((file / name).is_file() for name in _SAVED):
        rows = _rows(lambda library: _load_saved(library, file, path, split), file.name, path, "the data set")
        return _require_some(rows, "the data set has no records", path)
    if split is not None or subset is not None:
        option = "split" if split is not None else "subset"
        raise UserError("", f"{path} is a file, and a file has no {option}", f"leave {option} out")
    return _require_some(_read_file(file, path, whole), "the file has no records", path)


def read_hub(
    name: str, *, split: str, subset: str | None = None, revision: str | None = None
) -> list[Record]:
    """Return the records of a split of a data set, at a revision, which the `datasets` library can load."""
    return list(_iterate_hub(name, split=split, subset=subset, revision=revision))


def _iterate_hub(
    name: str, *, split: str, subset: str | None, revision: str | None = None
) -> Iterator[Record]:
    rows = _rows(
        lambda library: library.load_dataset(name, subset, split=split, revision=revision),
        name,
        f"{name}:{subset}" if subset else name,
        "the data set",
        "check its name, split and subset, and that the Hub can be reached; or give a file",
    )
    return _require_some(rows, f"split {split!r} has no records", name)


def _load_saved(library: Any, folder: Path, path: str, split: str | None) -> Any:
    """Return the data set in a directory that `save_to_disk` wrote: its split `split`, by default train."""
    saved, name = library.load_from_disk(str(folder)), split or "train"
    if not isinstance(saved, dict):
        if split is not None:
            raise UserError(path, "the data set has no splits", "leave split out")
        return saved
    if name not in saved:
        raise UserError(path, f"there is no split {name!r}", f"it has {', '.join(saved)}")
    return saved[name]


def _rows(load: Callable[[Any], Any], name: str, key: str, noun: str, fix: str = "") -> Iterator[Record]:
    """Yield the rows of a data set as records "name:1", "name:2", ...

    load: opens it with the `datasets` library. Raises UserError at `key` for any error of the library.
    """
    import datasets  # takes a second; text files do not need it

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # each of its retries is a line
    try:
        rows = load(datasets)
        yield from _number_rows(without_decoding(rows), name, typed_columns(rows))
    except UserError:
        raise
    except Exception as error:  # network, names, splits, scripts, damaged files
        raise UserError(key, f"{noun} cannot be loaded: {cause(error)}", fix) from None


def _number_rows(rows: Iterable[Any], name: str, typed: Container[str]) -> Iterator[Record]:
    return (record_of_row(row, f"{name}:{number}", typed) for number, row in enumerate(rows, start=1))


def _require_some(records: Iterator[Record], problem: str, where: str) -> Iterator[Record]:
    """Yield the records. Raises UserError with this problem if there are none."""
    empty = True
    for record in records:
        empty = False
        yield record
    if empty:
        raise UserError(where, problem)


def without_decoding(rows: Any) -> Any:
    """Return a data set of the `datasets` library with images, audio and video as bytes and paths.

    Only text is trained on; decoding needs libraries of its own and fails on damaged files. Any other value
    is returned unchanged.
    """
    features: Any = getattr(rows, "features", None)
    if not hasattr(features, "from_dict"):
        return rows
    rows = rows.with_format(None)
    bare = features.from_dict(json.loads(json.dumps(features.to_dict()), object_hook=_bare_feature))
    if bare == features:
        return rows
    return (rows.to_iterable_dataset() if hasattr(rows, "to_iterable_dataset") else rows).cast(bare)


def _bare_feature(feature: dict[str, Any]) -> dict[str, Any]:
    import datasets

    kind = getattr(datasets.features, str(feature.get("_type")), None)
    media = hasattr(kind, "decode") and feature["_type"] != "Json"
    return feature | {"decode": False} if media else feature


def typed_columns(rows: Any) -> frozenset[str]:
    """Return the columns of a table of Arrow, pandas or polars, except those with values of JSON.

    A column of objects has one type for all rows: a key that one row has is null in all others.
    """
    libraries = {kind.__module__.partition(".")[0] for kind in type(rows).__mro__}
    if not libraries & {"datasets", "pandas", "polars", "pyarrow"}:
        return frozenset()
    features = getattr(rows, "features", None)
    if isinstance(features, Mapping):
        return frozenset(name for name, feature in features.items() if "Json(" not in repr(feature))
    columns: Any = getattr(rows, "column_names", None) or getattr(rows, "columns", ())
    return frozenset(map(str, columns))


def check_regular(file: Path, where: str) -> None:
    """Raise UserError for a pipe, a device or a socket, which may never end, and for a dangling link."""
    try:
        mode = os.stat(file).st_mode
    except FileNotFoundError:
        if os.path.islink(file):
            problem = f"is a link to {os.readlink(file)}, which is not there"
            raise UserError(where, problem, "mend the link") from None
        return
    except (OSError, ValueError):  # opening it will raise a more precise error
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise UserError(where, "is a pipe or a device", "write what it gives into a file")


def _is_hub_name(path: str, file: Path) -> bool:
    """Return whether a path that does not exist has the form owner/name, unlike that of a file."""
    has_form = bool(_HUB_NAME.fullmatch(path)) and not path.lower().endswith(_SUFFIXES)
    return has_form and not os.path.isdir(file.parent)


def _check_file(file: Path, path: str) -> None:
    """Raise UserError for a directory, a pipe, or a file that does not exist."""
    if os.path.isdir(file):
        inside = sorted(p.name for p in file.iterdir() if p.name.lower().endswith(_SUFFIXES))[:3]
        hint = f"name a file in it: {', '.join(inside)}" if inside else "name a file"
        raise UserError(path, "it is a directory", hint)
    check_regular(file, path)
    if not os.path.exists(file):
        neighbours = [p.name for p in file.parent.iterdir()] if os.path.isdir(file.parent) else []
        hint = did_you_mean(file.name, neighbours) or "give a file, or a data set of the Hub as owner/name"
        raise UserError(path, "there is no such file", hint)


def _read_file(file: Path, path: str, strict: bool) -> Iterator[Record]:
    """Yield the records of a file, decompressed if it is gzipped."""
    _check_file(file, path)
    try:
        with open(file, "rb") as packed:
            zipped = packed.peek(2)[:2] == b"\x1f\x8b"
            with cast("BinaryIO", gzip.open(packed)) if zipped else packed as data:
                yield from _read_bytes(data, file, strict)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(path, f"the gzipped file is damaged or cut off: {error}") from None
    except OSError as error:
        raise UserError(path, f"it cannot be read: {error.strerror or error}") from None


def _read_bytes(data: BinaryIO, file: Path, strict: bool) -> Iterator[Record]:
    name, magic = file.name, data.read(4)
    data.seek(0)
    if magic == b"PAR1":
        return _read_parquet(data, name)
    if magic == b"\xff\xff\xff\xff":  # the first bytes of an Arrow stream
        return _rows(lambda library: library.Dataset.from_file(str(file)), name, name, "the Arrow file")
    suffix = Path(name.lower().removesuffix(".gz")).suffix
    if suffix in _SEPARATORS:
        return _read_separated(data, name, _SEPARATORS[suffix])
    blank = _BYTE_ORDER_MARK + _JSON_SPACE.encode()
    first = next((byte for byte in iter(lambda: data.read(1), b"") if byte not in blank), b"")
    data.seek(0)
    if first == b"[":
        return _read_array(decode(data.read().removeprefix(_BYTE_ORDER_MARK), name, 1, strict), name, strict)
    return _read_json_lines(data, name, strict)


def iterate_lines(data: BinaryIO, name: str) -> Iterator[tuple[int, int, bytes]]:
    """Yield (number, offset of its first byte, bytes) of each line, without a byte order mark."""
    for number, raw in enumerate(iter(lambda: data.readline(MOST_LINE + 1), b""), start=1):
        if len(raw) > MOST_LINE:
            raise UserError(f"{name}:{number}", "the line has more than 128 MiB")
        text = raw.removeprefix(_BYTE_ORDER_MARK) if number == 1 else raw
        yield number, data.tell() - len(text), text


def _read_json_lines(data: BinaryIO, name: str, strict: bool) -> Iterator[Record]:
    """Yield the object of each line; skip blank lines."""
    first = True
    for number, _, raw in iterate_lines(data, name):
        try:
            record = parse_line(raw, name, number, strict)
        except UserError:
            if first:
                _check_one_object(raw + data.read(MOST_LINE), name)
            raise
        if record is not None:
            first = False
            yield record


def parse_line(raw: bytes, name: str, number: int, strict: bool = True) -> Record | None:
    """Return the record of a line of JSON, or None for a blank line."""
    text, source = decode(raw, name, number, strict).strip(_JSON_SPACE), f"{name}:{number}"
    if not text:
        return None
    value = _parse(lambda: json.loads(text, **STRICT), source, at_end=not raw.endswith(b"\n"))
    return Record(_check_object(value, text, source, strict), source)


def _check_one_object(content: bytes, name: str) -> None:
    """Raise UserError if the content is one object over several lines."""
    with suppress(ValueError, RecursionError):
        value = json.loads(content.decode())
        if isinstance(value, dict) and b"\n" in content.strip():
            fix = nested_list_hint(value) or "write one object a line, or a list of objects"
            raise UserError(name, "it is one object over several lines", fix)


def nested_list_hint(value: Mapping[str, Any]) -> str:
    """Return a hint if an object has one list that may hold the records, else "".

    >>> nested_list_hint({"version": 1, "data": [{"prompt": "1?"}]})
    "if its records are in 'data', write that list alone"
    """
    lists = [
        key for key, item in value.items() if isinstance(item, list) and item and isinstance(item[0], dict)
    ]
    return f"if its records are in {lists[0]!r}, write that list alone" if len(lists) == 1 else ""


def _read_array(text: str, name: str, strict: bool) -> Iterator[Record]:
    """Yield the objects of a JSON array with their lines; with the column, too, behind others on a line."""
    decoder = json.JSONDecoder(**STRICT)
    breaks = [-1, *(match.start() for match in re.finditer("\n", text))]
    at = end = _skip_blanks(text, text.index("[") + 1)
    line, mark = 0, text[end : end + 1]
    while mark != "]":
        before, line = line, bisect(breaks, at)
        source = f"{name}:{line}" if line > before else f"{name}:{line}:{at - breaks[line - 1]}"
        value, end = _parse(lambda begin=at: decoder.raw_decode(text, begin), source, at_end=True)
        yield Record(_check_object(value, text[at:end], source, strict), source)
        end = _skip_blanks(text, end)
        mark, at = text[end : end + 1], _skip_blanks(text, end + 1)
        if mark not in ("]", ","):
            raise UserError(f"{name}:{bisect(breaks, end)}", "the array is cut off, or lacks a comma")
    if text[end + 1 :].strip(_JSON_SPACE):
        raise UserError(name, "something follows the array")


def _skip_blanks(text: str, at: int) -> int:
    return _SPACES.match(text, at).end()  # type: ignore[union-attr]  # it always matches


def _read_separated(data: BinaryIO, name: str, separator: str) -> Iterator[Record]:
    """Yield the rows below the first, which names the columns.

    Cells are text. A column has numbers or booleans if all its cells are written as JSON or Python writes
    those: 007 stays text. An empty cell is missing.
    """

    def rows() -> Iterator[tuple[int, list[str]]]:
        data.seek(0)
        texts = (decode(raw, name, number) for number, _, raw in iterate_lines(data, name))
        # A lone \r ends a line, too.
        parts = (part for text in texts for part in io.StringIO(text, newline=""))
        reader = csv.reader(parts, delimiter=separator, strict=True)
        begin = 1
        try:
            for row in reader:
                if row:
                    yield begin, row
                begin = reader.line_num + 1
        except csv.Error as error:
            raise UserError(f"{name}:{reader.line_num}", f"it is not CSV: {error}") from None

    csv.field_size_limit(MOST_LINE)
    head = next(rows(), (1, []))[1]
    if len(set(head)) < len(head) or not all(head):
        raise UserError(f"{name}:1", "the first row must name each column, and none twice")
    if len(head) == 1 and (
        other := next((mark for mark in ";\t,|" if mark in head[0] and mark != separator), "")
    ):
        problem = f"its columns seem to be separated by {other!r}, not {separator!r}"
        fix = f"write it with {separator!r}" + (", or call it .tsv" if other == "\t" else "")
        raise UserError(f"{name}:1", problem, fix)
    patterns = [[_NUMBER, _BOOLEAN] for _ in head]
    for line, row in islice(rows(), 1, None):
        if len(row) != len(head):
            raise UserError(f"{name}:{line}", f"{len(row)} columns, and {len(head)} have names")
        for cell, fitting in zip(row, patterns, strict=True):
            fitting[:] = [one for one in fitting if not cell or one.fullmatch(cell)]
    typed = [key for key, fitting in zip(head, patterns, strict=True) if fitting]
    for line, row in islice(rows(), 1, None):
        texts = dict(zip(head, row, strict=True))
        cells = {key: texts[key] for key in typed if texts[key]}
        values = {key: text or None for key, text in texts.items()}
        values |= {key: json.loads(cell.lower()) for key, cell in cells.items()}
        yield Record(values, f"{name}:{line}", cells)


def _parse(parse: Any, source: str, *, at_end: bool) -> Any:
    try:
        return parse()
    except json.JSONDecodeError as error:
        cut = at_end and (error.pos >= len(error.doc.rstrip()) or "Unterminated" in error.msg)
        if cut:
            raise UserError(source, "the record is cut off", "the file seems incomplete") from None
        raise UserError(source, f"it is not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise UserError(source, "it is nested too deeply") from None
    except ValueError as error:  # of the hooks below, and of numbers with thousands of digits
        raise UserError(source, str(error).partition(";")[0]) from None


def _check_object(value: Any, text: str, source: str, strict: bool) -> dict[str, Any]:
    if not isinstance(value, dict):
        kinds = {list: "a list", str: "a string", type(None): "null", bool: "a boolean"}
        kind = kinds.get(type(value), "a number")
        raise UserError(source, f"it is {kind}, not an object", 'write {"prompt": ...}')
    if strict and _ESCAPED_SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            raise UserError(source, f"{half} is half of a surrogate pair, not a character") from None
    return value


def decode(raw: bytes, name: str, line: int, strict: bool = True) -> str:
    """Return the text of these bytes, the first of which is on line `line`."""
    try:
        return raw.decode(errors="strict" if strict else "surrogateescape")
    except UnicodeDecodeError as error:
        at = line + raw[: error.start].count(b"\n")
        kind = "UTF-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else f"byte 0x{raw[error.start]:02x}"
        raise UserError(f"{name}:{at}", f"it is not UTF-8 ({kind})", "save it as UTF-8") from None


def _read_parquet(data: BinaryIO | gzip.GzipFile, name: str) -> Iterator[Record]:
    """Yield one record per row; its line is the number of the row."""
    import pyarrow.parquet  # type: ignore[import-untyped]  # takes a second; only Parquet needs it

    try:
        # The reader seeks back and forth, which is slow in a gzipped file.
        file = pyarrow.parquet.ParquetFile(
            io.BytesIO(data.read()) if isinstance(data, gzip.GzipFile) else data
        )
        rows = (row for batch in file.iter_batches(batch_size=_ROWS) for row in batch.to_pylist())
        yield from _number_rows(rows, name, frozenset(file.schema_arrow.names))
    except Exception as error:  # pyarrow does not document what it raises for a damaged file
        raise UserError(name, f"the Parquet file cannot be read: {cause(error)}") from None


def record_of_row(row: Mapping[str, Any], source: str, typed: Container[str] = ()) -> Record:
    """Return the record of a row of a table, in which NaN, like null, stands for a missing value."""
    return Record({key: _null_for_missing(value) for key, value in row.items()}, source, typed=typed)


def _null_for_missing(value: Any) -> Any:
    """Return the value with null for NaN and for pandas' marks, also within lists and objects."""
    if type(value) is dict:
        return {key: _null_for_missing(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_null_for_missing, value))
    missing = isinstance(value, float) and math.isnan(value)
    return None if missing or type(value).__name__ in ("NAType", "NaTType") else value


def reject_constant(name: str) -> Any:
    """Raise ValueError: NaN and Infinity are not JSON."""
    raise ValueError(f"{name} is not JSON")


def parse_finite(text: str) -> float:
    """Return the number. Raises ValueError for one that a double cannot represent."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


def reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these fields. Raises ValueError for a duplicate key."""
    fields: dict[str, Any] = {}
    for key, value in pairs:
        if key in fields:
            raise ValueError(f"the key {key[:60]!r} is given twice")
        fields[key] = value
    return fields


STRICT: dict[str, Any] = {
    "parse_constant": reject_constant,
    "parse_float": parse_finite,
    "object_pairs_hook": reject_duplicate_keys,
}
