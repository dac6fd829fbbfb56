"""Rows on one question each: the bias of a division, of a capped weight, of an estimator of the KL."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch

from posttrain.math import advantages, corrections, filters, kl, pass_at_k, reduce, surrogate
from posttrain.methods.policy_gradient import Estimator, PolicyGradient
from posttrain.methods.table import REINFORCE, RLOO
from posttrain_study.truth import baselines, exact, imitation, preferences, rewards, soft, trust, values
from posttrain_study.truth.comparison import EXACT, TruthRow, compare, error, sine, verdict
from posttrain_study.truth.other_policies import step_along_gradient
from posttrain_study.truth.policy import Policy
from posttrain_study.truth.world import World, short


def everything() -> list[TruthRow]:
    """Return every section but that of the methods."""
    world = short()
    sections = (
        *(baselines.baselines, baselines.certain, baselines.critics),
        *(deviation, lengths, batches, best, filtered),
        *(trust.epochs, trust.clipping, caps, values.older),
        *(trust.region, values.shaping, soft.bellman, soft.regression, divergences, penalties),
        *(preferences.minima, preferences.pulls, preferences.certain, preferences.shift),
        *(rewards.likelihood, rewards.choosing, imitation.fixed_points),
    )
    return [row for section in sections for row in section(world)]


def deviation(world: World) -> Iterator[TruthRow]:
    """Yield rows on GRPO's division by the group's deviation, everything else unbiased."""
    section, J = "Dividing by the group's deviation", exact.gradient(world)
    normal = replace(RLOO, credit=advantages.normalised)
    for size in (2, 4):
        estimate = world.estimate(normal, size)
        why = "a pair only tells which is better, by ±1" if size == 2 else "the deviation knows the answer"
        yield from compare(section, f"K = {size}", estimate, J, why, "sine")
    binary = world.with_rewards((world.returns > 0.3).double())
    estimate, J = binary.estimate(normal, 4), exact.gradient(binary)
    why = "right or wrong, on one task: every weight is a multiple of the same gradient"
    yield from compare(section, "rewards 0 and 1, K = 4", estimate, J, why, "sine")
    for p in (0.02, 0.1, 0.5):
        why = "what a task's ∇p is multiplied by: near 1/√(p(1 - p)), and less where a mixed group is rare"
        yield TruthRow(section, f"a task solved with p = {p:g}, K = 8", "weight", task_weight(p, 8), "-", why)


def filtered(world: World) -> Iterator[TruthRow]:
    """Yield rows on RLOO that trains some of the tokens, groups of four, everything else unbiased."""
    section, J = "Training some of the tokens", exact.gradient(world)
    undecided = "a state at which the policy is decided keeps what it says, right or wrong"
    for share in (1.0, 0.8, 0.5, 0.2):
        method = replace(RLOO, filter=partial(filters.top_entropy, top_share=share))
        why = undecided if share < 1 else "every token is kept"
        yield from compare(
            section, f"top entropy, share {share:g}", world.estimate(method, 4), J, why, "error", "sine"
        )
    for low in (0.1, 0.0):
        band = partial(filters.clip_cov, cov_share=1.0, cov_low=low, cov_high=math.inf)
        why = "with every token of the band dropped, the most that cov_share can do"
        name = f"clip_cov, covariance from {low:g}"
        estimate = world.estimate(replace(RLOO, filter=band), 4)
        yield from compare(section, name, estimate, J, why, "error", "sine")
    after = step_along_gradient(world)
    weighed = replace(RLOO, correction=partial(corrections.token_truncated, weight_cap=100.0))
    for bound in (0.04, 0.03, 0.02):
        method = replace(weighed, filter=partial(filters.low_second_moment, max_second_moment=bound))
        why = (
            "the policy moved along ∇J, so the tokens that moved most are those that still teach most"
            if bound < 0.04
            else "no token is dropped; weights by token leave the states those of the older policy"
        )
        yield from compare(
            section,
            f"M2PO, 0.02 nats later, moment {bound:g}",
            after.estimate(method, 4, sampler=after.old, anchor=after.policy),
            exact.gradient(after),
            why,
            *("error", "sine"),
        )


def task_weight(p: float, size: int) -> float:
    """The factor by which GRPO's credit multiplies the ∇p of a task that is solved with probability p.

    Σ_k P(k right of K) k/K (A_right/p + (K - k)/k |A_wrong|/(1 - p)), A as in advantages.normalised.
    """
    total = 0.0
    for k in range(1, size):
        right = torch.tensor([1.0] * k + [0.0] * (size - k), dtype=torch.float64)
        A = advantages.normalised(right, torch.zeros(size, dtype=torch.long))
        chance = math.comb(size, k) * p**k * (1 - p) ** (size - k)
        pushed = k * float(A[0]) / p - (size - k) * float(A[-1]) / (1 - p)
        total += chance * pushed / size
    return total


def lengths(world: World) -> Iterator[TruthRow]:
    """Yield rows on RLOO with other reductions than the sum over an answer's tokens."""
    section, J = "Dividing by a length", exact.gradient(world)
    cases: Mapping[str, tuple[PolicyGradient, str]] = {
        "per row": (RLOO, "the sum over an answer's tokens is its score"),
        "per horizon": (
            replace(RLOO, reduction=partial(reduce.per_horizon, horizon=world.length)),
            "a constant changes no direction",
        ),
        "per sequence, 1/length": (
            replace(RLOO, reduction=reduce.per_sequence),
            "short answers weigh more: right ones are favoured, wrong ones avoided, for being short",
        ),
        "per token": (
            replace(RLOO, reduction=reduce.per_token),
            "a ratio of two random numbers: a group of long answers counts less for each",
        ),
    }
    for name, (method, why) in cases.items():
        yield from compare(section, name, world.estimate(method, 4), J, why, "sine")


