"""Records as they stand in a file or a data set of the Hub, each with the place it was read from.

JSON is read strictly: what Python's reader lets pass (NaN, a key given twice, half of a surrogate
pair) is an error with its line, because it would otherwise surface hours later or never.
"""

import dataclasses
import gzip
import io
import json
import logging
import math
import os
import re
import stat
import zlib
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from posttrain.base.nearest import did_you_mean
from posttrain.base.usercode import cause
from posttrain.data.separated import separated
from posttrain.data.wrapped import check_lines
from posttrain.types import UserError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet", ".gz", ".csv", ".tsv", ".txt")
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SEPARATED = {".csv": ",", ".tsv": "\t"}
_SAVED = ("dataset_dict.json", "dataset_info.json", "state.json")
"""One of which `save_to_disk` leaves in a directory."""
MOST_LINE = 1 << 27
"""Bytes of a line, which are more tokens than any model reads."""
_JSON_SPACE = " \t\r\n"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Which some editors write."""
_ROWS = 1024
"""Of a Parquet file that are read at once."""


@dataclass(frozen=True, slots=True)
class Record:
    """The fields of one record, and its "file:line"."""

    fields: dict[str, Any]
    source: str
    cells: Mapping[str, str] = field(default_factory=dict)
    """How a CSV file spells its numbers and booleans, for where a text is wanted."""
    typed: Container[str] = ()
    """Columns with one type for all rows, as Arrow's: in their objects a null may stand for a missing key."""


def read_records(
    path: str, *, split: str | None = None, subset: str | None = None, whole: bool = True
) -> list[Record]:
    """Return the records of `iterate_records` as a list."""
    return list(iterate_records(path, split=split, subset=subset, whole=whole))


def iterate_records(
    path: str, *, split: str | None = None, subset: str | None = None, whole: bool = True
) -> Iterator[Record]:
    """Yield the records of a file or of a data set "owner/name".

    A file holds lines of JSON, a JSON array, Parquet or CSV, and may be gzipped. Its kind is told from its
    content, that of CSV and TSV from its name. Lines of JSON and rows of Parquet are read as they are taken,
    so a caller that stops early reads no more of the file. A directory is one that `save_to_disk` of the
    `datasets` library wrote. `split` and `subset` are for data sets only. With whole = False the texts of a
    file may hold what is not a character, as halves of surrogate pairs, which also stand for bytes that are
    not UTF-8. Raises UserError for whatever cannot be read, and for a file without records.
    """
    file = Path(os.path.expanduser(path))  # unlike pathlib, os.path raises on no path at all
    if not os.path.exists(file) and _is_hub_name(path, file):
        return _iterate_hub(path, split=split or "train", subset=subset)
    if os.path.isdir(file) and any((file / name).is_file() for name in _SAVED):
        return _iterate_saved(file, path, split=split)
    if split is not None or subset is not None:
        given = "split" if split is not None else "subset"
        raise UserError("", f"{path} is a file, and a file has no {given}", f"leave {given} out")
    return _some(_from_file(file, path, whole), "the file has no records", path)


def read_hub(
    name: str, *, split: str, subset: str | None = None, revision: str | None = None
) -> list[Record]:
    """The records of a split of a data set, at a revision of it, that the `datasets` library can load."""
    return list(_iterate_hub(name, split=split, subset=subset, revision=revision))


def _iterate_hub(
    name: str, *, split: str, subset: str | None, revision: str | None = None
) -> Iterator[Record]:
    import datasets  # takes a second, and only the Hub needs it

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # each of its retries is a line
    try:
        rows = datasets.load_dataset(name, subset, split=split, revision=revision)
    except Exception as error:  # the library raises nearly everything: network, names, splits, scripts
        raise UserError(
            f"{name}:{subset}" if subset else name,
            f"the data set cannot be loaded: {cause(error)}",
            "check its name, split and subset, and that the Hub can be reached; or give a file",
        ) from None
    return _some(_numbered(rows, name), f"split {split!r} has no records", name)


