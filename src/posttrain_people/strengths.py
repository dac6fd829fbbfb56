"""Bradley-Terry strengths of sources of answers, with a reliability of each rater, by maximum likelihood.

P(rater r prefers an answer of i to one of j) = σ(β_r (θ_i - θ_j))

θ are the strengths, in nats, with mean 0; β_r is the reliability of a rater: 0 is a coin, below 0 one who
prefers the weaker. Only the product is identified, so the mean of β over all comparisons is 1.

Source: Bradley and Terry 1952, "Rank analysis of incomplete block designs"; existence: Ford 1957, "Solution
of a ranking problem from binary comparisons"; raters of different reliability: Chen et al. 2013, "Pairwise
ranking aggregation in a crowdsourced setting", with a scale in place of a probability of flipping.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

STEEPEST = 30.0
"""Reliability, relative to a common one of 1, that stands for an infinite one."""
ROUNDS = 2000
"""Maximum number of alternations between strengths and reliabilities."""


class Win(NamedTuple):
    """A rater's preference; a tie is one of weight 1/2 in each direction."""

    rater: str
    winner: str
    loser: str
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Strengths:
    """Maximum-likelihood estimates, each by the name of a source or of a rater."""

    strength: dict[str, float]
    """θ in nats, mean 0. A rater of reliability 1 prefers the stronger by 1 with probability σ(1) = 0.73."""
    error: dict[str, float]
    """Standard error of θ, from the Fisher information."""
    reliability: dict[str, float]
    """β; infinite if no comparison of the rater contradicts the strengths."""
    log_likelihood: float


class _Table(NamedTuple):
    """Comparisons as indices, all [N]."""

    winner: Ints
    loser: Ints
    rater: Ints
    weight: Floats


def fit_strengths(comparisons: Sequence[Win]) -> Strengths:
    """Return the maximum-likelihood strengths and reliabilities.

    Raises ValueError without a maximum: some source cannot be reached from another by a chain of wins, so
    that their difference is unbounded or unknown.
    """
    sources = sorted({name for c in comparisons for name in (c.winner, c.loser)})
    raters = sorted({c.rater for c in comparisons})
    _check_connected(sources, comparisons)
    table = _Table(
        np.array([sources.index(c.winner) for c in comparisons]),
        np.array([sources.index(c.loser) for c in comparisons]),
        np.array([raters.index(c.rater) for c in comparisons]),
        np.array([c.weight for c in comparisons]),
    )
    theta, beta = _alternate(table, len(sources), len(raters))
    weights = np.bincount(table.rater, table.weight, len(raters))
    finite = np.abs(beta) < STEEPEST
    if not finite.any():
        beta, finite = np.ones_like(beta), ~finite
    mean = float(weights[finite] @ beta[finite] / weights[finite].sum())
    if mean > 0:
        theta, beta = theta * mean, beta / mean
    errors = _errors(table, theta, beta, np.where(finite, weights, 0.0))
    return Strengths(
        strength=dict(zip(sources, theta.tolist(), strict=True)),
        error=dict(zip(sources, errors.tolist(), strict=True)),
        reliability={
            name: float(b) if fits else math.copysign(math.inf, b)
            for name, b, fits in zip(raters, beta, finite, strict=True)
        },
        log_likelihood=_log_likelihood(table, theta, beta),
    )


def _check_connected(sources: Sequence[str], comparisons: Sequence[Win]) -> None:
    """Raise ValueError unless wins lead from each source to each other one."""
    beaten: dict[str, set[str]] = {name: set() for name in sources}
    for c in comparisons:
        beaten[c.winner].add(c.loser)
    for name in sources:
        reached, frontier = {name}, [name]
        while frontier:
            fresh = beaten[frontier.pop()] - reached
            reached |= fresh
            frontier += fresh
        if missing := [other for other in sources if other not in reached]:
            raise ValueError(f"no chain of wins leads from {name!r} to {missing[0]!r}")


