"""The head that a method reads: on the policy's backbone, on a model of its own, or a reward model's."""

from pathlib import Path
from typing import Any

from posttrain.learner import heads, pretrained
from posttrain.learner.critic import CriticModel
from posttrain.runtime.ask import Asked
from posttrain.runtime.plan import Shape
from posttrain.runtime.policy import Policy, Say, weights_of, with_layouts
from posttrain.runtime.recipe import Recipe
from posttrain.types import UserError


def critic_shape(asked: Asked, policy: Policy, say: Say) -> Shape | None:
    """The sizes of a critic's own model, all of it trained; None where there is none."""
    critic = asked.recipe.critic
    if "value" not in asked.method.needs or critic.kind == "shared":
        return None
    path = critic_path(asked.recipe, policy, say) if critic.path else policy.path
    config = pretrained.load_config(path, scores=True)
    parameters = pretrained.parameter_count(config)
    return Shape.of(config, parameters, parameters)


def head_class(config: Any, asked: Asked) -> type | None:
    """The transformers class under which a reward model is saved; None where the method has no head.

    Raises UserError if transformers has none for this kind of model.
    """
    if "head" not in asked.method.needs:
        return None
    steps = asked.line.learns == "steps"
    return heads.head_class(config, per_token=steps)


def critic_of(asked: Asked, policy: Policy, model: Any) -> CriticModel:
    """The critic that the recipe asks for, on the policy's backbone or on its own."""
    recipe = asked.recipe
    if "head" in asked.method.needs:
        found = CriticModel(model, bias=asked.line.learns == "steps")
        output = model.get_output_embeddings().weight
        if output is not model.get_input_embeddings().weight:
            output.requires_grad_(False)  # nobody asks for tokens: no master and no moments of it
        if not asked.recipe.model.random_init:
            found.start_from(heads.saved_head(policy.path))
        return found
    if recipe.critic.kind == "shared":
        return CriticModel(model)
    if not recipe.critic.path:
        return CriticModel(model, weights_of(recipe, policy))
    path = critic_path(recipe, policy, pretrained.silent)
    body = pretrained.load_model(path, dtype=policy.dtype, device=policy.device, scores=True)
    found = CriticModel(model, with_layouts(body, "critic.path"))
    found.start_from(heads.saved_head(path))
    return found


def critic_path(recipe: Recipe, policy: Policy, say: Say) -> Path:
    """The directory of an own critic's model; UserError if there is none, or its vocabulary is another."""
    try:
        path = pretrained.resolve(recipe.critic.path, say=say)
        config = pretrained.load_config(path, scores=True)
    except UserError as error:
        where, mend = (text.replace("model.path", "critic.path") for text in (error.where, error.mend))
        raise UserError(error.what, where=where, mend=mend) from None
    if config.get_text_config().vocab_size != policy.config.get_text_config().vocab_size:
        what = "the critic's model has another vocabulary than the policy's"
        raise UserError(what, where="critic.path", mend="take a model with the same tokenizer")
    theirs = pretrained.load_tokenizer(path).get_vocab()
    other = [token for token, at in policy.tokenizer.get_vocab().items() if theirs.get(token) != at]
    if other:
        raise UserError(
            f"the critic's model was trained with another tokenizer: {len(other)} tokens differ, first "
            f"{min(other)!r}",
            where="critic.path",
            mend="take a model with the same tokenizer",
        )
    return path