def _iterate_saved(folder: Path, path: str, *, split: str | None) -> Iterator[Record]:
    """Yield the records of a directory that `save_to_disk` wrote: of a split, train unless it is named."""
    import datasets

    try:
        found = datasets.load_from_disk(str(folder))
    except Exception as error:  # what a damaged file raises is not documented
        raise UserError(path, f"the data set cannot be loaded: {cause(error)}") from None
    name = split or "train"
    if isinstance(found, dict):
        if name not in found:
            raise UserError(path, f"there is no split {name!r}", f"it has {', '.join(found)}")
        found = found[name]
    elif split is not None:
        raise UserError(path, "the data set has no splits", "leave split out")
    return _some(_numbered(found, folder.name), "the data set has no records", path)


def _some(records: Iterator[Record], problem: str, where: str) -> Iterator[Record]:
    """Yield the records; UserError with this problem if there are none."""
    empty = True
    for record in records:
        empty = False
        yield record
    if empty:
        raise UserError(where, problem)


def _numbered(rows: Any, name: str) -> Iterator[Record]:
    """Yield the rows of a data set of the `datasets` library as records "name:1", "name:2", ..."""
    rows, typed = undecoded(rows), typed_columns(rows)
    return (of_columns(dict(row), f"{name}:{number}", typed) for number, row in enumerate(rows, start=1))


def undecoded(rows: Iterable[Any]) -> Iterable[Any]:
    """Return a data set of the `datasets` library with images, audio and video as bytes and paths.

    Only text is trained on, and decoding needs libraries of its own and fails on damaged files.
    Anything else is returned as it is.
    """
    features: Any = getattr(rows, "features", None)
    if not isinstance(features, Mapping) or not any(map(_is_media, _leaves(features))):
        return rows
    plain: Any = rows.with_format(None)  # type: ignore[attr-defined]
    streamed = plain.to_iterable_dataset() if hasattr(plain, "to_iterable_dataset") else plain
    kind: Any = type(features)
    return cast("Iterable[Any]", streamed.cast(kind(_without_decoding(dict(features)))))


def typed_columns(rows: Any) -> frozenset[str]:
    """Return the columns of a table that Arrow or the like holds, but for those with values of JSON.

    A column of objects has one type for all rows: a key that one row has is null in all others.
    """
    libraries = {kind.__module__.partition(".")[0] for kind in type(rows).__mro__}
    if not libraries & {"datasets", "pandas", "polars", "pyarrow"}:
        return frozenset()
    features = getattr(rows, "features", None)
    if isinstance(features, Mapping):
        return frozenset(name for name, one in features.items() if not any(map(_is_json, _leaves(one))))
    columns: Any = getattr(rows, "column_names", None) or getattr(rows, "columns", ())
    return frozenset(map(str, columns))


def _leaves(feature: Any) -> Iterator[Any]:
    """Yield the features of single values within a feature of the `datasets` library."""
    if isinstance(feature, Mapping | list | tuple):
        for inner in feature.values() if isinstance(feature, Mapping) else feature:
            yield from _leaves(inner)
    elif hasattr(feature, "feature"):
        yield from _leaves(feature.feature)
    else:
        yield feature


def _is_json(feature: Any) -> bool:
    return type(feature).__name__ == "Json"


def _is_media(feature: Any) -> bool:
    return hasattr(feature, "decode") and not _is_json(feature)


def _without_decoding(feature: Any) -> Any:
    if isinstance(feature, Mapping):
        return {name: _without_decoding(inner) for name, inner in feature.items()}
    if isinstance(feature, list | tuple):
        return [_without_decoding(inner) for inner in feature]
    if hasattr(feature, "feature"):
        return dataclasses.replace(feature, feature=_without_decoding(feature.feature))
    return dataclasses.replace(feature, decode=False) if _is_media(feature) else feature


def check_regular(file: Path, where: str) -> None:
    """UserError for a pipe, a device or a socket, which could be read for ever, and for a link to nothing."""
    try:
        mode = os.stat(file).st_mode
    except FileNotFoundError:
        if os.path.islink(file):
            problem = f"is a link to {os.readlink(file)}, which is not there"
            raise UserError(where, problem, "mend the link") from None
        return
    except (OSError, ValueError):  # it cannot be opened either, which tells more
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise UserError(where, "is a pipe or a device", "write what it gives into a file")


