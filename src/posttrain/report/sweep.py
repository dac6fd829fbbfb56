"""The page of a sweep: the comparison of its combinations over seeds, above their curves."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.errors import UserError
from posttrain.report import overlay
from posttrain.report.glossary import unknown_metric, words
from posttrain.report.headline import BEST, best, direction, ends, figure, percent
from posttrain.report.page import put
from posttrain.report.record import RunRecord

MEASURED = dict.fromkeys(BEST, "the last evaluation of each run")
UNEVALUATED = "at the end of each run; never evaluated on held-out tasks"
WITHOUT_EVALUATION = ("reward/mean", "loss")
"""Metrics of runs that never evaluate, in order of preference."""


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


def clip(metric: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of `compare_seeds`, its intervals cut to what is possible if the metric is a share.

    >>> row = {"low": -0.25, "high": 0.75, "against": {"low": -1.5, "high": 0.5}}
    >>> clip("eval/accuracy", row)
    {'low': 0.0, 'high': 0.75, 'against': {'low': -1.0, 'high': 0.5}}
    >>> clip("eval/reward", row) == row
    True
    """
    if words([metric]).get(metric, [""])[0] != "0–1":
        return dict(row)
    against = row["against"] and {**row["against"], **_clip_interval(row["against"], -1.0)}
    return {**row, **_clip_interval(row, 0.0), "against": against}


def _clip_interval(row: Mapping[str, Any], low: float) -> dict[str, float]:
    return {key: min(1.0, max(low, row[key])) for key in ("low", "high") if row[key] is not None}


def check_metric(metric: str) -> None:
    """Raise UserError unless it is a metric that exists, or "min METRIC" or "max METRIC"."""
    how, _, name = metric.rpartition(" ")
    if metric and (how not in ("", "min", "max") or not words([name])):
        raise unknown_metric("--metric", metric)


def measure(records: Mapping[str, RunRecord], metric: str) -> tuple[str, dict[str, float]]:
    """Return the metric and its value for each run that has one.

    metric: its value at the end of each run, of a noisy curve the mean of the last five updates at most;
    with "min " or "max " before it for `direction`. "": the last evaluation, by the first metric of BEST that
    a run has.

    Raises UserError for a metric that no run has.
    """
    values: dict[str, float] = {}
    metric, _ = direction(metric)
    if not metric:
        metrics = {name: one[0] for name, record in records.items() if (one := best(record.metrics))}
        metric = min(metrics.values(), key=list(BEST).index, default="")
        if metric:
            judged = (name for name in metrics if metrics[name] == metric)
            return metric, {name: records[name].metrics.points(metric)[-1][1] for name in judged}
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
