"""Open a run (`open_session`), and run it to its end (`train`), for every entry point of posttrain."""

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
from posttrain.recipe.document import DIRECTORY, is_run
from posttrain.recipe.objects import export_tables, find_temporary_files, read_sources, use_copies
from posttrain.recipe.recipe import LoadedModel, Recipe
from posttrain.report import terminal, write
from posttrain.report.headline import direction
from posttrain.report.record import read_json_lines
from posttrain.report.terminal import View, err, say
from posttrain.report.watch import Watch
from posttrain.run.journal import Show, stop_recorded, stop_requested
from posttrain.run.resume import DATA, check_digests, digest_files, digest_of_data, read_digests
from posttrain.run.rundir import CODE, LOCK, RunDir, code_versions, in_use, kept

MAY_DIFFER = ("checkpoint", "record", "track", "eval", "train")
"""Tables that may change when a run is resumed: no weight depends on them, except for the rounding of
sums over another number of ranks."""


def free_directory(name: str, root: str = "runs") -> Path:
    """Return the first directory ROOT/NAME-001, -002 ... that does not exist."""
    return next(p for n in range(1, 100_000) if not (p := Path(root) / f"{name}-{n:03d}").exists())


def claim_directory(name: str, root: str = "runs") -> Path:
    """Make the first free directory ROOT/NAME-001, -002 ... and return it; no other process gets the same."""
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
    loaded: config.LoadedRecipe,
    run_dir: Path | None,
    *,
    title: str,
    resume: bool = False,
    ranks: Ranks = ALONE,
    view: View | Show = "none",
) -> Parts:
    """Open the run of a recipe in its directory, and return the parts of its session.

    The command line, posttrain.train, posttrain.Session and each stage of a pipeline open runs here.

    run_dir: None for the first free one of runs/TITLE-001, -002 ... ranks: only rank 0 prints.

    Raises UserError, located, before anything is trained; a new directory is then removed.
    """
    if ranks is ALONE and launched():
        problem = "torchrun started several processes, each of which would make the whole run"
        fix = "several ranks are for `posttrain train RECIPE.toml` alone"
        raise UserError("torchrun", problem, fix)
    if resume and run_dir is None:
        raise UserError(str(Option("--resume", "resume")), "which run?", f"name its directory with {RUN_DIR}")
    claimed = claim_directory(title) if run_dir is None and not ranks.rank else run_dir
    path = ranks.tell(claimed, "the run directory")
    assert path is not None
    prints_plan = view == "plan" and not ranks.rank
    log = _say_for(view, ranks)
    if resume and (before := path / "config.toml").exists():
        with loaded.located():
            plain = config.from_tables(export_tables(settle_recipe(loaded, path, log).tables)).recipe
            check_resumable(plain, config.read(before).recipe, before)
    with ExitStack() as stack:
        try:
            directory = RunDir(path, resume=resume, rank=ranks.rank)
        except UserError:
            if run_dir is None and not in_use(path):  # the claimed directory cannot be locked
                (path / LOCK).unlink(missing_ok=True)
                with suppress(OSError):  # another process has written to it
                    path.rmdir()
            raise
        stack.callback(directory.close)
        try:
            loaded = _copy_sources(loaded, directory, resume, log)
            ranks.gather(None, "the run directory")
            # A Python program keeps its number of threads, unless the recipe sets one.
            set_threads = machine.configured if errors.SHELL else machine.keep_threads
            stack.enter_context(set_threads(loaded.recipe.run.threads))
            loaded, plan = prepare(loaded, directory, title=title, resume=resume, say=log, ranks=ranks)
            if prints_plan:
                print_plan(plan)
                say(f"run directory: {path}")
            display = stack.enter_context(
                terminal.view(
                    terminal.quiet if ranks.rank else view,
                    loaded.recipe.run.updates,
                    Watch(read_json_lines(path / "metrics.jsonl")[0]),
                    loaded.recipe.run.condition,
                    _judged_by(loaded.recipe),
                )
            )
            parts = build.build_session_parts(
                plan,
                directory,
                resume=resume,
                config=export_tables(loaded.tables),
                show=display,
                say=log,
                ranks=ranks,
            )
        except (UserError, KeyboardInterrupt, OSError) as error:
            if not resume:
                directory.discard()
            if isinstance(error, UserError):
                raise loaded.locate(error) from None
            raise
        stack.push(parts.closing)
        return replace(parts, closing=stack.pop_all())


