"""The commands that list runs, write their report and serve it."""

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

from posttrain.errors import UserError
from posttrain.recipe.settings import RunSettings
from posttrain.report import write
from posttrain.report.headline import BEST, best, figure, percent
from posttrain.report.live import ReportServer
from posttrain.report.overlay import write as write_overlay
from posttrain.report.pipeline import write as write_pipeline
from posttrain.report.record import ON_REQUEST, SIGNS_OF_A_RUN, RunRecord, file_text, read
from posttrain.report.terminal import console, out
from posttrain.run.rundir import in_use

STAGES = "stages.json"
DEPTH = 3
"""Folders below the one that is named in which runs are looked for."""


@dataclass(frozen=True, kw_only=True)
class Listed:
    """What is told of a run, or of a pipeline, whose updates are its stages."""

    path: str
    kind: str
    """run, pipeline, or unknown."""
    method: str = ""
    model: str = ""
    done: int = 0
    """Updates, or stages, that are finished."""
    of: int | None = None
    state: str
    """done, stopped, running, failed or broken."""
    note: str = ""
    """Why it is broken or has failed."""
    unreadable: bool = False
    """Whether it is broken since it cannot be read, and not for want of a record."""
    metric: str = ""
    """Of its best evaluation, with the update and the value."""
    at: int | None = None
    best: float | None = None
    weights: str = ""
    """Where the weights of its best evaluation are; empty if they were not saved or have been removed."""
    changed: float = 0.0
    """When it last wrote something, in seconds since 1970."""
    size: int = 0
    """Bytes on the disk."""

    @property
    def name(self) -> str:
        """The last part of its path."""
        return Path(self.path).name


class Order(StrEnum):
    """What the list can be sorted by."""

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
    as_json: Annotated[bool, typer.Option("--json", help="Print one run a line, as JSON.")] = False,
) -> None:
    """List runs and pipelines: method, updates, state, best evaluation, date, and size on disk.

    Of a pipeline its stages are told if it is named itself.

    Example: `posttrain run list --sort best`
    """
    if not folder.is_dir():
        fix = "name a folder of runs; posttrain train leaves them in runs/"
        raise UserError(str(folder), "there is no such directory", fix)
    found = ordered([listed(path) for path in found_in(folder)], sort)
    if as_json:
        for each in found:
            typer.echo(json.dumps(asdict(each)))
        return
    if not found:
        out.print(f"{folder} holds no runs", soft_wrap=True)
        return
    page = out if out.is_terminal else console(width=160)  # in a file or a pipe a line stays whole
    page.print(_table(found, folder))
    for each in found:
        if each.note:
            page.print(f"{each.path}: {each.state}, {each.note}", soft_wrap=True)


def report(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR ...", help="One run, or several.")],
    page: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE.html", help="By default in the run, of several beside them."),
    ] = None,
) -> None:
    """Write report.html of a run, pipeline.html of a pipeline, or one page of several runs.

    Of several runs it is one page, comparison.html beside them: what differs in their recipes, what they came
    to, and their curves; runs that differ in their seed alone are one series, a mean in a band.

    Example: `posttrain report runs/grpo-001 runs/grpo-002 --out grpo.html`
    """
    pipelines = [path for path in run_dirs if (path / STAGES).exists()]
    if len(run_dirs) > 1:
        if pipelines:
            fix = f"name runs of its stages, as {pipelines[0]}/01-..."
            raise UserError(str(pipelines[0]), "is a pipeline, and beside others only runs are shown", fix)
        beside = Path(os.path.commonpath([path.absolute().parent for path in run_dirs]))
        written = write_overlay(run_dirs, page or beside / "comparison.html")
    elif pipelines:
        written = write_pipeline(run_dirs[0], page)
    else:
        written = write(run_dirs[0], page)
    out.print(str(written), soft_wrap=True)


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run that goes on, or has ended.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of 127.0.0.1; 0 takes a free one.")] = 0,
) -> None:
    """Serve the report of a run on this machine and update it while the run continues, until Ctrl-C.

    Nothing is written, and nobody else than this machine is answered.

    Example: `posttrain run watch runs/arithmetic_grpo-001`
    """
    if (run / STAGES).exists():
        raise UserError(str(run), "is a pipeline", "name the run of one of its stages")
    with closing(ReportServer(run, port, in_use)) as server:
        out.print(f"{server.address} shows {run}; Ctrl-C ends it", soft_wrap=True)
        sys.stdout.flush()
        with suppress(KeyboardInterrupt):
            server.wait()
    out.print(f"no longer watching {run}", soft_wrap=True)


def found_in(folder: Path, depth: int = DEPTH) -> Iterator[Path]:
    """The runs and pipelines of a folder, which may be one itself, and what only half looks like one.

    Of a pipeline that is named itself come its stages. What lies inside a run is not looked at.
    """
    if _is_one(folder) and not (folder / STAGES).exists():
        yield folder
        return
    for path in sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".")):
        try:
            is_run = _is_one(path) or _is_half(path)
        except PermissionError:  # `listed` says so
            is_run = True
        if is_run:
            yield path
        elif depth > 1:
            yield from found_in(path, depth - 1)


def _is_one(path: Path) -> bool:
    return any((path / name).exists() for name in (STAGES, *SIGNS_OF_A_RUN))


