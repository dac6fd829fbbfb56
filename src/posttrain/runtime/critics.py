"""The head that a method reads: on the policy's backbone, on a model of its own, or a reward model's."""

from typing import Any

from posttrain.learner.critic import CriticModel
from posttrain.models import heads, pretrained
from posttrain.runtime.memory import Shape
from posttrain.runtime.model_info import ModelInfo, load_weights, with_layouts
from posttrain.runtime.resolve import Resolved


def critic_shape(resolved: Resolved, policy: ModelInfo) -> Shape | None:
    """The sizes of a critic's own model, all of it trained; None where there is none."""
    critic = resolved.recipe.critic
    if "value" not in resolved.method.needs or critic.kind == "shared":
        return None
    config = pretrained.load_config(policy.others.get("critic.path", policy.path), scores=True)
    parameters = pretrained.parameter_count(config)
    return Shape.of(config, parameters, parameters)


def head_class(config: Any, resolved: Resolved) -> type | None:
    """The transformers class under which a reward model is saved; None where the method has no head.

    Raises UserError if transformers has none for this kind of model.
    """
    if "head" not in resolved.method.needs:
        return None
    steps = resolved.line.learns == "steps"
    return heads.head_class(config, per_token=steps)


def build_critic(resolved: Resolved, policy: ModelInfo, model: Any) -> CriticModel:
    """The critic that the recipe asks for, on the policy's backbone or on its own."""
    recipe = resolved.recipe
    if "head" in resolved.method.needs:
        found = CriticModel(model, bias=resolved.line.learns == "steps")
        output = model.get_output_embeddings().weight
        if output is not model.get_input_embeddings().weight:
            output.requires_grad_(False)  # nobody asks for tokens: no master and no moments of it
        if not resolved.recipe.model.random_init:
            found.start_from(heads.saved_head(policy.path))
        return found
    if recipe.critic.kind == "shared":
        return CriticModel(model)
    if not recipe.critic.path:
        return CriticModel(model, load_weights(recipe, policy))
    path = policy.others["critic.path"]
    body = pretrained.load_model(path, dtype=policy.dtype, device=policy.device, scores=True)
    found = CriticModel(model, with_layouts(body, "critic.path"))
    found.start_from(heads.saved_head(path))
    return found
