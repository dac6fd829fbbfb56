"""Size the models beside the policy: the reference, a critic, and the head that a reward model has."""

import math
from typing import Any

from posttrain.models import heads, pretrained
from posttrain.plan.memory import (
    Shape,
)
from posttrain.plan.model_info import (
    ModelInfo,
)
from posttrain.plan.resolve import Resolved
from posttrain.types import UserError


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


def scores_once(resolved: Resolved) -> bool:
    """Whether the reference's log-probabilities are computed once, before the first update."""
    fixed = not resolved.online and not resolved.method.probes and not resolved.recipe.reference.refresh_every
    return fixed and "logp_ref" in resolved.method.needs


def keeps_reference(resolved: Resolved) -> bool:
    """Whether a frozen model is kept as the reference while the run trains."""
    recipe = resolved.recipe
    asks = "logp_ref" in resolved.method.needs
    return asks and bool(recipe.reference.path or not recipe.lora.rank) and not scores_once(resolved)


def reference_size(resolved: Resolved, policy: ModelInfo, parameters: int) -> int:
    """Parameters of the frozen model that is held, or asked beside the policy, which has so many; 0 for none.

    UserError for a model that cannot be the reference, or cannot follow where it is to.
    """
    chosen = resolved.recipe.reference
    if not chosen.path:
        return parameters if keeps_reference(resolved) else 0
    config = pretrained.load_config(policy.others["reference.path"])
    shapes = pretrained.parameter_shapes(config)
    if chosen.refresh_every and shapes != pretrained.parameter_shapes(policy.config):
        raise UserError(
            "reference.path",
            "the reference's model has weights of other names or shapes, and cannot follow the policy",
            "leave reference.refresh_every out, or take a model of the policy's shape",
        )
    return sum(math.prod(shape) for shape in shapes.values())
