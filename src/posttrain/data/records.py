"""Records as they stand in a file or a data set of the Hub, each with the place it was read from.

JSON is read strictly: what Python's reader lets pass (NaN, a key given twice, half of a surrogate
pair) is an error with its line, because it would otherwise surface hours later or never.
"""

import gzip
import io
import json
import logging
import math
import os
import re
import stat
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True, slots=True)
class Record:
    """The fields of one record, and its "file:line"."""

    fields: dict[str, Any]
    source: str
    cells: Mapping[str, str] = field(default_factory=dict)
    """How a CSV file spells its numbers and booleans, for where a text is wanted."""


def read_records(
    path: str, *, split: str | None = None, subset: str | None = None, whole: bool = True
) -> list[Record]:
    """The records of a file (JSONL, a JSON array, Parquet, CSV; also gzipped) or of a data set "owner/name".

    The kind of a file is told from its content, that of CSV and TSV from its name. A directory is one that
    `save_to_disk` of the `datasets` library wrote. `split` and `subset` are for data sets only. Raises
    UserError for whatever cannot be read, and for a file without records. With whole = False the texts of
    a file may hold what is no character, as halves of surrogate pairs, which also stand for bytes that
    are not UTF-8.
    """
    file = Path(os.path.expanduser(path))  # unlike pathlib, os.path raises on no path at all
    if not os.path.exists(file) and _is_hub_name(path, file):
        return read_hub(path, split=split or "train", subset=subset)
    if os.path.isdir(file) and any((file / name).is_file() for name in _SAVED):
        return read_saved(file, path, split=split)
    if split is not None or subset is not None:
        given = "split" if split is not None else "subset"
        raise UserError(f"{path} is a file, and a file has no {given}", mend=f"leave {given} out")
    records = list(_from_bytes(_contents(file, path), file.name, whole))
    if not records:
        raise UserError("the file has no records", where=path)
    return records


def read_hub(
    name: str, *, split: str, subset: str | None = None, revision: str | None = None
) -> list[Record]:
    """The records of a split of a data set, at a revision of it, that the `datasets` library can load."""
    import datasets  # takes a second, and only the Hub needs it

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # each of its retries is a line
    try:
        rows = datasets.load_dataset(name, subset, split=split, revision=revision)
    except Exception as error:  # the library raises nearly everything: network, names, splits, scripts
        raise UserError(
            f"the data set cannot be loaded: {cause(error)}",
            where=f"{name}:{subset}" if subset else name,
            mend="check its name, split and subset, and that the Hub can be reached; or give a file",
        ) from None
    records = [of_columns(dict(row), f"{name}:{number}") for number, row in enumerate(rows, start=1)]
    if not records:
        raise UserError(f"split {split!r} has no records", where=name)
    return records


def read_saved(folder: Path, path: str, *, split: str | None) -> list[Record]:
    """The records of a directory that `save_to_disk` wrote: of a split, else of train, if it has any."""
    import datasets

    try:
        found = datasets.load_from_disk(str(folder))
    except Exception as error:  # what a damaged file raises is not documented
        raise UserError(f"the data set cannot be loaded: {cause(error)}", where=path) from None
    name = split or "train"
    if isinstance(found, dict):
        if name not in found:
            raise UserError(f"there is no split {name!r}", where=path, mend=f"it has {', '.join(found)}")
        found = found[name]
    elif split is not None:
        raise UserError("the data set has no splits", where=path, mend="leave split out")
    records = [of_columns(dict(row), f"{folder.name}:{number}") for number, row in enumerate(found, start=1)]
    if not records:
        raise UserError("the data set has no records", where=path)
    return records


def check_regular(file: Path, where: str) -> None:
    """UserError for a pipe, a device or a socket, which could be read for ever, and for a link to nothing."""
    try:
        mode = os.stat(file).st_mode
    except FileNotFoundError:
        if os.path.islink(file):
            what = f"is a link to {os.readlink(file)}, which is not there"
            raise UserError(what, where=where, mend="mend the link") from None
        return
    except (OSError, ValueError):  # it cannot be opened either, which tells more
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise UserError("is a pipe or a device", where=where, mend="write what it gives into a file")


def _is_hub_name(path: str, file: Path) -> bool:
    """Whether a path that does not exist looks like owner/name rather than like a missing file."""
    named = bool(_HUB_NAME.fullmatch(path)) and not path.lower().endswith(_SUFFIXES)
    return named and not os.path.isdir(file.parent)


