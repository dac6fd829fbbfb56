"""The commands that list runs, write their report and serve it."""

import csv
import fnmatch
import json
import os
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal
from rich.table import Table

from posttrain.base.name_hints import did_you_mean
from posttrain.commands.options import Json, Port
from posttrain.errors import UserError
from posttrain.recipe.settings import RunSettings
from posttrain.report import write
from posttrain.report.headline import best, direction, figure, percent
from posttrain.report.live import FolderServer, ReportServer
from posttrain.report.overlay import write as write_overlay
from posttrain.report.pipeline import write as write_pipeline
from posttrain.report.record import (
    OUT_OF_TIME,
    SIGNS_OF_A_RUN,
    STOPPED_ON_REQUEST,
    Curves,
    RunRecord,
    file_text,
    read,
    read_json_lines,
    samples_in,
)
from posttrain.report.terminal import COLUMNS, console, join_pieces, mark, out
from posttrain.run.rundir import in_use

STAGES = "stages.json"
USUAL = tuple(name for name in COLUMNS if name != "update")
DEPTH = 3
"""Levels of folders that are searched for runs."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A line of the list: a run, or a pipeline, whose updates are its stages."""

    path: str
    kind: str
    """run, pipeline, or unknown."""
    method: str = ""
    model: str = ""
    done: int = 0
    """Finished updates, or stages."""
    of: int | None = None
    state: str
    """done, stopped, running, failed or broken."""
    note: str = ""
    """Why it is broken or has failed."""
    unreadable: bool = False
    """True if it is broken because a file cannot be read, False if files are missing."""
    metric: str = ""
    """The metric of its best evaluation; `at` is the update, `best` the value."""
    at: int | None = None
    best: float | None = None
    lower: bool = False
    """True if a lower value of the metric is better."""
    weights: str = ""
    """Checkpoint of its best evaluation; empty if it was not saved or has been removed."""
    changed: float = 0.0
    """Time of the last write, in seconds since 1970."""
    size: int = 0
    """Bytes on the disk."""


class Order(StrEnum):
    """An order of the list."""

    NAME = "name"
    METHOD = "method"
    STATE = "state"
    BEST = "best"
    WHEN = "when"
    SIZE = "size"


def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="A folder of runs, a pipeline or a run.")
    ] = Path("runs"),
    sort: Annotated[
        Order, typer.Option(help="best: the best first; when: the newest first; size: the largest first.")
    ] = Order.NAME,
    as_json: Json = False,
) -> None:
    """List runs and pipelines: method, updates, state, best evaluation, date, and size on disk.

    For a pipeline as DIR, its stages are listed.

    Example: `posttrain run list --sort best`
    """
    if not folder.is_dir():
        fix = "name a folder of runs; posttrain train leaves them in runs/"
        raise UserError(str(folder), "there is no such directory", fix)
    summaries = sort_runs([summarise(path) for path in find_runs(folder)], sort)
    if as_json:
        for run in summaries:
            typer.echo(json.dumps(asdict(run)))
        return
    if not summaries:
        out.print(f"{folder} holds no runs", soft_wrap=True)
        return
    page = out if out.is_terminal else console(width=160)  # in a file or a pipe a line stays whole
    page.print(_table(summaries, folder))
    for run in summaries:
        if run.note:
            page.print(f"{run.path}: {run.state}, {run.note}", soft_wrap=True)


