"""Check everything of a pipeline that can be checked before its first stage trains.

A stage that uses the model of an unfinished stage is planned with a stand-in: the model that the unfinished
stage starts from, with that stage's chat template. Data and reward models have no stand-in; a stage that uses
them is checked when they exist.
"""

from collections.abc import Container, Mapping
from dataclasses import replace
from pathlib import Path

from posttrain.base.toml import flat
from posttrain.evaluation.compare import Compare
from posttrain.models.checkpoint import weights_alone
from posttrain.models.pretrained import resolve, silent
from posttrain.pipeline.file import COMPARE, REFERENCE, Pipeline, find_references, substitute
from posttrain.pipeline.kinds import check_function, command_words
from posttrain.pipeline.record import (
    Place,
    check_stage_name,
    check_unchanged,
    locate_error,
    read_stage_recipe,
)
from posttrain.plan.disk import Disk, room
from posttrain.plan.memory import gib
from posttrain.plan.model_info import Say
from posttrain.plan.plan import plan_run
from posttrain.plan.resolve import resolve_recipe
from posttrain.recipe import config
from posttrain.recipe.recipe import Model, Recipe
from posttrain.recipe.verifier import VerifierChoice
from posttrain.types import UserError
from posttrain.verifiers.structure.patterns import Format

ANY = VerifierChoice.of(format=Format())
"""Stand-in for a verifier that does not exist yet: one that needs no field of a task."""
STAND_IN_TABLES = ("model", "critic", "reference")
"""Tables in which the model that a stage starts from may stand in for its output."""


def check(
    pipeline: Pipeline,
    places: list[Place],
    finished: Mapping[str, Mapping[str, str]],
    say: Say,
    *,
    again: Container[str] = (),
) -> int:
    """Check all stages; return a bound on the bytes that the unfinished ones that can be planned will write.

    finished: the outputs of each finished stage, whose tables must be unchanged. again: names of stages to
    make again, whose present output is ignored.

    Raises UserError for the first mistake by which a stage, or the comparison, cannot run.
    """
    outputs = {key: path for paths in finished.values() for key, path in paths.items()}
    models: dict[str, Model] = {}
    disks: list[Disk] = []
    for place in places:
        stage = place.stage
        if stage.kind == "recipe" and stage.name not in finished:
            say(f"checking stage {stage.name!r}")  # which makes tasks and tests the verifier
            disks += _check_recipe(pipeline, place, models, outputs, say)
        elif stage.kind == "new":
            command_words(pipeline, stage, outputs)
        elif stage.kind == "make":
            check_function(pipeline, stage)
        check_stage_name(pipeline, place)
        if stage.name in again:
            continue
        check_unchanged(pipeline, place, finished=stage.name in finished)
        later = [p for p in places[place.number :] if p.stage.name not in again]
        started = [p.stage.name for p in later if p.directory.exists()]
        if started and stage.name not in finished:
            raise UserError(
                pipeline.at(stage),
                f"stage {stage.name!r} is not finished, and {started[0]!r} began with its earlier output",
                f"make it and what follows again: --from {stage.name}",
            )
        if stage.name not in finished and weights_alone(place.directory / "checkpoints"):
            raise UserError(
                pipeline.at(stage),
                f"stage {stage.name!r} was finished, and its checkpoints hold only weights: it cannot resume",
                f"make it again: --from {stage.name}",
            )
    if pipeline.compare is not None:
        _check_compare(pipeline, models, outputs, say)
    stays, most = 0, 0
    for disk in disks:
        peak = disk.peak + disk.merged  # an adapter is merged before its checkpoints are thinned
        most = max(most, stays + peak)
        stays += disk.finished if pipeline.keep == "weights" else peak
    return most


