"""The registry of kinds: verifiers, tasks, engines and other components that recipes and commands name.

A kind is an entry point. A distribution registers it in its pyproject.toml, as posttrain registers its own
(docs/write-a-plugin.md):

    [project.entry-points."posttrain.verifiers"]
    palindrome = "my_package:Palindrome"

A plugin is imported when a table or a command names it, or lists all kinds of its group. If that fails, a
UserError with its distribution is raised where the kind is named; other kinds still work.
"""

import dataclasses
import inspect
import keyword
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import Distribution, EntryPoint, entry_points
from typing import Any

from posttrain.base.name_hints import did_you_mean
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
    "probes": "the metric probe/NAME: a function (task, answer) that returns a share, or None",
    "commands": "posttrain NAME: a function with typer's annotations (our own stand in cli.py)",
}
"""By group: where its kinds are named, and what such a kind is."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """An entry of the registry, not imported yet."""

    group: str
    name: str
    entry: EntryPoint

    @property
    def origin(self) -> str:
        """Return name and version of the distribution that registers the kind."""
        return " ".join(_read_identity(self.entry.dist)) if self.entry.dist else "unknown"

    @property
    def ours(self) -> bool:
        """Return whether posttrain itself registers the kind."""
        return self.entry.dist is not None and _read_identity(self.entry.dist)[0] == "posttrain"

    def load(self) -> Any:
        """Import the object. Raises UserError if that fails, or if the object is not of its group's type."""
        fix = "update or remove that plugin"
        try:
            loaded = self.entry.load()
        except (UserError, KeyboardInterrupt):
            raise
        except BaseException as error:  # a module may even call sys.exit while it is imported
            problem = f"{self.name!r} of {self.origin} cannot be imported: {cause(error)}"
            raise UserError(f"posttrain.{self.group}", problem, fix) from error
        if fault := _find_fault(self.group, loaded):
            problem = f"{self.name!r} of {self.origin} {fault}"
            raise UserError(f"posttrain.{self.group}", problem, fix)
        return loaded


@cache
def _read_identity(distribution: Distribution) -> tuple[str, str]:
    """Return name and version; importlib.metadata parses the distribution's whole METADATA for each."""
    return distribution.name, distribution.version


def _find_fault(group: str, loaded: Any) -> str:
    """Return why an object cannot be a kind of this group, or ""."""
    if not callable(loaded):
        return f"is a {type(loaded).__name__}, which cannot be called"
    if group == "moves" and not hasattr(loaded, "of_verifier"):
        return "has no of_verifier(verifier, search)"
    if group not in ("tasks", "verifiers"):
        return ""
    if not (isinstance(loaded, type) and dataclasses.is_dataclass(loaded)):
        return "is not a dataclass"
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
    registered = [entry for group in GROUPS for entry in kinds(group).values() if entry.ours]
    return frozenset({"posttrain", *(kind.entry.module.partition(".")[0] for kind in registered)})


@cache
def _installed() -> Any:
    """Return the entry points of all distributions: one walk over their files for all groups."""
    return entry_points()


@cache
def kinds(group: str) -> Mapping[str, Kind]:
    """Return the kinds of a group by name, sorted. A kind of posttrain hides a plugin's of the same name."""
    by_name: dict[str, Kind] = {}
    for entry in sorted(_installed().select(group=f"posttrain.{group}")):
        kind = Kind(group, entry.name, entry)
        if entry.name not in by_name or kind.ours:
            by_name[entry.name] = kind
    if group == "verifiers" and not any(kind.ours for kind in by_name.values()):
        problem = "posttrain's own entry points are not installed"
        raise RunError("registry of kinds", f"{problem}; install it again, as by pip install -e .")
    return by_name


@dataclasses.dataclass(frozen=True)
class OneOf:
    """A mark in the type of a key, `Annotated[str, OneOf(group)]`: values are names of kinds of the group."""

    group: str

    def __call__(self, name: str) -> str:
        """Return the name unchanged. Raises ValueError if the group has no kind of this name."""
        try:
            find_kind(self.group, name, "")
        except UserError as error:
            raise ValueError(str(error)) from None
        return name


def find_kind(group: str, name: str, key: str) -> Kind:
    """Return the kind of this name. Raises UserError at `key`, a key of the recipe, for another name."""
    by_name = kinds(group)
    if name not in by_name:
        fix = did_you_mean(name, by_name) or f"there are {', '.join(by_name)}"
        raise UserError(key, f"there is no {name!r}", fix)
    return by_name[name]


def table_of_kinds(base: type, group: str, module: str) -> Any:
    """Return a subclass of the configuration `base` with a field for each kind of a group, by default None.

    The field of a class with `several = True` is a tuple, since its table may be given more than once. The
    subclass gets the name of `base`, in this module, so that its instances can be pickled.
    """
    _bases[group] = base
    fields: list[Any] = []
    for kind in _tables(group):
        try:
            cls: Any = kind.load()
        except UserError:
            fields.append((kind.name, Any, None))  # chosen_kinds() raises the error if the table names it
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
"""By group: the configuration that `table_of_kinds` extends."""


def _tables(group: str) -> list[Kind]:
    """Return the kinds of a group whose names can be fields of its table: free identifiers."""
    base = _bases.get(group)
    reserved = {*dir(base), *getattr(base, "__dataclass_fields__", ()), "group", "kind_names"} if base else ()
    return [
        kind
        for name, kind in kinds(group).items()
        if base is None or (name.isidentifier() and not keyword.iskeyword(name) and name not in reserved)
    ]


def by_class(group: str) -> dict[type, str]:
    """Return the name of each kind of a group by its class, except classes with `several = True`."""
    classes: dict[type, str] = {}
    for name, kind in kinds(group).items():
        with suppress(UserError):  # a class that cannot be imported has no objects
            cls = kind.load()
            if not getattr(cls, "several", False):
                classes[cls] = name
    return classes


def chosen_kinds(table: Any) -> dict[str, Any]:
    """Return by name the kinds that are set in a table made by `table_of_kinds`.

    Raises UserError for a kind that cannot be imported.
    """
    values = {name: getattr(table, name) for name in table.kind_names}
    present = {name: value for name, value in values.items() if value is not None and value != ()}
    for name, value in present.items():
        if not dataclasses.is_dataclass(value) and not isinstance(value, tuple):
            kinds(table.group)[name].load()
    return present


def find_unloadable() -> dict[Kind, str]:
    """Return the kinds of plugins that cannot be used, each with the reason."""
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
