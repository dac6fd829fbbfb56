"""A recipe's model: what surrounds it, known before its weights are read, and then the weights."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from posttrain.attention import use_layouts
from posttrain.envs.chat import Chat
from posttrain.envs.tasks.arithmetic import Arithmetic
from posttrain.learner import pretrained
from posttrain.methods.table import line
from posttrain.runtime.recipe import Recipe, TaskChoice
from posttrain.types import UserError

NO_TASK = TaskChoice(arithmetic=Arithmetic())
"""For uses of a model that ask it no tasks."""

Say = Callable[[str], None]
"""Told, in one line, what takes time or is worth knowing."""


@dataclass(frozen=True)
class Policy:
    """A model's surroundings: everything of it but its weights."""

    path: Path
    tokenizer: Any
    chat: Chat
    config: Any
    dtype: torch.dtype
    device: torch.device
    context: int
    notes: list[str]


def surroundings(recipe: Recipe, say: Say) -> Policy:
    """The tokenizer, template and configuration of the recipe's model, checked; UserError names the fault."""
    path = pretrained.resolve(recipe.model.path, say=say)
    config = pretrained.load_config(path, scores=reads_head(recipe))
    template = recipe.model.chat_template
    tokenizer = pretrained.load_tokenizer(path, require_chat_template=template is None)
    chat = Chat(tokenizer, template=template, ends=frozenset(pretrained.stop_ids(path, tokenizer)))
    return Policy(
        path=path,
        tokenizer=tokenizer,
        chat=chat,
        config=config,
        dtype=getattr(torch, recipe.model.dtype),
        device=_device(recipe.model.device),
        context=int(getattr(config.get_text_config(), "max_position_embeddings", 1 << 20)),
        notes=pretrained.tokenizer_notes(tokenizer),
    )


def reads_head(recipe: Recipe) -> bool:
    """Whether the recipe's method reads a head, so that its model may be a reward model."""
    return "head" in line(str(recipe.method["name"])).method.needs


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError(name)
    except RuntimeError:
        raise UserError(
            f"unknown device {name!r}", where="model.device", mend="auto, cpu, cuda or cuda:0"
        ) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("there is no GPU that PyTorch can use", where="model.device", mend="set it to auto")
    return device


def weights_of(recipe: Recipe, policy: Policy) -> Any:
    """The recipe's model with its weights, or with new ones where it asks for those."""
    seed = recipe.run.seed if recipe.model.random_init else None
    model = pretrained.load_model(
        policy.path,
        dtype=policy.dtype,
        device=policy.device,
        init_seed=seed,
        scores=reads_head(recipe),
    )
    return with_layouts(model, "model.path")


def with_layouts(model: Any, where: str) -> Any:
    """The model, ready to be handed layouts; UserError, with this key, if it is of no kind that can be."""
    try:
        use_layouts(model)
    except ValueError as error:
        raise UserError(str(error), where=where, mend="take a Llama, Qwen, Gemma or Mistral") from None
    return model
