"""Rows on baselines: the variance that each saves, and where it adds variance instead."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from posttrain.math import advantages, returns
from posttrain.methods.table import LEARNED, REINFORCE, RLOO
from posttrain.types import Method
from posttrain_study.truth import exact
from posttrain_study.truth.comparison import TruthRow, compare, verdict
from posttrain_study.truth.other_policies import match_chances
from posttrain_study.truth.world import Estimate, World

CERTAIN = (0.04, 0.03, 0.9, 0.03)
"""Probabilities of the four answers of `mostly_right`."""


def baselines(world: World) -> Iterator[TruthRow]:
    """Yield the exact variance of one answer's contribution, by baseline; the mean is ∇J in every row."""
    section = "Baselines: the mean is the same, the variance is not"
    why = {
        "none": "the return itself: a policy is pushed even by what it always gets",
        "constant E[R]": "only what is better than usual pushes",
        "constant, optimal": "E[|g|²R] / E[|g|²], the least that a constant can leave",
        "leave one out, K = 2": "one other answer is a guess at E[R] so noisy that none were better here",
        "leave one out, K = 4": "three others are a better one",
        "group mean, K = 4": "leave one out times (K - 1)/K, so once rescaled the same",
        "V of each state": "each token against what was to be expected before it: good, and not the least",
        "optimal for each token": "E[|g|²G] / E[|g|²] there: the least for a token, not for an answer",
        "optimal for each state": "E[g_t · Σ G g] / E[|g_t|²] there: the least that any can leave",
    }
    for name, (method, size, value) in _kinds(world).items():
        yield _variance(section, name, world, world.estimate(method, size, value=value), why[name])
    noisy = "older answers make a noisy constant, decay 0.9"
    yield _variance(section, "running mean of 3", world, _running(world), noisy)


def certain(world: World) -> Iterator[TruthRow]:
    """Yield the same rows for a policy that is nearly always right: the mean reward is a bad baseline."""
    section, sure = "A policy that is right 9 times in 10, and its baselines", mostly_right(world)
    why = {
        "none": "only right answers push, and they are what it says anyway: |g|² is small there",
        "constant E[R]": "the rare wrong answers have the long gradients, and now they push: worse than none",
        "constant, optimal": "E[|g|²R] / E[|g|²] lies near the reward of the rare answers, far below E[R]",
        "leave one out, K = 4": "it guesses at E[R], which is already too much",
        "V of each state": "as with E[R], state by state: |g|² is no constant, so V is far from the best",
        "optimal for each state": "the least that any can leave",
    }
    kinds = _kinds(sure)
    for name, sentence in why.items():
        method, size, value = kinds[name]
        yield _variance(section, name, sure, sure.estimate(method, size, value=value), sentence)


def mostly_right(world: World) -> World:
    """Return a world whose policy gives the one right answer with probability 0.9."""
    sure = match_chances(world, CERTAIN)
    return sure.with_rewards((exact.chances(sure) > 0.5).double())


def _kinds(world: World) -> dict[str, tuple[Method, int, exact.Places]]:
    """Return {baseline: (a method with that baseline, answers in a group, values of the critic)}."""
    V, best = exact.state_values(world), exact.constant_baseline(world)
    constant = replace(REINFORCE, baseline=float(exact.objective(world).detach()))
    return {
        "none": (REINFORCE, 1, V),
        "constant E[R]": (constant, 1, V),
        "constant, optimal": (replace(REINFORCE, baseline=best), 1, V),
        "leave one out, K = 2": (RLOO, 2, V),
        "leave one out, K = 4": (RLOO, 4, V),
        "group mean, K = 4": (replace(REINFORCE, credit=advantages.centred), 4, V),
        "V of each state": (LEARNED, 1, V),
        "optimal for each token": (LEARNED, 1, exact.token_baselines(world)),
        "optimal for each state": (LEARNED, 1, exact.sum_baselines(world)),
    }


def _running(world: World) -> Estimate:
    """Average REINFORCE with a running mean of three earlier answers over all that they may have been."""
    method = replace(REINFORCE, running_baseline=0.9)
    groups, p = world.groups(1), world.probabilities(1)
    means, squares = [], []
    for past in itertools.product(range(len(groups)), repeat=3):
        state = method.start
        for i in past:
            state = method.update_state(world.fill_batch(method, groups[i], state=state), {})
        g = -world.group_gradients(method, groups, state=state)
        weight = p[list(past)].prod()
        means.append(weight * (p @ g))
        squares.append(weight * (p @ g.square().sum(1)))
    mean = torch.stack(means).sum(0)
    return Estimate(mean, float(torch.stack(squares).sum() - mean.square().sum()))


def _variance(section: str, name: str, world: World, estimate: Estimate, why: str) -> TruthRow:
    J = exact.gradient(world)
    along = float(estimate.mean @ J / (estimate.mean @ estimate.mean))
    return TruthRow(section, name, "variance", estimate.variance * along**2, verdict(estimate.mean, J), why)


def critics(world: World) -> Iterator[TruthRow]:
    """Yield rows on GAE(λ) with the true V, and with the values of another policy."""
    section, J = "GAE(λ): a wrong critic bends it, but for λ = 1", exact.gradient(world)
    right = exact.state_values(world)
    wrong = exact.state_values(world.with_policy(world.old))
    for name, V in (("true V", right), ("another policy's V", wrong)):
        for lam in (0.0, 0.5, 0.95, 1.0):
            estimate = world.estimate(replace(LEARNED, estimator=partial(returns.gae, lam=lam)), 1, value=V)
            why = (
                "every λ has the mean of the true advantage, and a small λ the least variance"
                if V is right
                else "what the critic sees wrongly shrinks as (1 - λ), and at λ = 1 is a mere baseline"
            )
            yield from compare(section, f"{name}, λ = {lam:g}", estimate, J, why, "error", "variance")
