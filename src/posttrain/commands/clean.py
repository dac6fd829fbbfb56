"""`posttrain run clean`: list and remove the files that runs do not need."""

import os
import shutil
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal

from posttrain.commands.runs import RunSummary, find_runs, summarise
from posttrain.errors import counted
from posttrain.models import checkpoint
from posttrain.report.headline import best
from posttrain.report.record import read
from posttrain.report.terminal import err, out
from posttrain.run.rundir import claim, in_use
from posttrain.types import UserError

RECORDS = ("samples/*.jsonl", "trees/*.jsonl", "ranks/*/samples/*.jsonl", "ranks/*/trees/*.jsonl")
LEFTOVERS = ("*.part", ".*.tmp", "*.tmp", "samples/.*.tmp", "trees/.*.tmp", "ranks/*/*/.*.tmp")


@dataclass(frozen=True)
class Removal:
    """Files and directories of a run to remove, of one kind."""

    kind: str
    paths: Sequence[Path]

    @property
    def size(self) -> int:
        return sum(f.lstat().st_size for path in self.paths for f in (path, *path.rglob("*")) if f.is_file())


@dataclass(frozen=True)
class CleanPlan:
    """What to remove from a run, and which checkpoints stay."""

    run: Path
    removals: Sequence[Removal]
    stays: str
    """The checkpoints that stay, and why."""


