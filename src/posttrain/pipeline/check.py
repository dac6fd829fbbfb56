"""Everything of a pipeline that can be checked before its first stage trains.

A stage whose inputs another one will make is planned with what they will be made of: the model that an
earlier stage starts from, with that stage's chat template, stands in for the one that it makes. What has no
such stand-in, data and reward models to be made, is checked when it is there.
"""

from collections.abc import Container, Mapping
from dataclasses import replace
from pathlib import Path

from posttrain.base.toml import flat
from posttrain.evaluation.compare import Compare
from posttrain.models.checkpoint import weights_alone
from posttrain.models.pretrained import resolve, silent
from posttrain.pipeline.file import COMPARE, TAKEN, Pipeline, filled, taken
from posttrain.pipeline.kinds import check_function, words_of
from posttrain.pipeline.record import Place, check_named, check_unchanged, placed, reading
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
"""In place of a verifier that cannot be made yet: one that asks nothing of a task."""
STOOD_IN = ("model", "critic", "reference")
"""Tables in which the model that a stage starts from may stand in for the one that it makes."""


def check(
    pipeline: Pipeline,
    where: list[Place],
    finished: Mapping[str, Mapping[str, str]],
    say: Say,
    *,
    again: Container[str] = (),
) -> int:
    """The bytes that the stages to come will write, at most, of those that can be planned already.

    UserError with the first thing for which a stage, or the comparison, could not run as it is.
    `finished` holds what each finished stage has made; nothing of those is checked but that they are still
    asked the same. What is there of stages that are made again does not count.
    """
    made = {key: path for each in finished.values() for key, path in each.items()}
    models: dict[str, Model] = {}
    disks: list[Disk] = []
    for place in where:
        stage = place.stage
        if stage.kind == "recipe" and stage.name not in finished:
            disks += _check_recipe(pipeline, place, models, made, say)
        elif stage.kind == "new":
            words_of(pipeline, stage, made)
        elif stage.kind == "make":
            check_function(pipeline, stage)
        check_named(pipeline, place)
        if stage.name in again:
            continue
        check_unchanged(pipeline, place, finished=stage.name in finished)
        later = [p for p in where[place.number :] if p.stage.name not in again]
        begun = [p.stage.name for p in later if p.directory.exists()]
        if begun and stage.name not in finished:
            raise UserError(
                pipeline.at(stage),
                f"stage {stage.name!r} is not finished, and {begun[0]!r} after it has begun with what it was",
                f"make it and what follows again: --from {stage.name}",
            )
        if stage.name not in finished and weights_alone(place.directory / "checkpoints"):
            raise UserError(
                pipeline.at(stage),
                f"stage {stage.name!r} had finished, and its checkpoints hold weights alone: it cannot go on",
                f"make it again: --from {stage.name}",
            )
    if pipeline.compare is not None:
        _check_compare(pipeline, models, made, say)
    stays, most = 0, 0
    for disk in disks:
        peak = disk.peak + disk.merged  # an adapter is merged before its checkpoints are thinned
        most = max(most, stays + peak)
        stays += disk.finished if pipeline.keep == "weights" else peak
    return most


def _check_recipe(
    pipeline: Pipeline, place: Place, models: dict[str, Model], made: Mapping[str, str], say: Say
) -> list[Disk]:
    """What the stage will write, if that is known; the model that it starts from is put among the others."""
    stage = place.stage
    found = reading(pipeline, stage, _known(models, made))
    waits = _waits(flat(stage.set), made)
    if waits - {*STOOD_IN, "verifier"}:
        return []
    recipe = found.recipe
    given = _template(flat(stage.set).get("model.path"), recipe.model.chat_template, models)
    recipe = replace(recipe, model=replace(recipe.model, chat_template=given))
    try:
        if "verifier" in waits:
            recipe = replace(recipe, verifier=ANY)
        if any(_unknown(table.path) for table in (recipe.model, recipe.critic, recipe.reference)):
            resolve_recipe(recipe)
            return []
        resolve(recipe.model.path, say=say)
        disk = plan_run(recipe, silent, place.directory).disk  # what else it finds is said in its turn
    except UserError as error:
        raise placed(pipeline, stage, found.locate(error)) from None
    models[stage.name] = recipe.model
    return [disk]


def _known(models: Mapping[str, Model], made: Mapping[str, str]) -> dict[str, str]:
    """What each {NAME} is, or what stands in for it."""
    return {name: model.path for name, model in models.items()} | dict(made)


def _template(path: object, own: str | None, models: Mapping[str, Model]) -> str | None:
    """The chat template of a model that is given so: where none is set, the one that its stage will save."""
    name = TAKEN.fullmatch(path) if isinstance(path, str) else None
    stands_in = models.get(name[1]) if name else None
    return stands_in.chat_template if own is None and stands_in else own


def _waits(given: Mapping[str, object], made: Mapping[str, str]) -> set[str]:
    """The tables in which something is taken that is not made yet."""
    return {
        key.split(".")[0]
        for key, name, suffix in taken(given)
        if f"{name}{'.' * bool(suffix)}{suffix}" not in made
    }


def _unknown(path: str) -> bool:
    return TAKEN.search(path) is not None


def tell(need: int, root: Path, say: Say) -> None:
    """Says what the stages will write, and whether the disk has as much."""
    if need:
        free = room(root)
        note = "; that may fill the disk" if need > free else ""
        say(f"the stages write at most {gib(need)}; {gib(free)} are free{note}")


def comparison(pipeline: Pipeline, made: Mapping[str, str]) -> Compare:
    """The comparison with {NAME} filled in; UserError with the line of what it cannot be."""
    tables = {COMPARE: filled(pipeline.compare, made)}
    where = replace(pipeline.where, within=(COMPARE,))
    compare: Compare = config.parse(Compare, tables[COMPARE], where)
    return compare


def _check_compare(
    pipeline: Pipeline, models: Mapping[str, Model], made: Mapping[str, str], say: Say
) -> None:
    tables, known = pipeline.compare or {}, _known(models, made)
    compare = comparison(pipeline, known)
    waits = _waits(tables, made)
    if "verifier" in waits:
        compare = replace(compare, verifier=ANY)
    if waits - {"verifier", "base"}:
        return
    given = [tables["base"]] if compare.base else []
    given += [f"{{{name}}}" for name in compare.stages if name in known]
    try:
        each = [(filled(path, known), _template(path, compare.chat_template, models)) for path in given]
        for model, template in dict.fromkeys(each):
            resolve(model, say=say)
            plan_run(replace(compare, chat_template=template).recipe(model), silent)
        if not given:
            resolve_recipe(compare.recipe("unknown"))
    except UserError as error:
        raise located(pipeline, error) from None


def located(pipeline: Pipeline, error: UserError) -> UserError:
    """An error of the comparison, with the line of the pipeline's file if it names a key."""
    key = error.key.split(".")
    if key[0] not in Recipe.__dataclass_fields__:
        return error
    own = {"task": key[1:], "model": ["stages"]}.get(key[0], key)
    return error.at(pipeline.where([COMPARE, *own]))
