"""From tables to a frozen dataclass, with every mistake named by its place.

A key that nothing reads is an error with the nearest valid name; a number is not a string; what a
component's own configuration refuses is said with its key. Only this file knows pydantic.

Tables of a program may hold objects beside plain data, as a reward function or an environment: a field takes
one where its type has a protocol, `Callable`, or a class with `__object__`. Files have none of these.
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
from posttrain.base.nearest import did_you_mean, elsewhere, nearest, within
from posttrain.math.choice import Between
from posttrain.types import UserError

STRICT = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True)
OBJECT = "\0object"
"""Key of the table that stands for an object of a program while its tables are read, with its number."""
_TAGS = ("\0plain", OBJECT)


def key_of(field: str) -> str:
    """The key of a recipe that a field is read from: Python has the word async for itself.

    >>> key_of("async_"), key_of("rollout")
    ('async', 'rollout')
    """
    return field.removesuffix("_")


@dataclasses.dataclass(frozen=True)
class Where:
    """Finds the line on which a key stands; of tables that stand in no file, the key alone."""

    path: Path | None = None
    text: str = ""
    given: Mapping[str, str] = dataclasses.field(default_factory=dict)
    within: tuple[str, ...] = ()
    """The table whose keys these are."""

    def __call__(self, loc: Sequence[str]) -> str:
        loc = (*self.within, *loc)
        dotted = ".".join(loc)
        if self.path is None:
            return dotted
        for key, override in self.given.items():
            if dotted == key or key.startswith(f"{dotted}.") or dotted.startswith(f"{key}."):
                return f"{override}: {dotted}"
        number = self._line(list(loc))
        return f"{self.path}:{number}: {dotted}" if number else f"{self.path}: {dotted}"

    def _line(self, loc: list[str]) -> int:
        """Of the key, or else of the nearest table around or below it; 0 if there is none."""
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
                here = table
            elif key:
                here = table + _parts(key[1])
            else:
                continue
            shared = next((n for n, (a, b) in enumerate(zip(here, loc, strict=False)) if a != b), None)
            shared = min(len(here), len(loc)) if shared is None else shared
            match = (shared, shared == len(here))
            if shared and match > best_match:
                best, best_match = number, match
        return best


def _parts(dotted: str) -> list[str]:
    return [part.strip(" \"'") for part in dotted.split(".")]


Also = Callable[[Mapping[str, Any]], Mapping[tuple[str, ...], str]]
"""Of tables, the places of more keys that nothing reads, and what each may have meant."""


def parsed(cls: type, tables: Mapping[str, Any], where: Where, also: Also | None = None) -> Any:
    """The tables as an instance of a configuration of ours; UserError at the line of the first mistake.

    Keys that nothing reads are named together, with those that `also` knows of.
    """
    objects: list[Any] = []
    try:
        text = json.dumps(_jsonable(_in_lists(tables, cls), (), where, objects))
    except RecursionError:
        raise UserError(str(where.path or where(())), "is nested too deeply") from None
    try:
        return _plain(_adapter(cls, bool(objects)).validate_json(text, context=objects), objects)
    except ValidationError as error:
        raise _unknown(error, cls, tables, where, also) or _first(error, tables, where, objects) from None
    except UserError as error:  # of a component that names what it was given, a function say
        key = _holding(tables, error.key)
        if not key or not where.text:
            raise
        raise error.at(where(key), keep=True) from None


def _holding(value: Any, wanted: str) -> tuple[str, ...]:
    """The key under which this text stands; empty if there is none."""
    held_by = value.items() if isinstance(value, Mapping) else enumerate(value) if type(value) is list else ()
    for key, held in held_by:
        if held == wanted and wanted:
            return (str(key),)
        if below := _holding(held, wanted):
            return (str(key), *below)
    return ()


def _in_lists(tables: Any, cls: type) -> Any:
    """The tables, and one alone in a list of its own where there may be several."""
    if not isinstance(tables, Mapping):
        return tables
    hints, made = typing.get_type_hints(cls), dict(tables)
    for name in made.keys() & hints.keys():
        kinds = (hints[name], *typing.get_args(hints[name]))
        table = next((kind for kind in kinds if dataclasses.is_dataclass(kind)), None)
        if isinstance(table, type):
            several = typing.get_origin(hints[name]) is tuple and isinstance(made[name], Mapping)
            made[name] = [made[name]] if several else _in_lists(made[name], table)
    return made


def _as_written(tables: Any, loc: Sequence[str]) -> list[str]:
    """The place of a key without the numbers of tables that were given alone, and the types it may have."""
    written, here = [], tables
    for name in loc:
        if here is not None and not isinstance(here, Mapping | list):
            break
        table = isinstance(here, Mapping)
        if (table or isinstance(here, list)) and name.isdigit() == table and name not in (here or ()):
            continue
        written.append(name)
        if isinstance(here, list):
            here = dict(enumerate(here)).get(int(name)) if name.isdigit() else None
        else:
            here = here.get(name) if isinstance(here, Mapping) else None
    return written


def _jsonable(value: Any, loc: tuple[str, ...], where: Where, objects: list[Any]) -> Any:
    """Return the value as JSON has it, its objects put into `objects`; UserError for what no option is."""
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
    """The dataclass, and every dataclass in its fields, as ones that refuse unknown keys and other types.

    A subclass of each, so that what is read is an instance of the component's own configuration. With
    `objects` their fields take objects too.
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
    made: type = checked(config=STRICT, frozen=True, kw_only=True)(type(cls.__name__, (cls,), body))
    return made


