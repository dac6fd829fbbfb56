"""What a command line names: a recipe, or a run whose newest checkpoint is meant."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from posttrain.models import checkpoint
from posttrain.recipe import config
from posttrain.recipe.document import is_run
from posttrain.recipe.recipe import Recipe
from posttrain.types import UserError


class Target(NamedTuple):
    """A recipe whose model is the one that is meant, and the adapter on top of it."""

    found: config.LoadedRecipe
    recipe: Recipe
    adapter: Path | None


def target_of(
    target: Path,
    sets: Sequence[str] = (),
    model: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Target:
    """The recipe, with the model of the newest checkpoint if the target is a run; and its adapter, if any.

    A `model` named besides takes the place of both. `say` is told of checkpoints that were passed over.

    Raises UserError for what is neither, and for a run without a whole checkpoint.
    """
    fix = "name a recipe's .toml file, or a run directory"
    if not target.exists():
        raise UserError(str(target), "there is no such recipe and no such run", fix)
    if target.is_dir():
        check_run(target, fix)
    found = config.read(target / "config.toml" if is_run(target) else target, sets)
    if is_run(target) and model is None:
        return Target(found, *trained(found.recipe, target, say))
    if model is None:
        return Target(found, found.recipe, None)
    given = {**found.where.given, "model.path": f"--model {model}"}
    found = replace(found, where=replace(found.where, given=given))
    return Target(found, _with(found.recipe, model), None)


def trained(
    recipe: Recipe, run: Path, say: Callable[[str], None] = lambda text: None
) -> tuple[Recipe, Path | None]:
    """The recipe of a run with the model of its newest checkpoint, and the adapter on top of it, if any."""
    newest = newest_of(run, say)
    if newest.name == "adapter":
        return recipe, newest
    return _with(recipe, str(newest)), None


def newest_of(run: Path, say: Callable[[str], None] = lambda text: None) -> Path:
    """The model, or the adapter, of a run's newest whole checkpoint; UserError if there is none."""
    newest, skipped = checkpoint.newest(run / "checkpoints")
    for fault in skipped:
        say(fault)
    if newest is None:
        raise UserError(str(run), "has no whole checkpoint", "give --model")
    return newest / ("adapter" if (newest / "adapter").exists() else "model")


def _with(recipe: Recipe, model: str) -> Recipe:
    # Weights that are named are read, also where the run began with new ones.
    return replace(recipe, model=replace(recipe.model, path=model, random_init=False))


def check_run(path: Path, fix: str = "name a run directory") -> None:
    """UserError if a path is no run's directory."""
    if not is_run(path):
        problem = "is no run: it has no config.toml" if path.exists() else "there is no such run"
        raise UserError(str(path), problem, fix)
