"""`posttrain pipeline`: stages that take what earlier ones made, from a file to one report."""

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from posttrain.api.opening import claimed_directory, free_directory
from posttrain.base.nearest import did_you_mean
from posttrain.models.pretrained import silent
from posttrain.pipeline import file, stages
from posttrain.pipeline.check import check, tell
from posttrain.pipeline.record import lock, places
from posttrain.report.terminal import out, say
from posttrain.types import UserError


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
        told = f"go on with --resume --dir {root}" if begun else "no stage has begun"
        raise KeyboardInterrupt(told) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def pipeline(
    path: Annotated[Path, typer.Argument(metavar="PIPELINE.toml", help="The stages; see recipes/rlhf.toml.")],
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="STAGE.A.B=C", help="Overrides a key: --set sft.optim.lr=1e-5"),
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Where everything is left; by default runs/NAME-001, -002 ..."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on in --dir: finished stages are passed over.")
    ] = False,
    begin: Annotated[
        str | None,
        typer.Option("--from", metavar="STAGE", help="Go on in --dir, this stage and all after it anew."),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print nothing but errors and the result.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines for other programs.")] = False,
) -> None:
    """Runs stages that each name a recipe and take what earlier ones made; leaves one pipeline.html.

    All stages are checked before the first one trains. Ctrl-C or SIGTERM finishes the update, saves and
    stops, and outside of updates stops at once; --resume goes on at the very update. With --from what was
    there is moved aside and kept.

    Example: `posttrain pipeline recipes/rlhf.toml --dir runs/rlhf --set sft.run.updates=20`
    """
    going_on = resume or begin is not None
    if going_on and directory is None:
        which = "--resume" if resume else "--from"
        raise UserError(which, "which pipeline?", "name its directory with --dir")
    found = file.read(path, sets or ())
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