def show(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run, which may still be running.")],
    names: Annotated[
        str,
        typer.Option(
            "--metrics",
            metavar="A,B",
            help="Names or patterns: loss,reward/mean,'eval/*'. By default the usual ones, in CSV all.",
        ),
    ] = "",
    last: Annotated[
        int | None,
        typer.Option(min=0, help="The last lines that are printed; 0 all. By default 20, in CSV all."),
    ] = None,
    as_csv: Annotated[
        bool,
        typer.Option("--csv", help="Print CSV of all updates, with every digit; nothing where no value."),
    ] = False,
    samples: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Print N answers of the newest update as text, not metrics."),
    ] = 0,
) -> None:
    """Print a run's metrics, one line for each update.

    Updates that have none of the metrics are left out. docs/metrics.md says what each is. With --samples some
    of its answers are printed instead.

    Example: `posttrain run show runs/demo-seed0-001 --metrics reward/mean,eval/accuracy`
    """
    if (run / STAGES).exists():
        raise UserError(
            str(run), "is a pipeline, and only runs have metrics", f"name a stage, as {run}/01-..."
        )
    curves = read(run).metrics
    if samples:
        _print_samples(run, samples)
        return
    columns = _selected(curves, names) if names else list(curves.series)
    if not names and not as_csv:
        columns = [name for name in USUAL if name in curves.series]
    rows = [(u, [curves.series[name].get(u) for name in columns]) for u in curves.updates]
    rows = [(update, values) for update, values in rows if any(value is not None for value in values)]
    if last is None:
        last = 0 if as_csv else 20
    rows = rows[-last:]
    if as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(["update", *columns])
        writer.writerows([update, *values] for update, values in rows)
        return
    cells = [["" if value is None else f"{value:.4g}" for value in values] for _, values in rows]
    lines = [["update", *columns], *([str(u), *row] for (u, _), row in zip(rows, cells, strict=True))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:  # a terminal wraps what is longer
        text = "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        out.print(text.rstrip(), soft_wrap=True)


def _print_samples(run: Path, count: int) -> None:
    """Print answers of the newest file of samples, with the prompt, and sampled text between ⟦ and ⟧."""
    files, notes = samples_in(run / "samples")
    if not files:
        problem = notes[0] if notes else "no answers are recorded: an offline run samples none"
        raise UserError("--samples", problem, "leave it out, or see posttrain data show")
    kind = "evaluation after update" if files[-1].kind == "eval" else "update"
    for row in read_json_lines(files[-1].path)[0][:count]:
        score = row.get("score")
        verdict = (
            f"{row.get('label')}, score {score:g}" if isinstance(score, int | float) else row.get("label")
        )
        answer = mark(join_pieces(zip(row["pieces"], row["sampled"], strict=True)))
        out.print(f"── {kind} {row['update']}, {row['task']}: {verdict}", markup=False, highlight=False)
        out.print(f"{row['prompt']}{answer}\n", markup=False, highlight=False, soft_wrap=True)


def _selected(curves: Curves, names: str) -> list[str]:
    """Return the metrics of these names and patterns, separated by commas; UserError for one without any."""
    columns: list[str] = []
    for name in names.split(","):
        matches = fnmatch.filter(curves.series, name.strip())
        if not matches:
            series = ", ".join(sorted(curves.series)) or "no metrics yet"
            fix = did_you_mean(name.strip(), curves.series) or f"it has {series}"
            raise UserError("--metrics", f"the run has no {name.strip()!r}", fix)
        columns += matches
    return list(dict.fromkeys(columns))


def report(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR ...", help="One run, or several.")],
    page: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE.html", help="By default in the run; for several in their common folder."
        ),
    ] = None,
) -> None:
    """Write report.html of a run, pipeline.html of a pipeline, or one page of several runs.

    Several runs are compared on one page, comparison.html in their common folder: differences of their
    recipes, results and curves; runs that differ in their seed alone are one series, a mean in a band.

    Example: `posttrain report runs/grpo-001 runs/grpo-002 --out grpo.html`
    """
    pipelines = [path for path in run_dirs if (path / STAGES).exists()]
    if len(run_dirs) > 1:
        if pipelines:
            fix = f"name runs of its stages, as {pipelines[0]}/01-..."
            raise UserError(str(pipelines[0]), "is a pipeline, and only runs can be compared", fix)
        common = Path(os.path.commonpath([path.absolute().parent for path in run_dirs]))
        written = write_overlay(run_dirs, page or common / "comparison.html")
    elif pipelines:
        written = write_pipeline(run_dirs[0], page)
    else:
        written = write(run_dirs[0], page)
    out.print(str(written), soft_wrap=True)


