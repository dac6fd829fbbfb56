"""Read tables into a frozen dataclass, and name every mistake by its place.

A key that is not a field is an error with the nearest valid name; values are not converted ("1" is not a
number); a ValueError of a dataclass's __post_init__ is reported at its key. Only this file imports pydantic.

Tables of a Python program may hold objects in addition to plain data, such as a reward function or an
environment: a field accepts an object if its type contains a protocol, a `Callable`, or a class with
`__object__`. Tables of a file have no objects.
"""

import dataclasses
import datetime
import json
import math
import re
import types
import typing
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import (
    AfterValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass as checked

from posttrain.base.kinds import OneOf
from posttrain.base.name_hints import did_you_mean, dotted_names, nearest, translate_name
from posttrain.math.choice import Between
from posttrain.types import UserError

STRICT = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True)
OBJECT = "\0object"
"""While tables are read as JSON, {OBJECT: n} stands for the n-th object in them."""
_TAGS = ("\0plain", OBJECT)


def key_of(field: str) -> str:
    """Return the key of a field: its name without the underscore that keeps it apart from Python's keywords.

    >>> key_of("async_"), key_of("rollout")
    ('async', 'rollout')
    """
    return field.removesuffix("_")


@dataclasses.dataclass(frozen=True)
class Where:
    """Names the place of a key: its file and line, its override, or, without a file, the dotted key alone."""

    path: Path | None = None
    text: str = ""
    """The content of the file."""
    overrides: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """By dotted key: the override that set it, as "--set key=value"."""
    within: tuple[str, ...] = ()
    """The table that keys are relative to."""

    def __call__(self, loc: Sequence[str]) -> str:
        loc = (*self.within, *loc)
        dotted = ".".join(loc)
        if self.path is None:
            return dotted
        for key, override in self.overrides.items():
            if dotted == key or key.startswith(f"{dotted}.") or dotted.startswith(f"{key}."):
                return f"{override}: {dotted}"
        number = self._line(list(loc))
        return f"{self.path}:{number}: {dotted}" if number else f"{self.path}: {dotted}"

    def _line(self, loc: list[str]) -> int:
        """Return the line of the key, or else of the nearest table around or below it; 0 without one."""
        table: list[str] = []
        arrays: Counter[str] = Counter()
        best, best_match = 0, (0, False)
        for number, text in enumerate(self.text.splitlines(), 1):
            head = re.fullmatch(r"\s*\[+\s*([^\]]+?)\s*\]+\s*(#.*)?", text)
            key = re.match(r"\s*([A-Za-z0-9_.\"'-]+)\s*=", text)
            if head:
                parts = _parts(head[1])
                arrays[".".join(parts)] += text.lstrip().startswith("[[")
                table = []
                for depth, part in enumerate(parts, 1):
                    number_of = arrays[".".join(parts[:depth])]
                    table += [part, str(number_of - 1)] if number_of else [part]
                place = table
            elif key:
                place = table + _parts(key[1])
            else:
                continue
            shared = next((n for n, (a, b) in enumerate(zip(place, loc, strict=False)) if a != b), None)
            shared = min(len(place), len(loc)) if shared is None else shared
            match = (shared, shared == len(place))
            if shared and match > best_match:
                best, best_match = number, match
        return best


def _parts(dotted: str) -> list[str]:
    return [part.strip(" \"'") for part in dotted.split(".")]


FindUnread = Callable[[Mapping[str, Any]], Mapping[tuple[str, ...], str]]
"""Returns the places of unread keys in tables, each with the name that was probably meant, or ""."""


def parse(cls: type, tables: Mapping[str, Any], where: Where, more_unread: FindUnread | None = None) -> Any:
    """Read tables into an instance of the dataclass `cls`. Raises UserError at the place of a mistake.

    All keys that nothing reads are reported together, including those that `more_unread` finds.
    """
    objects: list[Any] = []
    try:
        text = json.dumps(_jsonable(_in_lists(tables, cls), (), where, objects))
    except RecursionError:
        raise UserError(str(where.path or where(())), "is nested too deeply") from None
    try:
        return _plain(_adapter(cls, bool(objects)).validate_json(text, context=objects), objects)
    except ValidationError as error:
        unknown = _unknown_keys(error, cls, tables, where, more_unread)
        raise unknown or _first_mistake(error, tables, where, objects) from None
    except UserError as error:  # of a __post_init__: its key is the refused value, as a function's name
        key = _find_text(tables, error.key)
        if not key or not where.text:
            raise
        raise error.at(where(key), keep=True) from None