def _alternate(table: _Table, sources: int, raters: int) -> tuple[Floats, Floats]:
    """Maximise over θ and β in turn, each exactly, from the strengths for equal raters."""
    beta = np.ones(raters)
    theta = _best_theta(table, np.zeros(sources), beta)
    if raters == 1:
        return theta, beta
    before = _log_likelihood(table, theta, beta)
    for _ in range(ROUNDS):
        beta = _best_beta(table, theta, raters)
        theta = _best_theta(table, theta, beta)
        after = _log_likelihood(table, theta, beta)
        if after - before < 1e-11 * (1 + abs(after)):
            break
        before = after
    return theta, beta


def _log_likelihood(table: _Table, theta: Floats, beta: Floats) -> float:
    x = beta[table.rater] * (theta[table.winner] - theta[table.loser])
    return float(-(table.weight * np.logaddexp(0.0, -x)).sum())


def _best_theta(table: _Table, theta: Floats, beta: Floats) -> Floats:
    """Return the strengths for these reliabilities by Newton's method with step halving."""
    scale, size = beta[table.rater], len(theta)
    for _ in range(200):
        p = _sigmoid(scale * (theta[table.winner] - theta[table.loser]))
        pull = table.weight * scale * (1 - p)
        gradient = np.bincount(table.winner, pull, size) - np.bincount(table.loser, pull, size)
        if np.abs(gradient).max() < 1e-10 * (1 + table.weight.sum()):
            break
        curvature = table.weight * scale**2 * p * (1 - p)
        hessian = np.zeros((size, size))
        for one, other, sign in (
            (table.winner, table.winner, 1.0),
            (table.loser, table.loser, 1.0),
            (table.winner, table.loser, -1.0),
            (table.loser, table.winner, -1.0),
        ):
            np.add.at(hessian, (one, other), sign * curvature)
        step = np.linalg.lstsq(hessian, gradient, rcond=None)[0]
        before, length = _log_likelihood(table, theta, beta), 1.0
        while _log_likelihood(table, theta + length * step, beta) < before and length > 1e-10:
            length /= 2
        theta = theta + length * step
        theta -= theta.mean()
    return theta


def _best_beta(table: _Table, theta: Floats, raters: int) -> Floats:
    """Return each rater's reliability for these strengths: the root of a decreasing slope, by bisection."""
    gap: Floats = theta[table.winner] - theta[table.loser]
    low, high = np.full(raters, -STEEPEST), np.full(raters, STEEPEST)
    for _ in range(80):
        middle = (low + high) / 2
        missed = _sigmoid(-middle[table.rater] * gap)
        rises = np.bincount(table.rater, table.weight * gap * missed, raters) > 0
        low, high = np.where(rises, middle, low), np.where(rises, high, middle)
    middle = (low + high) / 2
    beta: Floats = np.where(np.abs(middle) > STEEPEST - 1e-6, np.sign(middle) * STEEPEST, middle)
    return beta


def _errors(table: _Table, theta: Floats, beta: Floats, weights: Floats) -> Floats:
    """Return the standard errors of θ under the two constraints that fix its place and its scale.

    weights: those of the raters in the mean of β; 0 holds a rater's β fixed.
    """
    sources, free = len(theta), np.flatnonzero(weights)
    gap, scale = theta[table.winner] - theta[table.loser], beta[table.rater]
    p = _sigmoid(scale * gap)
    slopes = np.zeros((len(gap), sources + len(beta)))
    row = np.arange(len(gap))
    slopes[row, table.winner] += scale
    slopes[row, table.loser] -= scale
    slopes[row, sources + table.rater] = gap
    slopes = slopes[:, [*range(sources), *(sources + free)]]
    information = slopes.T @ (slopes * (table.weight * p * (1 - p))[:, None])
    constraints = np.zeros((2, slopes.shape[1]))
    constraints[0, :sources], constraints[1, sources:] = 1.0, weights[free]
    basis: Any = np.linalg.svd(constraints)[2][2:].T
    covariance = basis @ np.linalg.pinv(basis.T @ information @ basis, hermitian=True) @ basis.T
    errors: Floats = np.sqrt(np.diag(covariance).clip(0.0))[:sources]
    return errors


def _sigmoid(x: Floats) -> Floats:
    """Return σ(x) with full relative precision where it is near 0."""
    return np.exp(-np.logaddexp(0.0, -x))