def _plain(value: Any, objects: Sequence[Any]) -> Any:
    """Return the components' own configurations, which worker processes know, with the objects in place."""
    if hasattr(type(value), "__pydantic_validator__"):
        cls = type(value).__bases__[0]
        return cls(**{f.name: _plain(getattr(value, f.name), objects) for f in dataclasses.fields(value)})
    if isinstance(value, dict) and objects:
        if OBJECT in value:
            return objects[value[OBJECT]]
        return {key: _plain(each, objects) for key, each in value.items()}
    return tuple(_plain(each, objects) for each in value) if type(value) is tuple else value


def is_object_type(hint: Any) -> bool:
    """Return whether only a program can give what this type stands for, as a function or an environment."""
    marked = getattr(hint, "_is_protocol", False) or getattr(hint, "__object__", False)
    return bool(marked) or typing.get_origin(hint) is Callable


def _strict_type(hint: Any, objects: bool) -> Any:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _strict(hint, objects)
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        kinds, own = _split(hint)
        tables: Any = typing.Union[tuple(_strict_type(kind, objects) for kind in kinds)]  # noqa: UP007
        return _either(tables, own) if own and objects else tables
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


def _either(plain: Any, own: tuple[Any, ...]) -> Any:
    """Return the type of what is plain data, or an object of one of these types."""

    def taken(value: dict[str, int], info: Any) -> Any:
        made = info.context[value[OBJECT]]
        if any(_fits(made, kind) for kind in own):
            return made
        raise ValueError(f"a {type(made).__name__} cannot be used here")

    there = typing.Annotated[Any, PlainValidator(taken), Tag(OBJECT)]
    return typing.Annotated[
        typing.Union[there, typing.Annotated[plain, Tag(_TAGS[0])]],  # noqa: UP007
        Discriminator(lambda value: OBJECT if isinstance(value, dict) and OBJECT in value else _TAGS[0]),
    ]


def _fits(value: Any, kind: Any) -> bool:
    """Return whether an object is of this type; what a protocol asks is checked by who uses it."""
    if typing.get_origin(kind) is Callable:
        return callable(value)
    return bool(getattr(kind, "_is_protocol", False)) or isinstance(value, kind)


def _split(hint: Any) -> tuple[list[Any], tuple[Any, ...]]:
    """Return of a union, or of the type alone, what a file can give, and what only a program can."""
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
"""Which of several mistakes to name: an unknown key, then anything else, then a missing one."""


