"""Signs of reward hacking: correlation with length, tampering, failures, disagreement of verifiers.

Everything is computed on episodes with a score. Episodes without one are in the error rate alone, and never
count as 0.
"""

import math
import statistics
from collections.abc import Collection, Iterable, Sequence
from itertools import combinations

from posttrain.envs.tools.call import COUNTED
from posttrain.types import AnyEpisode
from posttrain.verifiers.combine.combined import Combined
from posttrain.verifiers.protocol import Verifier

TAMPERING = "forbidden"
"""The label that every verifier gives to a response that attacks it, in any case."""


def hacking_metrics(
    groups: Sequence[Sequence[AnyEpisode]], auditors: Collection[str] = ()
) -> dict[str, float]:
    """Return hacking/*, probe/*, part/*, audit/* and agreement/* of an update's groups, if defined."""
    judged = [[e for e in group if not e.verdict.failed] for group in groups]
    scored = [e for group in judged for e in group]
    count = sum(map(len, groups))
    out = {"hacking/error_rate": (count - len(scored)) / max(count, 1)}
    if not scored:
        return out
    out["hacking/forbidden"] = statistics.fmean(e.verdict.label.casefold() == TAMPERING for e in scored)
    linked = within_groups([(e.reward, float(e.length)) for e in group] for group in judged)
    if linked is not None:
        out["hacking/length_correlation"] = linked
    for name in sorted({name for e in scored for name in e.probes}):
        out[f"probe/{name}"] = statistics.fmean(e.probes[name] for e in scored if name in e.probes)
    for name in _parts_of(scored):
        alike = agreement([[(e.reward, x) for e, x in _scores(group, name)] for group in judged])
        out |= {} if alike is None else {f"agreement/{name}": alike}
    return out | part_means(scored, auditors)


def part_means(scored: Sequence[AnyEpisode], auditors: Collection[str] = ()) -> dict[str, float]:
    """Return the mean of each part of the episodes' rewards: part/NAME, or audit/NAME for auditors."""
    out = {}
    for name in _parts_of(scored):
        if values := [x for _, x in _scores(scored, name)]:
            out[f"{'audit' if name in auditors else 'part'}/{name}"] = statistics.fmean(values)
    return out


def auditors_of(verifier: Verifier | None) -> frozenset[str]:
    """Return the parts of a combined verifier that only record: those of weight 0, except in a gate."""
    if not isinstance(verifier, Combined) or verifier.how == "gate":
        return frozenset()
    return frozenset(part.verifier.name for part in verifier.parts if part.weight == 0)


def within_groups(groups: Iterable[Sequence[tuple[float, float]]]) -> float | None:
    """Pearson correlation of x and y, each less its group's mean; None if x or y never varies.

    So tasks that make all answers both easy and short have no effect.

    >>> within_groups([[(0.0, 10.0), (2.0, 12.0)], [(5.0, 3.0), (7.0, 17.0)]])
    0.8
    """
    xs: list[float] = []
    ys: list[float] = []
    for group in filter(None, groups):
        xs += _centred([x for x, _ in group])
        ys += _centred([y for _, y in group])
    try:
        return statistics.correlation(xs, ys)
    except statistics.StatisticsError:  # a constant, or fewer than two
        return None


def agreement(groups: Iterable[Sequence[tuple[float, float]]]) -> float | None:
    """Share of pairs in a group that y ranks as x does, where x differs; a tie of y counts half.

    1 is the same order, 1/2 chance or a constant y, 0 the reverse. None without such a pair.

    >>> agreement([[(1.0, 0.9), (0.0, 0.2), (0.0, 0.9)]])
    0.75
    """
    alike = pairs = 0.0
    for group in groups:
        for (x, y), (other_x, other_y) in combinations(group, 2):
            if x != other_x:
                pairs += 1
                alike += 0.5 if y == other_y else (x > other_x) == (y > other_y)
    return alike / pairs if pairs else None


def _parts_of(scored: Sequence[AnyEpisode]) -> list[str]:
    return sorted({name for e in scored for name in e.verdict.parts if not name.startswith(COUNTED)})


def _scores(episodes: Sequence[AnyEpisode], name: str) -> list[tuple[AnyEpisode, float]]:
    """Return each episode that the part has scored, with the score."""
    return [(e, x) for e in episodes if math.isfinite(x := e.verdict.parts.get(name, math.nan))]


def _centred(values: Sequence[float]) -> list[float]:
    """Subtract the mean; exactly 0 if all are equal, which a rounded mean might not give."""
    mean = values[0] if min(values) == max(values) else statistics.fmean(values)
    return [x - mean for x in values]
