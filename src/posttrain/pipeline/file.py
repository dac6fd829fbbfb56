"""A pipeline's TOML: stages in order, what each takes from the ones before, and who is compared at the end.

In what a stage is given, {NAME} stands for what stage NAME made: the model of its newest checkpoint, or the
directory of a model or of data; {NAME.run} for the run directory of a recipe. Only earlier stages can be
named.
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
TAKEN = re.compile(r"\{([A-Za-z][A-Za-z0-9_-]*)(?:\.([A-Za-z_]+))?\}")
OWN_BRACES = ("template", "chat_template")
"""Keys whose texts have braces of their own."""
COMPARE = "compare"
TAKEN_OUT = ""
"""The value that takes a key out of a recipe, as the empty one of --set does."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage; exactly one of recipe, new and make says what it does."""

    name: str
    """Of its directory, and for {NAME} in later stages."""
    recipe: str = ""
    """A recipe, looked for from the pipeline's file."""
    set: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the recipe to override: { "model.path" = "{sft}" }; an empty text takes the key out."""
    new: Mapping[str, Any] = field(default_factory=dict)
    """A model from nothing: the options of `posttrain model new`."""
    make: str = ""
    """A function that writes data, "file.py:function"; called with a directory and the options."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of make, by their names."""

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ValueError(f"name must be letters, digits, - and _, after a letter, not {self.name!r}")
        if self.name == COMPARE:
            raise ValueError(f"name cannot be {COMPARE!r}, which is the comparison at the end")
        given = [kind for kind in ("recipe", "new", "make") if getattr(self, kind)]
        if len(given) != 1:
            said = " and ".join(given) if given else "none"
            raise ValueError(f"stage {self.name!r} needs exactly one of recipe, new and make, not {said}")
        for key, kind in (("set", "recipe"), ("options", "make")):
            if getattr(self, key) and not getattr(self, kind):
                raise ValueError(f"stage {self.name!r}: {key} is read beside {kind} only")

    @property
    def kind(self) -> str:
        """recipe, new or make."""
        return "recipe" if self.recipe else "new" if self.new else "make"

    @property
    def given(self) -> Mapping[str, Any]:
        """What it is given besides its name, in which {NAME} is filled in."""
        return {"recipe": self.set, "new": self.new, "make": self.options}[self.kind]


@dataclass(frozen=True, kw_only=True)
class Tables:
    """The file as it stands."""

    title: str = ""
    stage: tuple[Stage, ...] = ()
    compare: Compare | None = None
    """The policies against one another, on prompts that none was trained on."""
    keep: Literal["weights", "all"] = "weights"
    """What stays of the checkpoints of a finished stage: weights, or all that its recipe keeps, so that the
    last stage can be made longer."""


@dataclass(frozen=True)
class Pipeline:
    """A pipeline as it was read, each {NAME} in it that of an earlier stage."""

    path: Path
    title: str
    stages: tuple[Stage, ...]
    compare: Mapping[str, Any] | None
    """The table [compare], with {NAME} in it."""
    where: config.Where
    keep: str
    said: Mapping[str, str]
    """For each override of the command line, "STAGE.key", how it was given."""

    def number(self, name: str) -> int:
        """The place of a stage, from 0."""
        return next(n for n, stage in enumerate(self.stages) if stage.name == name)

    def at(self, stage: Stage, *keys: str) -> str:
        """Where in the file, or on the command line, a key of a stage stands."""
        dotted = ".".join((stage.name, *(k for k in keys if k not in ("set", "new", "options"))))
        said = next((said for key, said in self.said.items() if key == dotted), "")
        found = said or self.where(["stage", str(self.number(stage.name)), *keys]).split(": ")[0]
        return f"{found}: stage {stage.name!r}"


def is_pipeline(path: Path) -> bool:
    """Return whether a file has what pipelines have and no recipe has."""
    tables = read_toml(path)[0]
    return bool({"stage", "compare", "title"} & set(tables))


def read(path: Path, overrides: Sequence[str] = ()) -> Pipeline:
    """The pipeline of a file, with `STAGE.key=value` overrides on top.

    Raises UserError, with file and line, for what cannot be used as it stands.
    """
    tables, text = read_toml(path)
    if "model" in tables and "stage" not in tables:
        raise UserError(str(path), "it is a recipe, not a pipeline", f"posttrain train {path} runs it")
    where = config.Where(path, text, {})
    found = config.parse(Tables, tables, where)
    if not found.stage:
        raise UserError(str(path), "it has no stages", "begin one with [[stage]]")
    names = [stage.name for stage in found.stage]
    for number, name in enumerate(names):
        if name in names[:number]:
            at = where(["stage", str(number), "name"])
            raise UserError(at, f"a second stage is called {name!r}", "give each its own name")
    said: dict[str, str] = {}
    for each in overrides:
        said[_override(tables, names, each)] = f"--set {each}"
    stages: tuple[Stage, ...] = config.parse(Tables, tables, where).stage
    pipeline = Pipeline(path, found.title or path.stem, stages, tables.get(COMPARE), where, found.keep, said)
    for stage in stages:
        _check_taken(pipeline, stage)
    if pipeline.compare is not None:
        _check_compared(pipeline)
    return pipeline


