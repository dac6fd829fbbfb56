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

    Of RUN@best and RUN@UPDATE it is that checkpoint.
    model: use this model instead, without an adapter. say: receives a line for each damaged checkpoint that
    was skipped. Raises UserError if the target is neither a recipe nor a run, or a run without a whole
    checkpoint.
    """
    target, fix = find_recipe(target), "name a recipe, its .toml file, or a run directory"
    target, which = checkpoint.split_run(target)
    if not target.exists():
        raise UserError(str(target), "there is no such recipe and no such run", fix)
    if which or target.is_dir():
        check_run(target, fix)
    loaded = config.read(target / "config.toml" if is_run(target) else target, sets)
    if is_run(target) and model is None:
        return Target(loaded, *use_weights(loaded.recipe, target, which, say))
    if model is None:
        return Target(loaded, loaded.recipe, None)
    overrides = {**loaded.where.overrides, "model.path": f"--model {model}"}
    loaded = replace(loaded, where=replace(loaded.where, overrides=overrides))
    return Target(loaded, _use_model(loaded.recipe, model), None)


def use_weights(
    recipe: Recipe, run: Path, which: str = "", say: Callable[[str], None] = lambda text: None
) -> tuple[Recipe, Path | None]:
    """Return (recipe with the model of the run's checkpoint, None), or (recipe, adapter directory)."""
    weights = weights_of(run, which, say)
    if weights.name == "adapter":
        return recipe, weights
    return _use_model(recipe, str(weights)), None


def weights_of(run: Path, which: str = "", say: Callable[[str], None] = lambda text: None) -> Path:
    """Return the directory of the adapter, or else of the model, in a run's checkpoint.

    which: as in `checkpoint.select`. Raises UserError if the run does not have it.
    """
    folder, skipped = checkpoint.select(run, which)
    for fault in skipped:
        say(fault)
    return folder / ("adapter" if (folder / "adapter").exists() else "model")


def _use_model(recipe: Recipe, model: str) -> Recipe:
    # The run may have begun with random weights, or 4 bits of them; those of this model are read.
    return replace(recipe, model=replace(recipe.model, path=model, random_init=False, quantize="none"))


def check_run(path: Path, fix: str = "name a run directory") -> None:
    """Raise UserError if a path is not the directory of a run."""
    if not (path / "config.toml").exists():
        problem = "is no run: it has no config.toml" if path.exists() else "there is no such run"
        raise UserError(str(path), problem, fix)
