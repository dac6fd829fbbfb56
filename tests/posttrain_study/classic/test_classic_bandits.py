"""Bandits: regret against its theorems, and the gradient bandit against the gradient."""

import numpy as np
import pytest

from posttrain_study.classic.bandits import (
    Bernoulli,
    EpsilonGreedy,
    Gradient,
    Preferences,
    Thompson,
    Ucb,
    ascent,
    earlier_rewards,
    gaps,
    lai_robbins,
    no_baseline,
    play,
    random_argmax,
    regret,
)
from posttrain_study.classic.mdp import softmax

ARMS = Bernoulli((0.1, 0.3, 0.5, 0.8))
STRATEGIES = {
    "epsilon": EpsilonGreedy(0.1),
    "ucb": Ucb(),
    "thompson": Thompson(),
    "gradient": Gradient(0.1),
    "without baseline": Gradient(0.1, no_baseline),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_comes_to_prefer_the_best_arm_and_repeats_by_its_seed(name):
    strategy = STRATEGIES[name]
    pulled = play(ARMS, strategy, pulls=1500, games=40, seed=0)
    # ε-greedy pulls another arm in at least 7.5 % of its turns.
    assert (pulled[:, -300:] == 3).mean() > 0.85
    assert (play(ARMS, strategy, pulls=50, games=40, seed=0) == pulled[:, :50]).all()
    assert (play(ARMS, strategy, pulls=50, games=40, seed=1) != pulled[:, :50]).any()


@pytest.mark.parametrize("bandit", [ARMS, Bernoulli((0.45, 0.5, 0.55))], ids=["easy", "hard"])
def test_the_regret_of_ucb_stays_under_its_bound_at_every_time(bandit):
    mean = regret(bandit, play(bandit, Ucb(), pulls=3000, games=60, seed=1)).mean(axis=0)
    worse = gaps(bandit)[gaps(bandit) > 0]
    for t in (10, 100, 1000, 3000):
        bound = 8 * np.log(t) * (1 / worse).sum() + (1 + np.pi**2 / 3) * worse.sum()
        assert mean[t - 1] <= bound


def test_ucb_and_thompson_grow_like_the_logarithm_and_fixed_exploration_linearly():
    """From T to 4T: a line gives a factor of 4, c·log T one of log 4T / log T = 1.20."""
    T = 1000
    growth = {}
    for strategy in (EpsilonGreedy(0.3), Ucb(), Thompson()):
        mean = regret(ARMS, play(ARMS, strategy, pulls=4 * T, games=100, seed=2)).mean(axis=0)
        growth[type(strategy)] = (mean[-1] - mean[T - 1]) / mean[T - 1]
    assert growth[EpsilonGreedy] > 2.5
    # What a bounded transient leaves of ln(4T)/ln(T) − 1 = 0.2, doubled.
    assert growth[Ucb] < 0.6
    assert growth[Thompson] < 0.6


def test_a_fixed_explorer_pays_epsilon_times_the_mean_gap_for_each_pull():
    mean = regret(ARMS, play(ARMS, EpsilonGreedy(0.3), pulls=4000, games=100, seed=3)).mean(axis=0)
    slope = (mean[-1] - mean[1999]) / 2000
    assert slope == pytest.approx(0.3 * gaps(ARMS).mean(), rel=0.05)


def test_ucb_first_tries_every_arm_once():
    assert (np.sort(play(ARMS, Ucb(), pulls=4, games=20, seed=0), axis=1) == np.arange(4)).all()


@pytest.mark.parametrize("baseline", [0.0, 1.3, -4.0])
def test_the_gradient_bandit_follows_the_gradient_with_any_baseline(baseline):
    """Σ_a π_a (μ_a − b)(e_a − π) = ∂ Σ π_a μ_a / ∂θ: exactly, over all arms."""
    means, logits = np.array([0.3, -1.0, 2.0]), np.array([0.2, -0.5, 1.0])
    pi = softmax(logits)
    steps = ascent(np.tile(logits, (3, 1)), np.arange(3), means, np.full(3, baseline))
    gradient = pi * (means - pi @ means)
    np.testing.assert_allclose(pi @ steps, gradient, atol=1e-12)


def test_a_baseline_near_the_mean_takes_variance_away():
    means, pi = np.array([5.3, 4.0, 7.0]), np.full(3, 1 / 3)

    def variance(b: float) -> float:
        steps = ascent(np.zeros((3, 3)), np.arange(3), means, np.full(3, b))
        return float((pi @ steps**2 - (pi @ steps) ** 2).sum())

    assert variance(float(pi @ means)) < variance(0.0) / 5


def test_the_baseline_is_the_mean_of_the_rewards_before_this_one():
    strategy = Gradient(1.0)
    state = Preferences(np.zeros((1, 2)), np.zeros(1), 0)
    for reward, before in ((4.0, 0.0), (1.0, 4.0), (7.0, 2.5)):
        assert earlier_rewards(state) == before
        after = strategy.learn(state, np.array([0]), np.array([reward]))
        expected = ascent(state.logits, np.array([0]), np.array([reward]), np.array([before]))
        np.testing.assert_allclose(after.logits - state.logits, expected)
        state = after


def test_a_mean_is_a_probability():
    with pytest.raises(ValueError, match="probability"):
        Bernoulli((0.5, 1.5))


def test_pulls_have_their_means():
    rng = np.random.default_rng(0)
    wins = Bernoulli((0.0, 0.25)).pull(np.array([0, 1] * 10_000), rng).reshape(-1, 2)
    assert wins[:, 0].max() == 0
    assert wins[:, 1].mean() == pytest.approx(0.25, abs=5 * 0.0044)


def test_divergences_are_those_of_the_distributions():
    p, q = 0.3, 0.8
    samples = np.random.default_rng(0).random(200_000) < p
    ratio = np.where(samples, np.log(p / q), np.log((1 - p) / (1 - q)))
    error = 5 * ratio.std() / np.sqrt(len(ratio))
    assert Bernoulli((p, q)).divergence(p, q) == pytest.approx(ratio.mean(), abs=error)
    assert Bernoulli((0.0, 0.5)).divergence(0.0, 0.5) == pytest.approx(np.log(2))
    assert lai_robbins(Bernoulli((p, q))) == pytest.approx((q - p) / Bernoulli((p, q)).divergence(p, q))


def test_equals_are_decided_at_random():
    chosen = random_argmax(np.zeros((3000, 3)), np.random.default_rng(0))
    assert np.bincount(chosen) == pytest.approx(1000, abs=5 * 26)
