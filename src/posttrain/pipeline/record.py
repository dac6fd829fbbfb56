"""A pipeline's directory: for each stage what it was asked, and what it has made so far.

01-sft.toml    what stage sft was asked, {NAME} left in          stages.json    what the pipeline is
01-sft/        its run directory, its model or its data          compare/       answers of the policies
pipeline.html, pipeline.json    the report                       compare.json   what came out
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.api.merge import write_merged
from posttrain.api.opening import as_begun, otherwise, with_copies
from posttrain.base.atomic_files import put
from posttrain.base.toml import dump, flat, inline
from posttrain.errors import RESUME, RUN_DIR, UserError
from posttrain.loop.saving import best_update
from posttrain.models import checkpoint
from posttrain.pipeline.file import TAKEN_OUT, Pipeline, Stage, filled, taken
from posttrain.recipe import config
from posttrain.recipe.document import read_toml
from posttrain.recipe.settings import RunSettings
from posttrain.report.record import json_lines
from posttrain.run.rundir import LOCK, claim
from posttrain.run.track import METRICS

_RECORD = re.compile(r"(\d\d)-(.+)\.toml")


@dataclass(frozen=True)
class Place:
    """Where a stage's things lie."""

    root: Path
    number: int
    """From 1."""
    stage: Stage

    @property
    def directory(self) -> Path:
        """Its run directory, its model or its data."""
        return self.root / f"{self.number:02d}-{self.stage.name}"

    @property
    def record(self) -> Path:
        """What it was asked when it began."""
        return self.root / f"{self.number:02d}-{self.stage.name}.toml"


def places(pipeline: Pipeline, root: Path) -> list[Place]:
    """The place of each stage, in their order."""
    return [Place(root, number, stage) for number, stage in enumerate(pipeline.stages, start=1)]


@contextmanager
def lock(root: Path, *, resume: bool) -> Iterator[None]:
    """Keeps the directory for this process; UserError if it is in use, or used and not resumed."""
    if root.exists() and not root.is_dir():
        raise UserError(str(root), "is a file", f"give another {RUN_DIR}")
    if resume and not (root / "stages.json").exists():
        raise UserError(str(root), "there is no pipeline to resume here", f"leave {RESUME} out to start one")
    held = claim(root, f"give another {RUN_DIR}", "pipeline")
    try:
        if not resume and any(not p.name.startswith(".") for p in root.iterdir()):
            raise UserError(
                str(root), "already holds something", f"continue it with {RESUME}, or give another {RUN_DIR}"
            )
        yield
    finally:
        os.close(held)
        if not resume and not any(p.name != LOCK for p in root.iterdir()):  # refused before it began
            (root / LOCK).unlink(missing_ok=True)
            root.rmdir()


# ---------------------------------------------------------------------- what a stage is asked


def reading(pipeline: Pipeline, stage: Stage, made: Mapping[str, str]) -> config.LoadedRecipe:
    """The recipe of a stage, with what it is given on top; {NAME} that is not in `made` is left in.

    Raises UserError with the line of the recipe, or of the pipeline where that is what is wrong.
    """
    path = pipeline.path.parent / stage.recipe
    sets = [
        f"{key}={'' if value == TAKEN_OUT else inline(value)}"
        for key, value in filled(flat(stage.set), made).items()
    ]

    def place(text: str) -> str:
        return pipeline.at(stage, "set", *text.partition("=")[0].split("."))

    try:
        return config.read(path, sets, place)
    except UserError as error:
        if error.key == str(path):  # of the file as a whole
            at = pipeline.at(stage, "recipe")
            raise error.at(at, keep=True) from None
        raise placed(pipeline, stage, error) from None


def placed(pipeline: Pipeline, stage: Stage, error: UserError) -> UserError:
    """The error of a stage's recipe, with the line of the pipeline unless a line of the recipe is named."""
    known = (str(pipeline.path.parent / stage.recipe), str(pipeline.path), *pipeline.said.values())
    # A data file, say, or what has no place.
    return error if error.key.startswith(known) else error.at(pipeline.at(stage, "recipe"), keep=True)


def asked(pipeline: Pipeline, place: Place) -> dict[str, Any]:
    """What a stage is asked, as the tables that are kept of it."""
    stage = place.stage
    if stage.kind == "recipe":
        return as_begun(reading(pipeline, stage, {}), place.directory).tables
    if stage.kind == "new":
        return {"new": dict(stage.new)}
    return {"make": {"function": stage.make, "options": dict(stage.options)}}