def _say_for(view: View | Show, ranks: Ranks) -> Callable[[str], None]:
    """Return a function that prints a line where the view has lines for a person, else `silent`."""
    return silent if ranks.rank or callable(view) or view in ("none", "json") else say


def train(
    loaded: config.LoadedRecipe,
    run_dir: Path | None,
    *,
    title: str,
    resume: bool,
    view: View | Show = "plan",
    ranks: Ranks = ALONE,
) -> tuple[Path, dict[str, float]]:
    """Run a recipe to its end; return the run directory, with a report, and the last evaluation's metrics.

    A signal ends the run after its update, and saves it. Raises UserError, located, before anything is
    trained, and RunError if the run fails.
    """
    path = run_dir
    try:
        with interrupts():
            parts = open_session(loaded, run_dir, title=title, resume=resume, ranks=ranks, view=view)
        path = parts.run_dir.path
        try:
            with LoopSession(parts) as session:
                return path, run(session, signals=True, say=_say_for(view, ranks))
        except (UserError, KeyboardInterrupt) as error:
            if not resume:
                parts.run_dir.discard()  # if no update was done
            raise loaded.locate(error) if isinstance(error, UserError) else error from None
    except KeyboardInterrupt as error:
        if str(error) or resume:
            raise
        trained = path is not None and read_json_lines(path / "metrics.jsonl")[0]
        raise KeyboardInterrupt(kept(path) if path and trained else "nothing was trained yet") from None


def run(
    session: LoopSession, *, signals: bool = False, say: Callable[[str], None] = silent
) -> dict[str, float]:
    """Run a session to its end and write its report; return the metrics of its last evaluation.

    signals: SIGTERM and Ctrl-C end the run after its update, and save it.
    """
    directory, never = session.run_dir, lambda: False
    try:
        with (
            stop_recorded(directory.path, directory.own),
            stop_requested() if signals else nullcontext(never) as stopped,
        ):
            last = session.finish(stopped)
    except BaseException:
        # The report may fail too, on a full disk or at a second Ctrl-C: the first error counts.
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


def _copy_sources(
    loaded: config.LoadedRecipe, directory: RunDir, resume: bool, say: Callable[[str], None]
) -> config.LoadedRecipe:
    """Copy the source of a program's objects and the recipe's user code into the run directory.

    A model object is saved there, and the recipe is returned with its path.
    """
    if not resume and not directory.rank:
        directory.keep(config.find_training_files(loaded.tables))
    for name, source in read_sources(loaded.tables).items():
        if not directory.keep_source(name, source):
            problem = f"{name} has changed since the run began, which continues with it as it is now:"
            warnings.warn(f"{problem} not as it would have continued", stacklevel=6)
    if not resume:
        directory.keep(find_temporary_files(loaded.tables))
    model = loaded.recipe.model.loaded
    if model is None or (directory.path / "config.toml").exists():
        return loaded
    return _with_model_path(loaded, str(_save(model, directory)))


def _with_model_path(loaded: config.LoadedRecipe, model: str) -> config.LoadedRecipe:
    """Return the recipe with the path of a saved model in place of a model object."""
    table = {key: value for key, value in loaded.tables["model"].items() if key != "loaded"}
    return config.from_tables({**loaded.tables, "model": table | {"path": model}}, loaded.where)


def _save(program_model: LoadedModel, directory: RunDir) -> Path:
    """Save a program's model in the run directory, and leave the object unchanged; return the path."""
    model = program_model.model
    configs = {name: getattr(model, name) for name in ("config", "generation_config") if hasattr(model, name)}
    try:
        for name, value in configs.items():  # transformers changes them when it saves
            setattr(model, name, copy.deepcopy(value))
        save_pretrained(model, program_model.tokenizer, directory.start)
    finally:
        for name, value in configs.items():
            setattr(model, name, value)
    return directory.start


def _config_text(loaded: config.LoadedRecipe, run: Path, digests: Mapping[str, str]) -> str:
    """Return the text of config.toml: the recipe, naming code by its copies, and digests of its inputs."""
    here = str((run / CODE).resolve())
    places = config.TRAINING_CODE + config.CALLED_CODE
    tables = config.rename_code(
        export_tables(loaded.tables), lambda name: name.replace(here, CODE, 1), places
    )
    text = f"{dump(tables)}\n# {DIRECTORY}: {Path.cwd()}\n"
    return text + "".join(f"\n# {name}: BLAKE2b {digest}\n" for name, digest in digests.items())


