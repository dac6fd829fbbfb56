"""Compare runs on one page: differences of their recipes, their results, and their curves together.

Runs whose recipes differ only in the seed are one series: its curves are means over them, and a band
from least to greatest. A series ends with the first of its runs: a mean over fewer would jump there.
"""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from typing import Any

from posttrain.base.toml import flat
from posttrain.errors import UserError
from posttrain.report.glossary import words
from posttrain.report.headline import BEST, Show, best, count, duration, ends, figure, graded, mean, percent
from posttrain.report.page import assembled, block, columns, put, thinned
from posttrain.report.record import Curves, RunRecord, read
from posttrain.report.rollouts import json_text

SCRIPTS = ("dom.js", "scale.js", "charts.js", "groups.js", "metrics.js", "sweep.js", "poll.js", "overlay.js")
STYLES = ("style.css", "overlay.css")
SEED = "run.seed"
UNSET = "–"
CODE = re.compile(r"^# (code/\S+): BLAKE2b (\w+)$", re.MULTILINE)
"""Digests of user code, at the end of a config.toml."""

SEED_AT_END = re.compile(r"[-_., ]*((?<![a-zA-Z0-9])(seed|s)[-_. =]*\d*)?$")
"""What is left of the seed, with separators, at the end of what names of runs have in common."""

RESULTS: dict[str, tuple[str, Show]] = {
    "eval/accuracy": ("Held-out accuracy", percent),
    "eval/reward": ("Held-out reward", figure),
    "eval/rewards/accuracy": ("Held-out pairs in order", percent),
    "eval/score/accuracy": ("Held-out pairs in order", percent),
    "eval/loss": ("Held-out loss", figure),
    "reward/mean": ("Reward while training", figure),
    "loss": ("Loss", figure),
    "kl/ref": ("KL to the reference, nats a token", figure),
    "entropy": ("Entropy, nats a token", figure),
    "length/mean": ("Response length, tokens", figure),
    "tokens": ("Tokens trained", count),
    "seconds": ("Time", duration),
}
"""Label and format of each metric in the table of results."""
TOTALS = ("tokens", "seconds")


@dataclass(frozen=True)
class Series:
    """Runs of one recipe, up to its seed."""

    label: str
    runs: Sequence[RunRecord]
    recipe: Mapping[str, str]
    """Flat keys with their values as JSON, without the seed."""
    metrics: Curves
    """Means over the runs at updates that all runs have."""
    low: Curves
    high: Curves

    def last(self, name: str) -> list[float]:
        """Return the value of each run at the end of the series; a mean of the last few for noisy curves.

        Empty if a run has no value.
        """
        finals = []
        for run in self.runs:
            values = [y for u, y in run.metrics.points(name) if u <= self.metrics.updates[-1]]
            noisy = not (name.startswith("eval/") or name in TOTALS)
            finals += [ends(values)[1] if noisy else values[-1]] if values else []
        return finals if len(finals) == len(self.runs) else []


def write(run_dirs: Sequence[Path], out: Path) -> Path:
    """Write the page to `out` and return its path. Equal run directories give equal bytes.

    Raises UserError for fewer than two runs, for a directory that is not a run, and if the page cannot be
    written.
    """
    distinct = list({path.resolve(): path for path in run_dirs}.values())
    if len(distinct) < 2:
        raise UserError(str(run_dirs[0]), "is one run, named twice", "name another run too")
    return put(out, page(series([(path, read(path)) for path in distinct])))


# ---------------------------------------------------------------------- runs of one recipe


def series(runs: Sequence[tuple[Path, RunRecord]]) -> list[Series]:
    """Group the runs by their recipes, in the order of the runs."""
    groups: dict[str, list[RunRecord]] = {}
    recipes: dict[str, dict[str, str]] = {}
    for path, run in runs:
        recipe = {key: value for key, value in flat_recipe(run, path).items() if key != SEED}
        key = json.dumps(recipe, sort_keys=True)
        groups.setdefault(key, []).append(run)
        recipes[key] = recipe
    labels = _labels(list(groups.values()))
    return [
        one_series(label, members, recipes[key])
        for label, (key, members) in zip(labels, groups.items(), strict=True)
    ]


def one_series(label: str, runs: Sequence[RunRecord], recipe: Mapping[str, str]) -> Series:
    """Return runs of one recipe as a series; `recipe` is that of `flat_recipe`."""
    return Series(label, runs, {key: value for key, value in recipe.items() if key != SEED}, *_over(runs))


def flat_recipe(run: RunRecord, path: Path) -> dict[str, str]:
    """Return each key of a recipe with its value as JSON, the run's own directory replaced by RUN.

    Raises UserError if the recipe cannot be read.
    """
    try:
        tables = tomllib.loads(run.config)
    except tomllib.TOMLDecodeError as error:
        raise UserError(str(path / "config.toml"), f"its recipe cannot be read: {error}") from None
    recipe = {f"{name} (own code)": digest[:12] for name, digest in CODE.findall(run.config)}
    directories = {str(path), str(path.resolve())}
    for key, value in flat(tables).items():
        text = json.dumps(value, ensure_ascii=False, default=str)
        for directory in directories:
            text = text.replace(f'"{directory}/', '"RUN/')
        recipe[key] = text
    return recipe


def _labels(groups: list[list[RunRecord]]) -> list[str]:
    """Return a name for each series: the common beginning of its runs' names, or the first name."""
    labels = []
    for runs in groups:
        begin = SEED_AT_END.sub("", commonprefix([run.name for run in runs]))  # noqa: RUF071
        labels.append(begin if len(runs) > 1 and begin else runs[0].name)
    return [
        label if labels.count(label) == 1 else f"{label} ({place})"
        for place, label in enumerate(labels, start=1)
    ]


