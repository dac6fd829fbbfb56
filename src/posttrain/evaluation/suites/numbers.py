"""Metrics with intervals over problems, as answers to one problem are not independent."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy

from posttrain.evaluation.suites.suite import Metric, Suite
from posttrain.math.coverage import coverage
from posttrain.types import RunError
from posttrain.verifiers.protocol import Verifier

Z = 1.959963984540054
"""Standard errors on each side that hold 95 % of a normal distribution."""
RESAMPLES = 10_000
"""Bootstrap resamples; the relative error of a standard error is then 0.7 %."""
_CELLS = 1 << 22
"""Number of indices drawn at once, to bound memory."""


class Interval(NamedTuple):
    """A number with its standard error, and the bounds of its 95 % interval."""

    value: float
    error: float
    low: float
    high: float


class Ratio(NamedTuple):
    """Σ of / Σ per over problems: a numerator and a denominator for each problem, in the same order."""

    of: Sequence[float]
    per: Sequence[float]

    @property
    def value(self) -> float:
        per = math.fsum(self.per)
        if not per:
            raise RunError("evaluate", "no answer could be judged")
        return float(math.fsum(self.of) / per)


def resample(ratios: Sequence[Ratio]) -> Any:
    """Return [R, len(ratios)]: the ratios on problems drawn with replacement, the same for all ratios."""
    n = len(ratios[0].of)
    draws, columns = numpy.random.default_rng(0), numpy.array(ratios, dtype=float)  # [ratios, 2, n]
    out = []
    for _ in range(0, RESAMPLES, step := max(1, min(RESAMPLES, _CELLS // n))):
        picked = columns[:, :, draws.integers(n, size=(step, n))].sum(-1)  # [ratios, 2, step]
        with numpy.errstate(invalid="ignore"):
            out.append((picked[:, 0] / picked[:, 1]).T)
    values = numpy.concatenate(out)[:RESAMPLES]
    return values[~numpy.isnan(values).any(1)]  # without resamples whose denominator is 0


def estimate(ratio: Ratio) -> Interval:
    """Return the ratio with the bootstrap's standard error and percentiles.

    The interval is Wilson's if each problem is right or wrong, or if all problems have the same result: near
    0 and 1 few resamples differ, and their percentiles are too narrow.

    >>> [round(x, 3) for x in estimate(Ratio([0.0] * 100, [1.0] * 100))]
    [0.0, 0.0, 0.0, 0.037]
    """
    n = len(ratio.of)
    values = resample([ratio])[:, 0]
    low, high = (float(x) for x in numpy.percentile(values, [2.5, 97.5]))
    if _right_or_wrong(ratio) or (ratio.value in (0.0, 1.0) and low == high):
        low, high = wilson(ratio.value * n, n)
    return Interval(ratio.value, float(values.std()), low, high)


def paired_difference(first: Ratio, second: Ratio) -> Interval:
    """Return second - first on the same problems, which are resampled together.

    The interval is Tango's if each problem is right or wrong, or if no problem changed: with few changes few
    resamples differ.
    """
    values = resample([first, second])
    change = values[:, 1] - values[:, 0]
    low, high = (float(x) for x in numpy.percentile(change, [2.5, 97.5]))
    if first == second or (_right_or_wrong(first) and _right_or_wrong(second)):
        pairs = list(zip(first.of, second.of, strict=True))
        low, high = tango(sum(b > a for a, b in pairs), sum(b < a for a, b in pairs), len(pairs))
    return Interval(second.value - first.value, float(change.std()), low, high)


def _right_or_wrong(ratio: Ratio) -> bool:
    return set(ratio.of) <= {0.0, 1.0} and set(ratio.per) == {1.0}


def wilson(won: float, n: int) -> tuple[float, float]:
    """Return the interval of shares p with |won/n - p| ≤ z √(p (1 - p) / n), z = 1.96.

    Source: Wilson 1927, Journal of the American Statistical Association 22, p. 209.

    >>> [round(x, 4) for x in wilson(5, 10)], [round(x, 4) for x in wilson(0, 10)]
    ([0.2366, 0.7634], [0.0, 0.2775])
    """
    share, z2 = won / n, Z * Z
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    low = middle - half if won > 0 else 0.0  # middle equals half for won = 0, up to rounding
    high = middle + half if won < n else 1.0
    return low, high


def tango(better: int, worse: int, n: int) -> tuple[float, float]:
    """Return the interval of differences δ of two shares of n with |b - w - nδ| ≤ z √(n (2q + δ (1 - δ))).

    q is the likeliest share of the worse at that δ, the greater root of
    2n q² - (b + w - (2n - b + w) δ) q - w δ (1 - δ) = 0; z = 1.96.

    Source: Tango 1998, Statistics in Medicine 17, p. 891.

    >>> [round(x, 4) for x in tango(0, 0, 100)], [round(x, 4) for x in tango(9, 3, 50)]
    ([-0.037, 0.037], [-0.0178, 0.2627])
    """

    def beyond(delta: float) -> bool:
        linear = better + worse - (2 * n - better + worse) * delta
        root = math.sqrt(max(0.0, linear**2 + 8 * n * worse * delta * (1 - delta)))
        variance = n * ((linear + root) / (2 * n) + delta * (1 - delta))
        return (better - worse - n * delta) ** 2 > Z * Z * max(0.0, variance)

    value, ends = (better - worse) / n, []
    for end in (-1.0, 1.0):
        inside, outside = value, end
        for _ in range(60):  # bisection of a width of at most 2, to the last bit
            middle = (inside + outside) / 2
            inside, outside = (inside, middle) if beyond(middle) else (middle, outside)
        ends.append(inside)
    return ends[0], ends[1]


def sign_test(better: int, worse: int) -> float:
    """Return the probability of a split at least as uneven if both sides are equally likely, without ties.

    2 Σ_{i ≤ min} C(n, i) / 2ⁿ, at most 1.

    >>> sign_test(5, 0), sign_test(1, 1), sign_test(0, 0)
    (0.0625, 1.0, 1.0)
    """
    n = better + worse
    tail = sum(math.comb(n, i) for i in range(min(better, worse) + 1))
    return float(min(1.0, 2 * tail / 2**n))


def holm(ps: Sequence[float]) -> list[float]:
    """Return the p-values corrected for their number m: the i-th in order times m - i + 1, never falling.

    Source: Holm 1979, Scandinavian Journal of Statistics 6, p. 65.

    >>> holm([0.01, 0.5, 0.02])
    [0.03, 0.5, 0.04]
    """
    order = sorted(range(len(ps)), key=ps.__getitem__)
    out, least = [0.0] * len(ps), 0.0
    for rank, place in enumerate(order):
        least = max(least, min(1.0, (len(ps) - rank) * ps[place]))
        out[place] = least
    return out


def majority(keys: Sequence[str | None], right: Sequence[bool]) -> float:
    """Return the probability that the most frequent answer is right; ties are broken at random.

    All right answers vote for the same, whatever their key; answers without a key have no vote.

    >>> majority(["1/2", "0.5", "3"], [True, True, False]), majority(["1", "2"], [True, False])
    (1.0, 0.5)
    """
    pairs = zip(keys, right, strict=True)
    votes = Counter(("right", "") if ok else ("", key) for key, ok in pairs if key is not None)
    most = max(votes.values(), default=0)
    first = [name for name, count in votes.items() if count == most]
    return float(("right", "") in first) / max(1, len(first))


# ---------------------------------------------------------------------- of a suite


def group_by_problem(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the answers to each problem by its id, in the order of their samples."""
    out: dict[str, list[Mapping[str, Any]]] = {}
    for line in sorted(lines, key=lambda line: int(line["sample"])):
        out.setdefault(line["id"], []).append(line)
    return out