def watch(
    run: Annotated[
        Path,
        typer.Argument(metavar="[DIR]", help="A run, or a folder of runs or a pipeline for all of them."),
    ] = Path("runs"),
    port: Port = 0,
) -> None:
    """Serve the report of a run, or of all runs of a folder, and update it until Ctrl-C.

    A folder has a list of its runs, which opens the report of each and compares several on one page. Nothing
    is written, and only this machine can connect.

    Example: `posttrain run watch runs`
    """
    if not run.is_dir():
        fix = "name a run or a folder of runs; posttrain train leaves them in runs/"
        raise UserError(str(run), "there is no such directory", fix)
    is_folder = (run / STAGES).exists() or not _is_one(run)
    with closing(
        FolderServer(run, port, Summaries(run), in_use) if is_folder else ReportServer(run, port, in_use)
    ) as server:
        out.print(f"{server.address} shows {run}; Ctrl-C ends it", soft_wrap=True)
        sys.stdout.flush()
        with suppress(KeyboardInterrupt):
            server.wait()
    out.print(f"no longer watching {run}", soft_wrap=True)


def find_runs(folder: Path, depth: int = DEPTH) -> Iterator[Path]:
    """Yield the runs and pipelines of a folder, and remains of killed runs; or the folder if it is a run.

    A folder that is a pipeline yields its stages. The search does not go into runs.
    """
    if _is_one(folder) and not (folder / STAGES).exists():
        yield folder
        return
    for path in sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".")):
        try:
            is_run = _is_one(path) or _is_half(path)
        except PermissionError:  # `summarise` reports it
            is_run = True
        if is_run:
            yield path
        elif depth > 1:
            yield from find_runs(path, depth - 1)


class Summaries:
    """The rows of all runs, pipelines and their stages of a folder; only what changed is read again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._earlier: dict[Path, RunSummary] = {}

    def __call__(self) -> list[dict[str, Any]]:
        paths = [
            path
            for one in find_runs(self.folder)
            for path in (one, *(find_runs(one) if (one / STAGES).exists() else ()))
        ]
        self._earlier = {path: summarise(path, self._earlier.get(path)) for path in paths}
        return [asdict(summary) for summary in self._earlier.values()]


def _is_one(path: Path) -> bool:
    return any((path / name).exists() for name in (STAGES, *SIGNS_OF_A_RUN))


def _is_half(path: Path) -> bool:
    """Return whether a directory may be the rest of a killed run: empty, or with rollouts or checkpoints."""
    names = {p.name for p in path.iterdir() if not p.name.startswith(".")}
    return not names or bool(names & {"samples", "checkpoints"})


def summarise(path: Path, earlier: RunSummary | None = None) -> RunSummary:
    """Return the summary of a run or a pipeline, with the state "broken" if it cannot be read.

    earlier: a summary of before, returned if no file of a run that was not running has changed since.
    """
    values: dict[str, Any] = {"path": str(path), "changed": 0.0, "size": 0}
    try:
        files = list(_files(path))
        values |= {
            "size": sum(f.st_size for f in files),
            "changed": max((f.st_mtime for f in files), default=0),
        }
        same = earlier is not None and all(getattr(earlier, name) == value for name, value in values.items())
        if earlier is not None and same and earlier.state != "running" and not in_use(path):
            return earlier
        if (path / STAGES).exists():
            return _pipeline(path, values)
        return _run(path, values)
    except (UserError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        unreadable = not isinstance(error, UserError)
        note = error.problem if isinstance(error, UserError) else f"it cannot be read: {error}"
        return RunSummary(**values, kind="unknown", state="broken", note=note, unreadable=unreadable)


def _files(path: Path) -> Iterator[os.stat_result]:
    """Yield the status of all files below a path, except those that a running run removes meanwhile."""
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):
                yield (Path(folder) / name).lstat()


def _run(path: Path, values: dict[str, Any]) -> RunSummary:
    if not (path / "config.toml").exists():
        raise UserError("", "it has no config.toml" if any(path.iterdir()) else "it is empty")
    record = read(path)
    if not record.config:
        raise ValueError((record.notes or ["config.toml is empty"])[0])
    tables = tomllib.loads(record.config)
    updates = tables.get("run", {}).get("updates", RunSettings.updates)
    done = max(record.metrics.updates, default=0)
    state = "running" if in_use(path) else _end_state(record, done, updates)
    by = tables.get("checkpoint", {}).get("best")
    by = by if isinstance(by, str) else ""
    metric, at, value = best(record.metrics, by=by) or ("", None, None)
    saved = path / "checkpoints" / f"step_{at or 0:06d}"
    return RunSummary(
        **values,
        kind="run",
        method=str(tables.get("method", {}).get("name", "")),
        model=_model(str(tables.get("model", {}).get("path", ""))),
        done=done,
        of=updates,
        state=state,
        note=record.stopped if state == "failed" else "",
        metric=metric,
        at=at,
        best=value,
        lower=direction(by or metric)[1] < 0,
        weights=str(saved) if saved.is_dir() else "",
    )


def _model(path: str) -> str:
    """Return the last two parts of a model's path, or RUN/STEP for a checkpoint of another run."""
    parts = Path(path).parts
    if parts[-3:-2] == ("checkpoints",):
        return f"{parts[-4]}/{parts[-2]}" if len(parts) > 3 else parts[-2]
    return "/".join(parts[-2:])


