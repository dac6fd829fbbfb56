"""Resolve the target of a command: a recipe file, or a run, which stands for its newest checkpoint."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from posttrain.models import checkpoint
from posttrain.recipe import config
from posttrain.recipe.catalogue import find_recipe
from posttrain.recipe.document import is_run
from posttrain.recipe.recipe import Recipe
from posttrain.types import UserError


class Target(NamedTuple):
    """The recipe of a target with the model to use, and the adapter on top of that model."""

    loaded: config.LoadedRecipe
    """The recipe as its file has it."""
    recipe: Recipe
    """The same recipe with the model to use."""
    adapter: Path | None


def target_of(
    target: Path,
    sets: Sequence[str] = (),
    model: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Target:
    """Read the recipe of a target; of a run, with the model and the adapter of its newest whole checkpoint.

    model: use this model instead, without an adapter. say: receives a line for each damaged checkpoint that
    was skipped. Raises UserError if the target is neither a recipe nor a run, or a run without a whole
    checkpoint.
    """
    target, fix = find_recipe(target), "name a recipe, its .toml file, or a run directory"
    if not target.exists():
        raise UserError(str(target), "there is no such recipe and no such run", fix)
    if target.is_dir():
        check_run(target, fix)
    loaded = config.read(target / "config.toml" if is_run(target) else target, sets)
    if is_run(target) and model is None:
        return Target(loaded, *use_newest_weights(loaded.recipe, target, say))
    if model is None:
        return Target(loaded, loaded.recipe, None)
    overrides = {**loaded.where.overrides, "model.path": f"--model {model}"}
    loaded = replace(loaded, where=replace(loaded.where, overrides=overrides))
    return Target(loaded, _use_model(loaded.recipe, model), None)


def use_newest_weights(
    recipe: Recipe, run: Path, say: Callable[[str], None] = lambda text: None
) -> tuple[Recipe, Path | None]:
    """Return (recipe with the model of the run's newest checkpoint, None), or (recipe, adapter directory)."""
    newest = newest_of(run, say)
    if newest.name == "adapter":
        return recipe, newest
    return _use_model(recipe, str(newest)), None


def newest_of(run: Path, say: Callable[[str], None] = lambda text: None) -> Path:
    """Return the directory of the adapter, or else of the model, in a run's newest whole checkpoint.

    Raises UserError if the run has no whole checkpoint.
    """
    newest, skipped = checkpoint.newest(run / "checkpoints")
    for fault in skipped:
        say(fault)
    if newest is None:
        raise UserError(str(run), "has no whole checkpoint", "give --model")
    return newest / ("adapter" if (newest / "adapter").exists() else "model")


def _use_model(recipe: Recipe, model: str) -> Recipe:
    # The run may have begun with random weights; those of this model are read.
    return replace(recipe, model=replace(recipe.model, path=model, random_init=False))


def check_run(path: Path, fix: str = "name a run directory") -> None:
    """Raise UserError if a path is not the directory of a run."""
    if not is_run(path):
        problem = "is no run: it has no config.toml" if path.exists() else "there is no such run"
        raise UserError(str(path), problem, fix)
