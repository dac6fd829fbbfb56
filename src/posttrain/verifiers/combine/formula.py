"""How several scores become one. No result depends on the order of the scores, but for a gate's."""

import math
import statistics
from collections.abc import Sequence
from typing import Literal

How = Literal["sum", "product", "gate", "mean", "min", "mean_minus_std"]
ENSEMBLES = ("mean", "min", "mean_minus_std")


def combined(how: How, scores: Sequence[float], k: float = 1.0) -> float:
    """The one score; infinite where it is too large for a number.

    A product takes scores below 0 as 0, as two wrongs make no right. A gate's scores are those up to the
    part that decided, and the last one counts. Sums, means and deviations are exact, then rounded once.

    >>> [combined(how, [1.0, 0.5]) for how in ("sum", "product", "gate", "mean", "min", "mean_minus_std")]
    [1.5, 0.5, 0.5, 0.75, 0.5, 0.5]
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
    """Σ scores, correctly rounded; infinite where that is too large for a number."""
    try:
        return math.fsum(scores) if all(math.isfinite(score) for score in scores) else math.inf
    except OverflowError:
        return math.inf


def deviation(scores: Sequence[float]) -> float:
    """The standard deviation, ddof 0; exactly 0 where all scores are the same.

    >>> deviation([0.1, 0.1, 0.1]), deviation([1.0, 3.0])
    (0.0, 1.0)
    """
    return statistics.pstdev(scores) if all(math.isfinite(score) for score in scores) else math.inf