def check_named(pipeline: Pipeline, place: Place) -> None:
    """UserError if another stage than this one began in its place."""
    stage = place.stage
    for file in place.root.glob(f"{place.number:02d}-*.toml"):
        if (match := _RECORD.fullmatch(file.name)) and match[2] != stage.name:
            raise UserError(
                pipeline.at(stage, "name"),
                f"stage {place.number} of {place.root} is {match[2]!r}",
                "put it back, or start in another directory",
            )


def check_unchanged(pipeline: Pipeline, place: Place, *, finished: bool) -> None:
    """UserError if a stage that began is now asked something else; one that goes on may be made longer."""
    stage = place.stage
    if not place.record.exists() or not place.directory.exists():
        return
    if stage.kind == "recipe":
        now = as_begun(reading(pipeline, stage, {}), place.directory)
        before = with_copies(config.read(place.record), place.directory)
        name = otherwise(now.recipe, before.recipe, longer=not finished)
        what, where = f"[{name}] is not what it was made with", now.where([name])
    else:
        name = "" if place.record.read_text() == dump(asked(pipeline, place)) else stage.kind
        what, where = "its options are not what it was made with", pipeline.at(stage, stage.kind)
    if name:
        how = "finished" if finished else "running"
        fix = f"put it back (it is in {place.record}), or make it and what follows again: --from {stage.name}"
        raise UserError(where, f"stage {stage.name!r} is {how}, and {what}", fix)


# ---------------------------------------------------------------------- what a stage has made


def newest(place: Place, run: RunSettings) -> Path | None:
    """Return the checkpoint after the last update of a finished run, or None if it is not finished."""
    found, _ = checkpoint.newest(place.directory / "checkpoints")
    if found is None:
        return None
    state = checkpoint.read_state(found)
    update = state["progress"]["update"]
    ended = update >= run.updates
    if run.condition and not ended:
        ended = run.condition.first_update(json_lines(place.directory / METRICS)[0]) == update
    return found if ended and (state["learner"]["update"] or not run.updates) else None


def made_by(pipeline: Pipeline, place: Place, made: Mapping[str, str]) -> dict[str, str]:
    """What {NAME} and {NAME.run} of this stage are; empty while it is not finished."""
    name, directory = place.stage.name, place.directory
    if place.stage.kind != "recipe":
        return {name: str(directory)} if directory.is_dir() else {}
    if not (directory / "config.toml").exists():
        return {}
    found = newest(place, reading(pipeline, place.stage, made).recipe.run)
    if found is None:
        return {}
    model = found / "model"
    if not model.is_dir():
        model = directory / f"merged-{found.name}"  # a stage that was made longer has another one
        if not model.is_dir() and wanted(pipeline, name):
            for old in (*directory.glob("merged-*"), *directory.glob(".merged*")):
                shutil.rmtree(old)
            write_merged(read_recorded(place, made), found / "adapter", model)
    return {name: str(model), f"{name}.run": str(directory)}


def thin(pipeline: Pipeline, place: Place) -> None:
    """Takes from the checkpoints of a finished stage what only its own resume would need.

    Its newest weights stay, and those older ones of which its recipe keeps the weights: float32 masters, of
    which a later stage in any dtype, a comparison and `posttrain run inspect` make what they would have made.
    """
    if pipeline.keep == "weights" and place.stage.kind == "recipe":
        kept = config.read(place.directory / "config.toml").recipe.checkpoint
        older = kept.keep_weights if kept.keep else sys.maxsize
        root = place.directory / "checkpoints"
        best = best_update(root) if kept.best else None
        checkpoint.thin(root, whole=0, weights=1 + older, best=best)


def wanted(pipeline: Pipeline, name: str) -> bool:
    """Whether the model that a stage makes is taken by another one, or compared."""
    given = [*(stage.given for stage in pipeline.stages), pipeline.compare or {}]
    compared = (pipeline.compare or {}).get("stages", ())
    return name in compared or any(n == name and not suffix for g in given for _, n, suffix in taken(g))


def read_recorded(place: Place, made: Mapping[str, str]) -> config.LoadedRecipe:
    """The recipe that a stage began with; what it takes is looked for where it is now."""
    before = flat(read_toml(place.record)[0])
    now = filled(before, made)
    return config.read(place.record, [f"{k}={inline(v)}" for k, v in now.items() if v != before[k]])


def describe(pipeline: Pipeline, root: Path) -> None:
    """Writes stages.json: what the pipeline is, for its report."""
    stages = [
        {
            "name": place.stage.name,
            "kind": place.stage.kind,
            "directory": place.directory.name,
            "says": place.stage.recipe or place.stage.make or "posttrain model new",
            "takes": list(dict.fromkeys(name for _, name, _ in taken(place.stage.given))),
        }
        for place in places(pipeline, root)
    ]
    put(root / "stages.json", json.dumps({"title": pipeline.title, "stages": stages}, indent=1))
