"""The report of a pipeline: what each stage changed, and a comparison of its policies.

A pure function of the pipeline's directory: stages.json names the stages, each run directory holds the
results of its stage, compare.json those of the comparison. Files that do not exist yet are left out.
"""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.errors import UserError
from posttrain.report.headline import count, duration, ends, figure, percent
from posttrain.report.page import assembled, block, put
from posttrain.report.record import Curves, Row, json_object, number, read, text
from posttrain.report.rollouts import json_text

SCRIPTS = ("dom.js", "scale.js", "plane.js", "pipeline.js")
STYLES = ("style.css", "pipeline.css")
WHILE_TRAINING = ("reward/mean", "loss", "kl/ref")
"""Curves whose first and last values are reported besides those of evaluations."""


def write(root: Path, out: Path | None = None) -> Path:
    """Write the page to `out`, by default pipeline.html, and its data to pipeline.json; return its path.

    Raises UserError if the directory is not a pipeline's, or cannot be written to.
    """
    content = summary(root)
    put(root / "pipeline.json", json.dumps(content, indent=1))
    return put(out or root / "pipeline.html", page(content))


def summary(root: Path) -> dict[str, Any]:
    """Read a pipeline's directory: name, title, stages, comparison (None before it is made) and notes.

    Raises UserError if the directory is not a pipeline's.
    """
    plan, notes = json_object(root / "stages.json")
    if plan is None:
        raise UserError(
            str(root),
            "this is not a pipeline's directory: it has no stages.json",
            "give the directory that `posttrain train` wrote",
        )
    compare, compare_notes = json_object(root / "compare.json")
    if (root / "compare.json").exists():
        notes += compare_notes
    stages = [_stage(root, stage) for stage in plan.get("stages", []) if isinstance(stage, dict)]
    return {
        "name": root.resolve().name,
        "title": text(plan.get("title")) or root.resolve().name,
        "stages": stages,
        "compare": compare,
        "notes": notes,
    }


def _stage(root: Path, stage: Row) -> dict[str, Any]:
    """Return a stage with its state, and the changes of its metrics or the files it made."""
    directory = root / text(stage.get("directory"))
    out: dict[str, Any] = {key: text(stage.get(key)) for key in ("name", "kind", "directory", "says")}
    out["takes"] = [text(name) for name in stage.get("takes") or []]
    if stage.get("kind") != "recipe":
        files = sorted(f for f in directory.rglob("*") if f.is_file()) if directory.is_dir() else []
        out["files"] = [[str(f.relative_to(directory)), f.stat().st_size] for f in files]
        return out | {"state": "finished" if files else "waiting"}
    if not (directory / "config.toml").exists():
        return out | {"state": "waiting"}
    record = read(directory)
    metrics = record.metrics
    total = _updates(record.config)
    last = metrics.updates[-1] if metrics.updates else 0
    finished = (total and last >= total) or record.ended_early
    return out | {
        "state": "finished" if finished else "stopped" if record.stopped else "running",
        "title": record.title,
        "stopped": record.stopped,
        "report": f"{directory.name}/report.html" if (directory / "report.html").exists() else "",
        "updates": last,
        "of": total,
        "tokens": _last(metrics, "tokens"),
        "seconds": _last(metrics, "seconds"),
        "changed": _changes(metrics),
    }


def _updates(config: str) -> int:
    """Return `run.updates` of a recipe; 0 if it cannot be read."""
    try:
        updates = tomllib.loads(config).get("run", {}).get("updates", 100)
    except tomllib.TOMLDecodeError:
        return 0
    return updates if isinstance(updates, int) else 0


def _last(metrics: Curves, name: str) -> float | None:
    points = metrics.points(name)
    return points[-1][1] if points else None


def _changes(metrics: Curves) -> list[dict[str, Any]]:
    """Return the first and last values of evaluations, then of the curves WHILE_TRAINING."""
    out = []
    for name in sorted(n for n in metrics.series if n.startswith("eval/")):
        points = metrics.points(name)
        if points:
            out.append({"name": name, "first": points[0][1], "last": points[-1][1], "updates": len(points)})
    for name in WHILE_TRAINING:
        values = [y for _, y in metrics.points(name)]
        if values:
            first, last, _ = ends(values)
            out.append({"name": name, "first": first, "last": last, "updates": len(values)})
    return out


# ---------------------------------------------------------------------- the page


def page(content: Mapping[str, Any]) -> str:
    """Return the HTML of a pipeline's report: one file that loads nothing."""
    data = block("pipeline", json_text({**content, "headline": headline(content)}))
    return assembled("pipeline.html", SCRIPTS, STYLES, str(content["title"]), data)


def _with_error(score: Mapping[str, Any]) -> str:
    error = score["error"]
    return figure(score["mean"]) + ("" if error is None else f" ± {figure(error)}")


def _over(win: Mapping[str, Any], name: str) -> tuple[str, float | None, float, float]:
    """Return (the other policy, this policy's win rate over it, the bounds of its interval)."""
    if win["rate"] is None:
        return win["over"], None, 0.0, 1.0
    if win["of"] == name:
        return win["over"], win["rate"], win["low"], win["high"]
    return win["of"], 1 - win["rate"], 1 - win["high"], 1 - win["low"]


def headline(content: Mapping[str, Any]) -> list[list[str]]:
    """Return the tiles at the top as (label, value, remark): the best policy, stages, time and tokens.

    A policy is named the best if it has the highest mean score, and the 95 % interval of its win rate over
    each other policy lies above one half.
    """
    tiles = []
    runs = [s for s in content["stages"] if s["kind"] == "recipe"]
    compare = content["compare"]
    scored = [p for p in compare["policies"] if p["score"]] if compare else []
    if scored:
        best = max(scored, key=lambda p: p["score"]["mean"])
        won = [_over(w, best["name"]) for w in compare["wins"] if best["name"] in (w["of"], w["over"])]
        rates = [(other, rate, low, high) for other, rate, low, high in won if rate is not None]
        clear = bool(rates) and all(low > 0.5 for _, _, low, _ in rates)
        least = min(rates, key=lambda w: w[2], default=None)
        prompts = f"; {compare['prompts']} prompts"
        if least is not None:
            over, rate, low, high = least
            remark = f"wins {percent(rate)} over {over}, 95 %: {percent(low)} – {percent(high)}{prompts}"
            remark = remark if clear else f"{best['name']} {remark}"
            tiles.append(["Best policy", best["name"] if clear else "no clear winner", remark])
        others = [f"{p['name']} {_with_error(p['score'])}" for p in scored if p is not best]
        tiles.append(["Best mean score", _with_error(best["score"]), "; ".join([best["name"], *others])])
    finished = sum(s["state"] == "finished" for s in content["stages"])
    tiles.append(["Stages", f"{finished} of {len(content['stages'])}", "finished"])
    for label, key, show in (("Time", "seconds", duration), ("Tokens trained", "tokens", count)):
        values = [v for s in runs if (v := number(s.get(key))) is not None]
        if values:
            tiles.append([label, show(sum(values)), "all stages"])
    return tiles
