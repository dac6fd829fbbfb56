"""Rows on steps away from the sampling policy: the second epoch, clipping, and the trust region."""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from posttrain.learner.learner import Learner
from posttrain.learner.trust_region import Trust
from posttrain.math import corrections, masked, surrogate
from posttrain.methods.policy_gradient import PolicyGradient, Surrogate
from posttrain.methods.table import LEARNED, REINFORCE, TRPO
from posttrain_study.truth import exact
from posttrain_study.truth.comparison import Gradient, TruthRow, compare, error, verdict
from posttrain_study.truth.other_policies import match_chances, step_along_gradient
from posttrain_study.truth.policy import Policy
from posttrain_study.truth.world import World

IMPORTANCE = partial(corrections.sequence_truncated, weight_cap=math.inf)
"""The weight π/π_gen of the complete answer: importance sampling."""

SIXTEEN = (0, 0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3)
"""A group in which each answer of `exact_sample_world` is as frequent as its policy draws it."""


def epochs(world: World) -> Iterator[TruthRow]:
    """Yield rows on the second epoch: the policy has moved by 0.02 nats since it drew the answers."""
    section, after = "The second epoch: answers of the policy as it was", step_along_gradient(world)
    J = exact.gradient(after)
    by_token = replace(
        REINFORCE, surrogate=surrogate.unclipped, baseline=float(exact.objective(world).detach())
    )
    cases = {
        "no ratio": (replace(by_token, surrogate=surrogate.score), "the gradient of a policy that is gone"),
        "ratio by token": (by_token, "the states are still those that the old policy visits"),
        "ratio by token, clipped": (
            replace(by_token, surrogate=surrogate.clipped),
            "and tokens that have moved as they should push no more: that is the point",
        ),
        "ratio by token, cut at 1": (
            replace(by_token, surrogate=partial(surrogate.truncated, cap=1.0)),
            "every token still pushes, those that have become likelier no more than before",
        ),
        "ratio of the answer": (
            replace(by_token, surrogate=surrogate.score, correction=IMPORTANCE),
            "importance sampling proper is right; its weights multiply up as answers grow",
        ),
    }
    for name, (method, why) in cases.items():
        anchor = after.policy if method.correction is IMPORTANCE else after.old
        estimate = after.estimate(method, 1, sampler=after.old, anchor=anchor)
        yield from compare(section, name, estimate, J, why, "error", "sine", "variance")


def clipping(world: World) -> Iterator[TruthRow]:
    """Yield rows on PPO's second epoch with exact advantages, by clip range and distance of the policy."""
    section, V = "PPO's second epoch: the range of the clip, and the drift", exact.state_values(world)
    for nats in (0.001, 0.01, 0.05, 0.2):
        after = step_along_gradient(world, nats)
        J = exact.gradient(after)
        for epsilon in (0.1, 0.2, 0.3, math.inf):
            method = replace(LEARNED, surrogate=clip(epsilon))
            estimate = after.estimate(method, 1, sampler=after.old, value=V)
            name = f"{nats:g} nats, " + ("no clip" if epsilon == math.inf else f"ε = {epsilon:g}")
            label = verdict(estimate.mean, J)
            why = (
                "what is left without a clip: the states are those of the old policy"
                if epsilon == math.inf
                else "a token that has left the range as its advantage asks pushes no more"
            )
            yield TruthRow(section, name, "error", error(estimate.mean, J), label, why)
            yield TruthRow(section, name, "silent", silent_share(after, method), label, why)


def clip(epsilon: float) -> Surrogate:
    """Return PPO's surrogate with this range on both sides; for ∞ the unclipped one."""
    if epsilon == math.inf:
        return surrogate.unclipped
    return partial(surrogate.clipped, clip_low=epsilon, clip_high=epsilon)


def silent_share(after: World, method: PolicyGradient) -> float:
    """Return the share of the old policy's tokens whose gradient the clip removes."""
    everything = tuple(range(len(after.answers)))
    V = exact.state_values(after.with_policy(after.old))
    batch = method.prepare(after.fill_batch(method, everything, sampler=after.old, value=V))
    log_ratio = after.column(after.cached_logp(after.policy) - after.cached_logp(after.old), everything)
    log_ratio.requires_grad_()
    assert batch.advantage is not None
    [c] = torch.autograd.grad(method.surrogate(log_ratio, batch.advantage).sum(), log_ratio)
    still = masked.fill(((c == 0) & (batch.advantage != 0)).double(), batch.mask).sum(1)
    p = exact.chances(after, after.old)
    return float(p @ still / (p @ after.mask.double().sum(1)))


@dataclass(frozen=True)
class TrustUpdate:
    """The effect of one update of the learner within its trust region."""

    after: Policy
    step: Gradient
    """The change of each parameter."""
    share: float
    """The share of the full step that the line search left."""


def exact_sample_world(world: World) -> World:
    """Return a world of which 16 answers are an exact sample: each is as frequent as its policy draws it."""
    counts = [SIXTEEN.count(i) / len(SIXTEEN) for i in range(len(world.answers))]
    return match_chances(world, counts)


def run_trpo(world: World, config: Trust) -> TrustUpdate:
    """Run one update of TRPO by the learner itself on SIXTEEN: its expectation, without noise."""
    model = copy.deepcopy(world.policy.model)
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    learner = Learner(model, TRPO, trust=config, temperature=world.temperature)
    metrics = learner.update(world.batch(SIXTEEN)).metrics
    step = nn.utils.parameters_to_vector(model.parameters()).detach() - before
    return TrustUpdate(world.policy.shifted(step), step, metrics["trust/share"])


def natural_step(world: World, config: Trust) -> Gradient:
    """√(2δ / sᵀFs) s with s = (F + damping I)⁻¹ ∇J, F the oracle's full Fisher matrix a token."""
    tokens = float(exact.chances(world) @ world.mask.double().sum(1))
    F, J = exact.fisher(world) / tokens, exact.gradient(world)
    F += config.damping * torch.eye(len(F), dtype=F.dtype)
    s: Gradient = torch.linalg.pinv(F, rtol=1e-8, hermitian=True) @ J
    length = math.sqrt(2 * config.max_kl / float(s @ F @ s))
    return length * s


def region(world: World) -> Iterator[TruthRow]:
    """Yield rows on the natural step by bounds of the KL: its gain, and the gain that is guaranteed."""
    section, sample = "TRPO: the step, its KL, and what it gains", exact_sample_world(world)
    tokens = float(exact.chances(sample) @ sample.mask.double().sum(1))
    J = float(exact.objective(sample).detach())
    for max_kl in (1e-6, 1e-4, 1e-2, 0.1, 1.0):
        config = Trust(max_kl=max_kl, damping=0.0)
        update = run_trpo(sample, config)
        moved = sample.with_policy(update.after)
        distance = exact.divergence(moved, moved.old, moved.policy)
        quantities = {
            "off": error(update.step / update.share, natural_step(sample, config)),
            "KL / δ": float(distance.detach()) / tokens / max_kl,
            "gain": float(exact.objective(moved).detach()) - J,
            "surrogate": exact.surrogate_gain(sample, update.after),
            "sure": exact.guaranteed_gain(sample, update.after),
        }
        why = (
            "F⁻¹∇J with the full matrix, to the last digits, and a gain that is sure"
            if quantities["sure"] > 0
            else "the same direction, halved where it went too far; nothing is sure, and yet it gains"
        )
        for quantity, number in quantities.items():
            yield TruthRow(section, f"δ = {max_kl:g}", quantity, number, "-", why)
