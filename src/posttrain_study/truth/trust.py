"""Rows on steps away from the policy that drew: the second epoch, clipping, and the trust region."""

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
from posttrain_study.truth.elsewhere import drawing, moved
from posttrain_study.truth.policy import Policy
from posttrain_study.truth.row import Gradient, TruthRow, error, sine, verdict
from posttrain_study.truth.world import World

WHOLE = partial(corrections.sequence_truncated, weight_cap=math.inf)
"""The whole answer's weight π/π_gen: importance sampling."""

SIXTEEN = (0, 0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3)
"""A group in which each answer of `whole` is as frequent as its policy draws it."""


def epochs(world: World) -> Iterator[TruthRow]:
    """The second epoch: the policy has moved by 0.02 nats, and the answers are those of before."""
    section, after = "The second epoch: answers of the policy as it was", moved(world)
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
            replace(by_token, surrogate=surrogate.score, correction=WHOLE),
            "importance sampling proper is right; its weights multiply up as answers grow",
        ),
    }
    for name, (method, why) in cases.items():
        anchor = after.policy if method.correction is WHOLE else after.old
        found = after.estimate(method, 1, drawn=after.old, anchor=anchor)
        for quantity, number in (
            ("error", error(found.mean, J)),
            ("sine", sine(found.mean, J)),
            ("variance", found.variance),
        ):
            yield TruthRow(section, name, quantity, number, verdict(found.mean, J), why)


def clipping(world: World) -> Iterator[TruthRow]:
    """PPO's second epoch with exact advantages, by the range that it clips to and how far the policy is."""
    section, V = "PPO's second epoch: the range of the clip, and the drift", exact.state_values(world)
    for nats in (0.001, 0.01, 0.05, 0.2):
        after = moved(world, nats)
        J = exact.gradient(after)
        for epsilon in (0.1, 0.2, 0.3, math.inf):
            method = replace(LEARNED, surrogate=clip(epsilon))
            found = after.estimate(method, 1, drawn=after.old, value=V)
            name = f"{nats:g} nats, " + ("no clip" if epsilon == math.inf else f"ε = {epsilon:g}")
            said = verdict(found.mean, J)
            why = (
                "what is left without a clip: the states are those of the old policy"
                if epsilon == math.inf
                else "a token that has left the range as its advantage asks pushes no more"
            )
            yield TruthRow(section, name, "error", error(found.mean, J), said, why)
            yield TruthRow(section, name, "silent", silent(after, method), said, why)


def clip(epsilon: float) -> Surrogate:
    """PPO's surrogate with this range on both sides; at ∞ without one."""
    if epsilon == math.inf:
        return surrogate.unclipped
    return partial(surrogate.clipped, clip_low=epsilon, clip_high=epsilon)


def silent(after: World, method: PolicyGradient) -> float:
    """The share of the old policy's tokens whose gradient the clip takes away."""
    everything = tuple(range(len(after.answers)))
    V = exact.state_values(after.trained(after.old))
    batch = method.prepare(after.filled(method, everything, drawn=after.old, value=V))
    log_ratio = after.column(after.known_logp(after.policy) - after.known_logp(after.old), everything)
    log_ratio.requires_grad_()
    assert batch.advantage is not None
    [c] = torch.autograd.grad(method.surrogate(log_ratio, batch.advantage).sum(), log_ratio)
    still = masked.fill(((c == 0) & (batch.advantage != 0)).double(), batch.mask).sum(1)
    p = exact.chances(after, after.old)
    return float(p @ still / (p @ after.spoken.double().sum(1)))


@dataclass(frozen=True)
class TrustUpdate:
    """What one update of the learner did within its trust region."""

    after: Policy
    step: Gradient
    """By how much each parameter moved."""
    share: float
    """Of the full step, what the line search left."""


def whole(world: World) -> World:
    """A world of which 16 answers show all: each as often among them as its policy draws it."""
    counts = [SIXTEEN.count(i) / len(SIXTEEN) for i in range(len(world.answers))]
    return drawing(world, counts)


def natural(world: World, config: Trust) -> TrustUpdate:
    """One update of TRPO by the learner itself, on all that `whole` draws: its expectation, without noise."""
    model = copy.deepcopy(world.policy.model)
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    learner = Learner(model, TRPO, trust=config, temperature=world.temperature)
    metrics = learner.update(world.batch(SIXTEEN)).metrics
    step = nn.utils.parameters_to_vector(model.parameters()).detach() - before
    return TrustUpdate(world.policy.moved(step), step, metrics["trust/share"])


def wanted(world: World, config: Trust) -> Gradient:
    """√(2δ / sᵀFs) s with s = (F + damping I)⁻¹ ∇J, F the oracle's full Fisher matrix a token."""
    tokens = float(exact.chances(world) @ world.spoken.double().sum(1))
    F, J = exact.fisher(world) / tokens, exact.gradient(world)
    F += config.damping * torch.eye(len(F), dtype=F.dtype)
    s: Gradient = torch.linalg.pinv(F, rtol=1e-8, hermitian=True) @ J
    length = math.sqrt(2 * config.max_kl / float(s @ F @ s))
    return length * s


def region(world: World) -> Iterator[TruthRow]:
    """The natural step by bounds of the KL: what it keeps, what it gains, and what it is sure to gain."""
    section, all_of_it = "TRPO: the step, its KL, and what it gains", whole(world)
    tokens = float(exact.chances(all_of_it) @ all_of_it.spoken.double().sum(1))
    J = float(exact.objective(all_of_it).detach())
    for max_kl in (1e-6, 1e-4, 1e-2, 0.1, 1.0):
        config = Trust(max_kl=max_kl, damping=0.0)
        done = natural(all_of_it, config)
        moved_to = all_of_it.trained(done.after)
        distance = exact.divergence(moved_to, moved_to.old, moved_to.policy)
        quantities = {
            "off": error(done.step / done.share, wanted(all_of_it, config)),
            "KL / δ": float(distance.detach()) / tokens / max_kl,
            "gain": float(exact.objective(moved_to).detach()) - J,
            "surrogate": exact.surrogate_gain(all_of_it, done.after),
            "sure": exact.guaranteed_gain(all_of_it, done.after),
        }
        why = (
            "F⁻¹∇J with the full matrix, to the last digits, and a gain that is sure"
            if quantities["sure"] > 0
            else "the same direction, halved where it went too far; nothing is sure, and yet it gains"
        )
        for quantity, found in quantities.items():
            yield TruthRow(section, f"δ = {max_kl:g}", quantity, found, "-", why)