def use_code_copies(
    loaded: config.LoadedRecipe, run: Path, say: Callable[[str], None] = silent
) -> config.LoadedRecipe:
    """Return the recipe naming the run's copies of user code, if it has any; report files that differ."""

    def copied(name: str) -> str:
        file = file_of(name)
        copy = (run / CODE / file.name).resolve() if file else None
        if file is None or copy is None or not copy.is_file():
            return name
        if file.is_file() and file.read_bytes() != copy.read_bytes():
            say(f"note: {file} has changed since the run began, which continues with its copy {copy}")
        return f"{copy}:{name.rpartition(':')[2]}"

    tables = config.rename_code(loaded.tables, copied)
    if tables == loaded.tables:
        return loaded
    recipe = config.parse(Recipe, tables, loaded.where)
    return replace(loaded, tables=tables, recipe=recipe)


def prepare(
    loaded: config.LoadedRecipe,
    directory: RunDir,
    *,
    title: str,
    resume: bool,
    say: Callable[[str], None],
    ranks: Ranks = ALONE,
) -> tuple[config.LoadedRecipe, Plan]:
    """Return the recipe as this run began, and its plan; write both to the run directory.

    Raises UserError for a recipe or a plan that cannot run.
    """
    path = directory.path
    # A resumed run was settled already, to be compared with its recipe.
    loaded, before = settle_recipe(loaded, path, silent if resume else say), read_digests(path)
    if resume and weights_alone(directory.checkpoints):
        raise UserError(
            str(path),
            "its checkpoints hold weights alone: no run resumes from them",
            "begin another run with such a model as model.path",
        )
    checked = None if ranks.rank else path / ".prompts.json"
    waits = loaded.recipe.engine.sleep and loaded.recipe.is_central
    if waits and ranks.rank:  # rank 0 puts servers to sleep, before others measure their free memory
        ranks.follow("the plan")
    plan = plan_run(loaded.recipe, say, path, checked, ranks=ranks.size, begins=True)
    if waits and not ranks.rank:
        ranks.follow("the plan")
    if loaded.recipe.run.epochs:
        loaded = _with_updates(loaded, plan.resolved.recipe.run.updates)
    data = [rows for rows in (plan.resolved.train, plan.groups) if rows]
    digests = digest_files(loaded.tables, path) | {DATA: "".join(map(digest_of_data, data))}
    check_digests(before, digests, say)
    agree(ranks, dump(export_tables(loaded.tables)), code_versions(), digests[DATA])
    # Every rank cuts its rows by the same budget.
    budget = min(ranks.gather(plan.microbatch_tokens, "the plan"))
    plan = replace(plan, microbatch_tokens=budget)
    plan.check_memory()
    plan.disk.check(path)
    directory.describe(
        _config_text(loaded, path, digests), f"{title}: {plan.resolved.line.title}", plan.sections()
    )
    return loaded, plan


def _with_updates(loaded: config.LoadedRecipe, updates: int) -> config.LoadedRecipe:
    """Return the recipe with a number of updates in place of run.epochs."""
    run = {key: value for key, value in loaded.tables["run"].items() if key != "epochs"}
    tables = {**loaded.tables, "run": run | {"updates": updates}}
    return replace(
        loaded,
        recipe=replace(loaded.recipe, run=replace(loaded.recipe.run, updates=updates, epochs=0.0)),
        tables=tables,
    )


def settle_recipe(
    loaded: config.LoadedRecipe, run: Path, say: Callable[[str], None] = silent
) -> config.LoadedRecipe:
    """Return the recipe with "auto" replaced by the run's own dtype and date, or by those of here and now.

    A resumed run so computes in the same dtype and reads the same prompts on any machine and day. User code
    is replaced by the run's copy; `say` receives a line if it differs. A run directory as the model is
    replaced by its newest checkpoint at that time, as that run may continue.
    """
    began = run / "config.toml"
    before = config.read(began).recipe.model if began.exists() else None
    if before and loaded.recipe.model.loaded:
        loaded = _with_model_path(loaded, before.path)
    tables = use_copies(run / CODE, loaded.tables)
    if tables != loaded.tables:
        loaded = config.from_tables(tables, loaded.where)
    loaded = use_code_copies(loaded, run, say)
    model = loaded.recipe.model
    if before:
        keys = [key for key in ("dtype", "date") if loaded.tables["model"].get(key, "auto") == "auto"]
        model = replace(model, **{key: getattr(before, key) for key in keys})
    if is_run(Path(model.path)):
        model = replace(model, path=before.path if before else str(resolve(model.path, say)))
    fixed = {"dtype": model.dtype, "date": model.date, "path": model.path}
    if model.chat_template is not None:
        fixed["chat_template"] = model.chat_template
    tables = {**loaded.tables, "model": {**loaded.tables["model"], **fixed}}
    return replace(loaded, recipe=replace(loaded.recipe, model=model), tables=tables)


