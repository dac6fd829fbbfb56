"""The one way into a run: `open_session`, and `train`, which runs what it opens to its end."""

import copy
import hashlib
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from posttrain import errors
from posttrain.base.table_reader import key_of
from posttrain.base.toml import dump
from posttrain.base.usercode import MEMORY, file_of
from posttrain.errors import RUN_DIR, Option, RunError, UserError, interrupts
from posttrain.learner.ranks import ALONE, Ranks, launched
from posttrain.loop import build
from posttrain.loop.loop import Parts
from posttrain.loop.session import LoopSession
from posttrain.models.checkpoint import weights_alone
from posttrain.models.pretrained import resolve, save_pretrained, silent
from posttrain.plan.plan import Plan, plan_run
from posttrain.process import machine
from posttrain.recipe import config
from posttrain.recipe.objects import export_tables, find_temporary_files, read_sources, use_copies
from posttrain.recipe.recipe import LoadedModel, Recipe
from posttrain.report import terminal, write
from posttrain.report.record import json_lines
from posttrain.report.terminal import View, err, say
from posttrain.report.watch import Watch
from posttrain.run.journal import Show, stop_recorded, stop_requested
from posttrain.run.resume import DATA, check_digests, digest_of_data, digests_of, read_digests
from posttrain.run.rundir import CODE, RunDir, code_versions, kept

MAY_DIFFER = ("checkpoint", "record", "track", "eval", "train")
"""Tables that may change when a run is resumed: no weight depends on them, except for the rounding of
sums over another number of ranks."""


def free_directory(name: str, root: str = "runs") -> Path:
    """Return the first directory ROOT/NAME-001, -002 ... that is not taken."""
    return next(p for n in range(1, 100_000) if not (p := Path(root) / f"{name}-{n:03d}").exists())


def claimed_directory(name: str, root: str = "runs") -> Path:
    """Return the same, made at once, so that no other process that begins now takes it too."""
    while True:
        path = free_directory(name, root)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(str(path), f"cannot be made: {error.strerror}") from error
        return path


def open_session(
    found: config.LoadedRecipe,
    run_dir: Path | None,
    *,
    title: str,
    resume: bool = False,
    ranks: Ranks = ALONE,
    view: View | Show = "none",
) -> Parts:
    """Open the run of a recipe in its directory, and return what a session of it needs.

    The command line, posttrain.train, posttrain.Session and each stage of a pipeline come in here. A run
    directory that is not named is the first free one of runs/TITLE-001, -002 ... Of `ranks` all others than
    rank 0 are silent.

    Raises UserError, located, before anything is trained; nothing is then left of a new directory.
    """
    if ranks is ALONE:
        check_alone()
    if resume and run_dir is None:
        raise UserError(str(Option("--resume", "resume")), "which run?", f"name its directory with {RUN_DIR}")
    made = claimed_directory(title) if run_dir is None and not ranks.rank else run_dir
    path = ranks.tell(made, "the run directory")
    assert path is not None
    plans = view == "plan" and not ranks.rank
    told = _teller(view, ranks)
    if resume and (before := path / "config.toml").exists():
        with found.located():
            plain = config.from_tables(export_tables(as_begun(found, path, told).tables)).recipe
            check_same(plain, config.read(before).recipe, before)
    with ExitStack() as stack:
        directory = RunDir(path, resume=resume, rank=ranks.rank)
        stack.callback(directory.close)
        try:
            found = _with_sources(found, directory, resume, told)
            ranks.gather(None, "the run directory")
            # A program has the threads that it has set itself, unless the recipe says otherwise.
            threads = found.recipe.run.threads
            stack.enter_context(machine.configured(threads) if errors.SHELL else machine.as_before(threads))
            found, chosen = prepare(found, directory, title=title, resume=resume, say=told, ranks=ranks)
            if plans:
                print_plan(chosen)
                say(f"run directory: {path}")
            shown = stack.enter_context(
                terminal.view(
                    terminal.quiet if ranks.rank else view,
                    found.recipe.run.updates,
                    Watch(json_lines(path / "metrics.jsonl")[0]),
                    found.recipe.run.condition,
                )
            )
            parts = build.build_session_parts(
                chosen,
                directory,
                resume=resume,
                config=export_tables(found.tables),
                show=shown,
                say=told,
                ranks=ranks,
            )
        except (UserError, KeyboardInterrupt, OSError) as error:
            if not resume:
                directory.discard()
            if isinstance(error, UserError):
                raise found.locate(error) from None
            raise
        stack.push(parts.closing)
        return replace(parts, closing=stack.pop_all())


