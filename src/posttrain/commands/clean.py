"""`posttrain run clean`: removes what runs can do without, and says before what that is."""

import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal

from posttrain.commands.runs import Listed, found_in, listed
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
class Going:
    """What goes of a run, of one kind."""

    what: str
    paths: Sequence[Path]
    """Files and directories."""

    @property
    def size(self) -> int:
        return sum(f.lstat().st_size for path in self.paths for f in (path, *path.rglob("*")) if f.is_file())


@dataclass(frozen=True)
class CleanPlan:
    """What goes of a run, and what stays of what is alike."""

    run: Path
    going: Sequence[Going]
    stays: str
    """The checkpoints that stay, and why."""


def clean(
    named: Annotated[
        list[Path], typer.Argument(metavar="RUN|DIR ...", help="Runs, pipelines, or folders of them.")
    ],
    weights_only: Annotated[
        bool,
        typer.Option("--weights-only", help="Of finished runs also what only --resume needs."),
    ] = False,
    keep_records: Annotated[
        bool, typer.Option("--keep-records", help="Leave rollouts and searches as they are.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would go.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """List what runs can do without, ask, and remove it.

    These go: checkpoints other than the last whole one, the one of the best evaluation and those that
    another run begins from; rollouts and searches in samples/ and trees/; what a kill left half-written.
    What stays can be reported, sampled from, evaluated and, but for --weights-only, resumed. Running ones
    are left alone.

    Example: `posttrain run clean runs --dry-run`
    """
    plans = [
        plan
        for run in _runs(named)
        if (plan := planned(run, weights_only=weights_only, records=not keep_records)).going
    ]
    for plan in plans:
        _tell(plan)
    total = sum(going.size for plan in plans for going in plan.going)
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


def _runs(named: Iterable[Path]) -> Iterator[Listed]:
    """The runs that may be cleaned, those of pipelines included; of others it is said why not."""
    seen: set[Path] = set()
    for folder in named:
        if not folder.is_dir():
            raise UserError(str(folder), "there is no such directory", "name a run, or a folder of runs")
        for run in _with_stages(folder):
            path = Path(run.path)
            if path.resolve() in seen:
                continue
            seen.add(path.resolve())
            if run.state == "broken":
                err.print(f"{path}: left alone, {run.note}", soft_wrap=True)
            elif run.state == "running" or in_use(path.parent):
                err.print(f"{path}: left alone, it is running", soft_wrap=True)
            else:
                yield run


def _with_stages(folder: Path) -> Iterator[Listed]:
    for path in found_in(folder):
        run = listed(path)
        if run.kind == "pipeline":
            stages = map(listed, found_in(path))  # which need not all be of a recipe
            yield from (each for each in stages if each.kind == "run" or each.unreadable)
        else:
            yield run


def planned(run: Listed, *, weights_only: bool, records: bool) -> CleanPlan:
    """What can go of a run that nobody writes to."""
    path = Path(run.path)
    stays, going = _checkpoints(path)
    plans = [Going("checkpoints", going)]
    if weights_only and run.state == "done":
        plans.append(
            Going("what only --resume needs", [p for c in stays if (p := c / checkpoint.RESUME).is_dir()])
        )
    if records:
        plans.append(
            Going("rollouts and searches", [f for pattern in RECORDS for f in sorted(path.glob(pattern))])
        )
    left = [f for pattern in LEFTOVERS for f in sorted(path.glob(pattern))]
    left += checkpoint.leftovers(path / "checkpoints")
    plans.append(Going("half-written", list(dict.fromkeys(left))))
    why = ", ".join(f"{c.name} ({reason})" for c, reason in stays.items())
    return CleanPlan(path, [each for each in plans if each.paths], why)


def _checkpoints(run: Path) -> tuple[dict[Path, str], list[Path]]:
    """The checkpoints that stay, each with the reason, and those that go."""
    root = run / "checkpoints"
    there = dict(checkpoint.numbered(root))
    stays: dict[Path, str] = {}
    last, _ = checkpoint.newest(root)
    if last is None:  # nothing of it can be known to be good
        return dict.fromkeys(there.values(), "none is whole"), []
    stays[last] = "the last"
    resumed, _ = checkpoint.newest(root, resume=True)
    if resumed is not None and resumed != last:
        stays[resumed] = "the last to resume from"
    if found := best(read(run).metrics, there.keys()):
        name, update, value = found
        if not checkpoint.damage(there[update]):
            stays[there[update]] = (
                f"{stays.get(there[update], '')} and best by {name}, {value:.4g}".removeprefix(" and ")
            )
    recipes = _neighbours(run)
    for path in there.values():
        if path not in stays and path.is_symlink():
            stays[path] = "it lies elsewhere"
        elif path not in stays and any(f"{run.name}/checkpoints/{path.name}" in text for text in recipes):
            stays[path] = "another run begins from it"
    return dict(sorted(stays.items())), [path for path in there.values() if path not in stays]


def _neighbours(run: Path) -> list[str]:
    """The recipes of the runs and stages beside a run."""
    folder = run.resolve().parent
    files = [
        *folder.glob("*/config.toml"),
        *folder.glob("*/*/config.toml"),
        *folder.parent.glob("*/config.toml"),
    ]
    own = run.resolve() / "config.toml"
    return [f.read_text(encoding="utf-8", errors="replace") for f in files if f != own]


def _tell(plan: CleanPlan) -> None:
    out.print(str(plan.run), style="bold", soft_wrap=True)
    for going in plan.going:
        names = [p.name for p in going.paths]
        if going.what == "rollouts and searches":
            names = [counted(len(names), "file")]
        elif going.what.startswith("what only"):
            names = [f"{p.parent.name}/{p.name}" for p in going.paths]
        out.print(f"  {decimal(going.size):>9}  {going.what}: {', '.join(names)}", soft_wrap=True)
    if plan.stays:
        out.print(f"  stay: {plan.stays}", style="dim", soft_wrap=True)


def remove(plan: CleanPlan) -> None:
    """Removes it, while nobody else may write to the run. UserError if one began, or the disk refuses."""
    lock = claim(plan.run, "wait until it ends")
    try:
        for going in plan.going:
            for path in going.paths:
                _remove(path)
    except OSError as error:
        raise UserError(str(error.filename), f"cannot be removed: {error.strerror}") from None
    finally:
        os.close(lock)


def _remove(path: Path) -> None:
    if path.name == checkpoint.RESUME:
        checkpoint.to_weights(path.parent)
    elif path.is_dir():
        # Renamed first: a kill leaves what nobody takes for a checkpoint.
        working = (
            path if ".tmp-" in path.name else path.rename(path.with_name(f"{path.name}.tmp-{os.getpid()}"))
        )
        shutil.rmtree(working)
    else:
        path.unlink(missing_ok=True)
