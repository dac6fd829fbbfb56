"""KL and entropy terms against exact sums over the vocabulary at every state."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from posttrain.math import divergences, kl, reduce, returns
from posttrain.methods.table import DISTILL, GKD, REINFORCE, RLOO
from posttrain_study.truth import exact
from posttrain_study.truth.comparison import error
from posttrain_study.truth.world import World

EXACT = 1e-10
BETA = 0.25


def penalty_gradient(world: World, **choices: Any) -> torch.Tensor:
    """The expected gradient of the term alone: every reward is 0."""
    silent = world.with_rewards(torch.zeros(len(world.answers)))
    return -silent.estimate(replace(REINFORCE, **choices), 1).mean


def test_the_values_of_k1_and_k3_are_the_divergence_and_k2s_is_not(either: World) -> None:
    ours, theirs = either.step_log_probs(either.policy), either.step_log_probs(either.reference)
    divergence = (exact.visits(either) * kl.exact(ours, theirs)).sum()
    of_answers = either.logp(either.policy) - either.logp(either.reference)
    torch.testing.assert_close(divergence, (either.logp(either.policy).exp() * of_answers).sum())
    a, b = either.token_logp(either.policy), either.token_logp(either.reference)
    for estimator in (kl.k1, kl.k3):
        torch.testing.assert_close(
            (exact.visits(either) * estimator(a, b)).sum(), divergence, rtol=1e-12, atol=0
        )
    assert abs(float(((exact.visits(either) * kl.k2(a, b)).sum() / divergence).detach()) - 1) > 0.02


def test_k1_in_the_loss_does_nothing_on_average(either: World) -> None:
    k1, k2 = (penalty_gradient(either, kl=f, kl_in_loss=1.0).norm() for f in (kl.k1, kl.k2))
    assert float(k1 / k2) < EXACT


def test_k2_in_the_loss_is_the_gradient_of_the_divergence_at_each_state(either: World) -> None:
    ours, theirs = either.step_log_probs(either.policy), either.step_log_probs(either.reference).detach()
    here = either.policy.gradient((exact.visits(either) * kl.exact(ours, theirs)).sum())
    assert error(penalty_gradient(either, kl=kl.k2, kl_in_loss=1.0), here) < EXACT


def test_k3_in_the_loss_is_that_of_the_other_direction(either: World) -> None:
    ours, theirs = either.step_log_probs(either.policy), either.step_log_probs(either.reference).detach()
    there = either.policy.gradient((exact.visits(either) * kl.exact(theirs, ours)).sum())
    assert error(penalty_gradient(either, kl=kl.k3, kl_in_loss=1.0), there) < EXACT


def test_no_penalty_in_the_loss_sees_that_a_token_changes_the_states_to_come(either: World) -> None:
    of_answers = either.logp(either.policy) - either.logp(either.reference).detach()
    whole = either.policy.gradient((either.logp(either.policy).exp() * of_answers).sum())
    for estimator in (kl.k2, kl.k3):
        assert error(penalty_gradient(either, kl=estimator, kl_in_loss=1.0), whole) > 0.05


@pytest.mark.parametrize(
    "estimator", [kl.k2, kl.k3, kl.unbiased_k1, kl.unbiased_k3, kl.forward_k1, kl.forward_k3]
)
def test_only_weighed_penalties_are_right_on_answers_of_another_policy(estimator: Any, either: World) -> None:
    """At each state that it visits, in the direction that they are for."""
    ours, theirs = either.step_log_probs(either.policy), either.step_log_probs(either.reference).detach()
    pair = (theirs, ours) if estimator in (kl.forward_k1, kl.forward_k3) else (ours, theirs)
    here = either.policy.gradient((exact.visits(either, either.old) * kl.exact(*pair)).sum())
    silent = either.with_rewards(torch.zeros(len(either.answers)))
    method = replace(REINFORCE, kl=estimator, kl_in_loss=1.0)
    off = error(-silent.estimate(method, 1, sampler=either.old).mean, here)
    assert off > 0.05 if estimator in (kl.k2, kl.k3) else off < EXACT


@pytest.mark.parametrize("method", [REINFORCE, RLOO], ids=["reinforce", "rloo"])
def test_in_the_reward_it_is_the_gradient_of_reward_less_divergence(method: Any, either: World) -> None:
    ours, theirs = either.logp(either.policy), either.logp(either.reference).detach()
    regularised = either.policy.gradient((ours.exp() * (either.returns - BETA * (ours - theirs))).sum())
    assert error(either.estimate(replace(method, kl_in_reward=BETA)).mean, regularised) < EXACT
    assert error(either.estimate(method).mean, regularised) > 0.05


def test_the_entropy_bonus_is_the_gradient_of_the_entropy_at_each_state(either: World) -> None:
    ours = either.step_log_probs(either.policy)
    entropy = -(ours.exp() * ours).sum(-1)
    truth = either.policy.gradient((exact.visits(either) * entropy).sum())
    assert error(-penalty_gradient(either, entropy_bonus=1.0), truth) < EXACT


@pytest.mark.parametrize("gamma", [0.0, 1.0])
def test_distillation_follows_each_tokens_divergence_and_with_gamma_1_that_of_whole_answers(
    gamma: float, either: World
) -> None:
    """Whatever the rewards: they are left out, and are not 0 here."""
    method = replace(DISTILL, returns=partial(returns.to_go, gamma=gamma), reduction=reduce.per_row)
    found = either.estimate(method, 1).mean
    ours, theirs = either.step_log_probs(either.policy), either.step_log_probs(either.reference).detach()
    here = either.policy.gradient((exact.visits(either) * kl.exact(ours, theirs)).sum())
    whole = either.policy.gradient(exact.divergence(either))
    assert error(-found, whole if gamma else here) < EXACT
    assert error(-found, here if gamma else whole) > 0.05


@pytest.mark.parametrize("divergence", [divergences.reverse_kl, divergences.forward_kl])
def test_distillation_over_the_vocabulary_follows_the_divergence_of_each_state(
    divergence: Any, either: World
) -> None:
    ours, theirs = either.step_log_probs(either.policy), either.step_log_probs(either.reference).detach()
    p, q = (ours, theirs) if divergence is divergences.reverse_kl else (theirs, ours)
    here = either.policy.gradient((exact.visits(either) * (p.exp() * (p - q)).sum(-1)).sum())
    found = either.estimate(replace(GKD, token_divergence=divergence, reduction=reduce.per_row), 1)
    assert error(-found.mean, here) < EXACT


def test_the_reverse_kl_over_the_vocabulary_is_distills_mean_with_less_variance(either: World) -> None:
    drawn = either.estimate(replace(DISTILL, reduction=reduce.per_row), 1)
    summed = either.estimate(
        replace(GKD, token_divergence=divergences.reverse_kl, reduction=reduce.per_row), 1
    )
    assert error(summed.mean, drawn.mean) < EXACT
    assert summed.variance < 0.6 * drawn.variance


def test_the_exact_kl_in_the_loss_is_k2s_mean_with_less_variance(either: World) -> None:
    silent = either.with_rewards(torch.zeros(len(either.answers)))
    drawn, summed = (silent.estimate(replace(REINFORCE, kl=f, kl_in_loss=1.0), 1) for f in (kl.k2, kl.exact))
    assert error(summed.mean, drawn.mean) < EXACT
    assert summed.variance < drawn.variance
