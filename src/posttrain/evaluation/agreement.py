"""Agreement of a verifier with gold labels, for `posttrain verify --gold`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from posttrain.evaluation.suites.numbers import Interval, wilson
from posttrain.evaluation.verdicts import Response
from posttrain.types import UserError, Verdict

RESAMPLES = 2000
"""Bootstrap resamples of the tasks."""
BINS = 5

Pairs = Sequence[tuple[float, bool]]
"""Score and gold label of each response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """The responses with scores in one of BINS equal ranges."""

    low: float
    high: float
    count: int
    score: float
    """Mean score of its responses."""
    gold: float
    """Share whose gold label is right, with the bounds of Wilson's interval."""
    gold_low: float
    gold_high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Agreement of scores with gold labels; responses without a score are left out."""

    judged: int
    failed: int
    accuracy: Interval
    kappa: Interval
    auc: Interval
    """NaN if all gold labels are equal."""
    bins: Sequence[Bin] = field(default_factory=list)
    disagree: float | None = None
    """Share of comparisons in which the two orders contradict each other; None without comparisons."""
    bias: float | None = None
    """Mean preference for the response that is read first, -1 to 1; None without comparisons."""


def measure_agreement(
    responses: Sequence[Response], verdicts: Sequence[Verdict], *, right: float = 0.5
) -> Agreement:
    """Compare verdicts with the gold labels of the responses; a score of at least `right` counts as right.

    Intervals resample tasks, because responses to a task are not independent; that of the accuracy is
    Wilson's if each task has one response. Raises UserError if no response could be judged.
    """
    by_task: dict[str, list[tuple[float, bool]]] = {}
    for response, verdict in zip(responses, verdicts, strict=True):
        if verdict.score is not None:
            by_task.setdefault(response.task.id, []).append((verdict.score, read_gold(response)))
    pairs = [pair for of_task in by_task.values() for pair in of_task]
    if not pairs:
        raise UserError("--gold", "no response could be judged", "read the reasons of the verdicts")
    compared = [verdict for verdict in verdicts if "bias" in verdict.parts]
    accuracy = _interval(lambda some: _accuracy(some, right), list(by_task.values()))
    if len(pairs) == len(by_task):
        accuracy = Interval(*accuracy[:2], *wilson(accuracy.value * len(pairs), len(pairs)))
    return Agreement(
        judged=len(pairs),
        failed=len(responses) - len(pairs),
        accuracy=accuracy,
        kappa=_interval(
            lambda some: kappa([(score >= right, gold) for score, gold in some]), [*by_task.values()]
        ),
        auc=_interval(auc, list(by_task.values())),
        bins=_bins(pairs),
        disagree=sum(v.label == "disagree" for v in compared) / len(compared) if compared else None,
        bias=math.fsum(v.parts["bias"] for v in compared) / len(compared) if compared else None,
    )


def read_gold(response: Response) -> bool:
    """Return whether a response's gold label is right: true, or a number of at least 0.5.

    Raises UserError at the response's line without such a label.
    """
    gold: Any = response.gold
    if isinstance(gold, bool):
        return gold
    if isinstance(gold, (int, float)) and math.isfinite(gold):
        return gold >= 0.5
    problem = (
        f"the response has no gold label, but {gold!r}" if gold is not None else "there is no gold label"
    )
    raise UserError(
        response.source, problem, "give it the field 'gold' (or 'label'): true, false or a number"
    )


def kappa(pairs: Sequence[tuple[bool, bool]]) -> float:
    """(p_o - p_e) / (1 - p_e): observed agreement above that of independent labels; NaN if p_e = 1.

    Source: Cohen 1960, Educational and Psychological Measurement 20, p. 37.

    >>> kappa([(True, True)] * 20 + [(True, False)] * 5 + [(False, True)] * 10 + [(False, False)] * 15)
    0.4
    """
    n = len(pairs)
    observed = sum(a == b for a, b in pairs) / n
    first, second = sum(a for a, _ in pairs) / n, sum(b for _, b in pairs) / n
    chance = first * second + (1 - first) * (1 - second)
    return round((observed - chance) / (1 - chance), 12) if chance < 1 else math.nan


def auc(pairs: Pairs) -> float:
    """P(s⁺ > s⁻) + P(s⁺ = s⁻) / 2 of a right and a wrong response; NaN without one of either.

    >>> auc([(0.9, True), (0.4, True), (0.4, False), (0.1, False)])
    0.875
    """
    scores, golds = numpy.array([s for s, _ in pairs]), numpy.array([g for _, g in pairs], dtype=bool)
    right, wrong = scores[golds], numpy.sort(scores[~golds])
    if not len(right) or not len(wrong):
        return math.nan
    below, upto = (numpy.searchsorted(wrong, right, side=side) for side in ("left", "right"))
    return float((below + upto).sum() / 2 / (len(right) * len(wrong)))


def _accuracy(pairs: Pairs, right: float) -> float:
    return sum((score >= right) == gold for score, gold in pairs) / len(pairs)


def _interval(statistic: Callable[[Pairs], float], tasks: Sequence[Pairs]) -> Interval:
    """Return the statistic with its bootstrap over tasks; resamples in which it is undefined are left out."""
    draws = numpy.random.default_rng(0)
    value = statistic([pair for of_task in tasks for pair in of_task])
    values = [
        statistic([pair for i in draws.integers(len(tasks), size=len(tasks)) for pair in tasks[i]])
        for _ in range(RESAMPLES if not math.isnan(value) else 0)
    ]
    defined = numpy.array([v for v in values if not math.isnan(v)])
    if not len(defined):
        return Interval(value, math.nan, math.nan, math.nan)
    low, high = (float(x) for x in numpy.percentile(defined, [2.5, 97.5]))
    return Interval(value, float(defined.std()), low, high)


def _bins(pairs: Pairs) -> list[Bin]:
    """Return the bins that are not empty, between the least and the greatest score, or 0 and 1 if within."""
    low, high = min(0.0, *(s for s, _ in pairs)), max(1.0, *(s for s, _ in pairs))
    width = (high - low) / BINS
    bins = []
    for n in range(BINS):
        inside = [(s, g) for s, g in pairs if min(int((s - low) / width), BINS - 1) == n]
        if inside:
            golds = sum(g for _, g in inside)
            bounds = wilson(golds, len(inside))
            bins.append(
                Bin(
                    low=low + n * width,
                    high=low + (n + 1) * width,
                    count=len(inside),
                    score=math.fsum(s for s, _ in inside) / len(inside),
                    gold=golds / len(inside),
                    gold_low=bounds[0],
                    gold_high=bounds[1],
                )
            )
    return bins