def _contents(file: Path, path: str) -> bytes:
    """The bytes of a file, unpacked if they are gzipped."""
    if os.path.isdir(file):
        inside = sorted(p.name for p in file.iterdir() if p.name.lower().endswith(_SUFFIXES))[:3]
        hint = f"name a file in it: {', '.join(inside)}" if inside else "name a file"
        raise UserError("it is a directory", where=path, mend=hint)
    check_regular(file, path)
    if not os.path.exists(file):
        beside = [p.name for p in file.parent.iterdir()] if os.path.isdir(file.parent) else []
        hint = did_you_mean(file.name, beside) or "give a file, or a data set of the Hub as owner/name"
        raise UserError("there is no such file", where=path, mend=hint)
    try:
        data = file.read_bytes()
        return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"the gzipped file is damaged or cut off: {error}", where=path) from None
    except OSError as error:
        raise UserError(f"it cannot be read: {error.strerror or error}", where=path) from None


def _from_bytes(data: bytes, name: str, whole: bool) -> Iterator[Record]:
    if data[:4] == b"PAR1":
        return _parquet(data, name)
    start = data.removeprefix(b"\xef\xbb\xbf")  # the byte order mark that some editors write
    suffix = next((s for s in Path(name.lower().removesuffix(".gz")).suffixes[-1:] if s in _SEPARATED), "")
    if suffix:
        text = _decoded(start, name, 1)
        return (Record(*row) for row in separated(text, name, _SEPARATED[suffix]))
    if start.lstrip()[:1] == b"[":
        return _array(_decoded(start, name, 1, whole), name, whole)
    check_lines(start, name)
    return _lines(start, name, whole)


def _lines(data: bytes, name: str, whole: bool) -> Iterator[Record]:
    """One object a line; blank lines are skipped."""
    lines = data.split(b"\n")
    for number, raw in enumerate(lines, start=1):
        if len(raw) > MOST_LINE:
            raise UserError("the line has more than 128 MiB", where=f"{name}:{number}")
        text = _decoded(raw, name, number, whole).strip(_JSON_SPACE)
        if text:
            yield _object(text, f"{name}:{number}", number == len(lines), whole)


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
            raise UserError("the array is cut off, or lacks a comma", where=f"{name}:{reached}")
        begin = _skip(text, after + 1)
        before, start = line, max(start, text.rfind("\n", at, begin) + 1)
        line += text.count("\n", at, begin)
        at = begin
    if text[after + 1 :].strip(_JSON_SPACE):
        raise UserError("something follows the array", where=name)


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
            raise UserError("the record is cut off", where=source, mend="the file seems incomplete") from None
        raise UserError(f"it is not JSON: {error.msg} at column {error.colno}", where=source) from None
    except RecursionError:
        raise UserError("it is nested too deeply", where=source) from None
    except ValueError as error:  # from the hooks below, and numbers of thousands of digits
        raise UserError(str(error).partition(";")[0], where=source) from None


def _checked(value: Any, text: str, source: str, whole: bool) -> dict[str, Any]:
    if not isinstance(value, dict):
        kinds = {list: "a list", str: "a string", type(None): "null", bool: "a boolean"}
        kind = kinds.get(type(value), "a number")
        raise UserError(f"it is {kind}, not an object", where=source, mend='write {"prompt": ...}')
    if whole and _ESCAPED_SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            raise UserError(f"{half} is half of a surrogate pair, not a character", where=source) from None
    return value


def _decoded(raw: bytes, name: str, line: int, whole: bool = True) -> str:
    try:
        return raw.decode(errors="strict" if whole else "surrogateescape")
    except UnicodeDecodeError as error:
        at = line + raw[: error.start].count(b"\n")
        kind = "UTF-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else f"byte 0x{raw[error.start]:02x}"
        raise UserError(f"it is not UTF-8 ({kind})", where=f"{name}:{at}", mend="save it as UTF-8") from None


def _parquet(data: bytes, name: str) -> Iterator[Record]:
    """One record a row; the line is the number of the row."""
    import pyarrow.parquet  # type: ignore[import-untyped]  # takes a while, and only Parquet needs it

    try:
        rows = pyarrow.parquet.read_table(io.BytesIO(data)).to_pylist()
    except Exception as error:  # what a damaged file raises is not documented
        raise UserError(f"the Parquet file cannot be read: {cause(error)}", where=name) from None
    yield from (of_columns(row, f"{name}:{number}") for number, row in enumerate(rows, start=1))


def of_columns(row: dict[str, Any], source: str) -> Record:
    """A record of typed columns, in which NaN stands for what is missing, as null does."""
    missing = {key for key, value in row.items() if isinstance(value, float) and math.isnan(value)}
    return Record({key: None if key in missing else value for key, value in row.items()}, source)


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
