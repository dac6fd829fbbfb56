"""The registry of kinds: what recipes and commands can name, ours and those of plugins, by entry points.

A distribution registers a kind in its pyproject.toml, as our own does (docs/write-a-plugin.md):

    [project.entry-points."posttrain.verifiers"]
    palindrome = "my_package:Palindrome"

A plugin is imported when a table or a command names it or lists all of its group. One that cannot be imported
is a UserError with its distribution where it is named, and hurts nothing else.
"""

import dataclasses
import inspect
import keyword
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from posttrain.base.nearest import did_you_mean
from posttrain.base.usercode import cause
from posttrain.errors import RunError, UserError

GROUPS: Mapping[str, str] = {
    "tasks": "[task.NAME]: a frozen dataclass with make(limit, seed, games), which makes tasks",
    "verifiers": "[verifier.NAME]: a frozen dataclass that inherits Verifier",
    "environments": "task.env.factory: a function that returns an environment",
    "engines": "engine.name: a function (recipe, policy, adapter) that returns an engine",
    "searches": "search.strategy: a function that begins a search",
    "moves": "the name of a verifier: the Transitions of its proofs, with of_verifier(verifier, search)",
    "tools": "task.tools.builtin: a function (level) that returns what runs the tool",
    "trackers": "track.sinks: a class of a service that metrics go to",
    "commands": "posttrain NAME: a function with typer's annotations (our own stand in cli.py)",
}
"""What the kinds of each group are, and where they are named."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """An entry of the registry."""

    group: str
    name: str
    entry: EntryPoint

    @property
    def origin(self) -> str:
        """The distribution that registers it, and its version."""
        found = self.entry.dist
        return f"{found.name} {found.version}" if found else "unknown"

    @property
    def ours(self) -> bool:
        """Whether posttrain itself registers it."""
        return self.entry.dist is not None and self.entry.dist.name == "posttrain"

    def load(self) -> Any:
        """Import what it names; UserError if that fails, or if it is not what its group asks."""
        fix = "update or remove that plugin"
        try:
            loaded = self.entry.load()
        except (UserError, KeyboardInterrupt):
            raise
        except BaseException as error:  # a module may even call sys.exit while it is imported
            problem = f"{self.name!r} of {self.origin} cannot be imported: {cause(error)}"
            raise UserError(f"posttrain.{self.group}", problem, fix) from error
        if lacks := _lacks(self.group, loaded):
            problem = f"{self.name!r} of {self.origin} {lacks}"
            raise UserError(f"posttrain.{self.group}", problem, fix)
        return loaded


def _lacks(group: str, loaded: Any) -> str:
    """Return what keeps an object from being a kind of this group, or ""."""
    if not callable(loaded):
        return f"is a {type(loaded).__name__}, which cannot be called"
    if group == "moves" and not hasattr(loaded, "of_verifier"):
        return "has no of_verifier(verifier, search)"
    if group not in ("tasks", "verifiers"):
        return ""
    if not (isinstance(loaded, type) and dataclasses.is_dataclass(loaded)):
        return "is no dataclass"
    if not loaded.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return "is not frozen: write @dataclass(frozen=True, kw_only=True)"
    if group == "verifiers":
        judges = {"__call__", "golds", "fakes", "check", "place"} <= set(dir(loaded))
        return "" if judges or hasattr(loaded, "build") else "does not inherit posttrain.Verifier"
    try:
        make: Any = getattr(loaded, "make")  # noqa: B009 - mypy knows dataclasses alone here
        inspect.signature(make).bind(None, 1, 0, None)
    except (AttributeError, TypeError):
        return "has no make(self, limit, seed, games)"
    return ""


@cache
def packages() -> frozenset[str]:
    """Return the import packages of this distribution, by the kinds that it registers."""
    own = [entry for group in GROUPS for entry in kinds(group).values() if entry.ours]
    return frozenset({"posttrain", *(kind.entry.module.partition(".")[0] for kind in own)})


@cache
def kinds(group: str) -> Mapping[str, Kind]:
    """Return the kinds of a group by name, in the order of the alphabet; of two of one name ours counts."""
    found: dict[str, Kind] = {}
    for entry in sorted(entry_points(group=f"posttrain.{group}")):
        kind = Kind(group, entry.name, entry)
        if entry.name not in found or kind.ours:
            found[entry.name] = kind
    if group == "verifiers" and not any(kind.ours for kind in found.values()):
        problem = "posttrain's own entry points are not installed"
        raise RunError("registry of kinds", f"{problem}; install it again, as by pip install -e .")
    return found


@dataclasses.dataclass(frozen=True)
class OneOf:
    """In the type of a key: a name of this group."""

    group: str

    def __call__(self, name: str) -> str:
        """Return the name; ValueError if there is no such kind."""
        try:
            named(self.group, name, "")
        except UserError as error:
            raise ValueError(str(error)) from None
        return name


def named(group: str, name: str, key: str) -> Kind:
    """Return the kind of this name; UserError at a key of the recipe if there is none."""
    known = kinds(group)
    if name not in known:
        fix = did_you_mean(name, known) or f"there are {', '.join(known)}"
        raise UserError(key, f"there is no {name!r}", fix)
    return known[name]


def table_of_kinds(base: type, group: str, module: str) -> Any:
    """Return the configuration `base` with a field for each kind of a group, None unless it is given.

    A class with `several = True` may be given more than once: its field is a tuple. The table takes the name
    of `base`, in this module, so that it can be pickled.
    """
    _bases[group] = base
    fields: list[Any] = []
    for kind in _tables(group):
        try:
            cls: Any = kind.load()
        except UserError:
            fields.append((kind.name, Any, None))  # `chosen` says why, where it is named
            continue
        several = getattr(cls, "several", False)
        hint: Any = tuple[cls, ...] if several else cls | None
        fields.append((kind.name, hint, () if several else None))
    names = tuple(name for name, *_ in fields)
    space = {"__module__": module, "__doc__": base.__doc__, "group": group, "kind_names": names}
    return dataclasses.make_dataclass(
        base.__name__, fields, bases=(base,), frozen=True, kw_only=True, namespace=space
    )


_bases: dict[str, type] = {}
"""The tables that the kinds of a group stand in, without them."""


def _tables(group: str) -> list[Kind]:
    """Return the kinds of a group whose names can be keys of its table: identifiers that it does not have."""
    base = _bases.get(group)
    reserved = {*dir(base), *getattr(base, "__dataclass_fields__", ()), "group", "kind_names"} if base else ()
    return [
        kind
        for name, kind in kinds(group).items()
        if base is None or (name.isidentifier() and not keyword.iskeyword(name) and name not in reserved)
    ]


def by_class(group: str) -> dict[type, str]:
    """Return the names of the kinds of a group by their classes, without those given several times."""
    classes: dict[type, str] = {}
    for name, kind in kinds(group).items():
        with suppress(UserError):  # a plugin that cannot be imported has no objects
            cls = kind.load()
            if not getattr(cls, "several", False):
                classes[cls] = name
    return classes


def chosen(table: Any) -> dict[str, Any]:
    """Return the kinds that such a table has, by name; UserError for one that cannot be imported."""
    values = {name: getattr(table, name) for name in table.kind_names}
    given = {name: value for name, value in values.items() if value is not None and value != ()}
    for name, value in given.items():
        if not dataclasses.is_dataclass(value) and not isinstance(value, tuple):
            kinds(table.group)[name].load()
    return given


def unloadable() -> dict[Kind, str]:
    """Return the kinds of plugins that cannot be imported, with the reason."""
    faults = {}
    for group in GROUPS:
        for kind in kinds(group).values():
            if not kind.ours:
                if kind not in _tables(group):
                    faults[kind] = f"{kind.name!r} cannot be a table of its own: take another name"
                    continue
                try:
                    kind.load()
                except UserError as error:
                    faults[kind] = error.problem
    return faults
