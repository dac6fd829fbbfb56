"""Size the models next to the policy: the sampler's, the reference, a critic, a reward model's head."""

import math
from typing import Any

import torch

from posttrain.learner.lora import Lora, add_adapter
from posttrain.learner.moments import stored_bytes
from posttrain.learner.optim import Optim, hidden_matrices
from posttrain.models import heads, pretrained
from posttrain.plan.memory import Shape, samplers_on
from posttrain.plan.model_info import ModelInfo
from posttrain.plan.resolve import Resolved
from posttrain.types import UserError


def lends_weights(resolved: Resolved, device: torch.device) -> bool:
    """Return True if the sampler reads the learner's own tensors (learner/loan.py).

    It does where it is the native engine in the loop's thread and on the learner's device, takes turns with
    training, and no weight is in shares or in 4 bits. Not where weights are perturbed while it samples.
    """
    recipe = resolved.recipe
    takes_turns = recipe.async_.where == "here" and not recipe.async_.publishes
    in_one_piece = not recipe.train.shard and not recipe.model.is_quantized
    is_alike = recipe.engine.name == "native" and samplers_on(device, recipe.async_) == 1
    samples = bool(resolved.asked) and resolved.line.step != "evolution"
    return samples and takes_turns and in_one_piece and is_alike


def critic_shape(resolved: Resolved, policy: ModelInfo, context: int) -> Shape | None:
    """Return the sizes of a critic's own model, which is trained whole; None without one.

    context: see Shape.
    """
    critic = resolved.recipe.critic
    if "value" not in resolved.method.needs or critic.kind == "shared":
        return None
    config = pretrained.load_config(policy.others.get(critic.path, policy.path), scores=True)
    optimizer = optimizer_sizes(config, resolved.recipe.optim, Lora())
    return Shape.of(pretrained.skeleton(config), **optimizer, context=context)


def optimizer_sizes(config: Any, optim: Optim, adapter: Lora) -> dict[str, int]:
    """Return the fields of Shape that say how an optimiser moves such a model, or its adapter.

    None with AdamW whose moments are as wide as its masters.
    """
    if optim.name == "adamw":
        return {}
    model = pretrained.skeleton(config)
    with torch.device("meta"):
        model = add_adapter(model, adapter, seed=0) if adapter.rank else model
    if optim.name == "muon":
        return {"matrices": sum(p.numel() for p in hidden_matrices(model) if p.requires_grad)}
    return {"moment_bytes": sum(stored_bytes(p.shape) for p in model.parameters() if p.requires_grad)}


def head_class(config: Any, resolved: Resolved) -> type | None:
    """Return the transformers class under which a reward model is saved; None if the method has no head.

    Raises UserError if transformers has no such class for this kind of model.
    """
    if "head" not in resolved.method.needs:
        return None
    return heads.head_class(config, per_token=resolved.line.learns == "steps")


def scores_once(resolved: Resolved) -> bool:
    """Return True if the reference's log-probabilities are computed once, before the first update."""
    fixed = not resolved.online and not resolved.method.probes and not resolved.recipe.reference.refresh_every
    return fixed and "logp_ref" in resolved.method.needs and resolved.method.compare is None


def kept_references(resolved: Resolved) -> tuple[str, ...]:
    """Return the paths of the references during training, each a frozen model; "" is the start of the run.

    With [lora] that is the policy without its adapter, and no model more.
    """
    asks = "logp_ref" in resolved.method.needs or resolved.method.compare
    served = resolved.recipe.reference.url
    return resolved.recipe.teachers if asks and not served and not scores_once(resolved) else ()


def compared_size(resolved: Resolved, policy: ModelInfo) -> int:
    """Return the size of the largest state of a reference that a method compares with at each token, or 0."""
    paths = kept_references(resolved) if resolved.method.compare else ()
    configs = [pretrained.load_config(policy.others[path]) if path else policy.config for path in paths]
    return max((config.get_text_config().hidden_size for config in configs), default=0)


def references_size(resolved: Resolved, policy: ModelInfo, parameters: int) -> int:
    """Return the parameters of all frozen reference models; parameters: of the policy.

    Raises UserError for a model that cannot be refreshed from the policy although the recipe asks for it.
    """
    start = 0 if resolved.recipe.lora.rank else parameters
    paths = kept_references(resolved)
    return sum(_reference_size(path, resolved, policy) if path else start for path in paths)


def _reference_size(path: str, resolved: Resolved, policy: ModelInfo) -> int:
    reference = resolved.recipe.reference
    config = pretrained.load_config(policy.others[path])
    shapes = pretrained.parameter_shapes(config)
    if reference.refresh_every and shapes != pretrained.parameter_shapes(policy.config):
        raise UserError(
            "reference.path",
            "the reference's model has weights of other names or shapes, and cannot follow the policy",
            "leave reference.refresh_every out, or take a model of the policy's shape",
        )
    return sum(math.prod(shape) for shape in shapes.values())
