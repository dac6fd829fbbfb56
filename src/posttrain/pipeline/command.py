"""Check and run a pipeline for `posttrain validate` and `posttrain train`."""

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer

from posttrain.api.opening import claim_directory, free_directory
from posttrain.base.name_hints import did_you_mean
from posttrain.errors import UserError, how_to_resume
from posttrain.models.pretrained import silent
from posttrain.pipeline import file, stages
from posttrain.pipeline.check import check, report_disk
from posttrain.pipeline.record import lock, places
from posttrain.report.terminal import out, say


def check_stages(path: Path, sets: Sequence[str], say: Callable[[str], None]) -> list[str]:
    """Check a pipeline and return the names of its stages; raise UserError with the first mistake."""
    pipeline = file.read(path, sets)
    root = free_directory(path.stem)
    report_disk(check(pipeline, places(pipeline, root), {}, say), root, say)
    return [stage.name for stage in pipeline.stages]


@contextmanager
def _interruptible(root: Path) -> Iterator[None]:
    """Let SIGTERM interrupt as Ctrl-C does, and both say how to resume."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        started = (root / "stages.json").exists()
        message = f"continue with {how_to_resume(root)}" if started else "no stage has begun"
        raise KeyboardInterrupt(message) from None
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
    """Run the stages of a pipeline, after a check of all stages.

    begin: the stage to make again, with all after it. An interrupt during an update takes effect after that
    update, and saves the run.
    """
    continues = resume or begin is not None
    if continues and directory is None:
        option = "--resume" if resume else "--from"
        raise UserError(option, "which pipeline?", "name its directory with --run-dir")
    pipeline = file.read(path, sets)
    names = [stage.name for stage in pipeline.stages]
    if begin is not None and begin not in names:
        fix = did_you_mean(begin, names) or f"there are {', '.join(names)}"
        raise UserError("--from", f"there is no stage {begin!r}", fix)
    root = directory or claim_directory(path.stem)
    log = stages.StageLog(silent if quiet or as_json else say, quiet=quiet, as_json=as_json)
    with _interruptible(root), lock(root, resume=continues):
        page = stages.run(pipeline, root, log, begin=begin or "")
    if as_json:
        typer.echo(json.dumps({"state": "done", "report": str(page)}))
    else:
        out.print(f"done: {', '.join(names)}  report {page}", soft_wrap=True)
