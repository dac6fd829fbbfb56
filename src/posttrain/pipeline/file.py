"""A pipeline's TOML: stages in order, their references to earlier stages, and the comparison at the end.

In the settings of a stage, {NAME} stands for the output of stage NAME: the model of its newest checkpoint, or
the directory of a model or of data; {NAME.run} stands for the run directory of a recipe. Only earlier stages
can be named.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from posttrain.base.name_hints import did_you_mean
from posttrain.base.toml import flat
from posttrain.evaluation.compare import Compare
from posttrain.recipe import config
from posttrain.recipe.document import parse_override, put, read_toml
from posttrain.types import UserError

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
REFERENCE = re.compile(r"\{([A-Za-z][A-Za-z0-9_-]*)(?:\.([A-Za-z_]+))?\}")
TEMPLATES = ("template", "chat_template")
"""Keys whose texts have braces that are not references."""
COMPARE = "compare"
REMOVED = ""
"""The value that removes a key from a recipe, as in --set KEY=."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage; exactly one of recipe, new and make says what it does."""

    name: str
    """The name of its directory, and of {NAME} in later stages."""
    recipe: str = ""
    """A recipe, by its path from the pipeline's file."""
    set: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the recipe to override: { "model.path" = "{sft}" }; an empty text removes the key."""
    new: Mapping[str, Any] = field(default_factory=dict)
    """A new model with random weights: the options of `posttrain model new`."""
    make: str = ""
    """A function that writes data, "file.py:function"; called with a directory and the options."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function of `make`."""

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ValueError(f"name must be letters, digits, - and _, after a letter, not {self.name!r}")
        if self.name == COMPARE:
            raise ValueError(f"name cannot be {COMPARE!r}, which is the comparison at the end")
        kinds = [kind for kind in ("recipe", "new", "make") if getattr(self, kind)]
        if len(kinds) != 1:
            text = " and ".join(kinds) or "none"
            raise ValueError(f"stage {self.name!r} needs exactly one of recipe, new and make, not {text}")
        for key, kind in (("set", "recipe"), ("options", "make")):
            if getattr(self, key) and not getattr(self, kind):
                raise ValueError(f"stage {self.name!r}: {key} is read with {kind} only")

    @property
    def kind(self) -> str:
        """The key that says what the stage does: recipe, new or make."""
        return "recipe" if self.recipe else "new" if self.new else "make"

    @property
    def label(self) -> str:
        """The recipe, function or command of the stage, for a person."""
        return self.recipe or self.make or "posttrain model new"

    @property
    def settings_key(self) -> str:
        """The key of its settings: set, new or options."""
        return {"recipe": "set", "new": "new", "make": "options"}[self.kind]

    @property
    def settings(self) -> Mapping[str, Any]:
        """Its settings, with references to earlier stages."""
        settings: Mapping[str, Any] = getattr(self, self.settings_key)
        return settings


@dataclass(frozen=True, kw_only=True)
class Tables:
    """The tables of the file."""

    title: str = ""
    stage: tuple[Stage, ...] = ()
    compare: Compare | None = None
    """A comparison of the policies, on prompts that none was trained on."""
    keep: Literal["weights", "all"] = "weights"
    """Checkpoint files of a finished stage that stay: weights, or all that its recipe keeps, so that the last
    stage can be continued for more updates."""


@dataclass(frozen=True)
class Pipeline:
    """A pipeline whose references all name earlier stages."""

    path: Path
    title: str
    stages: tuple[Stage, ...]
    compare: Mapping[str, Any] | None
    """The table [compare], with references."""
    where: config.Where
    keep: str
    overrides: Mapping[str, str]
    """The option for each key "STAGE.key" that the command line sets, as "--set STAGE.key=value"."""

    def number(self, name: str) -> int:
        """Return the index of a stage, from 0."""
        return next(n for n, stage in enumerate(self.stages) if stage.name == name)

    def at(self, stage: Stage, *keys: str) -> str:
        """Return the place of a key of a stage: file and line, or the option, and the stage's name."""
        dotted = ".".join((stage.name, *(k for k in keys if k not in ("set", "new", "options"))))
        place = self.overrides.get(dotted, "")
        place = place or self.where(["stage", str(self.number(stage.name)), *keys]).split(": ")[0]
        return f"{place}: stage {stage.name!r}"


def is_pipeline(path: Path) -> bool:
    """Return whether a file has a key that only pipelines have."""
    return bool({"stage", "compare", "title"} & read_toml(path)[0].keys())


