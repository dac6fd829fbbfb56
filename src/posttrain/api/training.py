"""A recipe that was read, run to its end: what `posttrain train` and each stage of a pipeline do."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from posttrain.base.reader import key_of
from posttrain.base.toml import dump
from posttrain.base.usercode import MEMORY, file_of
from posttrain.learner.ranks import ALONE, Ranks, launched
from posttrain.models.checkpoint import weights_alone
from posttrain.models.pretrained import resolve, silent
from posttrain.process import machine
from posttrain.recipe import config
from posttrain.recipe.recipe import Recipe
from posttrain.report import terminal, write
from posttrain.report.record import json_lines
from posttrain.report.terminal import err
from posttrain.report.watch import Watch
from posttrain.runtime import build
from posttrain.runtime.ranks.ranked import agree
from posttrain.runtime.record.journal import Show, stop_recorded, stop_requested
from posttrain.runtime.record.resume import DATA, check_digests, digest_of_data, digests_of, read_digests
from posttrain.runtime.record.rundir import CODE, RunDir, code_versions, kept
from posttrain.runtime.record.schedule import RecordedSchedule
from posttrain.runtime.session import Session
from posttrain.types import RunError, UserError

MAY_DIFFER = ("checkpoint", "record", "track", "eval", "train")
"""Tables that a run may be resumed with otherwise than it was started: no weight depends on them, but for the
rounding of sums over another number of ranks."""


def say(text: str) -> None:
    """One line of what is going on, on stderr."""
    err.print(text, style="dim", soft_wrap=True)


def free_directory(name: str, root: str = "runs") -> Path:
    """The first directory ROOT/NAME-001, -002 ... that is not taken."""
    return next(p for n in range(1, 100_000) if not (p := Path(root) / f"{name}-{n:03d}").exists())


def claimed_directory(name: str, root: str = "runs") -> Path:
    """The same, made at once, so that no other process that begins now takes it too."""
    while True:
        path = free_directory(name, root)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(str(path), f"cannot be made: {error.strerror}") from error
        return path


def train(
    found: config.LoadedRecipe,
    path: Path,
    *,
    title: str,
    resume: bool,
    shown: Show | None = None,
    recorded: RecordedSchedule | None = None,
    ranks: Ranks = ALONE,
) -> dict[str, float]:
    """The metrics of the last evaluation of a run in this directory, which is then left with its report.

    The plan, and a line an update, go to the terminal; or to `shown` alone, if it is given. `recorded`: what
    another run's samplers did, to be done again. Of `ranks` all others than rank 0 are silent.
    Raises UserError, located, before anything was trained, and RunError from a run that had to stop.
    """
    if ranks is ALONE:
        check_alone()
    shown = terminal.quiet if ranks.rank else shown
    try:
        with _opened(found, path, resume, ranks) as directory:
            told = silent if shown else say
            found, chosen = prepare(
                found, directory, title=title, resume=resume, say=told, ranks=ranks, recorded=bool(recorded)
            )
            if shown is None:
                print_plan(chosen)
                say(f"run directory: {directory.path}")
            with machine.configured(found.recipe.run.threads):
                how: dict[str, Any] = {"resume": resume, "config": found.tables, "recorded": recorded}
                how["ranks"] = ranks
                return _run(chosen, directory, how, shown)
    except KeyboardInterrupt as error:
        if str(error) or resume:
            raise
        made = json_lines(path / "metrics.jsonl")[0]
        raise KeyboardInterrupt(kept(path) if made else "nothing was trained yet") from None


@contextmanager
def _opened(found: config.LoadedRecipe, path: Path, resume: bool, ranks: Ranks) -> Iterator[RunDir]:
    """The run directory of this rank; nothing is left of one that ends before its first update."""
    directory = open_run(found, path, resume, ranks.rank)
    try:
        ranks.gather(None, "the run directory")
        yield directory
    except (UserError, KeyboardInterrupt) as error:
        if not resume:
            directory.discard()
        raise found.locate(error) if isinstance(error, UserError) else error from None
    finally:
        directory.close()


def open_run(found: config.LoadedRecipe, path: Path, resume: bool, rank: int = 0) -> RunDir:
    """The run directory, with copies of the recipe's own code in it."""
    directory = RunDir(path, resume=resume, rank=rank)
    try:
        directory.keep(() if resume or rank else config.own_files(found.tables))
    except BaseException:
        directory.discard()
        directory.close()
        raise
    return directory