def batches(world: World) -> Iterator[TruthRow]:
    """Yield rows on normalisation over a batch, as it grows."""
    section, J = "Dividing by the batch's deviation (REINFORCE++)", exact.gradient(world)
    p = exact.chances(world)
    sigma = float((p @ world.returns.square() - (p @ world.returns) ** 2).sqrt())
    for size in (2, 3, 4, 8, 12):
        mean = world.estimate(replace(REINFORCE, credit=advantages.batch_normalised), size).mean
        why = "the direction comes right as the batch grows; the length tends to 1/σ(R), not to 1"
        quantities = (("sine", sine(mean, J)), ("length · σ", float(mean @ J / (J @ J)) * sigma))
        for quantity, number in quantities:
            yield TruthRow(section, f"batch of {size}", quantity, number, verdict(mean, J), why)


def best(world: World) -> Iterator[TruthRow]:
    """Yield rows on credits that aim at the best of two answers."""
    section = "The best of two answers: J = E[max(R, R')]"
    truth = world.policy.gradient(exact.best_of_two(world))
    for name, method, why in (
        (
            "pass_at_k, k = 2",
            replace(RLOO, credit=partial(pass_at_k.pass_at_k, k=2)),
            "it follows this J, which is pass@2 for rewards of 0 and 1",
        ),
        ("leave one out", RLOO, "the mean's gradient points elsewhere"),
    ):
        yield from compare(section, name, world.estimate(method, 4), truth, why, "error", "sine")


def caps(world: World) -> Iterator[TruthRow]:
    """Yield rows on weights π/π_gen of a sampler that is another policy, truncated at a cap."""
    section, J = "A sampler that is another policy: weights cut at a cap", exact.gradient(world)
    host = replace(REINFORCE, baseline=float(exact.objective(world).detach()))
    kinds = (
        ("answer", corrections.sequence_truncated, (1.0, 2.0, 3.0, math.inf)),
        ("token", corrections.token_truncated, (1.0, math.inf)),
    )
    for kind, correction, cut in kinds:
        for cap in cut:
            method = replace(host, correction=partial(correction, weight_cap=cap))
            estimate = world.estimate(method, 1, sampler=world.reference, anchor=world.policy)
            why = (
                "the bias falls as the cap rises, and the variance grows"
                if kind == "answer"
                else "no cap makes it right: the tokens before are not weighed"
            )
            name = f"{kind}'s weight, cap {cap:g}"
            yield from compare(section, name, estimate, J, why, "error", "variance")


def divergences(world: World) -> Iterator[TruthRow]:
    """Yield rows on k1, k2 and k3: values and gradients as penalties, by the policy that samples."""
    section = "Estimators of KL(π ‖ π_ref)"
    divergence = exact.divergence(world)
    value, truth = float(divergence.detach()), world.policy.gradient(divergence)
    ours, theirs = (world.cached_logp(p) for p in (world.policy, world.reference))
    silent = world.with_rewards(torch.zeros(len(world.answers)))
    values = {
        "k1": "log π/π_ref averages to the KL, and is of either sign",
        "k2": "half the square is another divergence, near the KL where the two policies are near",
        "k3": "the KL and a term that averages to 0 on samples of π, and only on those",
    }
    gradients = {
        "k1": "as a loss it has the gradient of log π, which averages to 0: no penalty at all",
        "k2": "that of each state's KL; which states follow is forgotten",
        "k3": "that of each state's KL(π_ref ‖ π), the other direction",
        "exact": "that of each state's KL as k2's on average, without the variance of the drawn token",
    }
    for estimator in (kl.k1, kl.k2, kl.k3):
        name = estimator.__name__
        terms = (estimator(ours, theirs) * world.mask).sum(1)
        for samples, policy in (("fresh samples", world.policy), ("another policy's", world.old)):
            ratio = float(exact.chances(world, policy) @ terms) / value
            label = "unbiased" if abs(ratio - 1) < EXACT else "biased"
            yield TruthRow(section, f"{name} on {samples}", "value / KL", ratio, label, values[name])
    for penalty in (kl.k1, kl.k2, kl.k3, kl.exact):
        name = penalty.__name__
        pull = silent.estimate(replace(REINFORCE, kl=penalty, kl_in_loss=1.0), 1)
        off, label = error(-pull.mean, truth), verdict(-pull.mean, truth)
        for quantity, number in (("gradient error", off), ("variance", pull.variance)):
            yield TruthRow(section, f"{name} in the loss", quantity, number, label, gradients[name])
    paid = -silent.estimate(replace(REINFORCE, kl_in_reward=1.0), 1).mean
    why = "paid like any other reward, it has the gradient of the whole KL"
    yield TruthRow(
        section, "k1 in the reward", "gradient error", error(paid, truth), verdict(paid, truth), why
    )


