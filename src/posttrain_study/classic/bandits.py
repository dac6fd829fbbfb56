"""Bandits: k arms, one state, and the price of finding the best arm.

    regret(T) = Σ_t (μ* − μ_{a_t})

A fixed share of exploration costs regret in proportion to T; UCB and Thompson in proportion to log T, which
is the least possible in the limit (`lai_robbins`). N independent games are played at once: arrays are
[N, K] over games and arms, [N, T] over games and pulls.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from posttrain_study.classic.mdp import Array, softmax

Arms = NDArray[np.int64]


@dataclass(frozen=True)
class Bernoulli:
    """Rewards 1 with probability μ_a, else 0; the optimum is to always pull the arm with the largest μ."""

    means: tuple[float, ...]

    def __post_init__(self) -> None:
        if not all(0 <= m <= 1 for m in self.means):
            raise ValueError(f"a probability lies in [0, 1]: {self.means}")

    def pull(self, arms: Arms, rng: np.random.Generator) -> Array:
        """Draw one reward for each of these arms, 0 or 1."""
        return np.asarray(rng.random(arms.shape) < np.array(self.means)[arms], dtype=np.float64)

    def divergence(self, low: float, high: float) -> float:
        """low log(low/high) + (1 − low) log((1 − low)/(1 − high)), with 0 log 0 = 0.

        >>> round(Bernoulli((0.25, 0.5)).divergence(0.25, 0.5), 4)
        0.1308
        """
        pairs = ((low, high), (1 - low, 1 - high))
        with np.errstate(divide="ignore"):
            return float(sum(p * (np.log(p) - np.log(q)) for p, q in pairs if p > 0))


class Strategy(Protocol):
    """Pulls arms in N games: a state, the choice of arms, and learning from their rewards."""

    def begin(self, games: int, arms: int) -> Any:
        """Return the state before the first pull."""
        ...

    def choose(self, state: Any, rng: np.random.Generator) -> Arms:
        """Choose one arm for each game."""
        ...

    def learn(self, state: Any, arms: Arms, rewards: Array) -> Any:
        """Return the state after these pulls."""
        ...


@dataclass(frozen=True, eq=False)
class Tally:
    """The number of pulls of each arm, and the sum of its rewards; both [N, K]."""

    pulls: Array
    total: Array

    @property
    def mean(self) -> Array:
        """Mean reward of each arm, 0 before its first pull."""
        return np.asarray(self.total / np.maximum(self.pulls, 1))


class Counting:
    """A strategy whose state is a Tally."""

    def begin(self, games: int, arms: int) -> Tally:
        """Return a tally without pulls."""
        return Tally(np.zeros((games, arms)), np.zeros((games, arms)))

    def learn(self, state: Tally, arms: Arms, rewards: Array) -> Tally:
        """Add one pull in each game."""
        hit = np.eye(state.pulls.shape[1])[arms]
        return Tally(state.pulls + hit, state.total + hit * rewards[:, None])


@dataclass(frozen=True)
class EpsilonGreedy(Counting):
    """Any arm with probability ε, otherwise the one with the largest mean so far.

    With a fixed ε the regret of each pull tends to ε · mean(μ* − μ), so it grows linearly.
    """

    epsilon: float

    def choose(self, state: Tally, rng: np.random.Generator) -> Arms:
        """Choose an arm; equal means are decided at random, untried arms count with mean 0."""
        games, arms = state.pulls.shape
        any_arm = rng.integers(arms, size=games)
        return np.where(rng.random(games) < self.epsilon, any_arm, random_argmax(state.mean, rng))


@dataclass(frozen=True)
class Ucb(Counting):
    """argmax_a mean_a + width √(log t / n_a), each arm once first; t pulls have been made.

    With width √2 its expected regret stays under 8 Σ log T / Δ_a + (1 + π²/3) Σ Δ_a over the worse arms.

    Source: UCB1, Auer, Cesa-Bianchi and Fischer 2002, figure 1 and theorem 1.
    """

    width: float = 2**0.5

    def choose(self, state: Tally, rng: np.random.Generator) -> Arms:
        """Choose an arm; untried arms have an infinite bound."""
        t = state.pulls.sum(axis=1, keepdims=True)
        bonus = self.width * np.sqrt(np.log(np.maximum(t, 1)) / np.maximum(state.pulls, 1))
        return random_argmax(np.where(state.pulls == 0, np.inf, state.mean + bonus), rng)


@dataclass(frozen=True)
class Thompson(Counting):
    """argmax_a of a draw from Beta(1 + successes, 1 + failures): each arm as often as it seems best.

    Source: Thompson 1933; its regret reaches the bound of Lai and Robbins (Kaufmann et al. 2012).
    """

    def choose(self, state: Tally, rng: np.random.Generator) -> Arms:
        """Choose the arm with the largest draw."""
        return random_argmax(rng.beta(1 + state.total, 1 + state.pulls - state.total), rng)


@dataclass(frozen=True, eq=False)
class Preferences:
    """Logits [N, K], the mean of the rewards so far [N], and their number."""

    logits: Array
    mean: Array
    pulls: int


def earlier_rewards(state: Preferences) -> Array:
    """Mean of the rewards before this one; with this one in it the step would shrink."""
    return state.mean


def no_baseline(state: Preferences) -> Array:
    """b = 0, so each reward counts in full."""
    return np.zeros_like(state.mean)


Baseline = Callable[[Preferences], Array]


@dataclass(frozen=True)
class Gradient:
    """θ ← θ + rate · (r − b)(e_a − π), π = softmax θ: REINFORCE with one state.

    Its expectation is the gradient of Σ π_a μ_a with any b that was fixed before the pull.

    Source: Sutton and Barto 2018, section 2.8.
    """

    rate: float
    baseline: Baseline = earlier_rewards
    """b: `earlier_rewards`, or `no_baseline`."""

    def begin(self, games: int, arms: int) -> Preferences:
        """Return equal preferences for all arms."""
        return Preferences(np.zeros((games, arms)), np.zeros(games), 0)

    def choose(self, state: Preferences, rng: np.random.Generator) -> Arms:
        """Draw an arm from the softmax of the preferences."""
        # The largest of logits plus Gumbel noise is a draw from their softmax.
        return np.asarray((state.logits + rng.gumbel(size=state.logits.shape)).argmax(axis=1))

    def learn(self, state: Preferences, arms: Arms, rewards: Array) -> Preferences:
        """Take one step of `ascent`."""
        n = state.pulls + 1
        step = ascent(state.logits, arms, rewards, self.baseline(state))
        logits = state.logits + self.rate * step
        return Preferences(logits, state.mean + (rewards - state.mean) / n, n)


def ascent(logits: Array, arms: Arms, rewards: Array, baseline: Array) -> Array:
    """(r − b)(e_a − π), the estimate of ∂ Σ π_a μ_a / ∂θ from one pull in each game.

    >>> ascent(np.zeros((1, 2)), np.array([0]), np.array([3.0]), np.array([1.0])).tolist()
    [[1.0, -1.0]]
    """
    score = np.eye(logits.shape[1])[arms] - softmax(logits)
    return np.asarray((rewards - baseline)[:, None] * score)


def play(bandit: Bernoulli, strategy: Strategy, *, pulls: int, games: int, seed: int) -> Arms:
    """Play `games` independent games and return the arms pulled, [N, T]."""
    rng = np.random.default_rng(seed)
    state = strategy.begin(games, len(bandit.means))
    history = np.empty((games, pulls), dtype=np.int64)
    for t in range(pulls):
        arms = strategy.choose(state, rng)
        history[:, t] = arms
        state = strategy.learn(state, arms, bandit.pull(arms, rng))
    return history


def gaps(bandit: Bernoulli) -> Array:
    """μ* − μ_a of each arm.

    >>> gaps(Bernoulli((0.25, 0.75))).tolist()
    [0.5, 0.0]
    """
    means = np.array(bandit.means)
    return np.asarray(means.max() - means)


def regret(bandit: Bernoulli, history: Arms) -> Array:
    """Σ_{i ≤ t} (μ* − μ_{a_i}), [N, T]: expected rewards, so the noise of the pulls is not in it.

    >>> regret(Bernoulli((0.25, 0.75)), np.array([[0, 1, 0]])).tolist()
    [[0.5, 0.5, 1.0]]
    """
    return np.asarray(gaps(bandit)[history].cumsum(axis=1))


def lai_robbins(bandit: Bernoulli) -> float:
    """Σ Δ_a / KL(μ_a, μ*): lim inf regret(T) / log T of any strategy that is good on every bandit.

    A limit: at a small T the regret may well lie under this times log T.

    Source: Lai and Robbins 1985.

    >>> round(lai_robbins(Bernoulli((0.25, 0.5))), 2)
    1.91
    """
    top = max(bandit.means)
    return sum((top - m) / bandit.divergence(m, top) for m in bandit.means if m < top)


def random_argmax(score: Array, rng: np.random.Generator) -> Arms:
    """argmax of each row; equal values are decided at random."""
    tie = np.where(score == score.max(axis=1, keepdims=True), rng.random(score.shape), -1.0)
    return np.asarray(tie.argmax(axis=1))
