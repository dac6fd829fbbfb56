"""KL and entropy terms against exact sums over the vocabulary at every state."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from posttrain.math import kl
from posttrain.methods.table import REINFORCE, RLOO

World = Any  # of this folder's conftest
EXACT = 1e-10
BETA = 0.25


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """|got - wanted| / |wanted|."""
    return float((got - wanted).norm() / wanted.norm())


def visits(world: World) -> torch.Tensor:
    """[N, LENGTH]: weights under which Σ over answers and places is the sum over visited states.

    A state is met in every answer that runs through it, and their probabilities add up to its own.
    """
    return world.logp(world.policy).exp()[:, None].detach() * world.spoken


def penalty_gradient(world: World, **choices: Any) -> torch.Tensor:
    """The expected gradient of the term alone: every reward is 0."""
    before = world.rewards
    world.rewards = torch.zeros_like(before)
    try:
        return -world.expected(replace(REINFORCE, **choices))
    finally:
        world.rewards = before


def test_the_values_of_k1_and_k3_are_the_divergence_and_k2s_is_not(world: World) -> None:
    ours, theirs = world.step_log_probs(world.policy), world.step_log_probs(world.other)
    exact = (visits(world) * kl.exact(ours, theirs)).sum()
    of_answers = world.logp(world.policy) - world.logp(world.other)
    torch.testing.assert_close(exact, (world.logp(world.policy).exp() * of_answers).sum())
    a, b = world.token_logp(world.policy), world.token_logp(world.other)
    for estimator in (kl.k1, kl.k3):
        torch.testing.assert_close((visits(world) * estimator(a, b)).sum(), exact, rtol=1e-12, atol=0)
    assert abs(float(((visits(world) * kl.k2(a, b)).sum() / exact).detach()) - 1) > 0.02


def test_k1_in_the_loss_does_nothing_on_average(world: World) -> None:
    k1, k2 = (penalty_gradient(world, kl=f, kl_in_loss=1.0).norm() for f in (kl.k1, kl.k2))
    assert float(k1 / k2) < EXACT


def test_k2_in_the_loss_is_the_gradient_of_the_divergence_at_each_state(world: World) -> None:
    ours, theirs = world.step_log_probs(world.policy), world.step_log_probs(world.other).detach()
    here = world.gradient_of((visits(world) * kl.exact(ours, theirs)).sum())
    assert error(penalty_gradient(world, kl=kl.k2, kl_in_loss=1.0), here) < EXACT


def test_k3_in_the_loss_is_that_of_the_other_direction(world: World) -> None:
    ours, theirs = world.step_log_probs(world.policy), world.step_log_probs(world.other).detach()
    there = world.gradient_of((visits(world) * kl.exact(theirs, ours)).sum())
    assert error(penalty_gradient(world, kl=kl.k3, kl_in_loss=1.0), there) < EXACT


def test_no_penalty_in_the_loss_sees_that_a_token_changes_the_states_to_come(world: World) -> None:
    of_answers = world.logp(world.policy) - world.logp(world.other).detach()
    whole = world.gradient_of((world.logp(world.policy).exp() * of_answers).sum())
    for estimator in (kl.k2, kl.k3):
        assert error(penalty_gradient(world, kl=estimator, kl_in_loss=1.0), whole) > 0.05


@pytest.mark.parametrize("method", [REINFORCE, RLOO], ids=["reinforce", "rloo"])
def test_in_the_reward_it_is_the_gradient_of_reward_less_divergence(method: Any, world: World) -> None:
    ours, theirs = world.logp(world.policy), world.logp(world.other).detach()
    regularised = world.gradient_of((ours.exp() * (world.rewards - BETA * (ours - theirs))).sum())
    assert error(world.expected(replace(method, kl_in_reward=BETA)), regularised) < EXACT
    assert error(world.expected(method), regularised) > 0.05


def test_the_entropy_bonus_is_the_gradient_of_the_entropy_at_each_state(world: World) -> None:
    ours = world.step_log_probs(world.policy)
    entropy = -(ours.exp() * ours).sum(-1)
    truth = world.gradient_of((visits(world) * entropy).sum())
    assert error(-penalty_gradient(world, entropy_bonus=1.0), truth) < EXACT
