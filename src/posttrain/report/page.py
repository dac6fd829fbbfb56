"""Put the data of a run and the HTML, CSS and JavaScript of assets/ into one page.

The texts of a run are untrusted. They reach the page only as JSON in data blocks and are shown
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

from posttrain.base.atomic_files import replace_atomically
from posttrain.errors import UserError
from posttrain.report.alarms import RULES, Evidence, findings
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
    "poll.js",
    "live.js",
    "main.js",
)
POINTS = 2000
"""Maximum number of updates whose metrics are drawn."""
SLOT = re.compile(r"<!--(\w+)-->")


def write(run_dir: Path, out: Path | None = None) -> Path:
    """Write the report of a run to `out`, by default report.html in the run directory, and return its path.

    A run that is still running or was killed gets a report of the files it has, and the page lists
    what could not be read. Equal run directories give equal bytes.

    Raises UserError if `run_dir` is not a run directory or the report cannot be written.
    """
    record = read(run_dir)
    return put(run_dir / "report.html" if out is None else out, page(record))


def put(path: Path, content: str) -> Path:
    """Write a page and return its path; UserError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_atomically(path) as draft:
            draft.write_bytes(content.encode("utf-8", "replace"))
    except OSError as error:
        raise UserError(str(path), f"cannot write the report: {error.strerror}") from None
    return path


def page(record: RunRecord, live: int | None = None) -> str:
    """Return the HTML of a run's report.

    live: bytes of metrics.jsonl in the page, which asks its server for the lines after them; None: no server.
    """
    rollouts, notes = steps(record.samples)
    logs, search_notes = searches(record.trees)
    summary = _summary(record, rollouts, logs, [*_share(record.metrics, rollouts), *notes, *search_notes])
    if live is not None:
        summary |= {"live": live, "files": len(record.samples)}
    blocks = [block("run", json_text(summary)), *(block(step.id, step.packed) for step in rollouts)]
    blocks += [block(log.id, log.trees) for log in logs]
    data = "\n".join(blocks)
    return assembled("page.html", SCRIPTS, ["style.css"], record.title, data, asks=live is not None)


def assembled(
    template: str, scripts: Sequence[str], styles: Sequence[str], title: str, data: str, *, asks: bool = False
) -> str:
    """Return a page made of these files of assets/ and of data blocks; `asks`: it may ask its own server."""
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
    # One pass over the template alone: inserted text is not searched for slots.
    return SLOT.sub(lambda slot: parts[slot[1]], part(template))


def _share(metrics: Curves, rollouts: list[UpdateRollouts]) -> list[str]:
    """Return a note if the run recorded only some of the groups that it trained on."""
    trained = dict(metrics.points("select/kept"))
    shares = [(s.recorded, trained.get(s.update, 0)) for s in rollouts if s.kind == "train"]
    fewer = [f"{recorded} of {total:g}" for recorded, total in shares if recorded < total]
    if not fewer:
        return []
    return [
        f"The run recorded the rollouts of a share of its groups, {fewer[-1]} of the last update shown here: "
        "record.tokens is how much. The numbers of rollouts are theirs."
    ]


def part(name: str) -> str:
    """Return the text of a file of assets/."""
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def block(name: str, content: str) -> str:
    """Return an element with JSON for the page's scripts."""
    return f'<script type="application/json" id="{name}">{content}</script>'


def content_policy(scripts: list[str], style: str, *, asks: bool = False) -> str:
    """Return the policy that admits these scripts and this style and loads nothing.

    asks: admit requests to the page's own server.
    """

    def digest(source: str) -> str:
        return "'sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode() + "'"

    return (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"script-src {' '.join(map(digest, scripts))}; style-src {digest(style)}"
        + ("; connect-src 'self'" if asks else "")
    )


def _summary(
    record: RunRecord, rollouts: list[UpdateRollouts], logs: list[SearchLog], notes: list[str]
) -> dict[str, Any]:
    updates, remark = thinned(record.metrics)
    return {
        "name": record.name,
        "title": record.title,
        "stopped": record.stopped,
        "ended": record.ended_early,
        "headline": asdict(side_by_side(logs) or headline(record.metrics)),
        "plan": record.sections,
        "config": record.config,
        "code": record.code,
        "updates": updates,
        "series": columns(record.metrics, updates),
        "words": words(record.metrics.series),
        "classes": classes(record.metrics),
        "lengths": by_length(rollouts),
        "alarms": alarms(record.metrics, rollouts),
        "rules": [[rule.name, rule.says] for rule in RULES],
        "steps": [
            {"id": s.id, "kind": s.kind, "update": s.update, "shown": s.count, "total": s.total}
            for s in rollouts
        ],
        "searches": [log.summary() for log in logs],
        "notes": [*record.notes, *remark, *notes],
    }


def alarms(metrics: Curves, rollouts: list[UpdateRollouts]) -> list[dict[str, Any]]:
    """Return the broken rules as JSON, each with its finding."""
    broken = findings(Evidence(metrics, rollouts))
    return [{"name": rule.name, "says": rule.says, **asdict(finding)} for rule, finding in broken]


def thinned(metrics: Curves) -> tuple[list[int], list[str]]:
    """Return the updates to draw and a note if some are left out.

    Of more than POINTS updates, POINTS at even distances are drawn, and as many evaluated ones.
    """
    if len(metrics.updates) <= POINTS:
        return list(metrics.updates), []
    evaluated = set[int]().union(
        *(curve for name, curve in metrics.series.items() if name.startswith("eval/"))
    )
    updates = sorted({*evenly(metrics.updates, POINTS), *evenly(sorted(evaluated), POINTS)})
    return updates, [f"The curves show {len(updates)} of {len(metrics.updates)} updates, at even distances."]


def columns(metrics: Curves, updates: list[int]) -> dict[str, dict[str, list[Any]]]:
    """Return for each curve the indices of its updates ("at", omitted if it has all) and its values ("y")."""
    columns: dict[str, dict[str, list[Any]]] = {}
    for name in sorted(metrics.series):
        values = metrics.series[name]
        at = [i for i, update in enumerate(updates) if update in values]
        ys = [None if (y := values[updates[i]]) is None else float(f"{y:.6g}") for i in at]
        columns[name] = {"y": ys} if len(at) == len(updates) else {"at": at, "y": ys}
    return columns