def _check_recipe(
    pipeline: Pipeline, place: Place, models: dict[str, Model], outputs: Mapping[str, str], say: Say
) -> list[Disk]:
    """Plan a stage; return its disk use, if it can be planned, and add the model that it starts from."""
    stage = place.stage
    loaded = read_stage_recipe(pipeline, stage, _paths(models, outputs))
    pending = _pending_tables(flat(stage.set), outputs)
    if pending - {*STAND_IN_TABLES, "verifier"}:
        return []
    recipe = loaded.recipe
    template = _template(flat(stage.set).get("model.path"), recipe.model.chat_template, models)
    recipe = replace(recipe, model=replace(recipe.model, chat_template=template))
    try:
        if "verifier" in pending:
            recipe = replace(recipe, verifier=ANY)
        if any(REFERENCE.search(table.path) for table in (recipe.model, recipe.critic, recipe.reference)):
            resolve_recipe(recipe)
            return []
        resolve(recipe.model.path, say=say)
        plan = plan_run(recipe, silent, place.directory)  # its notes are printed when it runs
        plan.check_memory()
    except UserError as error:
        raise locate_error(pipeline, stage, loaded.locate(error)) from None
    models[stage.name] = recipe.model
    return [plan.disk]


def _paths(models: Mapping[str, Model], outputs: Mapping[str, str]) -> dict[str, str]:
    """Return the path of each output, or of the model that stands in for it."""
    return {name: model.path for name, model in models.items()} | dict(outputs)


def _template(path: object, template: str | None, models: Mapping[str, Model]) -> str | None:
    """Return the chat template of a model: as set, or the one that the stage it refers to will save."""
    name = REFERENCE.fullmatch(path) if isinstance(path, str) else None
    stand_in = models.get(name[1]) if name else None
    return stand_in.chat_template if template is None and stand_in else template


def _pending_tables(settings: Mapping[str, object], outputs: Mapping[str, str]) -> set[str]:
    """Return the tables with references to outputs that do not exist yet."""
    return {
        key.split(".")[0]
        for key, name, suffix in find_references(settings)
        if f"{name}{'.' * bool(suffix)}{suffix}" not in outputs
    }


def report_disk(need: int, root: Path, say: Say, parts: str = "stages") -> None:
    """Print how much the stages, or other parts, will write, and whether the disk has room."""
    if need:
        free = room(root)
        note = "; that may fill the disk" if need > free else ""
        say(f"the {parts} write at most {gib(need)}; {gib(free)} are free{note}")


def read_comparison(pipeline: Pipeline, outputs: Mapping[str, str]) -> Compare:
    """Return the comparison with its references replaced; raise UserError at the line of a mistake."""
    tables = {COMPARE: substitute(pipeline.compare, outputs)}
    place = replace(pipeline.where, within=(COMPARE,))
    compare: Compare = config.parse(Compare, tables[COMPARE], place)
    return compare


def _check_compare(
    pipeline: Pipeline, models: Mapping[str, Model], outputs: Mapping[str, str], say: Say
) -> None:
    tables, paths = pipeline.compare or {}, _paths(models, outputs)
    compare = read_comparison(pipeline, paths)
    pending = _pending_tables(tables, outputs)
    if "verifier" in pending:
        compare = replace(compare, verifier=ANY)
    if pending - {"verifier", "base"}:
        return
    references = [tables["base"]] if compare.base else []
    references += [f"{{{name}}}" for name in compare.stages if name in paths]
    try:
        template_of = {path: _template(path, compare.chat_template, models) for path in references}
        policies = [(substitute(path, paths), template) for path, template in template_of.items()]
        for model, template in dict.fromkeys(policies):
            resolve(model, say=say)
            plan_run(replace(compare, chat_template=template).recipe(model), silent)
        if not references:
            resolve_recipe(compare.recipe("unknown"))
    except UserError as error:
        raise locate_comparison_error(pipeline, error) from None


def locate_comparison_error(pipeline: Pipeline, error: UserError) -> UserError:
    """Return an error of the comparison with the line of the pipeline's file if its key is in a recipe."""
    key = error.key.split(".")
    if key[0] not in Recipe.__dataclass_fields__:
        return error
    path = {"task": key[1:], "model": ["stages"]}.get(key[0], key)
    return error.at(pipeline.where([COMPARE, *path]))