def _is_hub_name(path: str, file: Path) -> bool:
    """Whether a path that does not exist looks like owner/name rather than like a missing file."""
    named = bool(_HUB_NAME.fullmatch(path)) and not path.lower().endswith(_SUFFIXES)
    return named and not os.path.isdir(file.parent)


def _check_file(file: Path, path: str) -> None:
    """UserError for a directory, a pipe, or what is not there."""
    if os.path.isdir(file):
        inside = sorted(p.name for p in file.iterdir() if p.name.lower().endswith(_SUFFIXES))[:3]
        hint = f"name a file in it: {', '.join(inside)}" if inside else "name a file"
        raise UserError(path, "it is a directory", hint)
    check_regular(file, path)
    if not os.path.exists(file):
        beside = [p.name for p in file.parent.iterdir()] if os.path.isdir(file.parent) else []
        hint = did_you_mean(file.name, beside) or "give a file, or a data set of the Hub as owner/name"
        raise UserError(path, "there is no such file", hint)


def _from_file(file: Path, path: str, whole: bool) -> Iterator[Record]:
    """Yield the records of a file, unpacked if it is gzipped."""
    _check_file(file, path)
    try:
        with open(file, "rb") as packed:
            zipped = packed.peek(2)[:2] == b"\x1f\x8b"
            with cast("BinaryIO", gzip.open(packed)) if zipped else packed as data:
                yield from _from_bytes(data, file.name, whole)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(path, f"the gzipped file is damaged or cut off: {error}") from None
    except OSError as error:
        raise UserError(path, f"it cannot be read: {error.strerror or error}") from None


def _from_bytes(data: BinaryIO, name: str, whole: bool) -> Iterator[Record]:
    magic = data.read(4)
    start = len(_BYTE_ORDER_MARK) if magic.startswith(_BYTE_ORDER_MARK) else 0
    data.seek(start)
    if magic == b"PAR1":
        return _parquet(data, name)
    suffix = next((s for s in Path(name.lower().removesuffix(".gz")).suffixes[-1:] if s in _SEPARATED), "")
    if suffix:
        text = _decoded(data.read(), name, 1)
        return (Record(*row) for row in separated(text, name, _SEPARATED[suffix]))
    begin = next((byte for byte in iter(lambda: data.read(1), b"") if not byte.isspace()), b"")
    data.seek(start)
    if begin == b"[":
        return _array(_decoded(data.read(), name, 1, whole), name, whole)
    return _lines(data, name, whole)


def _lines(data: BinaryIO, name: str, whole: bool) -> Iterator[Record]:
    """Yield the object of each line; blank lines are skipped."""
    first = True
    for number, raw in enumerate(iter(lambda: data.readline(MOST_LINE + 1), b""), start=1):
        if len(raw) > MOST_LINE:
            raise UserError(f"{name}:{number}", "the line has more than 128 MiB")
        text = _decoded(raw, name, number, whole).strip(_JSON_SPACE)
        if not text:
            continue
        if first:
            check_lines(raw, data, name)
            first = False
        yield _object(text, f"{name}:{number}", not raw.endswith(b"\n"), whole)


def _array(text: str, name: str, whole: bool) -> Iterator[Record]:
    """The objects of a JSON array, each with its line, and where one stands before it there, its column."""
    decoder = json.JSONDecoder(**_STRICT)
    at = _skip(text, text.index("[") + 1)
    line = 1 + text.count("\n", 0, at)
    before, start = 0, text.rfind("\n", 0, at) + 1
    if text[at : at + 1] == "]":
        return
    while True:
        source = f"{name}:{line}" if line > before else f"{name}:{line}:{at - start + 1}"
        value, end = _parsed(lambda begin=at: decoder.raw_decode(text, begin), source, at_end=True)
        yield Record(_checked(value, text[at:end], source, whole), source)
        after = _skip(text, end)
        mark = text[after : after + 1]
        if mark == "]":
            break
        if mark != ",":
            reached = line + text.count("\n", at, after)
            raise UserError(f"{name}:{reached}", "the array is cut off, or lacks a comma")
        begin = _skip(text, after + 1)
        before, start = line, max(start, text.rfind("\n", at, begin) + 1)
        line += text.count("\n", at, begin)
        at = begin
    if text[after + 1 :].strip(_JSON_SPACE):
        raise UserError(name, "something follows the array")


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _JSON_SPACE:
        at += 1
    return at


