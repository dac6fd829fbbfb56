"""The exact expectation of each method's gradient against the gradient of the expected reward."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from posttrain.math import advantages, corrections, filters, ratios, reduce, surrogate
from posttrain.methods.build import build
from posttrain.methods.table import DR_GRPO, GRPO, METHODS, REINFORCE, RLOO
from posttrain.types import Method
from posttrain_study.truth import estimators, exact
from posttrain_study.truth.comparison import error, sine
from posttrain_study.truth.world import World

HORIZON = 5
EXACT = 1e-10
ONLINE = [name for name, line in METHODS.items() if line.loop == "online" and line.has_loss]
POLICIES = [n for n, line in METHODS.items() if "head" not in line.method.needs and line.has_loss]
"""Methods that move log-probabilities by a loss: a reward model has none."""
GROUPED = [name for name in ONLINE if hasattr(METHODS[name].method, "credit")]
EXTRAS: dict[str, Any] = {"kl_in_loss": 0.3, "kl_in_reward": 0.2, "entropy_bonus": 0.1}


def expected(world: World, method: Method) -> torch.Tensor:
    """E[g] over all groups of two."""
    return world.estimate(method).mean


def test_the_worlds_are_whole(either: World) -> None:
    N = len(either.answers)
    assert N in (27, 15)
    for size in (1, 2):
        for policy in (either.policy, either.old, either.reference):
            assert float(either.probabilities(size, policy).sum()) == pytest.approx(1, abs=1e-12)
    assert len(either.groups(2)) == N * (N + 1) // 2
    assert float(exact.gradient(either).norm()) > 0.1
    p = exact.chances(either)
    assert 0.001 < float(p.min()) < float(p.max()) < 0.5


@pytest.mark.parametrize("name", ONLINE)
def test_the_order_within_a_group_says_nothing(name: str, short: World) -> None:
    """Or else each set of answers could not be counted once, with the number of its orders."""
    method = build(name, {}, horizon=HORIZON)
    value = exact.state_values(short)
    one, other = short.group_gradients(method, [(0, 1, 3), (3, 0, 1)], value=value)
    assert error(one, other) < EXACT


@pytest.mark.parametrize(
    ("name", "extras"),
    [(n, {}) for n in POLICIES if n != "gigpo"]
    + [
        pytest.param(n, EXTRAS, marks=() if n in ("reinforce", "ppo", "grpo", "gspo") else pytest.mark.full)
        for n in GROUPED
        if n != "gigpo"
    ],
    ids=lambda x: str(x)[:20],
)
def test_the_learner_takes_the_gradient_that_is_enumerated(
    name: str, extras: dict[str, Any], uneven: World, taken: Any
) -> None:
    """Some groups of each method, drawn by another policy, in microbatches of a row or two.

    Turns, which gigpo compares, are in test_truth_turns.py.
    """
    if getattr(METHODS[name].method, "kl_target", 0.0):
        extras = {key: value for key, value in extras.items() if key != "kl_in_reward"}  # one β at a time
    if name == "m2po":
        extras = extras | {"max_second_moment": 9.0}  # the sampler is far, and all would be dropped
    method = build(name, extras, horizon=HORIZON)
    groups = [(3, 8, 11), (0, 5, 14)]
    gradient, value = taken(uneven, method)
    found = torch.stack([gradient(uneven.batch(group, uneven.old)) for group in groups])
    enumerated = uneven.group_gradients(method, groups, sampler=uneven.old, anchor=uneven.policy, value=value)
    assert error(found, enumerated) < EXACT


def test_the_learner_takes_it_of_every_group(either: World, taken: Any) -> None:
    method = replace(GRPO, kl_in_loss=0.1)
    groups = either.groups(2)[::7]
    gradient, _ = taken(either, method)
    found = torch.stack([gradient(either.batch(group)) for group in groups])
    assert error(found, either.group_gradients(method, groups)) < EXACT


@pytest.mark.parametrize("method", [REINFORCE, RLOO], ids=["reinforce", "rloo"])
def test_reinforce_and_rloo_are_unbiased(method: Any, either: World) -> None:
    assert error(expected(either, method), exact.gradient(either)) < EXACT


def test_the_group_mean_shrinks_the_gradient_by_one_part_in_k(either: World, short: World) -> None:
    centred = replace(REINFORCE, credit=advantages.centred)
    assert error(expected(either, centred), exact.gradient(either) / 2) < EXACT
    assert error(short.estimate(centred, 4).mean, exact.gradient(short) * 3 / 4) < EXACT


def test_dr_grpo_is_that_over_the_horizon_whatever_the_lengths(either: World) -> None:
    method = replace(DR_GRPO, reduction=partial(reduce.per_horizon, horizon=4))
    assert error(expected(either, method), exact.gradient(either) / 2 / 4) < EXACT


def test_the_optimal_token_baseline_is_that_of_least_variance(either: World) -> None:
    """No shift of B_t lowers the noise Σ_i π(y_i) W_it (G_it - b)² of answers as often as they are likely."""
    W = either.score_norm(either.policy).cumsum(1)
    G = either.reward.flip(1).cumsum(1).flip(1)
    chance = either.logp(either.policy).exp().detach()
    for t in range(either.length):
        alive = either.mask[:, t]
        counts = (chance[alive] * 2000).round().long()
        g, w = (torch.repeat_interleave(x[alive, t], counts) for x in (G, W))
        group = torch.zeros(len(g), dtype=torch.long)
        A = advantages.optimal_by_token(g, group, torch.full_like(group, t), w)
        assert abs(float((w * A).sum())) < EXACT * float((w * g.abs()).sum() + 1)
        baseline = float((g - A).mean())
        noise = [float((w * (g - b).square()).sum()) for b in (baseline - 0.01, baseline, baseline + 0.01)]
        assert noise[1] < noise[0]
        assert noise[1] < noise[2]


@pytest.mark.parametrize("size", [1, 2])
def test_the_greedy_answer_is_an_unbiased_baseline_for_a_single_answer_too(size: int, either: World) -> None:
    """Its reward is a constant, whatever is drawn."""
    remax, reinforce = (
        either.estimate(build(name, {}, horizon=HORIZON), size) for name in ("remax", "reinforce")
    )
    assert error(remax.mean, exact.gradient(either)) < EXACT
    assert remax.variance != pytest.approx(reinforce.variance)
    step, tokens = either.step_log_probs(either.policy)[either.greedy], either.mask[either.greedy]
    assert torch.equal(step.argmax(-1)[tokens], either.tokens[either.greedy][tokens])


@pytest.mark.parametrize("size", [2, 3, 5, 6, 7])
def test_leaving_one_out_is_unbiased_in_groups_of_any_size(size: int, short: World) -> None:
    """To ten digits, also where 1/K is no binary fraction."""
    assert error(short.estimate(RLOO, size).mean, exact.gradient(short)) < EXACT


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_over_the_mean_is_the_series_of_the_likelihood_up_to_the_groups_size(size: int, short: World) -> None:
    """MaxRL: ∇p (1 - (1 - p)^(K-1))/p, which is ∇p for pairs and only in the limit ∇log p."""
    binary = short.with_rewards((short.returns > 0.3).double())
    p, J = float(exact.objective(binary).detach()), exact.gradient(binary)
    method = replace(REINFORCE, credit=partial(advantages.over_mean, eps=0.0))
    wanted = J * (1 - (1 - p) ** (size - 1)) / p
    assert error(binary.estimate(method, size).mean, wanted) < EXACT
    assert (error(wanted, J) < EXACT) == (size == 2)


def test_division_by_the_deviation_is_no_baseline(even: World) -> None:
    """GRPO's groups of two only say which answer was better: ±1, whatever the rewards."""
    got, truth = expected(even, GRPO), exact.gradient(even)
    p, R = exact.chances(even), even.returns
    # E = Σ_y p(y) (Pr[R < R(y)] - Pr[R > R(y)]) ∇log π(y) / length: the reward has become its rank.
    rank = ((R[:, None] - R).sign() * p).sum(1)
    by_rank = even.policy.gradient((even.logp(even.policy) * p * rank).sum() / 3)
    assert error(got, by_rank) < 1e-4  # eps = 1e-6 in the denominator
    assert sine(got, truth) > 0.1
    # without the division, and everything else the same, it is a multiple of the truth
    assert sine(expected(even, replace(GRPO, credit=advantages.centred)), truth) < EXACT