def _is_half(path: Path) -> bool:
    """Whether it is what a kill may leave of a run: nothing, or rollouts or checkpoints alone."""
    left = {p.name for p in path.iterdir() if not p.name.startswith(".")}
    return not left or bool(left & {"samples", "checkpoints"})


def listed(path: Path) -> Listed:
    """What a directory says of its run or its pipeline; broken where it says nothing that can be read."""
    told: dict[str, Any] = {"path": str(path), "changed": 0.0, "size": 0}
    try:
        files = list(_files(path))
        told |= {
            "size": sum(f.st_size for f in files),
            "changed": max((f.st_mtime for f in files), default=0),
        }
        if (path / STAGES).exists():
            return _pipeline(path, told)
        return _run(path, told)
    except (UserError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        unreadable = not isinstance(error, UserError)
        what = error.problem if isinstance(error, UserError) else f"it cannot be read: {error}"
        return Listed(**told, kind="unknown", state="broken", note=what, unreadable=unreadable)


def _files(path: Path) -> Iterator[os.stat_result]:
    """The files below; what a run that goes on removes meanwhile is passed over."""
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):
                yield (Path(folder) / name).lstat()


def _run(path: Path, told: dict[str, Any]) -> Listed:
    if not (path / "config.toml").exists():
        raise UserError("", "it has no config.toml" if any(path.iterdir()) else "it is empty")
    record = read(path)
    if not record.config:
        raise ValueError((record.notes or ["config.toml is empty"])[0])
    tables = tomllib.loads(record.config)
    updates = tables.get("run", {}).get("updates", RunSettings.updates)
    done = max(record.metrics.updates, default=0)
    state = "running" if in_use(path) else _ended(record, done, updates)
    found = best(record.metrics)
    metric, at, value = found or ("", None, None)
    saved = path / "checkpoints" / f"step_{at or 0:06d}"
    return Listed(
        **told,
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
        weights=str(saved) if saved.is_dir() else "",
    )


def _model(path: str) -> str:
    """Of a path the last two parts, or of another run's checkpoint that run."""
    parts = Path(path).parts
    if parts[-3:-2] == ("checkpoints",):
        return f"{parts[-4]}/{parts[-2]}" if len(parts) > 3 else parts[-2]
    return "/".join(parts[-2:])


def _ended(record: RunRecord, done: int, updates: int) -> str:
    if record.stopped and not record.stopped.startswith(ON_REQUEST):
        return "failed"
    return "done" if done >= updates or record.ended_early else "stopped"


def _pipeline(path: Path, told: dict[str, Any]) -> Listed:
    content, notes = file_text(path / STAGES)
    if notes:
        raise UserError("", notes[0])
    stages = [(path / each["directory"], each["kind"]) for each in json.loads(content)["stages"]]
    states = [
        _run(p, {"path": str(p)}).state if p.is_dir() and kind == "recipe" else "" for p, kind in stages
    ]
    ended = [state == "done" if state else p.is_dir() for state, (p, _) in zip(states, stages, strict=True)]
    done, ways = sum(ended), {state for state in states if state in ("running", "failed")}
    state = "running" if in_use(path) or "running" in ways else "failed" if ways else "stopped"
    if done == len(stages) and state == "stopped":
        state = "done"
    return Listed(**told, kind="pipeline", method="pipeline", done=done, of=len(stages), state=state)


def ordered(found: list[Listed], sort: Order) -> list[Listed]:
    """The list in this order; what is alike in it by name."""
    by_name = sorted(found, key=lambda each: each.path)
    if sort is Order.BEST:
        return sorted(by_name, key=lambda e: (e.metric or "~", -BEST.get(e.metric, 1) * (e.best or 0.0)))
    if sort in (Order.WHEN, Order.SIZE):
        return sorted(by_name, key=lambda e: -(e.size if sort is Order.SIZE else e.changed))
    return sorted(by_name, key=lambda e: str(getattr(e, sort.value if sort is not Order.NAME else "path")))


STYLES = {"running": "bold", "failed": "red", "broken": "red", "stopped": "yellow"}


def _table(found: list[Listed], folder: Path) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("run", overflow="fold", style="bold")
    for name, side in (("method", "left"), ("model", "left"), ("updates", "right"), ("state", "left")):
        table.add_column(name, justify=side, overflow="ellipsis", no_wrap=True)  # type: ignore[arg-type]
    table.add_column("best evaluation", overflow="fold")
    for name in ("changed", "size"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in found:
        path = Path(each.path)
        table.add_row(
            str(path.relative_to(folder)) if path != folder else path.name,
            each.method,
            each.model,
            "" if each.of is None else f"{each.done} of {each.of}",
            each.state,
            _best(each),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(each.changed)) if each.changed else "",
            decimal(each.size),
        )
        if style := STYLES.get(each.state):
            table.rows[-1].style = style
    return table


def _best(each: Listed) -> str:
    if each.best is None:
        return "–"
    shown = percent(each.best) if each.metric.endswith("accuracy") else figure(each.best)
    name = Path(each.weights).name
    place = f"in {name}" if name else "weights not kept" if each.at else "the start"
    return f"{each.metric.removeprefix('eval/')} {shown} @ {each.at}, {place}"