def _object(text: str, source: str, last: bool, whole: bool = True) -> Record:
    value = _parsed(lambda: json.loads(text, **_STRICT), source, at_end=last)
    return Record(_checked(value, text, source, whole), source)


def _parsed(parse: Any, source: str, *, at_end: bool) -> Any:
    try:
        return parse()
    except json.JSONDecodeError as error:
        cut = at_end and (error.pos >= len(error.doc.rstrip()) or "Unterminated" in error.msg)
        if cut:
            raise UserError(source, "the record is cut off", "the file seems incomplete") from None
        raise UserError(source, f"it is not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise UserError(source, "it is nested too deeply") from None
    except ValueError as error:  # from the hooks below, and numbers of thousands of digits
        raise UserError(source, str(error).partition(";")[0]) from None


def _checked(value: Any, text: str, source: str, whole: bool) -> dict[str, Any]:
    if not isinstance(value, dict):
        kinds = {list: "a list", str: "a string", type(None): "null", bool: "a boolean"}
        kind = kinds.get(type(value), "a number")
        raise UserError(source, f"it is {kind}, not an object", 'write {"prompt": ...}')
    if whole and _ESCAPED_SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            raise UserError(source, f"{half} is half of a surrogate pair, not a character") from None
    return value


def _decoded(raw: bytes, name: str, line: int, whole: bool = True) -> str:
    try:
        return raw.decode(errors="strict" if whole else "surrogateescape")
    except UnicodeDecodeError as error:
        at = line + raw[: error.start].count(b"\n")
        kind = "UTF-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else f"byte 0x{raw[error.start]:02x}"
        raise UserError(f"{name}:{at}", f"it is not UTF-8 ({kind})", "save it as UTF-8") from None


def _parquet(data: BinaryIO | gzip.GzipFile, name: str) -> Iterator[Record]:
    """Yield one record a row; the line is the number of the row."""
    import pyarrow.parquet  # type: ignore[import-untyped]  # takes a while, and only Parquet needs it

    number = 0
    try:
        file = pyarrow.parquet.ParquetFile(
            io.BytesIO(data.read()) if isinstance(data, gzip.GzipFile) else data
        )
        typed = frozenset(file.schema_arrow.names)
        for batch in file.iter_batches(batch_size=_ROWS):
            for row in batch.to_pylist():
                number += 1
                yield of_columns(row, f"{name}:{number}", typed)
    except Exception as error:  # what a damaged file raises is not documented
        raise UserError(name, f"the Parquet file cannot be read: {cause(error)}") from None


def of_columns(row: Mapping[str, Any], source: str, typed: Container[str] = ()) -> Record:
    """Return the record of a row of a table, in which NaN stands for what is missing, as null does."""
    return Record({key: _null_for_missing(value) for key, value in row.items()}, source, typed=typed)


def _null_for_missing(value: Any) -> Any:
    """Return the value with null for NaN and for the marks that pandas has, also within lists and objects."""
    if type(value) is dict:
        return {key: _null_for_missing(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_null_for_missing, value))
    missing = isinstance(value, float) and math.isnan(value)
    return None if missing or type(value).__name__ in ("NAType", "NaTType") else value


def no_constant(name: str) -> Any:
    """ValueError: NaN and Infinity are no JSON."""
    raise ValueError(f"{name} is not JSON")


def finite(text: str) -> float:
    """The number; ValueError beyond what a double holds."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these fields; ValueError if one is given twice."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key[:60]!r} is given twice")
        found[key] = value
    return found


_STRICT: dict[str, Any] = {
    "parse_constant": no_constant,
    "parse_float": finite,
    "object_pairs_hook": unique,
}
