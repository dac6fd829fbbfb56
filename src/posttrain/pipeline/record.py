"""A pipeline's directory: for each stage its recipe and its output.

01-sft.toml    the recipe of stage sft, with references          stages.json    the stages, for the report
01-sft/        its run directory, its model or its data          compare/       answers of the policies
pipeline.html, pipeline.json    the report                       compare.json   results of the comparison
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

from posttrain.api.export import write_merged
from posttrain.api.opening import first_difference, settle_recipe, use_code_copies
from posttrain.base.atomic_files import put
from posttrain.base.toml import dump, flat, inline
from posttrain.errors import RESUME, RUN_DIR, UserError
from posttrain.loop.saving import best_update
from posttrain.models import checkpoint
from posttrain.pipeline.file import REMOVED, Pipeline, Stage, find_references, substitute
from posttrain.recipe import config
from posttrain.recipe.document import read_toml
from posttrain.recipe.settings import RunSettings
from posttrain.report.headline import progress_ended
from posttrain.report.record import metrics, read_json_lines
from posttrain.run.rundir import LOCK, claim
from posttrain.run.track import METRICS

_RECORD = re.compile(r"(\d\d)-(.+)\.toml")


@dataclass(frozen=True)
class Place:
    """The directory and the record of a stage."""

    root: Path
    number: int
    """The number of the stage, from 1."""
    stage: Stage

    @property
    def directory(self) -> Path:
        """Its run directory, its model or its data."""
        return self.root / f"{self.number:02d}-{self.stage.name}"

    @property
    def record(self) -> Path:
        """The file of the tables that it began with."""
        return self.root / f"{self.number:02d}-{self.stage.name}.toml"


def places(pipeline: Pipeline, root: Path) -> list[Place]:
    """Return the place of each stage, in their order."""
    return [Place(root, number, stage) for number, stage in enumerate(pipeline.stages, start=1)]


@contextmanager
def lock(root: Path, *, resume: bool) -> Iterator[None]:
    """Lock the directory for this process; raise UserError if it is in use, or not empty and not resumed."""
    if root.exists() and not root.is_dir():
        raise UserError(str(root), "is a file", f"give another {RUN_DIR}")
    if resume and not (root / "stages.json").exists():
        raise UserError(str(root), "there is no pipeline to resume here", f"leave {RESUME} out to start one")
    descriptor = claim(root, f"give another {RUN_DIR}", "pipeline")
    try:
        if not resume and any(not p.name.startswith(".") for p in root.iterdir()):
            raise UserError(
                str(root), "already holds something", f"continue it with {RESUME}, or give another {RUN_DIR}"
            )
        yield
    finally:
        os.close(descriptor)
        if not resume and not any(p.name != LOCK for p in root.iterdir()):  # refused before a stage began
            (root / LOCK).unlink(missing_ok=True)
            root.rmdir()


# ---------------------------------------------------------------------- the recipe of a stage


def read_stage_recipe(pipeline: Pipeline, stage: Stage, outputs: Mapping[str, str]) -> config.LoadedRecipe:
    """Read the recipe of a stage with its settings; references that are not in `outputs` stay.

    Raises UserError with the line of the recipe, or that of the pipeline if the mistake is there.
    """
    path = pipeline.path.parent / stage.recipe
    sets = [
        f"{key}={'' if value == REMOVED else inline(value)}"
        for key, value in substitute(flat(stage.set), outputs).items()
    ]

    def place(text: str) -> str:
        return pipeline.at(stage, "set", *text.partition("=")[0].split("."))

    try:
        return config.read(path, sets, place)
    except UserError as error:
        if error.key == str(path):  # the file cannot be read
            at = pipeline.at(stage, "recipe")
            raise error.at(at, keep=True) from None
        raise locate_error(pipeline, stage, error) from None


def locate_error(pipeline: Pipeline, stage: Stage, error: UserError) -> UserError:
    """Return an error with the line of the pipeline, unless it has a line of the recipe or the pipeline."""
    files = (str(pipeline.path.parent / stage.recipe), str(pipeline.path), *pipeline.overrides.values())
    # Other errors name a data file, for example, or have no place.
    return error if error.key.startswith(files) else error.at(pipeline.at(stage, "recipe"), keep=True)


def stage_tables(pipeline: Pipeline, place: Place) -> dict[str, Any]:
    """Return the tables of a stage that its record holds."""
    stage = place.stage
    if stage.kind == "recipe":
        return settle_recipe(read_stage_recipe(pipeline, stage, {}), place.directory).tables
    if stage.kind == "new":
        return {"new": dict(stage.new)}
    return {"make": {"function": stage.make, "options": dict(stage.options)}}


def check_stage_name(pipeline: Pipeline, place: Place) -> None:
    """Raise UserError if a stage of another name began with this number."""
    stage = place.stage
    for file in place.root.glob(f"{place.number:02d}-*.toml"):
        if (match := _RECORD.fullmatch(file.name)) and match[2] != stage.name:
            raise UserError(
                pipeline.at(stage, "name"),
                f"stage {place.number} of {place.root} is {match[2]!r}",
                "put it back, or start in another directory",
            )


def check_unchanged(pipeline: Pipeline, place: Place, *, finished: bool) -> None:
    """Raise UserError if the tables of a stage that began have changed; an unfinished run may get longer."""
    stage = place.stage
    if not place.record.exists() or not place.directory.exists():
        return
    if stage.kind == "recipe":
        now = settle_recipe(read_stage_recipe(pipeline, stage, {}), place.directory)
        before = use_code_copies(config.read(place.record), place.directory)
        name = first_difference(now.recipe, before.recipe, longer=not finished)
        problem, key = f"[{name}] is not what it was made with", now.where([name])
    else:
        name = "" if place.record.read_text() == dump(stage_tables(pipeline, place)) else stage.kind
        problem, key = "its options are not what it was made with", pipeline.at(stage, stage.kind)
    if name:
        how = "finished" if finished else "running"
        fix = f"put it back (it is in {place.record}), or make it and what follows again: --from {stage.name}"
        raise UserError(key, f"stage {stage.name!r} is {how}, and {problem}", fix)


# ---------------------------------------------------------------------- the output of a stage


def final_checkpoint(directory: Path, run: RunSettings) -> Path | None:
    """Return the checkpoint after the last update of a finished run, or None if it is not finished."""
    last, _ = checkpoint.newest(directory / "checkpoints")
    if last is None:
        return None
    if run.epochs:  # the run knows how many updates these are
        run = config.read(directory / "config.toml").recipe.run
    state = checkpoint.read_state(last)
    update = state["progress"]["update"]
    finished = update >= run.updates
    if run.condition and not finished:
        finished = run.condition.first_update(read_json_lines(directory / METRICS)[0]) == update
    if run.patience and not finished:
        recipe = config.read(directory / "config.toml").recipe
        curves, _ = metrics(read_json_lines(directory / METRICS)[0])
        finished = bool(progress_ended(curves, run.patience, recipe.checkpoint.best_metric))
    return last if finished and (state["learner"]["update"] or not run.updates) else None


def outputs_of(pipeline: Pipeline, place: Place, outputs: Mapping[str, str]) -> dict[str, str]:
    """Return the outputs {NAME} and {NAME.run} of a stage, merging an adapter if needed; {} if unfinished."""
    name, directory = place.stage.name, place.directory
    if place.stage.kind != "recipe":
        return {name: str(directory)} if directory.is_dir() else {}
    if not (directory / "config.toml").exists():
        return {}
    last = final_checkpoint(directory, read_stage_recipe(pipeline, place.stage, outputs).recipe.run)
    if last is None:
        return {}
    model = last / "model"
    if not model.is_dir():
        model = directory / f"merged-{last.name}"  # a stage that was continued has another checkpoint
        if not model.is_dir() and is_used(pipeline, name):
            for old in (*directory.glob("merged-*"), *directory.glob(".merged*")):
                shutil.rmtree(old)
            write_merged(read_recorded(place, outputs), last / "adapter", model)
    return {name: str(model), f"{name}.run": str(directory)}


def thin(pipeline: Pipeline, place: Place) -> None:
    """Remove from the checkpoints of a finished stage what only resuming it needs.

    Its newest weights stay, and older ones that its recipe keeps. They are float32 masters, from which later
    stages in any dtype, the comparison and `posttrain run inspect` get the same numbers as before.
    """
    if pipeline.keep == "weights" and place.stage.kind == "recipe":
        settings = config.read(place.directory / "config.toml").recipe.checkpoint
        older = settings.keep_weights if settings.keep else sys.maxsize
        root = place.directory / "checkpoints"
        best = best_update(root, settings.best_metric) if settings.best else None
        checkpoint.thin(root, whole=0, weights=1 + older, best=best)


def is_used(pipeline: Pipeline, name: str) -> bool:
    """Return whether another stage, or the comparison, uses the model of a stage."""
    compare = pipeline.compare or {}
    tables = [*(stage.settings for stage in pipeline.stages), compare]
    references = ((other, suffix) for table in tables for _, other, suffix in find_references(table))
    return name in compare.get("stages", ()) or (name, "") in references


def read_recorded(place: Place, outputs: Mapping[str, str]) -> config.LoadedRecipe:
    """Read the recipe that a stage began with; references become the present paths of outputs."""
    recorded = flat(read_toml(place.record)[0])
    settings = substitute(recorded, outputs)
    return config.read(place.record, [f"{k}={inline(v)}" for k, v in settings.items() if v != recorded[k]])


def describe(pipeline: Pipeline, root: Path) -> None:
    """Write stages.json, the stages of the pipeline for its report."""
    stages = [
        {
            "name": place.stage.name,
            "kind": place.stage.kind,
            "directory": place.directory.name,
            "says": place.stage.label,
            "takes": list(dict.fromkeys(name for _, name, _ in find_references(place.stage.settings))),
        }
        for place in places(pipeline, root)
    ]
    put(root / "stages.json", json.dumps({"title": pipeline.title, "stages": stages}, indent=1))
