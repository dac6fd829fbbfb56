"""`posttrain model merge`: write a run's model with its adapter merged."""

from pathlib import Path
from typing import Annotated

import typer
from safetensors import SafetensorError

from posttrain.learner import lora
from posttrain.models import pretrained
from posttrain.plan.model_info import Say, load_weights, read_model_info
from posttrain.process import machine
from posttrain.recipe import config
from posttrain.recipe.target import check_run, target_of
from posttrain.report.terminal import say
from posttrain.types import UserError


def merge(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run with [lora]; its newest checkpoint.")],
    out: Annotated[Path, typer.Argument(metavar="DIR", help="Where the model goes; must not be there yet.")],
) -> None:
    """Merge the adapter of a run into its model, which other recipes and transformers can load.

    It is written in float32; rounded to the run's dtype it is bit for bit what the run sampled from. A run
    without an adapter has its model in checkpoints/step_.../model already.
    """
    check_run(run)
    machine.configure()
    typer.echo(str(merge_run(run, out, say)))


def merge_run(run: Path, out: Path, say: Say) -> Path:
    """Write the model of a run with the newest checkpoint's adapter merged to `out`, and return that.

    Raises UserError if the run has no adapter, and if `out` exists or cannot be written.
    """
    if out.exists():
        raise UserError(str(out), "is there already", "name a directory that is not")
    loaded, recipe, adapter = target_of(run, say=say)
    if adapter is None:
        fix = f"the model is {recipe.model.path}"
        raise UserError(str(run), "the run has no adapter to merge", fix)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_merged(loaded, adapter, out)
    except (OSError, SafetensorError) as error:
        problem = f"it cannot be written: {getattr(error, 'strerror', None) or error}"
        raise UserError(str(out), problem, "name another directory") from None
    return out


def write_merged(loaded: config.LoadedRecipe, adapter: Path, out: Path) -> None:
    """Write the model with its adapter merged, in float32; the run sampled from it in the run's dtype."""
    recipe = loaded.recipe
    policy = read_model_info(recipe, pretrained.silent)
    model = lora.with_saved_adapter(load_weights(recipe, policy), adapter, wide=True)
    fresh = out.with_name(f".{out.name}.tmp")
    pretrained.save_pretrained(model, policy.tokenizer, fresh)
    fresh.replace(out)