def ratio_of(metric: Metric, answers: Mapping[str, Sequence[Mapping[str, Any]]], ids: Sequence[str]) -> Ratio:
    """Return a metric over these problems; an answer without a score adds 0 to the numerator."""
    of = [math.fsum(_part(line, metric.of) for line in answers[name]) for name in ids]
    per = [
        math.fsum(_part(line, metric.per) if metric.per else 1.0 for line in answers[name]) for name in ids
    ]
    return Ratio(of, per)


def _part(line: Mapping[str, Any], name: str) -> float:
    return float((line["score"] if name == "score" else line["parts"].get(name)) or 0.0)


def ratios(suite: Suite, lines: Sequence[Mapping[str, Any]]) -> dict[str, Ratio]:
    """Return the metrics of a suite; with several answers to a problem also pass@k and majority@n."""
    answers = group_by_problem(lines)
    out = {metric.name: ratio_of(metric, answers, list(answers)) for metric in suite.metrics}
    n = min(map(len, answers.values()))
    ones = [1.0] * len(answers)
    right = {name: [line["score"] == 1.0 for line in group] for name, group in answers.items()}
    for k in sorted({2**i for i in range(1, n.bit_length())} | {n} - {1}):
        out[f"pass@{k}"] = Ratio([coverage(sum(group), len(group), k) for group in right.values()], ones)
    if n > 1 and suite.verifier and type(suite.verifier).vote is not Verifier.vote:
        keys = {name: [line.get("key") for line in group] for name, group in answers.items()}
        out[f"majority@{n}"] = Ratio([majority(keys[name], right[name]) for name in answers], ones)
    return out


def summary(suite: Suite, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the entry of a suite in results.json."""
    return {
        "answers": len(lines),
        "errors": sum(line["score"] is None for line in lines),
        "cut_off": sum(line["stop"] in ("length", "context") for line in lines),
        "labels": dict(Counter(line["label"] for line in lines).most_common()),
        "metrics": {name: estimate(ratio)._asdict() for name, ratio in ratios(suite, lines).items()},
    }
