"""Where a reference policy comes from: the start of the run or another model, held, or asked beforehand."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from posttrain.learner import forward, pretrained
from posttrain.learner.learner import Learner
from posttrain.runtime.ask import Asked
from posttrain.runtime.journal import Journal
from posttrain.runtime.policy import Policy, weights_of, with_layouts
from posttrain.runtime.recipe import Recipe
from posttrain.runtime.rows import Group
from posttrain.runtime.scored import Scored, scored
from posttrain.runtime.stream import Stream
from posttrain.types import Batch, PerToken, UserError


def scores_once(asked: Asked) -> bool:
    """Whether the reference's log-probabilities are computed once, before the first update."""
    fixed = not asked.online and not asked.method.probes and not asked.recipe.reference.refresh_every
    return fixed and "logp_ref" in asked.method.needs


def _held(asked: Asked) -> bool:
    """Whether a frozen model is held as the reference while the run trains."""
    recipe = asked.recipe
    asks = "logp_ref" in asked.method.needs
    return asks and bool(recipe.reference.path or not recipe.lora.rank) and not scores_once(asked)


def held_size(asked: Asked, policy: Policy, parameters: int) -> int:
    """Parameters of the frozen model that is held, or asked beside the policy, which has so many; 0 for none.

    UserError for a model that cannot be the reference, or cannot follow where it is to.
    """
    chosen = asked.recipe.reference
    if not chosen.path:
        return parameters if _held(asked) else 0
    config = pretrained.load_config(policy.others["reference.path"])
    shapes = pretrained.parameter_shapes(config)
    if chosen.refresh_every and shapes != pretrained.parameter_shapes(policy.config):
        raise UserError(
            "the reference's model has weights of other names or shapes, and cannot follow the policy",
            where="reference.path",
            mend="leave reference.refresh_every out, or take a model of the policy's shape",
        )
    return sum(math.prod(shape) for shape in shapes.values())


def held(asked: Asked, policy: Policy) -> Any:
    """The reference policy, where a frozen model is held."""
    return _weights(asked.recipe, policy) if _held(asked) else None


def _weights(recipe: Recipe, policy: Policy) -> Any:
    """The model that the recipe names as the reference, or the one that the run starts from."""
    if not recipe.reference.path:
        return weights_of(recipe, policy)
    model = pretrained.load_model(policy.others["reference.path"], dtype=policy.dtype, device=policy.device)
    return with_layouts(model, "reference.path")


def reference_of(
    asked: Asked,
    policy: Policy,
    groups: Sequence[Group],
    held_out: Sequence[Group],
    *,
    file: Path,
    learner: Learner,
    journal: Journal,
) -> Scored | None:
    """The reference's log-probabilities of every row that the run will meet, if they are computed once."""
    recipe = asked.recipe
    if not scores_once(asked):
        return None
    order = Stream(range(len(groups)), seed=recipe.run.seed)
    met = {order.take()[1] for _ in range(recipe.run.updates * recipe.batch.batch_size)}
    wanted = [groups[i] for i in sorted(met)] + list(held_out)

    fresh: Any = None
    ranks = learner.ranks
    ranks.gather(None, "the reference's answers")  # what one has written, all read alike

    def score(batch: Batch) -> PerToken:
        nonlocal fresh
        elsewhere = bool(recipe.reference.path)
        if recipe.lora.rank and not elsewhere:
            return learner.score_reference(batch).logp
        if not learner.step_count and not elsewhere:
            # Before the first step the policy is its own reference; a resumed one is not any more.
            return learner.score(batch).logp
        fresh = _weights(recipe, policy) if fresh is None else fresh
        return forward.scored(forward.Net(fresh), batch, 1.0, learner.microbatch_tokens).logp

    def shared(batch: Batch) -> PerToken:
        """Each rank scores its share of the groups, and all are told."""
        mine = batch.group % ranks.size == ranks.rank
        out = torch.zeros_like(batch.logp_gen)
        own = score(batch.rows(mine.nonzero().flatten())) if ranks.size > 1 else score(batch)
        for rank, told in enumerate(ranks.gather(own.numpy(), "scores")):
            out[batch.group % ranks.size == rank] = torch.from_numpy(told)
        return out

    with journal.timed("reference"):
        return scored(
            file,
            wanted,
            shared,
            lambda done, total: journal.show("reference", {"done": done, "total": total}),
            writes=ranks.rank == 0,
        )