def _end_state(record: RunRecord, done: int, updates: int) -> str:
    if record.stopped and not record.stopped.startswith((STOPPED_ON_REQUEST, OUT_OF_TIME)):
        return "failed"
    return "done" if done >= updates or record.ended_early else "stopped"


def _pipeline(path: Path, values: dict[str, Any]) -> RunSummary:
    content, notes = file_text(path / STAGES)
    if notes:
        raise UserError("", notes[0])
    stages = [(path / stage["directory"], stage["kind"]) for stage in json.loads(content)["stages"]]
    states = [
        _run(p, {"path": str(p)}).state if p.is_dir() and kind == "recipe" else "" for p, kind in stages
    ]
    finished = [
        state == "done" if state else p.is_dir() for state, (p, _) in zip(states, stages, strict=True)
    ]
    done, active = sum(finished), {state for state in states if state in ("running", "failed")}
    state = "running" if in_use(path) or "running" in active else "failed" if active else "stopped"
    if done == len(stages) and state == "stopped":
        state = "done"
    return RunSummary(**values, kind="pipeline", method="pipeline", done=done, of=len(stages), state=state)


def sort_runs(summaries: list[RunSummary], sort: Order) -> list[RunSummary]:
    """Return the runs in this order, and ties in the order of their paths."""
    by_name = sorted(summaries, key=lambda run: run.path)
    if sort is Order.BEST:
        return sorted(by_name, key=lambda r: (r.metric or "~", (1 if r.lower else -1) * (r.best or 0.0)))
    if sort in (Order.WHEN, Order.SIZE):
        return sorted(by_name, key=lambda run: -(run.size if sort is Order.SIZE else run.changed))
    return by_name if sort is Order.NAME else sorted(by_name, key=lambda run: str(getattr(run, sort.value)))


STYLES = {"running": "bold", "failed": "red", "broken": "red", "stopped": "yellow"}


def _table(summaries: list[RunSummary], folder: Path) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("run", overflow="fold", style="bold")
    for name, side in (("method", "left"), ("model", "left"), ("updates", "right"), ("state", "left")):
        table.add_column(name, justify=side, overflow="ellipsis", no_wrap=True)  # type: ignore[arg-type]
    table.add_column("best evaluation", overflow="fold")
    for name in ("changed", "size"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in summaries:
        path = Path(run.path)
        table.add_row(
            str(path.relative_to(folder)) if path != folder else path.name,
            run.method,
            run.model,
            "" if run.of is None else f"{run.done} of {run.of}",
            run.state,
            _best(run),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(run.changed)) if run.changed else "",
            decimal(run.size),
        )
        if style := STYLES.get(run.state):
            table.rows[-1].style = style
    return table


def _best(run: RunSummary) -> str:
    if run.best is None:
        return "–"
    value = percent(run.best) if run.metric.endswith("accuracy") else figure(run.best)
    name = Path(run.weights).name
    place = f"in {name}" if name else "weights not kept" if run.at else "the start"
    return f"{run.metric.removeprefix('eval/')} {value} @ {run.at}, {place}"
