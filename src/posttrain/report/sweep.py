"""The page of a sweep: the comparison of its combinations over seeds, above their curves."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.base.name_hints import did_you_mean
from posttrain.errors import UserError
from posttrain.report import overlay
from posttrain.report.glossary import sections, words
from posttrain.report.headline import BEST, best, ends, figure, percent
from posttrain.report.page import put
from posttrain.report.record import RunRecord

MEASURED = dict.fromkeys(BEST, "the best evaluation of each run")
UNEVALUATED = "at the end of each run; never evaluated on held-out tasks"
WITHOUT_EVALUATION = ("reward/mean", "loss")
"""Metrics of runs that never evaluate, in order of preference."""


def sign(metric: str) -> int:
    """Return -1 for losses and KL, of which less is better, else 1."""
    return -1 if metric.endswith("loss") or metric.startswith("kl/") else 1


def show(metric: str, value: float) -> str:
    """Format a value of the metric: shares of right answers in percent.

    >>> show("eval/accuracy", 0.5), show("loss", 0.5)
    ('50.0%', '0.5')
    """
    return (percent if metric.endswith("accuracy") else figure)(value)


def show_difference(metric: str, value: float) -> str:
    """Format a difference of two values, of shares in points.

    >>> show_difference("eval/accuracy", -0.125), show_difference("loss", 0.5)
    ('-12.5 points', '+0.5')
    """
    if metric.endswith("accuracy"):
        return f"{100 * value:+.1f} points"
    return f"{'+' if value > 0 else ''}{figure(value)}"


def check_metric(metric: str) -> None:
    """Raise UserError for a metric that does not exist."""
    if metric and not words([metric]):
        names = [name for section in sections().values() for keys in section for name in keys.split(", ")]
        fix = did_you_mean(metric, names) or "docs/metrics.md lists the metrics"
        raise UserError("--metric", f"there is no metric {metric!r}", fix)


def measure(records: Mapping[str, RunRecord], metric: str) -> tuple[str, dict[str, float]]:
    """Return the metric and its value for each run that has one.

    metric: its value at the end of each run, of a noisy curve the mean of the last five updates at most.
    "": the best evaluation by the first metric of BEST that a run has.

    Raises UserError for a metric that no run has.
    """
    values: dict[str, float] = {}
    if not metric:
        evaluated = {
            name: evaluation for name, record in records.items() if (evaluation := best(record.metrics))
        }
        order = list(BEST)
        metric = min((one[0] for one in evaluated.values()), key=order.index, default="")
        if metric:
            return metric, {name: one[2] for name, one in evaluated.items() if one[0] == metric}
        metric = next(
            (m for m in WITHOUT_EVALUATION if any(r.metrics.points(m) for r in records.values())), "loss"
        )
    for name, record in records.items():
        if points := [y for _, y in record.metrics.points(metric)]:
            noisy = not (metric.startswith("eval/") or metric in overlay.TOTALS)
            values[name] = ends(points)[1] if noisy else points[-1]
    if records and not values:
        names = sorted({name for record in records.values() for name in record.metrics.series})
        raise UserError("--metric", f"no run has {metric!r}", f"they have {', '.join(names)}")
    return metric, values


def write(root: Path, result: Mapping[str, Any], records: Mapping[str, RunRecord]) -> Path:
    """Write sweep.html of the finished runs, and return its path."""
    groups = []
    for combination in result["combinations"]:
        names = [one["name"] for one in result["runs"] if one["combination"] == combination["name"]]
        members = [records[name] for name in names if name in records]
        if members:
            recipe = overlay.flat_recipe(members[0], root / members[0].name)
            groups.append(overlay.one_series(combination["label"], members, recipe))
    labels = [group.label for group in groups]
    rows = [
        {**one, "series": labels.index(one["label"]) if one["label"] in labels else None}
        for one in result["combinations"]
    ]
    content = {**result, "combinations": rows, "format": show(result["metric"], 0.0)[-1:] == "%"}
    return put(root / "sweep.html", overlay.page(groups, title=f"{result['title']}: a sweep", sweep=content))