def _override(tables: dict[str, Any], names: Sequence[str], text: str) -> str:
    """Puts an override where it belongs; its key."""
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
        stage["set"] = {**flat(stage.get("set", {})), rest: TAKEN_OUT if value is None else value}
        return key
    table = "new" if "new" in stage else "options"
    if value is None and rest not in stage.get(table, {}):
        raise UserError(place, f"cannot remove {rest!r}: it is not set")
    stage[table] = {k: v for k, v in {**stage.get(table, {}), rest: value}.items() if v is not None}
    return key


# ---------------------------------------------------------------------- {NAME}


def taken(value: Any, key: str = "") -> Iterator[tuple[str, str, str]]:
    """(key, name, suffix) of each {NAME} and {NAME.suffix} in a value and in what it holds.

    >>> list(taken({"model.path": "{sft}", "template": "{question}"}))
    [('model.path', 'sft', '')]
    """
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from taken(inner, name if not key else f"{key}.{name}")
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from taken(inner, key)
    elif isinstance(value, str) and key.rpartition(".")[2] not in OWN_BRACES:
        yield from ((key, match[1], match[2] or "") for match in TAKEN.finditer(value))


def filled(value: Any, made: Mapping[str, str], key: str = "") -> Any:
    """The value with each {NAME} that is in `made` replaced by what was made; others stay.

    >>> filled({"paths": ["{reward}/x"]}, {"reward": "runs/02-reward"})
    {'paths': ['runs/02-reward/x']}
    """
    if isinstance(value, Mapping):
        return {name: filled(inner, made, name) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [filled(inner, made, key) for inner in value]
    if isinstance(value, str) and key.rpartition(".")[2] not in OWN_BRACES:
        return TAKEN.sub(lambda match: made.get(match[0][1:-1], match[0]), value)
    return value


def _check_taken(pipeline: Pipeline, stage: Stage) -> None:
    """UserError unless every {NAME} in a stage is that of an earlier one."""
    own = pipeline.number(stage.name)
    place = {"recipe": "set", "new": "new", "make": "options"}[stage.kind]
    for key, name, suffix in taken(stage.given):
        _check_name(pipeline, name, suffix, own, pipeline.at(stage, place, *key.split(".")))


def _check_name(pipeline: Pipeline, name: str, suffix: str, before: int, at: str) -> None:
    names = [each.name for each in pipeline.stages]
    said = f"{{{name}{'.' * bool(suffix)}{suffix}}}"
    if name not in names:
        fix = did_you_mean(name, names) or f"there are {', '.join(names[:before]) or 'none before it'}"
        raise UserError(at, f"{said} names no stage", fix)
    if pipeline.number(name) == before:
        raise UserError(at, f"{said} is what this stage itself makes")
    if pipeline.number(name) > before:
        problem = f"{said} is made by a later stage"
        raise UserError(at, problem, "put that stage first: stages run in the order of the file")
    if suffix and (suffix != "run" or pipeline.stages[pipeline.number(name)].kind != "recipe"):
        fix = f"write {{{name}}} or {{{name}.run}}" if suffix != "run" else f"write {{{name}}}"
        raise UserError(at, f"{said} is nothing that stage {name!r} makes", fix)


def _check_compared(pipeline: Pipeline) -> None:
    """UserError unless the policies that are compared are stages that make models, each once."""
    assert pipeline.compare is not None
    names = {stage.name: stage.kind for stage in pipeline.stages}
    for key, name, suffix in taken(pipeline.compare):
        at = pipeline.where([COMPARE, *key.split(".")])
        _check_name(pipeline, name, suffix, len(pipeline.stages), at)
    at = pipeline.where([COMPARE, "stages"])
    if pipeline.compare.get("base") and "base" in pipeline.compare["stages"]:
        raise UserError(at, "stage 'base' and the model of base would have one name")
    for name in pipeline.compare["stages"]:
        if name not in names:
            fix = did_you_mean(name, names) or f"there are {', '.join(names)}"
            raise UserError(at, f"there is no stage {name!r}", fix)
        if names[name] == "make":
            raise UserError(at, f"stage {name!r} makes data, and no policy", "leave it out")
