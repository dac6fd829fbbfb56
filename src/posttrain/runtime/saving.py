"""What a checkpoint of a learner holds, and how it goes back.

model/ or adapter/      what transformers or peft loads; model/ holds the float32 masters
trained.safetensors     the adapter's weights, where there is one
optimizer.safetensors   AdamW's moments
critic.safetensors, critic_optimizer.safetensors   the same of a critic, where there is one
reference.safetensors   the reference policy, where it is refreshed
state.json              counts of the learner and of the loop
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.learner import checkpoint
from posttrain.learner.learner import Learner
from posttrain.learner.lora import base, save_adapter
from posttrain.types import UserError


def save(
    root: Path, update: int, learner: Learner, tokenizer: Any, state: Mapping[str, Any], *, keep: int
) -> Path:
    """The committed checkpoint of this update."""
    tensors = learner.tensors()

    def write(folder: Path) -> None:
        for name in tensors.keys() - {"trained"}:
            checkpoint.write_tensors(folder / f"{name}.safetensors", tensors[name])
        model = base(learner.model)
        if learner.lora.rank:
            checkpoint.write_tensors(folder / "trained.safetensors", tensors["trained"])
            save_adapter(learner.model, folder / "adapter")
            return
        held = {name: p.detach() for name, p in model.named_parameters()} | tensors["trained"]
        checkpoint.write_tensors(folder / "model" / "model.safetensors", held)
        model.config.save_pretrained(folder / "model")
        model.generation_config.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")

    return checkpoint.save(root, update, write, {**state, "learner": learner.state()}, keep=keep)


def restore(folder: Path, learner: Learner, state: Mapping[str, Any]) -> None:
    """Puts a checkpoint back into a learner made from the same recipe; UserError if it is of another."""
    trained = "trained.safetensors" if learner.lora.rank else "model/model.safetensors"
    try:
        held = learner.tensors().keys() - {"trained"}
        tensors = {name: checkpoint.read_tensors(folder / f"{name}.safetensors") for name in held}
        tensors["trained"] = checkpoint.read_tensors(folder / trained)
        learner.restore(tensors, state["learner"])
    except (KeyError, RuntimeError, FileNotFoundError) as error:
        raise UserError(
            f"this checkpoint is of another model or adapter: {error}",
            where=str(folder),
            mend="resume with the recipe that it was made with",
        ) from error