def json_schema(cls: type) -> dict[str, Any]:
    """Return the JSON Schema of tables that `parse` reads into the dataclass `cls`, without objects."""
    return _adapter(cls, False).json_schema()


def _find_text(value: Any, text: str) -> tuple[str, ...]:
    """Return the key whose value is this text, or ()."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if type(value) is list else ()
    for key, item in items:
        if item == text and text:
            return (str(key),)
        if below := _find_text(item, text):
            return (str(key), *below)
    return ()


def _in_lists(tables: Any, cls: type) -> Any:
    """Return the tables with a single table wrapped in a list where the field is a tuple of tables."""
    if isinstance(tables, list | tuple):
        return [_in_lists(table, cls) for table in tables]
    if not isinstance(tables, Mapping):
        return tables
    hints, wrapped = typing.get_type_hints(cls), dict(tables)
    for name in wrapped.keys() & hints.keys():
        kinds = (hints[name], *typing.get_args(hints[name]))
        table = next((kind for kind in kinds if dataclasses.is_dataclass(kind)), None)
        if isinstance(table, type):
            several = typing.get_origin(hints[name]) is tuple and isinstance(wrapped[name], Mapping)
            wrapped[name] = _in_lists([wrapped[name]] if several else wrapped[name], table)
    return wrapped


def _as_written(tables: Any, loc: Sequence[str]) -> list[str]:
    """Translate a place of pydantic's into the user's tables.

    Drops the index of a table that `_in_lists` wrapped, and the names of the types that a value was tried as.
    """
    written, value = [], tables
    for name in loc:
        if value is not None and not isinstance(value, Mapping | list):
            break
        table = isinstance(value, Mapping)
        if (table or isinstance(value, list)) and name.isdigit() == table and name not in (value or ()):
            continue
        written.append(name)
        if isinstance(value, list):
            value = dict(enumerate(value)).get(int(name)) if name.isdigit() else None
        else:
            value = value.get(name) if isinstance(value, Mapping) else None
    return written


def _jsonable(value: Any, loc: tuple[str, ...], where: Where, objects: list[Any]) -> Any:
    """Return the value as JSON data, with its objects moved to `objects`.

    Raises UserError for dates, infinities, numbers of more than 64 bits and half surrogate pairs.
    """
    if isinstance(value, Mapping):
        return {k: _jsonable(v, (*loc, k), where, objects) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(v, loc, where, objects) for v in value]
    if isinstance(value, (datetime.date, datetime.time)):
        raise UserError(where(loc), "is a date or time, and no option may be")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(where(loc), f"is {value}, and no option may be")
    if isinstance(value, int) and abs(value) >= 1 << 63:
        raise UserError(where(loc), "is a number of more than 64 bits")
    if isinstance(value, str) and not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
        raise UserError(where(loc), "holds half of a surrogate pair, not a character")
    if not isinstance(value, bool | int | float | str | None):
        objects.append(value)
        return {OBJECT: len(objects) - 1}
    return value


@lru_cache(maxsize=64)
def _adapter(cls: type, objects: bool) -> TypeAdapter[Any]:
    return TypeAdapter(_strict(cls, objects))


@lru_cache(maxsize=64)
def _strict(cls: type, objects: bool) -> type:
    """Return a pydantic subclass of the dataclass, and of those in its fields, without conversion of values.

    It refuses unknown keys. As a subclass it has the __post_init__ of the configuration itself. With
    `objects` its fields accept Python objects, too.
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    annotations = {
        f.name: typing.Annotated[_strict_type(hints[f.name], objects), Field(alias=key_of(f.name))]
        for f in dataclasses.fields(cls)
    }
    fields = {
        f.name: f.default
        if f.default_factory is dataclasses.MISSING
        else dataclasses.field(default_factory=f.default_factory)
        for f in dataclasses.fields(cls)
        if f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING
    }
    body = {"__annotations__": annotations, "__doc__": cls.__doc__, "__module__": cls.__module__, **fields}
    strict: type = checked(config=STRICT, frozen=True, kw_only=True)(type(cls.__name__, (cls,), body))
    return strict


