"""What a checkpoint of a learner holds, and how it goes back.

model/ or adapter/      what transformers or peft loads; model/ holds the float32 masters. A reward
                        model is in model/ with its head, adapter or not
trained.safetensors     the adapter's weights, where there is one
optimizer.safetensors   AdamW's moments
critic.safetensors, critic_optimizer.safetensors   the same of a critic, where there is one
reference.safetensors   the reference policy, where it is refreshed
state.json              counts of the learner and of the loop
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.learner import checkpoint, heads
from posttrain.learner.learner import Learner
from posttrain.learner.lora import base, save_adapter
from posttrain.types import UserError


def save(
    root: Path,
    update: int,
    learner: Learner,
    tokenizer: Any,
    state: Mapping[str, Any],
    *,
    keep: int,
    head: type | None = None,
) -> Path:
    """The committed checkpoint of this update; `head` is the class under which a reward model is saved."""
    tensors = learner.tensors()

    def write(folder: Path) -> None:
        for name in tensors.keys() - {"trained"}:
            checkpoint.write_tensors(folder / f"{name}.safetensors", tensors[name])
        model = base(learner.model)
        if learner.lora.rank:
            checkpoint.write_tensors(folder / "trained.safetensors", tensors["trained"])
            save_adapter(learner.model, folder / "adapter")
            tokenizer.save_pretrained(folder / "adapter")  # with the template that it was trained under
            if head is None:
                return
            held = dict(learner.weights())  # a verifier loads a reward model whole
        else:
            held = {name: p.detach() for name, p in model.named_parameters()} | tensors["trained"]
        config, words = model.config, tokenizer
        if head is not None:
            assert learner.critic is not None
            held |= heads.head_tensors(learner.critic.head.state_dict())
            words = heads.padded(tokenizer, _ends(model, tokenizer))
            config = heads.head_config(
                config, head, words.pad_token_id, heads=learner.critic.head.out_features
            )
        checkpoint.write_tensors(folder / "model" / "model.safetensors", held)
        config.save_pretrained(folder / "model")
        model.generation_config.save_pretrained(folder / "model")
        words.save_pretrained(folder / "model")

    return checkpoint.save(root, update, write, {**state, "learner": learner.state()}, keep=keep)


def _ends(model: Any, tokenizer: Any) -> set[int]:
    """Tokens that end an answer, and so may be a conversation's last."""
    named = model.generation_config.eos_token_id
    return {tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])} - {None}


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
