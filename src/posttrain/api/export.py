"""Write a run's model as a directory that transformers loads, as GGUF, or to the Hub."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils._validators import validate_repo_id
from safetensors import SafetensorError

from posttrain.api.model_card import model_card
from posttrain.errors import RunError, UserError
from posttrain.learner import lora
from posttrain.methods.table import line
from posttrain.models import checkpoint, gguf_export, pretrained
from posttrain.models.tensor_files import cast_weights
from posttrain.plan.model_info import Say, load_weights, read_model_info
from posttrain.recipe import config
from posttrain.recipe.target import check_run, target_of


def export_run(
    run: Path,
    out: Path,
    say: Say,
    *,
    dtype: str = "float32",
    gguf: str | None = None,
    push: str | None = None,
    private: bool = False,
    progress: Callable[[int, int], None] = lambda count, total: None,
) -> Path:
    """Write the model of a run's checkpoint to `out`, with a model card, and return that.

    run: a run directory, RUN@best or RUN@UPDATE. progress: called with the numbers of tensors of the GGUF
    file that are written and of all. What is uploaded stays in `out` too.

    Raises UserError if `out` exists or cannot be written, for a model that GGUF cannot hold, and for --push
    without a token; RunError if the upload fails.
    """
    if dtype not in ("float32", "bfloat16"):
        raise UserError("--dtype", f"unknown dtype {dtype!r}", "bfloat16 or float32")
    if gguf not in (None, *gguf_export.TYPES):
        raise UserError("--gguf", f"unknown type {gguf!r}", f"one of {', '.join(gguf_export.TYPES)}")
    if private and not push:
        raise UserError("--private", "there is no --push", "add --push OWNER/NAME")
    if push:
        _check_push(push)
    if out.exists():
        raise UserError(str(out), "is there already", "name a directory that is not")
    place, which = checkpoint.split_run(run)
    check_run(place)
    folder, _ = checkpoint.select(place, which)
    loaded, _, _ = target_of(run, say=say)
    if gguf and "head" in line(loaded.recipe.method["name"]).method.needs:
        raise UserError("--gguf", "a reward model cannot be written as GGUF", "export without --gguf")
    fresh = out.with_name(f".{out.name}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(fresh, ignore_errors=True)
        if (folder / "model").is_dir():
            shutil.copytree(pretrained.from_run(place, which), fresh)
        else:
            write_merged(loaded, folder / "adapter", fresh)
        cast_weights(fresh, getattr(torch, dtype))
        if gguf:
            gguf_export.write_gguf(
                pretrained.load_model(fresh, dtype=torch.float32),
                pretrained.load_tokenizer(fresh),
                fresh / f"model-{gguf}.gguf",
                gguf,
                progress,
            )
        card = model_card(place, loaded.recipe, int(folder.name.removeprefix("step_")), dtype, gguf, push)
        (fresh / "README.md").write_text(card, encoding="utf-8")
        fresh.replace(out)
    except (OSError, SafetensorError) as error:
        problem = f"it cannot be written: {getattr(error, 'strerror', None) or error}"
        raise UserError(str(out), problem, "name another directory") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    if push:
        say(f"uploading {out} to {push}")
        upload(out, push, private=private)
    return out


def write_merged(loaded: config.LoadedRecipe, adapter: Path, out: Path) -> None:
    """Write the model with its adapter merged, in float32; the run sampled from it in the run's dtype."""
    recipe = loaded.recipe
    policy = read_model_info(recipe, pretrained.silent)
    model = lora.with_saved_adapter(load_weights(recipe, policy), adapter, wide=True)
    fresh = out.with_name(f".{out.name}.tmp")
    pretrained.save_pretrained(model, policy.tokenizer, fresh)
    fresh.replace(out)


def upload(folder: Path, name: str, *, private: bool) -> None:
    """Upload a directory to a repository of the Hub, which is made if it is not there.

    Raises RunError, which names the directory, if the Hub refuses or cannot be reached.
    """
    api: Any = HfApi()
    try:
        api.create_repo(name, private=private or None, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload model")
    except Exception as error:  # any error of the library's HTTP stack, as one line
        first = next(iter(str(error).strip().splitlines()), "")
        cause = f"{type(error).__name__}: {first}; the model is in {folder}, for hf upload {name} {folder}"
        raise RunError(f"upload to {name}", cause) from error


def _check_push(name: str) -> None:
    """Raise UserError for a name that is not a repository's, and without a token."""
    try:
        validate_repo_id(name)
        valid = name.count("/") == 1
    except HFValidationError:
        valid = False
    if not valid:
        raise UserError("--push", f"{name!r} is not a repository", "write OWNER/NAME")
    if get_token() is None:
        raise UserError(
            "--push", "there is no token of the Hugging Face Hub", "run hf auth login, or set HF_TOKEN"
        )