def _config_text(found: config.LoadedRecipe, run: Path, digests: Mapping[str, str]) -> str:
    """The recipe as the run keeps it: its own code by the copies; with digests of what it read."""
    here = str((run / CODE).resolve())
    places = config.OWN + config.CALLED
    text = dump(config.renamed(found.tables, lambda name: name.replace(here, CODE, 1), places))
    return text + "".join(f"\n# {name}: BLAKE2b {digest}\n" for name, digest in digests.items())


def with_copies(
    found: config.LoadedRecipe, run: Path, say: Callable[[str], None] = silent
) -> config.LoadedRecipe:
    """The recipe with the run's copies of code of one's own, if it has them; `say` is told what differs."""

    def copied(name: str) -> str:
        file = file_of(name)
        copy = (run / CODE / file.name).resolve() if file else None
        if file is None or copy is None or not copy.is_file():
            return name
        if file.is_file() and file.read_bytes() != copy.read_bytes():
            say(f"note: {file} has changed since the run began, which goes on with its copy {copy}")
        return f"{copy}:{name.rpartition(':')[2]}"

    tables = config.renamed(found.tables, copied)
    if tables == found.tables:
        return found
    recipe = found.bind(config.parsed(Recipe, tables, found.where))
    return replace(found, tables=tables, recipe=recipe)


def check_alone() -> None:
    """UserError in a process that torchrun started as one of several, each of which would make the run."""
    if launched():
        problem = "torchrun started several processes, each of which would make the whole run"
        fix = "several ranks are for `posttrain train RECIPE.toml` alone"
        raise UserError("torchrun", problem, fix)


def prepare(
    found: config.LoadedRecipe,
    directory: RunDir,
    *,
    title: str,
    resume: bool,
    say: Callable[[str], None],
    ranks: Ranks = ALONE,
    recorded: bool = False,
) -> tuple[config.LoadedRecipe, build.Plan]:
    """The recipe as this run began, and its plan; the directory then describes both. UserError if refused."""
    path = directory.path
    found, before = as_begun(found, path), read_digests(path)
    if resume and weights_alone(directory.checkpoints):
        raise UserError(
            str(path),
            "its checkpoints hold weights alone, or are of another version: nothing goes on from them",
            "begin another run with such a model as model.path",
        )
    checked = None if ranks.rank else path / ".prompts.json"
    chosen = build.plan(found.recipe, say, path, checked, ranks=ranks.size)
    now = digests_of(found.tables, path) | {DATA: digest_of_data(chosen.resolved.train or chosen.groups)}
    check_digests(before, now, say)
    agree(ranks, dump(found.tables), code_versions(), now[DATA])
    # All cut their rows alike.
    budget = min(ranks.gather(chosen.microbatch_tokens, "the plan"))
    chosen = replace(chosen, microbatch_tokens=budget, recorded=recorded)
    chosen.disk.check(path)
    directory.describe(
        _config_text(found, path, now), f"{title}: {chosen.resolved.line.title}", chosen.sections()
    )
    return found, chosen


def as_begun(
    found: config.LoadedRecipe, run: Path, say: Callable[[str], None] = silent
) -> config.LoadedRecipe:
    """The recipe with what auto came to as dtype and date: where the run in this directory began, or here.

    So the policy goes on in the same numbers and reads the same prompts wherever and whenever it is resumed.
    `say` is told of code of one's own that differs from the run's copy, which is taken.
    The directory of a run as its model becomes the checkpoint that is then its newest: that run may go on.
    """
    found = with_copies(found, run, say)
    model, began = found.recipe.model, run / "config.toml"
    before = config.read(began).recipe.model if began.exists() else None
    if before:
        keys = [key for key in ("dtype", "date") if found.tables["model"].get(key, "auto") == "auto"]
        model = replace(model, **{key: getattr(before, key) for key in keys})
    if (Path(model.path) / "config.toml").is_file():
        model = replace(model, path=before.path if before else str(resolve(model.path)))
    settled = {"dtype": model.dtype, "date": model.date, "path": model.path}
    tables = {**found.tables, "model": {**found.tables["model"], **settled}}
    return replace(found, recipe=replace(found.recipe, model=model), tables=tables)


