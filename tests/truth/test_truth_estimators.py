"""The exact expectation of each method's gradient against the gradient of the expected reward."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from posttrain.math import advantages, ratios, reduce, surrogate
from posttrain.methods.table import DR_GRPO, GRPO, METHODS, REINFORCE, RLOO, build

World = Any  # of this folder's conftest
HORIZON = 5
EXACT = 1e-10
ONLINE = [name for name, line in METHODS.items() if line.loop == "online"]
EXTRAS: dict[str, Any] = {"kl_in_loss": 0.3, "kl_in_reward": 0.2, "entropy_bonus": 0.1}


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """|got - wanted| / |wanted|."""
    return float((got - wanted).norm() / wanted.norm())


def bias(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Sine of the angle between them: 0 if and only if got is a multiple of wanted."""
    along = (got @ wanted) / (wanted @ wanted) * wanted
    return float((got - along).norm() / got.norm())


def test_the_worlds_are_whole(world: World) -> None:
    assert len(world.pairs()) in (27**2, 15**2)
    assert float(world.probabilities().sum()) == pytest.approx(1, abs=1e-12)
    assert float(world.probabilities(world.other).sum()) == pytest.approx(1, abs=1e-12)
    assert float(world.true_gradient().norm()) > 0.1
    p = world.logp(world.policy).exp().detach()
    assert 0.001 < float(p.min()) < float(p.max()) < 0.5


@pytest.mark.parametrize(
    ("name", "extras"), [(n, {}) for n in METHODS] + [(n, EXTRAS) for n in ONLINE], ids=lambda x: str(x)[:12]
)
def test_the_learner_takes_the_gradient_that_is_enumerated(
    name: str, extras: dict[str, Any], world: World
) -> None:
    """Some groups of each method, through Learner.update with microbatches of a row or two."""
    method = build(name, extras, horizon=HORIZON)
    picked = torch.randperm(len(world.pairs()), generator=torch.Generator().manual_seed(3))[:6].tolist()
    pairs = [world.pairs()[number] for number in picked]
    learner = world.learner(method)
    found = torch.stack([learner(world.batch(*pair)) for pair in pairs])
    assert error(found, world.group_gradients(method, pairs)) < EXACT


def test_the_learner_takes_it_of_every_group(uneven: World) -> None:
    method = replace(GRPO, kl_in_loss=0.1)
    learner, all_of_them = uneven.learner(method), uneven.group_gradients(method)
    found = torch.stack([learner(uneven.batch(*pair)) for pair in uneven.pairs()])
    assert error(found, all_of_them) < EXACT


@pytest.mark.parametrize("method", [REINFORCE, RLOO], ids=["reinforce", "rloo"])
def test_reinforce_and_rloo_are_unbiased(method: Any, world: World) -> None:
    assert error(world.expected(method), world.true_gradient()) < EXACT


def test_the_group_mean_shrinks_the_gradient_by_one_part_in_k(world: World) -> None:
    centred = replace(REINFORCE, credit=advantages.centred)
    assert error(world.expected(centred), world.true_gradient() / 2) < EXACT


def test_dr_grpo_is_that_over_the_horizon_whatever_the_lengths(world: World) -> None:
    method = replace(DR_GRPO, reduction=partial(reduce.per_horizon, horizon=4))
    assert error(world.expected(method), world.true_gradient() / 2 / 4) < EXACT


def test_division_by_the_deviation_is_no_baseline(even: World) -> None:
    """GRPO's groups of two only say which answer was better: ±1, whatever the rewards."""
    got, truth = even.expected(GRPO), even.true_gradient()
    p, R = even.logp(even.policy).exp().detach(), even.rewards
    # E = Σ_y p(y) (Pr[R < R(y)] - Pr[R > R(y)]) ∇log π(y) / length: the reward has become its rank.
    rank = ((R[:, None] - R).sign() * p).sum(1)
    by_rank = even.gradient_of((even.logp(even.policy) * p * rank).sum() / 3)
    assert error(got, by_rank) < 1e-4  # eps = 1e-6 in the denominator
    assert bias(got, truth) > 0.1
    # without the division, and everything else the same, it is a multiple of the truth
    assert bias(even.expected(replace(GRPO, credit=advantages.centred)), truth) < 1e-7


def test_with_rewards_of_0_and_1_in_groups_of_two_it_is_one(even: World) -> None:
    """Every mixed group then has the same deviation, 1/2. With more answers it is not so."""
    before = even.rewards
    even.rewards = (before > 0.3).double()
    try:
        assert bias(even.expected(GRPO), even.true_gradient()) < 1e-7
    finally:
        even.rewards = before


def test_grpo_and_dapo_are_one_where_lengths_are_equal(even: World, uneven: World) -> None:
    dapo = METHODS["dapo"].method
    assert error(even.group_gradients(dapo), even.group_gradients(GRPO)) < EXACT
    assert error(uneven.group_gradients(dapo), uneven.group_gradients(GRPO)) > 0.05


@pytest.mark.parametrize(("one", "other"), [("gspo", "grpo"), ("cispo", "dapo")])
def test_on_fresh_samples_the_kind_of_ratio_does_not_matter(one: str, other: str, world: World) -> None:
    a, b = (world.group_gradients(METHODS[name].method) for name in (one, other))
    assert error(a, b) < EXACT


@pytest.mark.parametrize("reduction", [reduce.per_token, reduce.per_sequence])
def test_a_mean_over_tokens_or_within_answers_is_biased_by_length(reduction: Any, uneven: World) -> None:
    method = replace(RLOO, reduction=reduction)
    assert bias(uneven.expected(method), uneven.true_gradient()) > 0.03
    assert bias(uneven.expected(RLOO), uneven.true_gradient()) < EXACT


def test_leaving_one_out_takes_the_variance_of_a_far_away_zero(world: World) -> None:
    p, before = world.probabilities(), world.rewards

    def variance(method: Any) -> float:
        g = world.group_gradients(method)
        return float(p @ (g - p @ g).square().sum(1))

    world.rewards = before + 10
    try:
        assert variance(RLOO) * 20 < variance(REINFORCE)
        shifted = variance(RLOO)
    finally:
        world.rewards = before
    assert variance(RLOO) == pytest.approx(shifted, rel=1e-9)


@pytest.mark.parametrize("credit", [advantages.raw, advantages.leave_one_out])
def test_on_samples_of_another_policy_only_the_ratio_of_the_whole_answer_is_unbiased(
    credit: Any, world: World
) -> None:
    """Groups drawn from the other model; the gradient is the policy's own."""
    drawn = world.probabilities(world.other)
    free = replace(REINFORCE, credit=credit, surrogate=surrogate.unclipped)
    # by_trajectory puts the whole answer's ratio on each of its tokens: their mean counts it once.
    whole = replace(free, ratio=ratios.by_trajectory, reduction=reduce.per_sequence)
    got = -(drawn @ world.group_gradients(whole, old=True))
    assert error(got, world.true_gradient()) < 1e-7  # the weight 1/6 is a float32
    by_token = -(drawn @ world.group_gradients(free, old=True))
    assert bias(by_token, world.true_gradient()) > 0.01