def _unknown(
    error: ValidationError, cls: type, tables: Mapping[str, Any], where: Where, also: Also | None
) -> UserError | None:
    """All keys that nothing reads, as one line, each with what it may have meant."""
    found: dict[tuple[str, ...], str] = {}
    mistakes = error.errors(include_url=False)
    unknown = [each for each in mistakes if _URGENCY.get(each["type"]) == 0]
    for mistake in unknown:
        place = tuple(str(part) for part in mistake["loc"] if part not in _TAGS)
        known, loc = keys_at(cls, place[:-1]), tuple(_as_written(tables, place))
        near, same = did_you_mean(loc[-1], known), f" {nearest(loc[-1], known)}."
        for name in within(".".join(loc), mistake["input"]):
            # Where the table alone is misspelt, what stands in it is called as here.
            own = near and (loc[1:] or elsewhere(name).endswith(f"{same}{name.rpartition('.')[2]} here"))
            other = "" if own else elsewhere(name, known)
            found[tuple(name.split(".")) if other else loc] = (
                other or near or f"known here: {', '.join(known)}"
            )
    if not found:
        return None
    found |= also(tables) if also else {}
    (loc, fix), *others = found.items()
    more = f" (and {rest} more)" if (rest := len(mistakes) - len(unknown)) else ""
    if not others:
        return UserError(where(loc), f"unknown key {loc[-1]!r}{more}", fix)
    told = "; ".join(f"{where(loc)}{f': {hint}' if hint else ''}" for loc, hint in found.items())
    return UserError(str(where.path or where(())), f"{len(found)} unknown keys{more}: {told}")


def _first(
    error: ValidationError, tables: Mapping[str, Any], where: Where, objects: Sequence[Any]
) -> UserError:
    """The first mistake but for unknown keys, as one line."""
    # What is there and should not be tells more than what is missing because of it.
    found = sorted(error.errors(include_url=False), key=lambda e: _URGENCY.get(e["type"], 1))
    places = [_as_written(tables, [str(x) for x in each["loc"] if x not in _TAGS]) for each in found]
    mistake, loc = found[0], places[0]
    others = {tuple(place) for place in places} - {tuple(loc)}
    more = f" (and {len(others)} more)" if others else ""
    kind, said = mistake["type"], mistake["msg"]
    if _URGENCY.get(kind) == 2:
        return UserError(where(loc), f"{'.'.join(loc)!r} is missing{more}")
    if kind == "value_error" or isinstance(mistake.get("ctx", {}).get("error"), UserError):
        return UserError(where(loc), str(mistake["ctx"]["error"]) + more)
    if isinstance(mistake["input"], dict) and OBJECT in mistake["input"]:
        made = objects[mistake["input"][OBJECT]]
        fix = "name it as 'file.py:NAME'" if callable(made) else ""
        key = where([name for name in loc if not name.isdigit()])
        return UserError(key, f"a {type(made).__name__} is no plain data{more}", fix)
    given = json.dumps(mistake["input"], ensure_ascii=False, default=str)
    shown = given if len(given) <= 60 else given[:57] + "..."
    return UserError(where(loc), f"{shown} will not do: {said[0].lower() + said[1:]}{more}")


def keys_at(cls: Any, loc: Sequence[str]) -> list[str]:
    """The keys of the table at this place."""
    for name in (n for n in loc if not n.isdigit()):  # but for places in an array of tables
        hint = {key_of(field): hint for field, hint in typing.get_type_hints(cls).items()}[name]
        cls = next((a for a in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(a)), None)
        if cls is None:
            return []
    return [key_of(name) for name, _ in keys_of(cls)]


def keys_of(cls: type) -> list[tuple[str, Any]]:
    """Return the fields of a configuration that a file can give, each with its type there."""
    hints, keys = typing.get_type_hints(cls), []
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        plain, own = _split(hint)
        if not own:
            keys.append((field.name, hint))
        elif plain and plain != [type(None)]:
            keys.append((field.name, typing.Union[tuple(plain)]))  # noqa: UP007
    return keys