def _run(
    chosen: build.Plan, directory: RunDir, how: Mapping[str, Any], shown: Show | None
) -> dict[str, float]:
    """The metrics of the last evaluation, once every update is made; a signal asks it to save and stop."""
    run, told = chosen.resolved.recipe.run, silent if shown else say
    watch = Watch(json_lines(directory.path / "metrics.jsonl")[0])
    view: AbstractContextManager[Show] = (
        nullcontext(shown) if shown else terminal.Terminal(err, run.updates, watch, run.condition)
    )
    try:
        with view as show:
            session = Session(build.build_session_parts(chosen, directory, **how, show=show, say=told))
            with stop_recorded(directory.path, directory.own), session, stop_requested() as stopped:
                last = session.finish(stopped)
                if session.reached:
                    told(f"the run ends early: {session.stopped}")
    except BaseException:
        with suppress(Exception, KeyboardInterrupt):  # on a full disk the first error is the one to tell
            if not directory.rank:
                write(directory.path)
        raise
    if directory.rank:
        return last
    try:
        write(directory.path)
    except UserError as error:
        raise RunError("report", str(error), "the run has ended and is saved") from None
    return last


def check_same(now: Recipe, before: Recipe, file: Path) -> None:
    """UserError if a run is resumed with a recipe that would not have made it; `file` holds what did."""
    if name := otherwise(now, before, longer=True):
        now = _like(now, before, longer=True)
        one, other = (getattr(each, name, getattr(each, f"{name}_", None)) for each in (now, before))
        again = "give what it was started with" if MEMORY in f"{other}" else f"resume with {file}"
        problem = f"[{name}] is not what the run was started with{_difference(one, other)}"
        raise UserError(name, problem, f"{again}, or start another run")


def _difference(now: Any, before: Any) -> str:
    """The first key in which two tables differ, and what it was, where that is short."""
    names = [f.name for f in fields(before)] if is_dataclass(before) and type(now) is type(before) else []
    for name in names:
        was, is_now = getattr(before, name), getattr(now, name)
        if was != is_now:
            short = len(f"{was!r}{is_now!r}") <= 80
            return f": {key_of(name)} " + (f"was {was!r} and is {is_now!r}" if short else "differs")
    return ""


def otherwise(now: Recipe, before: Recipe, *, longer: bool) -> str:
    """The first table in which a recipe differs from the one that a run was started with; empty if none does.

    `longer`: it may have another number of updates, or end on another condition.
    """
    same = _like(now, before, longer=longer)
    return next((key_of(n) for n in vars(before) if getattr(same, n) != getattr(before, n)), "")


def _like(now: Recipe, before: Recipe, *, longer: bool) -> Recipe:
    """The recipe with what may differ as it was."""
    same = replace(now, **{name: getattr(before, name) for name in MAY_DIFFER})
    # Curricula and selection go by it.
    same = replace(same, eval=replace(same.eval, right=now.eval.right))
    if not longer:
        return same
    return replace(same, run=replace(same.run, updates=before.run.updates, stop_when=before.run.stop_when))


def print_plan(chosen: build.Plan) -> None:
    """Prints what a run will do and need, and what is worth knowing of it."""
    for name, rows in chosen.sections().items():
        table = Table(title=name, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_column(style="dim")
        table.add_column()
        for key, value in rows.items():
            table.add_row(key, str(value))
        err.print(table)
    for note in chosen.policy.notes:
        say(f"note: {note}")
    if chosen.memory.total > chosen.free:
        say("note: the estimate is above the free memory; steps.gradient_checkpointing or lora.rank help")
    if chosen.disk.peak > chosen.disk.free:
        say("note: the run may fill the disk; lora.rank, checkpoint.keep or record.tokens help")