def _teller(view: View | Show, ranks: Ranks) -> Callable[[str], None]:
    """Return what prints a line for a person where a run has this view."""
    return silent if ranks.rank or callable(view) or view in ("none", "json") else say


def train(
    found: config.LoadedRecipe,
    run_dir: Path | None,
    *,
    title: str,
    resume: bool,
    view: View | Show = "plan",
    ranks: Ranks = ALONE,
) -> tuple[Path, dict[str, float]]:
    """Run a recipe to its end: the run directory, which has a report, and the last evaluation's metrics.

    A signal ends the run after its update, saved. Raises UserError, located, before anything was trained, and
    RunError from a run that had to stop.
    """
    path = run_dir
    try:
        with interrupts():
            parts = open_session(found, run_dir, title=title, resume=resume, ranks=ranks, view=view)
        path = parts.run_dir.path
        try:
            with LoopSession(parts) as session:
                return path, run(session, signals=True, say=_teller(view, ranks))
        except (UserError, KeyboardInterrupt) as error:
            if not resume:
                parts.run_dir.discard()  # nothing is left of a run that ends before its first update
            raise found.locate(error) if isinstance(error, UserError) else error from None
    except KeyboardInterrupt as error:
        if str(error) or resume:
            raise
        made = path is not None and json_lines(path / "metrics.jsonl")[0]
        raise KeyboardInterrupt(kept(path) if path and made else "nothing was trained yet") from None


def run(
    session: LoopSession, *, signals: bool = False, say: Callable[[str], None] = silent
) -> dict[str, float]:
    """Run a session to its end, and write its report: the metrics of its last evaluation.

    signals: SIGTERM and Ctrl-C end the run after its update, saved.
    """
    directory, never = session.run_dir, lambda: False
    try:
        with (
            stop_recorded(directory.path, directory.own),
            stop_requested() if signals else nullcontext(never) as stopped,
        ):
            last = session.finish(stopped)
    except BaseException:
        # On a full disk, or where someone is in a hurry, the first error is the one to report.
        with suppress(Exception, KeyboardInterrupt):
            if not directory.rank:
                write(directory.path)
        raise
    if directory.rank:
        return last
    if session.reached:
        say(f"the run ends early: {session.stopped}")
    elif session.stopped:
        (directory.path / "stopped.txt").write_text(f"{session.stopped}\n", encoding="utf-8")
    try:
        write(directory.path)
    except UserError as error:
        raise RunError("report", str(error), "the run has ended and is saved") from None
    return last


def _with_sources(
    found: config.LoadedRecipe, directory: RunDir, resume: bool, say: Callable[[str], None]
) -> config.LoadedRecipe:
    """Keep the source of a program's objects, and of the recipe's own code, in the run's directory.

    A loaded model is saved there, and then named by its path.
    """
    if not resume and not directory.rank:
        directory.keep(config.find_training_files(found.tables))
    for name, source in read_sources(found.tables).items():
        if not directory.keep_source(name, source):
            problem = f"{name} has changed since the run began, which goes on with it as it is now:"
            warnings.warn(f"{problem} not as it would have gone on", stacklevel=6)
    if not resume:
        directory.keep(find_temporary_files(found.tables))
    loaded = found.recipe.model.loaded
    if loaded is None or (directory.path / "config.toml").exists():
        return found
    return _starting(found, str(_save(loaded, directory)))