def check_resumable(now: Recipe, before: Recipe, file: Path) -> None:
    """Raise UserError if a run is resumed with another recipe than that of `file`, its config.toml."""
    if name := first_difference(now, before, longer=True):
        now = _with_allowed_changes(now, before, longer=True)
        table, table_before = (
            getattr(recipe, name, getattr(recipe, f"{name}_", None)) for recipe in (now, before)
        )
        fix = "give what it was started with" if MEMORY in f"{table_before}" else f"resume with {file}"
        problem = f"[{name}] is not what the run was started with{_difference(table, table_before)}"
        raise UserError(name, problem, f"{fix}, or start another run")


def _difference(now: Any, before: Any) -> str:
    """Return the first key in which two tables differ, with both values if they are short."""
    names = [f.name for f in fields(before)] if is_dataclass(before) and type(now) is type(before) else []
    for name in names:
        value_before, value = getattr(before, name), getattr(now, name)
        if value_before != value:
            short = len(f"{value_before!r}{value!r}") <= 80
            return f": {key_of(name)} " + (f"was {value_before!r} and is {value!r}" if short else "differs")
    return ""


def first_difference(now: Recipe, before: Recipe, *, longer: bool) -> str:
    """Return the first table in which a recipe differs from the one that a run was started with, or "".

    longer: allow another number of updates, and other conditions to end on.
    """
    same = _with_allowed_changes(now, before, longer=longer)
    return next((key_of(n) for n in vars(before) if getattr(same, n) != getattr(before, n)), "")


def _with_allowed_changes(now: Recipe, before: Recipe, *, longer: bool) -> Recipe:
    """Return the recipe with the tables that may differ as they were."""
    same = replace(now, **{name: getattr(before, name) for name in MAY_DIFFER})
    # Curricula and selection depend on it.
    same = replace(same, eval=replace(same.eval, right=now.eval.right))
    if now.reference.url and before.reference.url:  # a server may have moved
        place = {key: getattr(before.reference, key) for key in ("url", "api_key_env", "deadline_s")}
        same = replace(same, reference=replace(same.reference, **place))
    if bool(now.engine.url) == bool(before.engine.url):
        place = {key: getattr(before.engine, key) for key in ("url", "folder", "deadline_s", "sleep")}
        same = replace(same, engine=replace(same.engine, **place))
    if not longer:
        return same
    ends = {
        key: getattr(before.run, key) for key in ("updates", "epochs", "stop_when", "patience", "max_time")
    }
    return replace(same, run=replace(same.run, **ends))


def _judged_by(recipe: Recipe) -> set[str]:
    """Return the metrics that decide when the run ends, and which checkpoint is its best."""
    best, condition = recipe.checkpoint.best_metric, recipe.run.condition
    return ({direction(best)[0]} if best else set()) | ({condition.metric} if condition else set())


def print_plan(plan: Plan) -> None:
    """Print what a run will do and need, and notes on it."""
    for name, rows in plan.sections().items():
        table = Table(title=name, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
        table.add_column(style="dim")
        table.add_column()
        for key, value in rows.items():
            table.add_row(key, str(value))
        err.print(table)
    for note in plan.policy.notes:
        say(f"note: {note}")
    if plan.memory.total > plan.free:
        helps = plan.smaller or "steps.gradient_checkpointing or lora.rank"
        say(f"note: the estimate is above the free memory; {helps} would help")
    elif plan.smaller:
        tokens = f"microbatches of {plan.microbatch_tokens} tokens leave little memory free"
        say(f"note: {tokens}; {plan.smaller} would make room")
    if plan.disk.peak > plan.disk.free:
        say("note: the run may fill the disk; lora.rank, checkpoint.keep or record.tokens help")


def agree(ranks: Ranks, config: str, code: str, data: str) -> None:
    """Raise UserError that names the ranks whose recipe, code or data differ from those of rank 0."""
    versions = "\n".join(line for line in code.splitlines() if not line.startswith("python"))
    for action, text in (("have a recipe", config), ("run code", versions), ("read data", data)):
        try:
            ranks.agree(action, hashlib.blake2b(text.encode(), digest_size=8).hexdigest())
        except RunError as error:
            fix = "give every rank the same recipe, options, posttrain and data"
            raise UserError("torchrun", str(error), fix) from None
