"""The same world with another policy: some nats further along ∇J, or with given answer probabilities."""

from collections.abc import Sequence

import torch

from posttrain_study.truth import exact
from posttrain_study.truth.world import World


def step_along_gradient(world: World, nats: float = 0.02) -> World:
    """Return the world after a step along ∇J with KL(π_old ‖ π) = nats over whole answers."""
    J = exact.gradient(world)
    size = (2 * nats / float(J @ exact.fisher(world) @ J)) ** 0.5
    for _ in range(30):
        after = world.with_policy(world.policy.shifted(J * size))
        distance = float(exact.divergence(after, after.old, after.policy).detach())
        if abs(distance / nats - 1) < 1e-6:
            return after
        size *= (nats / distance) ** 0.5
    raise ValueError(f"no step along the gradient changes the policy by {nats} nats")


def match_chances(world: World, chances: Sequence[float]) -> World:
    """Return the world whose policy draws each answer with this probability, up to rounding.

    Newton's method; of all steps that reach the probabilities to first order, it takes the shortest.
    """
    target = torch.tensor(chances, dtype=torch.float64).log()
    for _ in range(200):
        gap = target - world.cached_logp(world.policy).sum(1)
        if float(gap.abs().max()) < 1e-13:
            return world
        step = torch.linalg.pinv(exact.answer_scores(world), rtol=1e-8) @ gap
        # Far steps leave the region in which the log-probabilities are nearly linear.
        world = world.with_policy(world.policy.shifted(step * min(1.0, 1.0 / float(step.norm()))))
    raise ValueError(f"no policy was found that draws the answers with {chances}")