def read(path: Path, overrides: Sequence[str] = ()) -> Pipeline:
    """Read the pipeline of a file, and apply `STAGE.key=value` overrides.

    Raises UserError, with file and line, for the first mistake.
    """
    tables, text = read_toml(path)
    if "model" in tables and "stage" not in tables:
        raise UserError(str(path), "it is a recipe, not a pipeline", f"posttrain train {path} runs it")
    where = config.Where(path, text, {})
    file = config.parse(Tables, tables, where)
    if not file.stage:
        raise UserError(str(path), "it has no stages", "begin one with [[stage]]")
    names = [stage.name for stage in file.stage]
    for number, name in enumerate(names):
        if name in names[:number]:
            at = where(["stage", str(number), "name"])
            raise UserError(at, f"a second stage is called {name!r}", "give one of them another name")
    options = {_override(tables, names, override): f"--set {override}" for override in overrides}
    stages: tuple[Stage, ...] = config.parse(Tables, tables, where).stage
    pipeline = Pipeline(path, file.title or path.stem, stages, tables.get(COMPARE), where, file.keep, options)
    for number, stage in enumerate(stages):
        for key, name, suffix in find_references(stage.settings):
            at = pipeline.at(stage, stage.settings_key, *key.split("."))
            _check_reference(pipeline, name, suffix, number, at)
    if pipeline.compare is not None:
        _check_comparison(pipeline, pipeline.compare)
    return pipeline


def _override(tables: dict[str, Any], names: Sequence[str], text: str) -> str:
    """Apply an override to the tables, and return its key."""
    place = f"--set {text}"
    key, value = parse_override(text, place)
    name, _, rest = key.partition(".")
    if name not in (*names, COMPARE) or not rest:
        problem = f"sets nothing: there is no stage {name!r}" if rest else "names no key of a stage"
        fix = did_you_mean(name, [*names, COMPARE]) or f"there are {', '.join(names)}"
        raise UserError(place, problem, fix)
    if name == COMPARE:
        put(tables, key, value, place)
        return key
    stage = tables["stage"][names.index(name)]
    if "recipe" in stage:
        stage["set"] = {**flat(stage.get("set", {})), rest: REMOVED if value is None else value}
        return key
    table = "new" if "new" in stage else "options"
    if value is None and rest not in stage.get(table, {}):
        raise UserError(place, f"cannot remove {rest!r}: it is not set")
    stage[table] = {k: v for k, v in {**stage.get(table, {}), rest: value}.items() if v is not None}
    return key


# ---------------------------------------------------------------------- references


def find_references(value: Any, key: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield (key, name, suffix) for each {NAME} and {NAME.suffix} in a value and its elements.

    >>> list(find_references({"model.path": "{sft}", "template": "{question}"}))
    [('model.path', 'sft', '')]
    """
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from find_references(inner, name if not key else f"{key}.{name}")
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from find_references(inner, key)
    elif isinstance(value, str) and key.rpartition(".")[2] not in TEMPLATES:
        yield from ((key, match[1], match[2] or "") for match in REFERENCE.finditer(value))


def substitute(value: Any, outputs: Mapping[str, str], key: str = "") -> Any:
    """Return the value with each reference that is in `outputs` replaced; others stay.

    >>> substitute({"paths": ["{reward}/x"]}, {"reward": "runs/02-reward"})
    {'paths': ['runs/02-reward/x']}
    """
    if isinstance(value, Mapping):
        return {name: substitute(inner, outputs, name) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [substitute(inner, outputs, key) for inner in value]
    if isinstance(value, str) and key.rpartition(".")[2] not in TEMPLATES:
        return REFERENCE.sub(lambda match: outputs.get(match[0][1:-1], match[0]), value)
    return value


def _check_reference(pipeline: Pipeline, name: str, suffix: str, before: int, at: str) -> None:
    """Raise UserError, at this place, unless a reference names an output of a stage before this number."""
    names = [stage.name for stage in pipeline.stages]
    reference = f"{{{name}{'.' * bool(suffix)}{suffix}}}"
    if name not in names:
        fix = did_you_mean(name, names) or f"there are {', '.join(names[:before]) or 'none before it'}"
        raise UserError(at, f"{reference} names no stage", fix)
    number = names.index(name)
    if number == before:
        raise UserError(at, f"{reference} is what this stage itself makes")
    if number > before:
        problem = f"{reference} is made by a later stage"
        raise UserError(at, problem, "put that stage first: stages run in the order of the file")
    if suffix and (suffix != "run" or pipeline.stages[number].kind != "recipe"):
        fix = f"write {{{name}}} or {{{name}.run}}" if suffix != "run" else f"write {{{name}}}"
        raise UserError(at, f"stage {name!r} makes no {reference}", fix)


def _check_comparison(pipeline: Pipeline, table: Mapping[str, Any]) -> None:
    """Raise UserError unless the policies to compare are stages that make models."""
    kinds = {stage.name: stage.kind for stage in pipeline.stages}
    for key, name, suffix in find_references(table):
        at = pipeline.where([COMPARE, *key.split(".")])
        _check_reference(pipeline, name, suffix, len(pipeline.stages), at)
    at = pipeline.where([COMPARE, "stages"])
    if table.get("base") and "base" in table["stages"]:
        raise UserError(at, "stage 'base' and the model of base would have one name")
    for name in table["stages"]:
        if name not in kinds:
            fix = did_you_mean(name, kinds) or f"there are {', '.join(kinds)}"
            raise UserError(at, f"there is no stage {name!r}", fix)
        if kinds[name] == "make":
            raise UserError(at, f"stage {name!r} makes data, not a policy", "leave it out")
