"""The page: everything read from a run, and the HTML, CSS and JavaScript beside this file, in one file.

What a run says is untrusted text. It reaches the page only as JSON in data blocks and is shown
through `textContent`; the page's own scripts are admitted by their digest, and nothing may be loaded.
"""

import base64
import hashlib
import html
import re
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from posttrain.base.atomic_files import replacing
from posttrain.errors import UserError
from posttrain.report.alarms import RULES, findings
from posttrain.report.evidence import Evidence
from posttrain.report.glossary import words
from posttrain.report.headline import headline
from posttrain.report.record import Curves, RunRecord, read
from posttrain.report.rollouts import UpdateRollouts, evenly, json_text, steps
from posttrain.report.searches import SearchLog, searches, side_by_side
from posttrain.report.verdicts import by_length, classes

SCRIPTS = (
    "dom.js",
    "scale.js",
    "charts.js",
    "groups.js",
    "metrics.js",
    "verdicts.js",
    "timeline.js",
    "curves.js",
    "tokens.js",
    "group.js",
    "rollouts.js",
    "trees.js",
    "searches.js",
    "live.js",
    "main.js",
)
POINTS = 2000
"""Most updates whose metrics are drawn."""
SLOT = re.compile(r"<!--(\w+)-->")


def write(run_dir: Path, out: Path | None = None) -> Path:
    """The path of the report of a run, written to `out` or to report.html in the run directory.

    A run that is still going or was killed gets a report of what is there, and the page says what
    could not be read. Equal run directories give equal bytes.

    Raises UserError if `run_dir` is no run directory or the report cannot be written.
    """
    record = read(run_dir)
    return put(run_dir / "report.html" if out is None else out, page(record))


def put(path: Path, content: str) -> Path:
    """The path of a page, once it is written; UserError if it cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as draft:
            draft.write_bytes(content.encode("utf-8", "replace"))
    except OSError as error:
        raise UserError(str(path), f"cannot write the report: {error.strerror}") from None
    return path


def page(record: RunRecord, live: int | None = None) -> str:
    """The HTML of a run's report; `live`: it asks its server for what follows these bytes of metrics."""
    held, notes = steps(record.samples)
    found, omitted = searches(record.trees)
    summary = _summary(record, held, found, [*_share(record.metrics, held), *notes, *omitted])
    if live is not None:
        summary |= {"live": live, "files": len(record.samples)}
    blocks = [block("run", json_text(summary)), *(block(step.id, step.packed) for step in held)]
    blocks += [block(each.id, each.trees) for each in found]
    data = "\n".join(blocks)
    return assembled("page.html", SCRIPTS, ["style.css"], record.title, data, asks=live is not None)


def assembled(
    template: str, scripts: Sequence[str], styles: Sequence[str], title: str, data: str, *, asks: bool = False
) -> str:
    """A page of these files beside this one, with its data in blocks; `asks`: it may ask its own server."""
    script = "(() => {\n'use strict';\n" + "\n".join(part(name) for name in scripts) + "\n})();\n"
    guard, style = part("guard.js"), "\n".join(part(name) for name in styles)
    parts = {
        "policy": content_policy([guard, script], style, asks=asks),
        "title": html.escape("".join(c if c.isprintable() else " " for c in title)),
        "guard": f"<script>{guard}</script>",
        "style": f"<style>{style}</style>",
        "data": data,
        "script": f"<script>{script}</script>",
    }
    # One pass over the template alone: what is put in is not searched for slots again.
    return SLOT.sub(lambda slot: parts[slot[1]], part(template))


def _share(metrics: Curves, held: list[UpdateRollouts]) -> list[str]:
    """A note if the run recorded only some of the groups that it trained on."""
    trained = dict(metrics.points("select/kept"))
    shares = [(s.recorded, trained.get(s.update, 0)) for s in held if s.kind == "train"]
    fewer = [f"{recorded} of {kept:g}" for recorded, kept in shares if recorded < kept]
    if not fewer:
        return []
    return [
        f"The run recorded the rollouts of a share of its groups, {fewer[-1]} of the last update shown here: "
        "record.tokens is how much. What is said of rollouts is of these."
    ]


def part(name: str) -> str:
    """A file of the page."""
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def block(name: str, content: str) -> str:
    """JSON as an element that the page's scripts read."""
    return f'<script type="application/json" id="{name}">{content}</script>'


def content_policy(scripts: list[str], style: str, *, asks: bool = False) -> str:
    """The policy that admits these scripts and this style, loading nothing; `asks`: but of its own server."""

    def digest(source: str) -> str:
        return "'sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode() + "'"

    return (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"script-src {' '.join(map(digest, scripts))}; style-src {digest(style)}"
        + ("; connect-src 'self'" if asks else "")
    )


def _summary(
    record: RunRecord, held: list[UpdateRollouts], found: list[SearchLog], notes: list[str]
) -> dict[str, Any]:
    updates, remark = drawn(record.metrics)
    return {
        "name": record.name,
        "title": record.title,
        "stopped": record.stopped,
        "ended": record.ended_early,
        "headline": asdict(side_by_side(found) or headline(record.metrics)),
        "plan": record.sections,
        "config": record.config,
        "code": record.code,
        "updates": updates,
        "series": columns(record.metrics, updates),
        "words": words(record.metrics.series),
        "classes": classes(record.metrics),
        "lengths": by_length(held),
        "alarms": alarms(record.metrics, held),
        "rules": [[rule.name, rule.says] for rule in RULES],
        "steps": [
            {"id": s.id, "kind": s.kind, "update": s.update, "shown": s.shown, "total": s.total} for s in held
        ],
        "searches": [each.summary() for each in found],
        "notes": [*record.notes, *remark, *notes],
    }


def alarms(metrics: Curves, held: list[UpdateRollouts]) -> list[dict[str, Any]]:
    """The rules that are broken, and what was found."""
    broken = findings(Evidence(metrics, held))
    return [{"name": rule.name, "says": rule.says, **asdict(found)} for rule, found in broken]


def drawn(metrics: Curves) -> tuple[list[int], list[str]]:
    """The updates to draw: all, or some at even distances with every evaluated one."""
    if len(metrics.updates) <= POINTS:
        return list(metrics.updates), []
    evaluated = set[int]().union(
        *(curve for name, curve in metrics.series.items() if name.startswith("eval/"))
    )
    kept = sorted({*evenly(metrics.updates, POINTS), *evenly(sorted(evaluated), POINTS)})
    return kept, [f"The curves show {len(kept)} of {len(metrics.updates)} updates, at even distances."]


def columns(metrics: Curves, updates: list[int]) -> dict[str, dict[str, list[Any]]]:
    """For each curve the indices of its updates ("at", left out if it has all) and its values ("y")."""
    columns: dict[str, dict[str, list[Any]]] = {}
    for name in sorted(metrics.series):
        values = metrics.series[name]
        at = [i for i, update in enumerate(updates) if update in values]
        ys = [None if (y := values[updates[i]]) is None else float(f"{y:.6g}") for i in at]
        columns[name] = {"y": ys} if len(at) == len(updates) else {"at": at, "y": ys}
    return columns
