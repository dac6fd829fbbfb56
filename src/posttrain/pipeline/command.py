"""Pipelines: stages that take what earlier ones made, from a file to one report."""

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer

from posttrain.api.opening import claimed_directory, free_directory
from posttrain.base.name_hints import did_you_mean
from posttrain.errors import UserError, how_to_resume
from posttrain.models.pretrained import silent
from posttrain.pipeline import file, stages
from posttrain.pipeline.check import check, tell
from posttrain.pipeline.record import lock, places
from posttrain.report.terminal import out, say


def check_stages(path: Path, sets: Sequence[str], say: Callable[[str], None]) -> list[str]:
    """The names of the stages of a pipeline that could begin as it is; UserError with the first fault."""
    found = file.read(path, sets)
    root = free_directory(path.stem)
    tell(check(found, places(found, root), {}, say), root, say)
    return [stage.name for stage in found.stages]


@contextmanager
def _interruptible(root: Path) -> Iterator[None]:
    """SIGTERM ends what is inside as Ctrl-C does, and either says how to go on; a stage ends its updates."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        begun = (root / "stages.json").exists()
        told = f"go on with {how_to_resume(root)}" if begun else "no stage has begun"
        raise KeyboardInterrupt(told) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def run_stages(
    path: Path,
    sets: Sequence[str],
    directory: Path | None,
    *,
    resume: bool = False,
    begin: str | None = None,
    quiet: bool = False,
    as_json: bool = False,
) -> None:
    """Run the stages of a pipeline, all of which are checked before the first one trains.

    begin: the stage that is made again, with all after it. Interrupted in an update, it finishes that update
    and saves.
    """
    going_on = resume or begin is not None
    if going_on and directory is None:
        which = "--resume" if resume else "--from"
        raise UserError(which, "which pipeline?", "name its directory with --run-dir")
    found = file.read(path, sets)
    names = [stage.name for stage in found.stages]
    if begin is not None and begin not in names:
        fix = did_you_mean(begin, names) or f"there are {', '.join(names)}"
        raise UserError("--from", f"there is no stage {begin!r}", fix)
    root = directory or claimed_directory(path.stem)
    news = stages.News(silent if quiet or as_json else say, quiet=quiet, as_json=as_json)
    with _interruptible(root), lock(root, resume=going_on):
        page = stages.run(found, root, news, begin=begin or "")
    if as_json:
        typer.echo(json.dumps({"state": "done", "report": str(page)}))
    else:
        out.print(f"done: {', '.join(names)}  report {page}", soft_wrap=True)