def _plain(value: Any, objects: Sequence[Any]) -> Any:
    """Replace pydantic's subclasses by the configurations, which can be pickled, and put objects back."""
    if hasattr(type(value), "__pydantic_validator__"):
        cls = type(value).__bases__[0]
        return cls(**{f.name: _plain(getattr(value, f.name), objects) for f in dataclasses.fields(value)})
    if isinstance(value, dict) and objects:
        if OBJECT in value:
            return objects[value[OBJECT]]
        return {key: _plain(item, objects) for key, item in value.items()}
    return tuple(_plain(item, objects) for item in value) if type(value) is tuple else value


def is_object_type(hint: Any) -> bool:
    """Return whether values of this type are Python objects that no file can hold, such as functions."""
    marked = getattr(hint, "_is_protocol", False) or getattr(hint, "__object__", False)
    return bool(marked) or typing.get_origin(hint) is Callable


def _strict_type(hint: Any, objects: bool) -> Any:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _strict(hint, objects)
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        plain, object_types = _split(hint)
        tables: Any = typing.Union[tuple(_strict_type(kind, objects) for kind in plain)]  # noqa: UP007
        return _either(tables, object_types) if object_types and objects else tables
    if typing.get_origin(hint) is tuple:
        return tuple[tuple(_strict_type(a, objects) for a in typing.get_args(hint))]  # type: ignore[misc]
    if typing.get_origin(hint) is typing.Annotated:
        kind, *marks = typing.get_args(hint)
        for mark in marks:
            if isinstance(mark, Between):
                least, most = (x if math.isfinite(x) else None for x in (mark.least, mark.most))
                mark = Field(ge=least, le=most)
            if isinstance(mark, OneOf):
                mark = AfterValidator(mark)
            kind = typing.Annotated[kind, mark]
        return kind
    return hint


def _either(plain: Any, object_types: tuple[Any, ...]) -> Any:
    """Return the type of values that are plain data, or an object of one of these types."""

    def restore(value: dict[str, int], info: Any) -> Any:
        restored = info.context[value[OBJECT]]
        if any(_fits(restored, kind) for kind in object_types):
            return restored
        raise ValueError(f"a {type(restored).__name__} cannot be used here")

    an_object = typing.Annotated[Any, PlainValidator(restore), Tag(OBJECT)]
    return typing.Annotated[
        typing.Union[an_object, typing.Annotated[plain, Tag(_TAGS[0])]],  # noqa: UP007
        Discriminator(lambda value: OBJECT if isinstance(value, dict) and OBJECT in value else _TAGS[0]),
    ]


def _fits(value: Any, kind: Any) -> bool:
    """Return whether an object is of this type. Any object fits a protocol: its user checks the methods."""
    if typing.get_origin(kind) is Callable:
        return callable(value)
    return bool(getattr(kind, "_is_protocol", False)) or isinstance(value, kind)


def _split(hint: Any) -> tuple[list[Any], tuple[Any, ...]]:
    """Split the members of a union, or a single type, into types of plain data and types of objects."""
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    kinds = typing.get_args(hint) if union else (hint,)
    return [k for k in kinds if not is_object_type(k)], tuple(k for k in kinds if is_object_type(k))


_URGENCY = {
    "unexpected_keyword_argument": 0,
    "extra_forbidden": 0,
    "missing": 2,
    "missing_argument": 2,
    "missing_keyword_only_argument": 2,
}
"""Order in which mistakes are reported: unknown keys first, missing keys last, others (1) between them."""