@pytest.mark.parametrize("size", [2, 4, 6])
def test_with_rewards_of_0_and_1_on_one_task_it_keeps_the_direction(size: int, short: World) -> None:
    """Σ_i A_i ∇log π_i is then a number that only counts the right answers, times ∇p."""
    binary = short.with_rewards((short.returns > 0.3).double())
    method = replace(RLOO, credit=advantages.normalised)
    assert sine(binary.estimate(method, size).mean, exact.gradient(binary)) < EXACT


def test_grpo_and_dapo_are_one_where_lengths_are_equal(even: World, uneven: World) -> None:
    dapo = METHODS["dapo"].method
    some = even.groups(2)[::5]
    assert error(even.group_gradients(dapo, some), even.group_gradients(GRPO, some)) < EXACT
    pairs = uneven.groups(2)
    assert error(uneven.group_gradients(dapo, pairs), uneven.group_gradients(GRPO, pairs)) > 0.05


@pytest.mark.parametrize(
    ("one", "other"), [("gspo", "grpo"), ("gmpo", "grpo"), ("cispo", "dapo"), ("sapo", "grpo")]
)
def test_on_fresh_samples_the_kind_of_ratio_does_not_matter(one: str, other: str, uneven: World) -> None:
    pairs = uneven.groups(2)
    a, b = (uneven.group_gradients(METHODS[name].method, pairs) for name in (one, other))
    assert error(a, b) < EXACT