def penalties(world: World) -> Iterator[TruthRow]:
    """Yield rows on each penalty of a KL: its gradient's error and noise, by who drew the tokens."""
    section, ours, theirs = "Where a KL enters", world.policy, world.reference
    silent = world.with_rewards(torch.zeros(len(world.answers)))
    host = replace(REINFORCE, surrogate=surrogate.unclipped)

    def at_states(p: Policy, q: Policy) -> Callable[[Policy | None], torch.Tensor]:
        return lambda sampler: exact.state_divergence(world, sampler, p, q)

    reverse, forward = at_states(ours, theirs), at_states(theirs, ours)
    cases: dict[str, tuple[Estimator, Callable[[Policy | None], torch.Tensor], str]] = {
        "k1: KL(π ‖ π_ref)": (kl.k1, reverse, "no penalty: 0 where π draws the tokens, else of no KL"),
        "k2: KL(π ‖ π_ref)": (kl.k2, reverse, "the score times log π/π_ref, where π draws the tokens"),
        "k3: KL(π ‖ π_ref)": (kl.k3, reverse, "its gradient is that of the other direction"),
        "k3: KL(π_ref ‖ π)": (kl.k3, forward, "the score times 1 - π_ref/π, where π draws the tokens"),
        "unbiased_k1: KL(π ‖ π_ref)": (kl.unbiased_k1, reverse, "π/π_old (Δ + 1), whose 1 averages to 0"),
        "unbiased_k3: KL(π ‖ π_ref)": (kl.unbiased_k3, reverse, "π/π_old Δ, 0 where π = π_ref"),
        "forward_k1: KL(π_ref ‖ π)": (kl.forward_k1, forward, "-π_ref/π_old: imitation of π_ref"),
        "forward_k3: KL(π_ref ‖ π)": (kl.forward_k3, forward, "(π - π_ref)/π_old, 0 where π = π_ref"),
    }
    for name, (estimator, truth, why) in cases.items():
        method = replace(host, kl=estimator, kl_in_loss=1.0)
        yield from _penalty(section, f"in the loss, {name}", silent, method, truth, why)
    of_old, why = at_states(world.old, ours), "needs no reference; on its own tokens it is 0"
    yield from _penalty(
        section, "kl_from_old: KL(π_old ‖ π)", silent, replace(host, kl_from_old=1.0), of_old, why
    )
    why = "of whole answers; older ones are at states where π is not"
    method = replace(host, kl_in_reward=1.0)
    name = "in the reward, k1: KL(π ‖ π_ref)"
    yield from _penalty(section, name, silent, method, lambda sampler: exact.divergence(world), why)


def _penalty(
    section: str,
    name: str,
    silent: World,
    method: PolicyGradient,
    divergence: Callable[[Policy | None], torch.Tensor],
    why: str,
) -> Iterator[TruthRow]:
    """Yield the rows of one penalty; `divergence`: the KL that it is for, by the sampler."""
    numbers: dict[str, float] = {}
    for quantity, sampler in (("fresh", None), ("older", silent.old)):
        if method.kl_from_old and sampler is None:
            continue  # KL(π ‖ π) has no gradient to compare with
        estimate = silent.estimate(method, 1, sampler=sampler)
        truth = silent.policy.gradient(divergence(sampler))
        numbers[quantity] = error(-estimate.mean, truth)
        noise = estimate.variance / float(truth @ truth)
    label = "unbiased" if max(numbers.values()) < EXACT else "biased"
    for quantity, number in (numbers | {"noise": noise, "passes": len(method.needs)}).items():
        yield TruthRow(section, name, quantity, number, label, why)
