"""Compare settings over seeds: means with intervals, and paired tests against the best.

Runs with the same seed see the same tasks in the same order, so differences are paired by seed. With a
handful of seeds they follow Student's t distribution if runs are normal around their mean.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.evaluation.suites.numbers import holm, sign_test

LEVEL = 0.05
LEAST = 3
"""Fewest seeds of a verdict: with two, the 95 % interval is 12.7 standard errors wide on each side."""
_TINY = 1e-12
"""Spread, relative to the values, that is only rounding."""


def t_tails(t: float, df: int) -> float:
    """Return P(|T| > |t|) of Student's distribution with `df` degrees of freedom.

    Source: Abramowitz and Stegun 1964, 26.7.3 and 26.7.4.

    >>> round(t_tails(12.7062, 1), 5), round(t_tails(4.30265, 2), 5), round(t_tails(2.570582, 5), 5)
    (0.05, 0.05, 0.05)
    """
    angle = math.atan(abs(t) / math.sqrt(df))
    cosine, odd = math.cos(angle), df % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(2 + odd, df + 1, 2):
        total += term
        term *= (k - 1) / k * cosine**2
    inside = (angle + math.sin(angle) * total) * 2 / math.pi if odd else math.sin(angle) * total
    return max(0.0, 1.0 - inside)


def t_bound(df: int) -> float:
    """Return the t with P(|T| > t) = 0.05, which many standard errors the half of a 95 % interval is.

    >>> round(t_bound(1), 3), round(t_bound(2), 3), round(t_bound(30), 3)
    (12.706, 4.303, 2.042)
    """
    low, high = 0.0, 16.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tails(middle, df) > LEVEL else (low, middle)
    return high


def mean_interval(values: Sequence[float]) -> dict[str, float | None]:
    """Return mean ± t s / √n as mean, low and high; the bounds of a single value are None."""
    mean = statistics.fmean(values) if values else None
    if mean is None or len(values) < 2:
        return {"mean": mean, "low": None, "high": None}
    half = t_bound(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return {"mean": mean, "low": mean - half, "high": mean + half}


def paired_t(differences: Sequence[float], scale: float = 1.0) -> dict[str, float | None]:
    """Return the mean difference with its 95 % interval and the two-sided p of t = mean √n / s.

    scale: magnitude of the values that were subtracted. Differences that are all equal have no spread from
    which a t could be computed: their p is that of the sign test, and they have no interval.

    >>> paired_t([1.0, 2.0, 3.0])["p"] < paired_t([1.0, 2.0, 6.0])["p"]
    True
    >>> paired_t([0.25, 0.25, 0.25])
    {'difference': 0.25, 'low': None, 'high': None, 'p': 0.25}
    """
    n, interval = len(differences), mean_interval(differences)
    mean = interval.pop("mean")
    out: dict[str, float | None] = {"difference": mean, **interval, "p": None}
    if n < 2 or mean is None:
        return out
    error = statistics.stdev(differences) / math.sqrt(n)
    if error <= _TINY * scale:
        equal = abs(mean) <= _TINY * scale
        return out | {"low": None, "high": None, "p": 1.0 if equal else sign_test(n, 0)}
    return out | {"p": t_tails(mean / error, n - 1)}


def compare_seeds(values: Sequence[Mapping[int, float]], sign: int) -> dict[str, Any]:
    """Compare each setting with the best one, paired by seed.

    values: for each setting its value by seed. sign: 1 if higher is better, -1 if lower is. The best one has
    the best mean among those with the most seeds. A difference to it, setting minus best, is `real` if its p,
    corrected by Holm for all settings that can be tested, is at most 0.05; None, undecided, with fewer than
    LEAST common seeds. If several with the most seeds share the best mean, each is `tied` and no setting is
    best; the others are compared with the first tied one.

    Returns best (index; None for a tie, or without any value) and settings: n, mean, low, high, tied, and
    against.
    """
    most = max(map(len, values), default=0)
    means = [mean_interval(list(of_seed.values())) for of_seed in values]
    complete = [k for k, of_seed in enumerate(values) if most and len(of_seed) == most]
    best = max(complete, key=lambda k: sign * (means[k]["mean"] or 0.0), default=None)
    top = 0.0 if best is None else means[best]["mean"] or 0.0
    rounding = _TINY * max((abs(x) for of_seed in values for x in of_seed.values()), default=0.0)
    tied = [k for k in complete if abs((means[k]["mean"] or 0.0) - top) <= rounding]
    against: list[dict[str, Any] | None] = [None] * len(values)
    for k, of_seed in enumerate(values):
        if k == best or best is None:
            continue
        shared = sorted(of_seed.keys() & values[best].keys())
        differences = [of_seed[seed] - values[best][seed] for seed in shared]
        scale = max((abs(x) for one in (of_seed, values[best]) for x in one.values()), default=0.0)
        against[k] = {"seeds": len(shared), **paired_t(differences, scale), "p_holm": None, "real": None}
    tested = [one for k, one in enumerate(against) if one and k not in tied and one["seeds"] >= LEAST]
    for one, p in zip(tested, holm([one["p"] for one in tested]), strict=True):
        one["p_holm"], one["real"] = p, p <= LEVEL
    is_tie = len(tied) > 1
    rows = [
        {"n": len(of_seed), **mean, "tied": is_tie and k in tied, "against": one}
        for k, (of_seed, mean, one) in enumerate(zip(values, means, against, strict=True))
    ]
    return {"best": None if is_tie else best, "settings": rows}