def _over(runs: Sequence[RunRecord]) -> tuple[Curves, Curves, Curves]:
    """Return the mean, least and greatest of the runs' curves, at updates where all runs have a value.

    Evaluations are computed at every update, other curves at the updates that are drawn.
    """
    if len(runs) == 1:
        return (runs[0].metrics,) * 3
    shared = sorted(set.intersection(*(set(run.metrics.updates) for run in runs)))
    names = set.intersection(*(set(run.metrics.series) for run in runs))
    results = [dict[str, dict[int, float | None]]() for _ in range(3)]
    updates = shared
    for name in sorted(names, key=lambda name: (not name.startswith("eval/"), name)):
        if updates is shared and not name.startswith("eval/"):
            updates, _ = thinned(Curves(tuple(shared), results[0]))
        curves = [run.metrics.series[name] for run in runs]
        at = [u for u in updates if all(u in curve for curve in curves)]
        rows = [[curve[u] for curve in curves] for u in at]
        for result, reduce in zip(results, (mean, min, max), strict=True) if at else ():
            values = (None if None in row else reduce(row) for row in rows)  # type: ignore[operator]
            result[name] = dict(zip(at, values, strict=True))
    middle, low, high = (Curves(tuple(shared), result) for result in results)
    return middle, low, high


# ---------------------------------------------------------------------- the page


def page(
    groups: Sequence[Series], *, title: str = "", sweep: Mapping[str, Any] | None = None, live: bool = False
) -> str:
    """Return the HTML of the page.

    sweep: the comparison of the series over seeds, for a sweep's page. live: the page asks its server for
    what came since.
    """
    summary = {**content(groups, title), "sweep": sweep, "live": live}
    data = block("overlay", json_text(summary))
    return assembled("overlay.html", SCRIPTS, STYLES, str(summary["title"]), data, asks=live)


def content(groups: Sequence[Series], title: str = "") -> dict[str, Any]:
    """Return what the page shows of these series, as JSON data."""
    return {
        "series": [_series_json(group) for group in groups],
        "differences": differences(groups),
        "results": results(groups),
        "words": words(sorted({name for group in groups for name in group.metrics.series})),
        "notes": _notes(groups),
        "title": title or ", ".join(group.label for group in groups),
    }


def _series_json(group: Series) -> dict[str, Any]:
    updates, _ = thinned(group.metrics)
    several = len(group.runs) > 1
    return {
        "label": group.label,
        "runs": [run.name for run in group.runs],
        "updates": updates,
        "series": columns(group.metrics, updates),
        "low": columns(group.low, updates) if several else {},
        "high": columns(group.high, updates) if several else {},
    }


def differences(groups: Sequence[Series]) -> list[list[str]]:
    """Return rows [key, value of each series] where their recipes, or the versions of their code, differ."""
    rows: list[list[str]] = []
    code = [dict(line.partition(" ")[::2] for line in group.runs[0].code.splitlines()) for group in groups]
    for prefix, tables in (("", [dict(group.recipe) for group in groups]), ("ran with ", code)):
        for key in sorted(set().union(*tables)):
            values = [table.get(key, UNSET) for table in tables]
            if len(set(values)) > 1:
                rows.append([prefix + key, *values])
    return rows


def results(groups: Sequence[Series]) -> list[dict[str, Any]]:
    """Return the table of results: a name, and a cell for each series with its difference to the first."""
    rows = []
    for name, (label, show) in RESULTS.items():
        if name == "eval/accuracy" and any(graded(group.metrics) for group in groups):
            continue
        last = [group.last(name) if group.metrics.updates else [] for group in groups]
        if any(last):
            ending = ", last" if name in BEST else ""
            rows.append({"name": label + ending, "cells": _cells(last, show)})
        if name in BEST and any(last):
            peaks = [_peak(group.metrics, name) for group in groups]
            cells = _cells([[peak[1]] if peak else [] for peak in peaks], show)
            for cell, peak in zip(cells, peaks, strict=True):
                cell["remark"] = f"update {peak[0]}" if peak else ""
            rows.append({"name": f"{label}, best", "cells": cells})
    return rows


def _peak(metrics: Curves, name: str) -> tuple[int, float] | None:
    peak = best(Curves(metrics.updates, {name: metrics.series.get(name, {})}))
    return peak[1:] if peak else None


def _cells(columns: list[list[float]], show: Show) -> list[dict[str, str]]:
    cells = []
    for values in columns:
        if not values:
            cells.append({"value": UNSET, "remark": "", "difference": ""})
            continue
        spread = f"{show(min(values))} … {show(max(values))}" if min(values) < max(values) else ""
        is_first = values is columns[0] or not columns[0]
        change = "" if is_first else _change(mean(values) - mean(columns[0]), show)
        cells.append({"value": show(mean(values)), "remark": spread, "difference": change})
    return cells


def _change(difference: float, show: Show) -> str:
    if not difference:
        return "the same"
    sign = "+" if difference > 0 else "−"
    return sign + (f"{abs(difference) * 100:.1f} points" if show is percent else show(abs(difference)))


def _notes(groups: Sequence[Series]) -> list[str]:
    """Return what could not be read, series that end before some of their runs, and runs that stopped."""
    notes = [f"{run.name}: {note}" for group in groups for run in group.runs for note in run.notes]
    for group in groups:
        lasts = {run.name: max(run.metrics.updates, default=0) for run in group.runs}
        if len(set(lasts.values())) > 1:
            short = min(lasts, key=lambda name: lasts[name])
            notes.append(f"{group.label} ends at update {lasts[short]}, where {short} does.")
        if stopped := [run.name for run in group.runs if run.stopped]:
            notes.append(f"{', '.join(stopped)} had to stop; the report of the run says why.")
    return notes
