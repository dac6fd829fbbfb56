"""From tables to a frozen dataclass, with every mistake named by its place.

A key that nothing reads is an error with the nearest valid name; a number is not a string; what a
component's own configuration refuses is said with its key. Only this file knows pydantic.
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

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from posttrain.base.nearest import did_you_mean, elsewhere, nearest, within
from posttrain.math.choice import Between
from posttrain.types import UserError

STRICT = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True)


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
    try:
        text = json.dumps(_jsonable(_in_lists(tables, cls), (), where))
    except RecursionError:
        raise UserError(str(where.path or where(())), "is nested too deeply") from None
    try:
        return _plain(_adapter(cls).validate_json(text))
    except ValidationError as error:
        raise _unknown(error, cls, tables, where, also) or _first(error, tables, where) from None
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


def _jsonable(value: Any, loc: tuple[str, ...], where: Where) -> Any:
    """The value, if no part of it is something that TOML can hold and no option can be."""
    if isinstance(value, Mapping):
        return {k: _jsonable(v, (*loc, k), where) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(v, loc, where) for v in value]
    if isinstance(value, (datetime.date, datetime.time)):
        raise UserError(where(loc), "is a date or time, and no option may be")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(where(loc), f"is {value}, and no option may be")
    if isinstance(value, int) and abs(value) >= 1 << 63:
        raise UserError(where(loc), "is a number of more than 64 bits")
    if isinstance(value, str) and not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
        raise UserError(where(loc), "holds half of a surrogate pair, not a character")
    if not isinstance(value, bool | int | float | str | None):
        fix = "name it as 'file.py:NAME'" if callable(value) else ""
        raise UserError(where(loc), f"a {type(value).__name__} is no plain data", fix)
    return value


@lru_cache(maxsize=64)
def _adapter(cls: type) -> TypeAdapter[Any]:
    return TypeAdapter(_strict(cls))


@lru_cache(maxsize=64)
def _strict(cls: type) -> type:
    """The dataclass, and every dataclass in its fields, as ones that refuse unknown keys and other types.

    A subclass of each, so that what is read is an instance of the component's own configuration.
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    annotations = {
        f.name: typing.Annotated[_strict_type(hints[f.name]), Field(alias=key_of(f.name))]
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


def _plain(value: Any) -> Any:
    """The component's own configurations again: they are sent to worker processes, which know no others.

    A default that no table replaces stays the very object, which tells what was given from what was not.
    """
    if hasattr(type(value), "__pydantic_validator__"):
        cls = type(value).__bases__[0]
        return cls(**{f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)})
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


def _strict_type(hint: Any) -> Any:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _strict(hint)
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return typing.Union[tuple(_strict_type(a) for a in typing.get_args(hint))]  # noqa: UP007
    if typing.get_origin(hint) is tuple:
        return tuple[tuple(_strict_type(a) for a in typing.get_args(hint))]  # type: ignore[misc]
    if typing.get_origin(hint) is typing.Annotated:
        kind, *marks = typing.get_args(hint)
        for mark in marks:
            if isinstance(mark, Between):
                least, most = (x if math.isfinite(x) else None for x in (mark.least, mark.most))
                mark = Field(ge=least, le=most)
            kind = typing.Annotated[kind, mark]
        return kind
    return hint


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
        place = tuple(str(part) for part in mistake["loc"])
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


def _first(error: ValidationError, tables: Mapping[str, Any], where: Where) -> UserError:
    """The first mistake but for unknown keys, as one line."""
    # What is there and should not be tells more than what is missing because of it.
    found = sorted(error.errors(include_url=False), key=lambda e: _URGENCY.get(e["type"], 1))
    places = [_as_written(tables, [str(part) for part in each["loc"]]) for each in found]
    mistake, loc = found[0], places[0]
    others = {tuple(place) for place in places} - {tuple(loc)}
    more = f" (and {len(others)} more)" if others else ""
    kind, said = mistake["type"], mistake["msg"]
    if _URGENCY.get(kind) == 2:
        return UserError(where(loc), f"{'.'.join(loc)!r} is missing{more}")
    if kind == "value_error" or isinstance(mistake.get("ctx", {}).get("error"), UserError):
        return UserError(where(loc), str(mistake["ctx"]["error"]) + more)
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
    return [key_of(f.name) for f in dataclasses.fields(cls)]
