"""The report of a pipeline: what each stage changed, and its policies against one another.

A pure function of the pipeline's directory: stages.json names the stages, each run directory says what its
stage did, compare.json how the policies stand. What is not there yet is left out.
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
"""Curves of which the first and the last value are told where a run was not evaluated."""


def write(root: Path, out: Path | None = None) -> Path:
    """The path of the page, `out` or pipeline.html; the same numbers go to pipeline.json in the directory.

    Raises UserError if the directory holds no pipeline, or cannot be written to.
    """
    found = summary(root)
    out = out or root / "pipeline.html"
    put(root / "pipeline.json", json.dumps(found, indent=1))
    return put(out, page(found))


def summary(root: Path) -> dict[str, Any]:
    """What the directory says: title, stages, comparison (None while there is none), notes."""
    told, notes = json_object(root / "stages.json")
    if told is None:
        raise UserError(
            str(root),
            "this is no pipeline's directory: it holds no stages.json",
            "give the directory that `posttrain train` wrote",
        )
    compare, not_read = json_object(root / "compare.json")
    if (root / "compare.json").exists():
        notes += not_read
    stages = [_stage(root, each) for each in told.get("stages", []) if isinstance(each, dict)]
    return {
        "name": root.resolve().name,
        "title": text(told.get("title")) or root.resolve().name,
        "stages": stages,
        "compare": compare,
        "notes": notes,
    }


def _stage(root: Path, told: Row) -> dict[str, Any]:
    """One stage: what it is, how far it is, and what it changed."""
    directory = root / text(told.get("directory"))
    out: dict[str, Any] = {key: text(told.get(key)) for key in ("name", "kind", "directory", "says")}
    out["takes"] = [text(name) for name in told.get("takes") or []]
    if told.get("kind") != "recipe":
        files = sorted(f for f in directory.rglob("*") if f.is_file()) if directory.is_dir() else []
        out["files"] = [[str(f.relative_to(directory)), f.stat().st_size] for f in files]
        return out | {"state": "finished" if files else "waiting"}
    if not (directory / "config.toml").exists():
        return out | {"state": "waiting"}
    record = read(directory)
    metrics = record.metrics
    wanted = _updates(record.config)
    done = metrics.updates[-1] if metrics.updates else 0
    finished = (wanted and done >= wanted) or record.ended_early
    return out | {
        "state": "finished" if finished else "stopped" if record.stopped else "running",
        "title": record.title,
        "stopped": record.stopped,
        "report": f"{directory.name}/report.html" if (directory / "report.html").exists() else "",
        "updates": done,
        "of": wanted,
        "tokens": _last(metrics, "tokens"),
        "seconds": _last(metrics, "seconds"),
        "changed": _changes(metrics),
    }


def _updates(config: str) -> int:
    """The updates that a run was asked for; 0 if its config does not say."""
    try:
        found = tomllib.loads(config).get("run", {}).get("updates", 100)
    except tomllib.TOMLDecodeError:
        return 0
    return found if isinstance(found, int) else 0


def _last(metrics: Curves, name: str) -> float | None:
    points = metrics.points(name)
    return points[-1][1] if points else None


def _changes(metrics: Curves) -> list[dict[str, Any]]:
    """First and last value of what was measured on held-out data, then of what training itself shows."""
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


def page(found: Mapping[str, Any]) -> str:
    """The HTML of a pipeline's report: one file that loads nothing."""
    data = block("pipeline", json_text({**found, "headline": headline(found)}))
    return assembled("pipeline.html", SCRIPTS, STYLES, str(found["title"]), data)


def _within(score: Mapping[str, Any]) -> str:
    error = score["error"]
    return figure(score["mean"]) + ("" if error is None else f" ± {figure(error)}")


def _over(win: Mapping[str, Any], name: str) -> tuple[str, float | None, float, float]:
    """(the other policy, how often this one wins over it, and the interval of that)."""
    if win["rate"] is None:
        return win["over"], None, 0.0, 1.0
    if win["of"] == name:
        return win["over"], win["rate"], win["low"], win["high"]
    return win["of"], 1 - win["rate"], 1 - win["high"], 1 - win["low"]


def headline(found: Mapping[str, Any]) -> list[list[str]]:
    """The tiles at the top, each (label, value, remark): the best policy, then what it all took.

    A policy is named the best if it has the highest mean score, and of its win rate over each of the others
    all of the 95 % interval lies above one half.
    """
    tiles = []
    runs = [s for s in found["stages"] if s["kind"] == "recipe"]
    compare = found["compare"]
    scored = [p for p in compare["policies"] if p["score"]] if compare else []
    if scored:
        best = max(scored, key=lambda p: p["score"]["mean"])
        won = [_over(w, best["name"]) for w in compare["wins"] if best["name"] in (w["of"], w["over"])]
        told = [(other, rate, low, high) for other, rate, low, high in won if rate is not None]
        clear = bool(told) and all(low > 0.5 for _, _, low, _ in told)
        least = min(told, key=lambda w: w[2], default=None)
        prompts = f"; {compare['prompts']} prompts"
        if least is not None:
            over, rate, low, high = least
            remark = f"wins {percent(rate)} over {over}, 95 %: {percent(low)} – {percent(high)}{prompts}"
            remark = remark if clear else f"{best['name']} {remark}"
            tiles.append(["Best policy", best["name"] if clear else "no clear winner", remark])
        others = [f"{p['name']} {_within(p['score'])}" for p in scored if p is not best]
        tiles.append(["Best mean score", _within(best["score"]), "; ".join([best["name"], *others])])
    ended = sum(s["state"] == "finished" for s in found["stages"])
    tiles.append(["Stages", f"{ended} of {len(found['stages'])}", "finished"])
    for label, key, shown in (("Time", "seconds", duration), ("Tokens trained", "tokens", count)):
        values = [v for s in runs if (v := number(s.get(key))) is not None]
        if values:
            tiles.append([label, shown(sum(values)), "all stages"])
    return tiles
