"""Several runs on one page: what differs in their recipes, what they came to, and their curves together.

Runs whose recipes differ in nothing but the seed are one series: its curves are means over them, and a band
from least to greatest. A series ends where the first of its runs does: a mean over fewer would jump there.
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
from posttrain.report.page import assembled, block, columns, drawn, put
from posttrain.report.record import Curves, RunRecord, read
from posttrain.report.rollouts import json_text

SCRIPTS = ("dom.js", "scale.js", "charts.js", "groups.js", "metrics.js", "overlay.js")
STYLES = ("style.css", "overlay.css")
SEED = "run.seed"
UNSET = "–"
CODE = re.compile(r"^# (code/\S+): BLAKE2b (\w+)$", re.MULTILINE)
"""Digests of code of one's own, at the end of a config.toml."""

TOLD: dict[str, tuple[str, Show]] = {
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
"""Metrics of the table of results."""
TOTALS = ("tokens", "seconds")


@dataclass(frozen=True)
class Series:
    """Runs of one recipe."""

    label: str
    runs: Sequence[RunRecord]
    recipe: Mapping[str, str]
    """Without the seed, flat."""
    metrics: Curves
    """Means over the runs, of updates that all of them have."""
    low: Curves
    high: Curves

    def last(self, name: str) -> list[float]:
        """What each run came to at the end of the series: of noisy curves a mean of the last few."""
        found = []
        for run in self.runs:
            values = [y for u, y in run.metrics.points(name) if u <= self.metrics.updates[-1]]
            noisy = not (name.startswith("eval/") or name in TOTALS)
            found += [ends(values)[1] if noisy else values[-1]] if values else []
        return found if len(found) == len(self.runs) else []


def write(run_dirs: Sequence[Path], out: Path) -> Path:
    """The path of the page, written to `out`. Equal run directories give equal bytes.

    Raises UserError for what is no run, for fewer than two, and if the page cannot be written.
    """
    distinct = list({path.resolve(): path for path in run_dirs}.values())
    if len(distinct) < 2:
        raise UserError(str(run_dirs[0]), "is one run, given twice", "name another one beside it")
    found = series([(path, read(path)) for path in distinct])
    return put(out, page(found))


# ---------------------------------------------------------------------- runs of one recipe


def series(runs: Sequence[tuple[Path, RunRecord]]) -> list[Series]:
    """The runs by their recipes, in the order in which they were named."""
    groups: dict[str, list[RunRecord]] = {}
    recipes: dict[str, dict[str, str]] = {}
    for path, run in runs:
        recipe = {key: value for key, value in flat_recipe(run, path).items() if key != SEED}
        key = json.dumps(recipe, sort_keys=True)
        groups.setdefault(key, []).append(run)
        recipes[key] = recipe
    labels = _labels(list(groups.values()))
    return [
        Series(label, members, recipes[key], *_over(members))
        for label, (key, members) in zip(labels, groups.items(), strict=True)
    ]


def flat_recipe(run: RunRecord, path: Path) -> dict[str, str]:
    """Each key of a recipe with its value as JSON, without what names the run's own directory.

    Raises UserError if it cannot be read.
    """
    try:
        tables = tomllib.loads(run.config)
    except tomllib.TOMLDecodeError as error:
        raise UserError(str(path / "config.toml"), f"its recipe cannot be read: {error}") from None
    found = {f"{name} (own code)": digest[:12] for name, digest in CODE.findall(run.config)}
    own = {str(path), str(path.resolve())}
    for key, value in flat(tables).items():
        text = json.dumps(value, ensure_ascii=False, default=str)
        for name in own:
            text = text.replace(f'"{name}/', '"RUN/')
        found[key] = text
    return found


def _labels(groups: list[list[RunRecord]]) -> list[str]:
    """A name for each series: what the names of its runs begin with, or that of the first."""
    labels = []
    for runs in groups:
        begin = re.sub(r"[-_. ]*(seed|s)?[-_. ]*$", "", commonprefix([run.name for run in runs]))  # noqa: RUF071
        labels.append(begin if len(runs) > 1 and begin else runs[0].name)
    return [
        label if labels.count(label) == 1 else f"{label} ({place})"
        for place, label in enumerate(labels, start=1)
    ]


def _over(runs: Sequence[RunRecord]) -> tuple[Curves, Curves, Curves]:
    """Mean, least and greatest of several curves at updates of all runs: none where one has none.

    Of evaluations at each update, of other curves where they are drawn.
    """
    if len(runs) == 1:
        return (runs[0].metrics,) * 3
    shared = sorted(set.intersection(*(set(run.metrics.updates) for run in runs)))
    names = set.intersection(*(set(run.metrics.series) for run in runs))
    found = [dict[str, dict[int, float | None]]() for _ in range(3)]
    updates = shared
    for name in sorted(names, key=lambda name: (not name.startswith("eval/"), name)):
        if updates is shared and not name.startswith("eval/"):
            updates, _ = drawn(Curves(tuple(shared), found[0]))
        each = [run.metrics.series[name] for run in runs]
        at = [u for u in updates if all(u in curve for curve in each)]
        rows = [[curve[u] for curve in each] for u in at]
        for curves, of in zip(found, (mean, min, max), strict=True) if at else ():
            values = (None if None in row else of(row) for row in rows)  # type: ignore[operator]
            curves[name] = dict(zip(at, values, strict=True))
    middle, low, high = (Curves(tuple(shared), curves) for curves in found)
    return middle, low, high


# ---------------------------------------------------------------------- the page


def page(found: Sequence[Series]) -> str:
    summary = {
        "series": [_told(each) for each in found],
        "differences": differences(found),
        "results": results(found),
        "words": words(sorted({name for each in found for name in each.metrics.series})),
        "notes": _notes(found),
    }
    title = ", ".join(each.label for each in found)
    return assembled("overlay.html", SCRIPTS, STYLES, title, block("overlay", json_text(summary)))


def _told(each: Series) -> dict[str, Any]:
    updates, _ = drawn(each.metrics)
    several = len(each.runs) > 1
    return {
        "label": each.label,
        "runs": [run.name for run in each.runs],
        "updates": updates,
        "series": columns(each.metrics, updates),
        "low": columns(each.low, updates) if several else {},
        "high": columns(each.high, updates) if several else {},
    }


def differences(found: Sequence[Series]) -> list[list[str]]:
    """What differs between the series: key and values, of their recipes and of what ran them."""
    rows: list[list[str]] = []
    code = [dict(line.partition(" ")[::2] for line in each.runs[0].code.splitlines()) for each in found]
    for prefix, tables in (("", [dict(each.recipe) for each in found]), ("ran with ", code)):
        for key in sorted(set().union(*tables)):
            values = [table.get(key, UNSET) for table in tables]
            if len(set(values)) > 1:
                rows.append([prefix + key, *values])
    return rows


def results(found: Sequence[Series]) -> list[dict[str, Any]]:
    """The table of what each series came to: name, and a cell for each with its difference to the first."""
    rows = []
    for name, (label, show) in TOLD.items():
        if name == "eval/accuracy" and any(graded(each.metrics) for each in found):
            continue
        last = [each.last(name) if each.metrics.updates else [] for each in found]
        if any(last):
            ending = ", last" if name in BEST else ""
            rows.append({"name": label + ending, "cells": _cells(last, show)})
        if name in BEST and any(last):
            peaks = [_peak(each.metrics, name) for each in found]
            cells = _cells([[peak[1]] if peak else [] for peak in peaks], show)
            for cell, peak in zip(cells, peaks, strict=True):
                cell["remark"] = f"update {peak[0]}" if peak else ""
            rows.append({"name": f"{label}, best", "cells": cells})
    return rows


def _peak(metrics: Curves, name: str) -> tuple[int, float] | None:
    found = best(Curves(metrics.updates, {name: metrics.series.get(name, {})}))
    return found[1:] if found else None


def _cells(values: list[list[float]], show: Show) -> list[dict[str, str]]:
    cells = []
    for each in values:
        if not each:
            cells.append({"value": UNSET, "remark": "", "difference": ""})
            continue
        spread = f"{show(min(each))} … {show(max(each))}" if min(each) < max(each) else ""
        change = "" if each is values[0] or not values[0] else _change(mean(each) - mean(values[0]), show)
        cells.append({"value": show(mean(each)), "remark": spread, "difference": change})
    return cells


def _change(difference: float, show: Show) -> str:
    if not difference:
        return "the same"
    sign = "+" if difference > 0 else "−"
    return sign + (f"{abs(difference) * 100:.1f} points" if show is percent else show(abs(difference)))


def _notes(found: Sequence[Series]) -> list[str]:
    """Where a mean ends before a run does, and what could not be read."""
    notes = [f"{run.name}: {note}" for each in found for run in each.runs for note in run.notes]
    for each in found:
        lasts = {run.name: max(run.metrics.updates, default=0) for run in each.runs}
        if len(set(lasts.values())) > 1:
            short = min(lasts, key=lambda name: lasts[name])
            notes.append(f"{each.label} ends at update {lasts[short]}, where {short} does.")
        if stopped := [run.name for run in each.runs if run.stopped]:
            notes.append(f"{', '.join(stopped)} had to stop; the report of the run says why.")
    return notes
