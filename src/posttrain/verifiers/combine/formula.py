"""Combine several scores into one. Only a gate depends on their order."""

import math
import statistics
from collections.abc import Sequence
from typing import Literal

How = Literal["sum", "product", "gate", "mean", "min", "mean_minus_std"]
ENSEMBLES = ("mean", "min", "mean_minus_std")


def combine_scores(how: How, scores: Sequence[float], k: float = 1.0) -> float:
    """Combine scores by one of the formulas below; infinite if the result is beyond a float.

    A product counts scores below 0 as 0, so that two negative scores do not make a positive one. A gate gets
    the scores up to the part that decided, and returns the last. Sums, means and deviations are computed
    exactly and rounded once.

    >>> [combine_scores(how, [1.0, 0.5]) for how in ("sum", "product", "gate", "mean", "min")]
    [1.5, 0.5, 0.5, 0.75, 0.5]
    >>> combine_scores("mean_minus_std", [1.0, 0.5])
    0.5
    """
    if how == "gate":
        return scores[-1]
    if how == "product":
        return math.prod(sorted(max(score, 0.0) for score in scores))
    if how == "min":
        return min(scores)
    if how == "sum":
        return total(scores)
    if not all(math.isfinite(score) for score in scores):
        return math.inf
    return statistics.mean(scores) - (k * deviation(scores) if how == "mean_minus_std" else 0.0)


def total(scores: Sequence[float]) -> float:
    """Σ scores, correctly rounded; infinite if the sum is beyond a float."""
    try:
        return math.fsum(scores) if all(math.isfinite(score) for score in scores) else math.inf
    except OverflowError:
        return math.inf


def deviation(scores: Sequence[float]) -> float:
    """Standard deviation of the scores, ddof 0; exactly 0 if all scores are the same.

    >>> deviation([0.1, 0.1, 0.1]), deviation([1.0, 3.0])
    (0.0, 1.0)
    """
    return statistics.pstdev(scores) if all(math.isfinite(score) for score in scores) else math.inf
