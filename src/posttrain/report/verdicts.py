"""What the verifier said over a run: its classes as a table, and the reward by the length of the answer."""

from typing import Any

from posttrain.report.headline import ends, mean
from posttrain.report.record import Curves
from posttrain.report.rollouts import UpdateRollouts

PREFIX = "verdict/"
BINS = 8
"""Most dots of one line of reward by length."""
LEAST = 8
"""Fewest answers in a dot."""


def classes(metrics: Curves) -> list[dict[str, Any]]:
    """For each class of verdict its share in the first and last updates, and where it was largest.

    An update with verdicts but none of a class counts as 0. `ends` says how many updates that are.

    >>> shares = {"verdict/right": {1: 0.25, 2: 1.0}, "verdict/wrong": {1: 0.75}}
    >>> [(c["label"], c["early"], c["late"], c["most"], c["at"]) for c in classes(Metrics((1, 2), shares))]
    [('right', 0.25, 1.0, 1.0, 2), ('wrong', 0.75, 0.0, 0.75, 1)]
    """
    shares = {n: dict(metrics.points(n)) for n in sorted(metrics.series) if n.startswith(PREFIX)}
    judged = [u for u in metrics.updates if any(u in known for known in shares.values())]
    rows = []
    for name, known in shares.items():
        if not known:
            continue
        values = [known.get(u, 0.0) for u in judged]
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
    """The mean reward of short and long answers, in the first and in the last third of the updates at hand.

    A dot is [mean tokens, mean reward, answers]; the dots of a line hold about as many answers each, and
    answers of one length lie in one dot. Empty where no line has two dots.
    """
    trained = [step for step in steps if step.kind == "train" and step.paid]
    third = max(1, len(trained) // 3)
    parts = [trained[:third], trained[-third:]] if len(trained) > 1 else [trained]
    lines = [(part, _dots([p for step in part for p in step.paid])) for part in parts if part]
    if all(len(dots) < 2 for _, dots in lines):
        return []
    return [{"from": part[0].update, "to": part[-1].update, "dots": dots} for part, dots in lines]


def _dots(paid: list[tuple[int, float]]) -> list[list[float]]:
    """Answers in the order of their lengths, cut where a dot has its share of them and a new length begins.

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