def clean(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN|DIR ...", help="Runs, pipelines, or folders of them.")
    ],
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Remove from finished runs also what only --resume needs.")
    ] = False,
    keep_records: Annotated[
        bool, typer.Option("--keep-records", help="Leave rollouts and searches as they are.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be removed.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """List what runs can do without, ask, and remove it.

    It removes checkpoints other than the last whole one, the one of the best evaluation and those that
    another run begins from; rollouts and searches in samples/ and trees/; half-written files of killed runs.
    What stays can be reported, sampled from, evaluated and, except after --weights-only, resumed. Running
    runs are left alone.

    Example: `posttrain run clean runs --dry-run`
    """
    plans = [
        plan
        for run in _runs(folders)
        if (plan := plan_removals(run, weights_only=weights_only, records=not keep_records)).removals
    ]
    for plan in plans:
        _print(plan)
    total = sum(removal.size for plan in plans for removal in plan.removals)
    if not plans:
        out.print("nothing can go")
    elif dry_run or not (yes or sys.stdin.isatty()):
        out.print(f"{decimal(total)} can go" + ("" if dry_run else "; --yes removes it"))
    elif yes or typer.confirm(f"Remove {decimal(total)}?"):
        for plan in plans:
            remove(plan)
        out.print(f"{decimal(total)} removed")
    else:
        out.print("nothing was removed")


def _runs(folders: Iterable[Path]) -> Iterator[RunSummary]:
    """Yield the runs to clean, also those of pipelines; print why others are left alone."""
    visited: set[Path] = set()
    for folder in folders:
        if not folder.is_dir():
            raise UserError(str(folder), "there is no such directory", "name a run, or a folder of runs")
        for run in _with_stages(folder):
            path = Path(run.path)
            if path.resolve() in visited:
                continue
            visited.add(path.resolve())
            if run.state == "broken":
                err.print(f"{path}: left alone, {run.note}", soft_wrap=True)
            elif run.state == "running" or in_use(path.parent):
                err.print(f"{path}: left alone, it is running", soft_wrap=True)
            else:
                yield run


def _with_stages(folder: Path) -> Iterator[RunSummary]:
    for path in find_runs(folder):
        run = summarise(path)
        if run.kind == "pipeline":
            stages = map(summarise, find_runs(path))  # some make a model or data, and are not runs
            yield from (stage for stage in stages if stage.kind == "run" or stage.unreadable)
        else:
            yield run


def plan_removals(run: RunSummary, *, weights_only: bool, records: bool) -> CleanPlan:
    """Return what can be removed from a run that is not running."""
    path = Path(run.path)
    stays, superfluous = _checkpoints(path)
    removals = [Removal("checkpoints", superfluous)]
    if weights_only and run.state == "done":
        removals.append(
            Removal("what only --resume needs", [p for c in stays if (p := c / checkpoint.RESUME).is_dir()])
        )
    if records:
        removals.append(
            Removal("rollouts and searches", [f for pattern in RECORDS for f in sorted(path.glob(pattern))])
        )
    leftovers = [f for pattern in LEFTOVERS for f in sorted(path.glob(pattern))]
    leftovers += checkpoint.leftovers(path / "checkpoints")
    removals.append(Removal("half-written", list(dict.fromkeys(leftovers))))
    reasons = ", ".join(f"{c.name} ({reason})" for c, reason in stays.items())
    return CleanPlan(path, [removal for removal in removals if removal.paths], reasons)


def _checkpoints(run: Path) -> tuple[dict[Path, str], list[Path]]:
    """Return the checkpoints that stay, each with the reason, and those to remove."""
    root = run / "checkpoints"
    checkpoints = dict(checkpoint.numbered(root))
    stays: dict[Path, str] = {}
    last, _ = checkpoint.newest(root)
    if last is None:  # any of them may be the best that there is
        return dict.fromkeys(checkpoints.values(), "none is whole"), []
    stays[last] = "the last"
    resumed, _ = checkpoint.newest(root, resume=True)
    if resumed is not None and resumed != last:
        stays[resumed] = "the last to resume from"
    record = read(run)
    by = tomllib.loads(record.config).get("checkpoint", {}).get("best")
    if best_evaluation := best(record.metrics, checkpoints.keys(), by if isinstance(by, str) else ""):
        name, update, value = best_evaluation
        if not checkpoint.damage(checkpoints[update]):
            stays[checkpoints[update]] = (
                f"{stays.get(checkpoints[update], '')} and best by {name}, {value:.4g}".removeprefix(" and ")
            )
    recipes = _neighbours(run)
    for path in checkpoints.values():
        if path not in stays and path.is_symlink():
            stays[path] = "it lies elsewhere"
        elif path not in stays and any(f"{run.name}/checkpoints/{path.name}" in text for text in recipes):
            stays[path] = "another run begins from it"
    return dict(sorted(stays.items())), [path for path in checkpoints.values() if path not in stays]


def _neighbours(run: Path) -> list[str]:
    """Return the recipes of the other runs and stages in the folders around a run."""
    folder = run.resolve().parent
    files = [
        *folder.glob("*/config.toml"),
        *folder.glob("*/*/config.toml"),
        *folder.parent.glob("*/config.toml"),
    ]
    config = run.resolve() / "config.toml"
    return [f.read_text(encoding="utf-8", errors="replace") for f in files if f != config]


def _print(plan: CleanPlan) -> None:
    out.print(str(plan.run), style="bold", soft_wrap=True)
    for removal in plan.removals:
        names = [p.name for p in removal.paths]
        if removal.kind == "rollouts and searches":
            names = [counted(len(names), "file")]
        elif removal.kind.startswith("what only"):
            names = [f"{p.parent.name}/{p.name}" for p in removal.paths]
        out.print(f"  {decimal(removal.size):>9}  {removal.kind}: {', '.join(names)}", soft_wrap=True)
    if plan.stays:
        out.print(f"  stay: {plan.stays}", style="dim", soft_wrap=True)


def remove(plan: CleanPlan) -> None:
    """Remove the files of a plan under the run's lock; raise UserError if it runs, or the disk refuses."""
    lock = claim(plan.run, "wait until it ends")
    try:
        for removal in plan.removals:
            for path in removal.paths:
                _remove(path)
    except OSError as error:
        raise UserError(str(error.filename), f"cannot be removed: {error.strerror}") from None
    finally:
        os.close(lock)


def _remove(path: Path) -> None:
    if path.name == checkpoint.RESUME:
        checkpoint.to_weights(path.parent)
    elif path.is_dir():
        # Renamed first, so that after a kill the rest is not taken for a checkpoint.
        doomed = (
            path if ".tmp-" in path.name else path.rename(path.with_name(f"{path.name}.tmp-{os.getpid()}"))
        )
        shutil.rmtree(doomed)
    else:
        path.unlink(missing_ok=True)