@pytest.mark.parametrize("reduction", [reduce.per_token, reduce.per_sequence])
def test_a_mean_over_tokens_or_within_answers_is_biased_by_length(reduction: Any, uneven: World) -> None:
    method = replace(RLOO, reduction=reduction)
    assert sine(expected(uneven, method), exact.gradient(uneven)) > 0.03
    assert sine(expected(uneven, RLOO), exact.gradient(uneven)) < EXACT


def test_leaving_one_out_takes_the_variance_of_a_far_away_zero(uneven: World) -> None:
    far = uneven.with_rewards(uneven.returns + 10)
    shifted = far.estimate(RLOO).variance
    assert shifted * 20 < far.estimate(REINFORCE).variance
    assert uneven.estimate(RLOO).variance == pytest.approx(shifted, rel=1e-9)


@pytest.mark.parametrize("credit", [advantages.raw, advantages.leave_one_out])
def test_on_samples_of_another_policy_only_the_ratio_of_the_whole_answer_is_unbiased(
    credit: Any, either: World
) -> None:
    """Groups drawn from the other model; the gradient is the policy's own."""
    free = replace(REINFORCE, credit=credit, surrogate=surrogate.unclipped)
    # by_trajectory puts the whole answer's ratio on each of its tokens: their mean counts it once.
    whole = replace(free, ratio=ratios.by_trajectory, reduction=reduce.per_sequence)
    truth = exact.gradient(either)
    got = either.estimate(whole, sampler=either.old).mean
    assert error(got, truth) < EXACT
    assert sine(either.estimate(free, sampler=either.old).mean, truth) > 0.01


def test_a_correction_counts_from_the_sampler_and_a_ratio_from_the_anchor(short: World) -> None:
    """Decoupled PPO's two factors: π_anchor/π_gen times π/π_anchor is π/π_gen, whatever the anchor."""
    no_cap = partial(corrections.sequence_truncated, weight_cap=float("inf"))
    free = replace(REINFORCE, surrogate=surrogate.unclipped, reduction=reduce.per_sequence)
    whole = replace(free, ratio=ratios.by_trajectory, correction=no_cap)
    truth = exact.gradient(short)
    for anchor in (short.old, short.reference, short.policy):
        assert error(short.estimate(whole, 1, sampler=short.old, anchor=anchor).mean, truth) < EXACT


@pytest.mark.full
def test_training_fewer_tokens_bends_the_gradient_further(short: World) -> None:
    """All tokens: unbiased. No filter is unbiased that drops one, and the more it drops the more it bends."""
    rows = {r.name: r for r in estimators.filtered(short) if r.quantity == "error"}
    off = {name: row.number for name, row in rows.items()}
    entropy = [off[f"top entropy, share {share:g}"] for share in (1.0, 0.8, 0.5, 0.2)]
    assert entropy[0] < EXACT < entropy[1]
    assert entropy == sorted(entropy)
    assert EXACT < off["clip_cov, covariance from 0.1"] < off["clip_cov, covariance from 0"]
    moments = [off[f"M2PO, 0.02 nats later, moment {bound:g}"] for bound in (0.04, 0.03, 0.02)]
    assert moments == sorted(moments)
    assert [r.verdict for r in rows.values()].count("unbiased") == 1


def test_on_fresh_samples_m2po_drops_nothing(short: World) -> None:
    held = replace(RLOO, filter=partial(filters.low_second_moment, max_second_moment=0.0))
    assert error(short.estimate(held, 2).mean, short.estimate(RLOO, 2).mean) < EXACT
