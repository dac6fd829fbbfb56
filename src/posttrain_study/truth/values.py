"""Rows on values: V-trace on another policy's answers, and potentials in the reward."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from posttrain.math import returns
from posttrain.methods.actor_critic import ActorCritic
from posttrain.methods.table import LEARNED, TO_GO
from posttrain_study.truth import exact
from posttrain_study.truth.comparison import EXACT, TruthRow, error, verdict
from posttrain_study.truth.other_policies import match_chances
from posttrain_study.truth.policy import Policy
from posttrain_study.truth.world import World

APART = (0.3, 0.3, 0.3, 0.1)
"""Probabilities of the four answers for a sampler that is far from the policy."""
BETA = 0.3
"""Weight of the KL to the reference, where there is one."""


def vtrace(cap: float, c_cap: float = 1.0) -> ActorCritic:
    """Return IMPALA with these caps, as a sum over an answer's tokens."""
    return replace(LEARNED, estimator=partial(returns.vtrace, rho_cap=cap, c_cap=c_cap))


def older(world: World) -> Iterator[TruthRow]:
    """Yield rows on V-trace with answers of another policy μ, by the cap ρ̄ on π/μ."""
    section, V = "V-trace: answers of another policy μ, π/μ cut at ρ̄", exact.state_values(world)
    sampler = match_chances(world, APART).policy
    ratio = (world.cached_logp(world.policy) - world.cached_logp(sampler)).exp() * world.mask
    true = ratio * exact.advantages(world)
    J, theirs = exact.gradient(world), exact.score(world, true, sampler)
    for cap in (1.0, 2.0, math.inf):
        method, name, free = vtrace(cap), f"ρ̄ = {cap:g}", cap == math.inf
        mean = exact.mean_given_token(world, advantages_and_targets(world, method, sampler, V)[0], sampler)
        learned = fixed_point(world, method, sampler)
        g = world.estimate(method, 1, sampler=sampler, anchor=world.policy, value=V).mean
        why = "tokens that π draws more than ρ̄ times as often as μ count for too little"
        why = "with the exact V they average to π/μ times A, token by token" if free else why
        yield _off(section, f"{name}: advantages", error(mean, true), why)
        why = "the critic learns the V of a policy between μ and π"
        why = "the critic learns the V of π from answers of μ" if free else why
        yield _off(section, f"{name}: the critic, against V of π", error(learned, V), why)
        clipped = exact.clipped_values(world, sampler, cap)
        why = "it is the policy that draws in proportion to min(ρ̄ μ, π), as IMPALA says"
        yield _off(section, f"{name}: the critic, against that policy's V", error(learned, clipped), why)
        why = "the expected step, where the states that μ visits are the ones that count"
        yield TruthRow(
            section, f"{name}: step at μ's states", "error", error(g, theirs), verdict(g, theirs), why
        )
        why = "how often π would visit a state, the weights of its own token do not say"
        yield TruthRow(section, f"{name}: step against ∇J", "error", error(g, J), verdict(g, J), why)


def advantages_and_targets(
    world: World, method: ActorCritic, sampler: Policy, V: exact.Places
) -> tuple[exact.Places, exact.Places]:
    """Return the (advantages, targets) that the method's own prepare computes for the sampler's answers."""
    everything, start = tuple(range(len(world.answers))), len(world.prompt)
    batch = world.fill_batch(method, everything, sampler=sampler, anchor=world.policy, value=V)
    batch = method.prepare(batch)
    assert batch.advantage is not None
    assert batch.target is not None
    return batch.advantage[:, start:], batch.target[:, start:]


def fixed_point(world: World, method: ActorCritic, sampler: Policy) -> exact.Places:
    """Return the limit of a critic that is set to its expected targets repeatedly."""
    V = torch.zeros_like(world.reward)
    for _ in range(1000):
        targets = advantages_and_targets(world, method, sampler, V)[1]
        last, V = V, exact.mean_given_state(world, targets, sampler) * world.mask
        if float((V - last).abs().max()) < 1e-14:
            return V
    raise ValueError("the critic's targets do not settle")


def _off(section: str, name: str, number: float, why: str) -> TruthRow:
    return TruthRow(section, name, "off", number, "unbiased" if number < EXACT else "biased", why)


def shaping(world: World) -> Iterator[TruthRow]:
    """Yield rows on r + Φ(s') - Φ(s) in place of r: the best answer, ∇J, and the noise."""
    section, J = "Shaping: r + Φ(s') - Φ(s) in place of r", exact.gradient(world)
    V, R, nothing = exact.state_values(world), world.returns, torch.zeros(len(world.answers)).double()
    guess = exact.state_values(world.with_policy(world.old))
    best = exact.optimal_policy(world, BETA)
    ends = "every return has shifted by Φ of the prompt alone"
    cases = {
        "no shaping": (torch.zeros_like(V), nothing, "the reward as it is"),
        "Φ = V, 0 at the end": (V, nothing, "a token earns G - V: the critic as baseline, paid as a reward"),
        "Φ = a wrong V, 0 at the end": (guess, nothing, f"whatever Φ is: {ends}"),
        "Φ = a wrong V, and at the end": (
            guess,
            torch.tensor([0.3, 0.6, 0.9, 0.1]).double(),
            "what Φ says of a finished answer is paid on top, and the highest sum is another answer's",
        ),
        "Φ = a wrong V, R at the end": (
            guess,
            R,
            "even the truth is paid twice: the best answer stays, and π* with a KL is that of β/2",
        ),
    }
    for name, (potential, at_end, why) in cases.items():
        paid = world.with_rewards(shaped_rewards(world, potential, at_end))
        estimate = paid.estimate(TO_GO, 1)
        bent = exact.optimal_policy(paid, BETA)
        quantities = {
            "lost": float(R.max() - R[paid.returns.argmax()]),
            "π* moved": float(bent @ (bent / best).log()),
            "error": error(estimate.mean, J),
            "variance": estimate.variance,
        }
        for quantity, number in quantities.items():
            yield TruthRow(section, name, quantity, number, verdict(estimate.mean, J), why)


def shaped_rewards(world: World, potential: exact.Places, at_end: exact.Answers) -> exact.Places:
    """r_t + Φ(s_{t+1}) - Φ(s_t); `potential` is Φ before each token, `at_end` that of a complete answer."""
    last = world.mask.sum(1) - 1
    after = torch.cat([potential[:, 1:], torch.zeros_like(potential[:, :1])], 1)
    after = after.scatter(1, last[:, None], at_end[:, None])
    return (world.reward + after - potential) * world.mask
