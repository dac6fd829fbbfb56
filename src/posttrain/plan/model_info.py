"""A recipe's model: its surroundings, known before its weights are read, and then the weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from posttrain.base import plain_template
from posttrain.base.chat import Chat
from posttrain.data.arithmetic import Arithmetic
from posttrain.methods.table import line
from posttrain.models import nf4, pretrained, slices
from posttrain.models.attention import context_of, mask_tokens, use_layouts
from posttrain.models.loading import usable_device
from posttrain.recipe.recipe import Recipe
from posttrain.recipe.tasks import TaskChoice
from posttrain.types import UserError

NO_TASK = (TaskChoice.of(arithmetic=Arithmetic()),)
"""A task for callers that use a model without tasks."""

Say = Callable[[str], None]
"""Called with one line about what takes time or is worth knowing."""


@dataclass(frozen=True)
class ModelInfo:
    """Everything about a model except its weights."""

    path: Path
    tokenizer: Any
    """With the recipe's template as its own, so that saving the tokenizer saves the template."""
    chat: Chat
    config: Any
    dtype: torch.dtype
    device: torch.device
    context: int
    """Tokens of the longest row that every model of the run can read."""
    notes: list[str]
    narrowest: str = "the model"
    """The model with this context, for messages."""
    others: Mapping[str, Path] = field(default_factory=dict)
    """Directories of references and the critic, by their names in the recipe."""

    def masked(self, model: Any) -> Any:
        """Mask ids without a token in the model, and return it (see models/attention.py)."""
        mask_tokens(model, {*pretrained.token_ids(self.tokenizer), *self.chat.stops})
        return model


def read_model_info(recipe: Recipe, say: Say) -> ModelInfo:
    """Read and check the model's tokenizer, template and configuration; raise UserError for a fault."""
    path = pretrained.resolve(recipe.model.path, say=say)
    config = pretrained.load_config(path, scores=reads_head(recipe))
    _check_layouts(config, str(path / "config.json"))
    template = recipe.model.chat_template
    tokenizer = pretrained.load_tokenizer(
        path, chat_template=template, require_chat_template=template is None
    )
    chat = Chat(
        tokenizer,
        template=template if template in (None, plain_template.NAME) else tokenizer.chat_template,
        ends=frozenset(pretrained.stop_ids(path, tokenizer)),
        embedded=config.get_text_config().vocab_size,
        today=datetime.fromisoformat(recipe.model.date),
        template_args=recipe.model.template_args,
        parse_special=recipe.model.parse_special,
    )
    if chat.plain:
        begins = tokenizer("x").input_ids[:1] == [tokenizer.bos_token_id]
        tokenizer.chat_template = "{{ bos_token }}" * begins + plain_template.TEMPLATE
    return ModelInfo(
        path=path,
        tokenizer=tokenizer,
        chat=chat,
        config=config,
        dtype=getattr(torch, recipe.model.dtype),
        device=usable_device(recipe.model.device, "model.device"),
        context=context_of(config),
        notes=pretrained.tokenizer_notes(tokenizer),
    )


def with_companion_models(recipe: Recipe, policy: ModelInfo, say: Say) -> ModelInfo:
    """Return the policy with the references and the critic that the recipe names, and rows that all can read.

    Raises UserError for a model that does not fit the policy.
    """
    names = {"reference.path": recipe.reference.path if recipe.reference.path in recipe.teachers else ""}
    for number, source in enumerate(recipe.task):
        key = f"task.{number}.reference_path" if len(recipe.task) > 1 else "task.reference_path"
        names[key] = source.reference_path if source.reference_path not in names.values() else ""
    for key, name in {**names, "critic.path": recipe.critic.path}.items():
        if not name:
            continue
        scores = key == "critic.path"
        path = _resolve_companion(name, key, policy, say, scores=scores)
        policy = replace(policy, others={**policy.others, name: path})
        context = context_of(pretrained.load_config(path, scores=scores))
        if context < policy.context:
            who = "the critic" if scores else "the reference"
            notes = [*policy.notes, f"rows have at most {context} tokens, the context of {who}'s model"]
            policy = replace(policy, context=context, notes=notes, narrowest=who)
    return policy


def reads_head(recipe: Recipe) -> bool:
    """Return True if the recipe's method reads a head, so that its model may be a reward model."""
    return "head" in line(recipe.method["name"]).method.needs


def load_weights(recipe: Recipe, policy: ModelInfo, *, packed: bool = False, sliced: bool = False) -> Any:
    """Load the recipe's model, with random weights if the recipe asks for them.

    packed: keep linear layers in 4 bits if model.quantize says so; otherwise they get the same numbers.
    sliced: leave weights in their files until they are sharded, except random ones and those in 4 bits.
    """
    quantizes = recipe.model.is_quantized
    if sliced and not quantizes and not recipe.model.random_init:
        model = slices.load_model(
            policy.path, dtype=policy.dtype, device=policy.device, scores=reads_head(recipe)
        )
        return policy.masked(with_layouts(model, "model.path"))
    model = pretrained.load_model(
        policy.path,
        dtype=policy.dtype,
        device="cpu" if quantizes and packed else policy.device,  # a GPU need not hold what is packed
        init_seed=recipe.run.seed if recipe.model.random_init else None,
        scores=reads_head(recipe),
    )
    if quantizes:
        (nf4.pack if packed else nf4.round_trip)(model)
    return policy.masked(with_layouts(model.to(policy.device), "model.path"))


def with_layouts(model: Any, where: str) -> Any:
    """Prepare the model for attention layouts and return it; raise UserError with this key if impossible."""
    try:
        use_layouts(model)
    except ValueError as error:
        raise UserError(where, str(error), "docs/models.md lists those that work") from None
    return model


_checked: set[str] = set()
"""Configurations whose architecture this process has checked; a pipeline or a sweep plans with few."""


def _check_layouts(config: Any, where: str) -> None:
    """Raise UserError with this key if a model of this configuration cannot be prepared for layouts."""
    text = config.to_json_string(use_diff=False)
    if text not in _checked:
        with_layouts(pretrained.skeleton(config), where)
        _checked.add(text)


def _resolve_companion(name: str, key: str, policy: ModelInfo, say: Say, *, scores: bool) -> Path:
    """Return the directory of a second model that reads the policy's tokens; `key` of the recipe names it.

    Raises UserError if the model does not exist, or if its vocabulary differs. With `scores` it may be a
    reward model.
    """
    who = f"the {'critic' if scores else 'reference'}'s model"
    try:
        path = pretrained.resolve(name, say=say)
        config = pretrained.load_config(path, scores=scores)
    except UserError as error:
        raise error.at(key, keep=error.key != pretrained.KEY) from None
    fix = "take a model with the same tokenizer"
    # Models of one family differ in how far their vocabulary is padded.
    if config.get_text_config().vocab_size < policy.config.get_text_config().vocab_size:
        raise UserError(key, f"{who} has a smaller vocabulary than the policy", fix)
    ids = pretrained.load_tokenizer(path).get_vocab()
    other = [token for token, number in policy.tokenizer.get_vocab().items() if ids.get(token) != number]
    if other:
        problem = f"{len(other)} tokens differ, first {min(other)!r}"
        raise UserError(key, f"{who} was trained with another tokenizer: {problem}", fix)
    return path