def _starting(found: config.LoadedRecipe, model: str) -> config.LoadedRecipe:
    """The recipe with the path of a saved model in the place of a loaded one."""
    table = {key: value for key, value in found.tables["model"].items() if key != "loaded"}
    return config.from_tables({**found.tables, "model": table | {"path": model}}, found.where)


def _save(loaded: LoadedModel, directory: RunDir) -> Path:
    """Save a program's model in the run's directory; the model itself is left as it is."""
    model = loaded.model
    own = {name: getattr(model, name) for name in ("config", "generation_config") if hasattr(model, name)}
    try:
        for name, each in own.items():  # transformers writes into them as it saves
            setattr(model, name, copy.deepcopy(each))
        save_pretrained(model, loaded.tokenizer, directory.start)
    finally:
        for name, each in own.items():
            setattr(model, name, each)
    return directory.start


def _config_text(found: config.LoadedRecipe, run: Path, digests: Mapping[str, str]) -> str:
    """The recipe as the run keeps it: its own code by the copies; with digests of what it read."""
    here = str((run / CODE).resolve())
    places = config.TRAINING_CODE + config.CALLED_CODE
    tables = config.rename_code(export_tables(found.tables), lambda name: name.replace(here, CODE, 1), places)
    text = dump(tables)
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

    tables = config.rename_code(found.tables, copied)
    if tables == found.tables:
        return found
    recipe = config.parse(Recipe, tables, found.where)
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
) -> tuple[config.LoadedRecipe, Plan]:
    """The recipe as this run began, and its plan; the directory then describes both. UserError if refused."""
    path = directory.path
    found, before = as_begun(found, path), read_digests(path)
    if resume and weights_alone(directory.checkpoints):
        raise UserError(
            str(path),
            "its checkpoints hold weights alone: nothing goes on from them",
            "begin another run with such a model as model.path",
        )
    checked = None if ranks.rank else path / ".prompts.json"
    chosen = plan_run(found.recipe, say, path, checked, ranks=ranks.size)
    now = digests_of(found.tables, path) | {DATA: digest_of_data(chosen.resolved.train or chosen.groups)}
    check_digests(before, now, say)
    agree(ranks, dump(export_tables(found.tables)), code_versions(), now[DATA])
    # All cut their rows alike.
    budget = min(ranks.gather(chosen.microbatch_tokens, "the plan"))
    chosen = replace(chosen, microbatch_tokens=budget)
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
    began = run / "config.toml"
    before = config.read(began).recipe.model if began.exists() else None
    if before and found.recipe.model.loaded:
        found = _starting(found, before.path)
    tables = use_copies(run / CODE, found.tables)
    if tables != found.tables:
        found = config.from_tables(tables, found.where)
    found = with_copies(found, run, say)
    model = found.recipe.model
    if before:
        keys = [key for key in ("dtype", "date") if found.tables["model"].get(key, "auto") == "auto"]
        model = replace(model, **{key: getattr(before, key) for key in keys})
    if (Path(model.path) / "config.toml").is_file():
        model = replace(model, path=before.path if before else str(resolve(model.path)))
    settled = {"dtype": model.dtype, "date": model.date, "path": model.path}
    tables = {**found.tables, "model": {**found.tables["model"], **settled}}
    return replace(found, recipe=replace(found.recipe, model=model), tables=tables)


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


def print_plan(chosen: Plan) -> None:
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


def agree(ranks: Ranks, config: str, code: str, data: str) -> None:
    """UserError that names the ranks whose recipe, code or data are not those of rank 0."""
    alike = "\n".join(line for line in code.splitlines() if not line.startswith("python"))  # and its kernel
    for what, text in (
        ("have a recipe", config),
        ("run code", alike),
        ("read data", data),
    ):
        try:
            ranks.agree(what, hashlib.blake2b(text.encode(), digest_size=8).hexdigest())
        except RunError as error:
            fix = "give every rank the same recipe, options, posttrain and data"
            raise UserError("torchrun", str(error), fix) from None
