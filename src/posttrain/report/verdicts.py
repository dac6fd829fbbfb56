"""Verdicts over a run: a table of their classes, and the reward by the length of the answer."""

from typing import Any

from posttrain.report.headline import ends, mean
from posttrain.report.record import Curves
from posttrain.report.rollouts import UpdateRollouts

PREFIX = "verdict/"
BINS = 8
"""Maximum number of dots in a line of reward by length."""
LEAST = 8
"""Minimum number of answers in a dot."""


def classes(metrics: Curves) -> list[dict[str, Any]]:
    """Return for each class of verdict its share in the first and last updates (see `ends`), and the largest.

    An update with verdicts but none of a class counts as 0.

    >>> shares = {"verdict/right": {1: 0.25, 2: 1.0}, "verdict/wrong": {1: 0.75}}
    >>> [(c["label"], c["early"], c["late"], c["most"], c["at"]) for c in classes(Curves((1, 2), shares))]
    [('right', 0.25, 1.0, 1.0, 2), ('wrong', 0.75, 0.0, 0.75, 1)]
    """
    shares = {n: dict(metrics.points(n)) for n in sorted(metrics.series) if n.startswith(PREFIX)}
    judged = [u for u in metrics.updates if any(u in curve for curve in shares.values())]
    rows = []
    for name, curve in shares.items():
        if not curve:
            continue
        values = [curve.get(u, 0.0) for u in judged]
        most = max(values)
        early, late, _ = ends(values)
        rows.append(
            {
                "label": name.removeprefix(PREFIX),
                "early": early,
                "late": late,
                "most": most,
                "at": judged[values.index(most)],
            }
        )
    return rows


def by_length(steps: list[UpdateRollouts]) -> list[dict[str, Any]]:
    """Return the mean reward by length of answers, for the first and for the last third of the updates.

    A dot is [mean tokens, mean reward, answers]; the dots of a line hold about equally many answers, and
    answers of one length lie in one dot. Empty if no line has two dots.
    """
    trained = [step for step in steps if step.kind == "train" and step.paid]
    third = max(1, len(trained) // 3)
    parts = [trained[:third], trained[-third:]] if len(trained) > 1 else [trained]
    lines = [(part, _dots([p for step in part for p in step.paid])) for part in parts if part]
    if all(len(dots) < 2 for _, dots in lines):
        return []
    return [{"from": part[0].update, "to": part[-1].update, "dots": dots} for part, dots in lines]


def _dots(paid: list[tuple[int, float]]) -> list[list[float]]:
    """Sort answers by length, and begin a new dot where one has its share of answers and the length changes.

    >>> _dots([(5, 0.0)] * 8 + [(9, 1.0)] * 4 + [(10, 0.0)] * 4)
    [[5.0, 0.0, 8], [9.5, 0.5, 8]]
    """
    ordered = sorted(paid)
    share = max(LEAST, -(-len(ordered) // BINS))
    dots: list[list[tuple[int, float]]] = [[]]
    for at, answer in enumerate(ordered):
        full = len(dots[-1]) >= share and len(ordered) - at >= LEAST
        if full and answer[0] != dots[-1][-1][0]:
            dots.append([])
        dots[-1].append(answer)
    return [[mean([float(n) for n, _ in dot]), mean([r for _, r in dot]), len(dot)] for dot in dots if dot]