def _unknown_keys(
    error: ValidationError,
    cls: type,
    tables: Mapping[str, Any],
    where: Where,
    more_unread: FindUnread | None,
) -> UserError | None:
    """Return one error for all unknown keys, each with the name that was probably meant; None without any."""
    hints: dict[tuple[str, ...], str] = {}
    mistakes = error.errors(include_url=False)
    unknown = [mistake for mistake in mistakes if _URGENCY.get(mistake["type"]) == 0]
    for mistake in unknown:
        place = tuple(str(part) for part in mistake["loc"] if part not in _TAGS)
        known_keys, loc = keys_at(cls, place[:-1]), tuple(_as_written(tables, place))
        near, same = did_you_mean(loc[-1], known_keys), f" {nearest(loc[-1], known_keys)}."
        for name in dotted_names(".".join(loc), mistake["input"]):
            # A similar key is a better hint than the name of another trainer. A table counts as misspelt only
            # if this key belongs to the table with the similar name.
            misspelt = near and (
                loc[1:] or translate_name(name).endswith(f"{same}{name.rpartition('.')[2]} here")
            )
            around = ".".join(part for part in loc[:-1] if not part.isdigit())
            translation = translate_name(name, known_keys, around if name != ".".join(loc) else "")
            is_here = translation.startswith("did you mean")
            foreign = "" if misspelt and not is_here else translation
            hints[tuple(name.split(".")) if foreign else loc] = (
                foreign or near or f"known here: {', '.join(known_keys)}"
            )
    if not hints:
        return None
    hints |= more_unread(tables) if more_unread else {}
    (loc, fix), *others = hints.items()
    more = f" (and {rest} more)" if (rest := len(mistakes) - len(unknown)) else ""
    if not others:
        return UserError(where(loc), f"unknown key {loc[-1]!r}{more}", fix)
    mistaken_keys = "; ".join(f"{where(loc)}{f': {hint}' if hint else ''}" for loc, hint in hints.items())
    return UserError(str(where.path or where(())), f"{len(hints)} unknown keys{more}: {mistaken_keys}")


def _first_mistake(
    error: ValidationError, tables: Mapping[str, Any], where: Where, objects: Sequence[Any]
) -> UserError:
    """Return the error for the first mistake, in the order of `_URGENCY`."""
    # A wrong key often causes a missing one, so a missing key is reported last.
    mistakes = sorted(error.errors(include_url=False), key=lambda e: _URGENCY.get(e["type"], 1))
    places = [_as_written(tables, [str(x) for x in m["loc"] if x not in _TAGS]) for m in mistakes]
    mistake, loc = mistakes[0], places[0]
    others = {tuple(place) for place in places} - {tuple(loc)}
    more = f" (and {len(others)} more)" if others else ""
    kind, message = mistake["type"], mistake["msg"]
    if _URGENCY.get(kind) == 2:
        return UserError(where(loc), f"{'.'.join(loc)!r} is missing{more}")
    if kind == "value_error" or isinstance(mistake.get("ctx", {}).get("error"), UserError):
        return UserError(where(loc), str(mistake["ctx"]["error"]) + more)
    if isinstance(mistake["input"], dict) and OBJECT in mistake["input"]:
        value = objects[mistake["input"][OBJECT]]
        fix = "name it as 'file.py:NAME'" if callable(value) else ""
        key = where([name for name in loc if not name.isdigit()])
        return UserError(key, f"a {type(value).__name__} is not plain data{more}", fix)
    text = json.dumps(mistake["input"], ensure_ascii=False, default=str)
    text = text if len(text) <= 60 else text[:57] + "..."
    return UserError(where(loc), f"{_expectation(message)}, got {text}{more}")


def _expectation(message: str) -> str:
    """Return a message of pydantic as what a value should be.

    >>> _expectation("Input should be a valid integer"), _expectation("Input should be less than 1")
    ('expected a valid integer', 'expected a number less than 1')
    """
    if not message.startswith("Input should be "):
        return message[0].lower() + message[1:]
    value = message.removeprefix("Input should be ")
    return f"expected {'a number ' * value.startswith(('less than', 'greater than'))}{value}"


def keys_at(cls: Any, loc: Sequence[str]) -> list[str]:
    """Return the keys of the table at this place of a configuration."""
    for name in (n for n in loc if not n.isdigit()):  # digits are indices in an array of tables
        hint = {key_of(field): hint for field, hint in typing.get_type_hints(cls).items()}[name]
        cls = next((a for a in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(a)), None)
        if cls is None:
            return []
    return [key_of(name) for name, _ in keys_of(cls)]


def keys_of(cls: type) -> list[tuple[str, Any]]:
    """Return (name, type) of the fields that a file can set; the type is without types of objects."""
    hints, keys = typing.get_type_hints(cls), []
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        plain, object_types = _split(hint)
        if not object_types:
            keys.append((field.name, hint))
        elif plain and plain != [type(None)]:
            keys.append((field.name, typing.Union[tuple(plain)]))  # noqa: UP007
    return keys
