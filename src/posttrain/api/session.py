"""Training from Python: a session of a recipe, and the whole of it in one call."""

import copy
import gc
import os
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

import torch

from posttrain.api.answering import evaluate_recipe
from posttrain.api.given import named_in, sources_of, written_files
from posttrain.api.recipe import Recipe
from posttrain.api.run import Run
from posttrain.api.training import (
    check_alone,
    check_same,
    claimed_directory,
    open_run,
    prepare,
    say,
    with_copies,
)
from posttrain.methods.table import METHODS, Line
from posttrain.models.pretrained import save_pretrained, silent
from posttrain.process import machine
from posttrain.recipe import config
from posttrain.report import write
from posttrain.report.terminal import view
from posttrain.runtime import build, session
from posttrain.runtime.loop import Callback
from posttrain.runtime.record.journal import Show, stop_recorded
from posttrain.runtime.record.rundir import CODE, RunDir, kept
from posttrain.types import Method, UserError

Shown = Literal["auto", "table", "lines", "none"]
Directory = str | os.PathLike[str]


class Session(session.Session):
    """One run, stepped by a program; use it in a `with`, or close it: what was trained is then saved.

        with posttrain.Session(model, method="grpo", data=data, reward=reward, updates=100) as s:
            while not s.done:
                groups = s.sample()
                s.update(groups)
                s.publish()

    `step` does what is due of an update, `run` all that is left. See runtime/session.py for what each verb
    asks of the others.
    """

    def __init__(
        self,
        recipe: Any,
        *,
        dir: Directory | None = None,  # noqa: A002 - what it is called everywhere
        resume: bool = False,
        callbacks: object = (),
        show: Shown = "none",
        **asked: Any,
    ) -> None:
        """recipe: a Recipe, the path of one, or a model, and then `asked` as Recipe takes it.

        dir: where everything is left, by default runs/METHOD-001, -002 ... resume: go on from its newest
        checkpoint. Raises UserError, with the key, before anything is trained.
        """
        self.recipe, told = _recipe_of(recipe, asked), _callbacks(callbacks)
        check_alone()
        if show not in get_args(Shown):
            raise UserError("show", f"{show!r} is none of {', '.join(get_args(Shown))}")
        if resume not in (True, False):
            problem = "it goes on from the newest checkpoint of dir, and is True or False"
            fix = "for an older one give the checkpoint's model as model"
            raise UserError("resume", problem, fix)
        if resume and dir is None:
            raise UserError("resume", "which run?", "name its directory: dir=...")
        with ExitStack() as stack:
            name = _title(self.recipe)
            path = claimed_directory(name) if dir is None else Path(dir).expanduser()
            directory = open_run(self.recipe.found, path, resume)
            stack.callback(directory.close)
            found = self.recipe.found
            try:
                found = self._found(directory, resume)
                stack.enter_context(machine.as_before())
                if found.recipe.run.threads:
                    torch.set_num_threads(found.recipe.run.threads)
                said = silent if show == "none" else say
                found, chosen = prepare(found, directory, title=name, resume=resume, say=said)
                shown: Show = stack.enter_context(
                    view(show, found.recipe.run.updates, found.recipe.run.condition)
                )
                parts = build.build_session_parts(
                    chosen, directory, resume=resume, config=found.tables, show=shown, say=said
                )
            except (UserError, KeyboardInterrupt) as error:
                if not resume:
                    directory.discard()
                raise found.locate(error) if isinstance(error, UserError) else error from None
            stack.push(parts.closing)
            closing = stack.pop_all()
            super().__init__(replace(parts, closing=closing), told)
            weakref.finalize(self, closing.close)  # of one that nobody closes, while there are modules yet

    def run(self) -> Run:
        """Steps until all is done, and writes the report: what `posttrain train` does.

        Raises RunError for what ends a run; it says what is kept, and the directory has a report of it.
        """
        directory = self.run_dir
        try:
            with stop_recorded(directory.path, directory.own):
                try:
                    self.finish()
                except BaseException as error:
                    self._save_at_exit(error)
                    raise
        except BaseException:
            # On a full disk, or where someone is in a hurry, the first error is the one to tell.
            with suppress(Exception, KeyboardInterrupt):
                write(directory.path)
            raise
        if self.stopped and not self.reached:
            (directory.path / "stopped.txt").write_text(f"{self.stopped}\n", encoding="utf-8")
        write(directory.path)
        return Run(directory.path, self.recipe)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._parts is not None and not self._ended:
                self._save_at_exit(error)
        finally:
            super().__exit__(kind, error, trace)
        gc.collect()  # models have cycles in them
        torch.cuda.empty_cache()  # does nothing where no GPU was used

    def _save_at_exit(self, error: BaseException | None) -> None:
        """Leaves a checkpoint of what was trained; an error that ends the session tells of it."""
        try:
            path = self.save_whole()
        except Exception as failed:
            if error is None:
                raise
            error.add_note(f"what was trained since the last checkpoint cannot be saved: {failed}")
            return
        lost = 0 if path else self._open.learner.step_count - self._saved_steps
        if lost:
            text = f"not saved, optimiser steps since the last checkpoint: {lost}; no run goes on from half"
            text += " an update, nor where samplers are ahead; save() between updates, or checkpoint.every"
            if error is None:
                warnings.warn(text, stacklevel=3)
            else:
                error.add_note(text)
        elif error is not None and path is not None:
            error.add_note(kept(self.run_dir.path))

    def _found(self, directory: RunDir, resume: bool) -> config.LoadedRecipe:
        """The recipe, with a model of the program's own as this directory keeps it.

        UserError if a run is resumed with a recipe that would not have made it.
        """
        file = directory.path / "config.toml"
        before = config.read(file) if resume else None
        for name, source in sources_of(self.recipe.held).items():
            if not directory.keep_source(name, source):
                what = f"{name} has changed since the run began, which goes on with it as it is now:"
                warnings.warn(f"{what} not as it would have gone on", stacklevel=5)
        if not resume:
            directory.keep(written_files(self.recipe.tables))
        self.recipe = self.recipe.of(named_in(directory.path / CODE, self.recipe.tables), self.recipe.held)
        if "model.path" in self.recipe.held:
            start = (
                before.tables["model"]["path"] if before else str(_save_given_model(self.recipe, directory))
            )
            self.recipe = self.recipe.replace(**{"model.path": start})
        if before is None:
            return self.recipe.found
        given = self.recipe.found
        now = with_copies(
            config.LoadedRecipe(self.recipe.plain, given.tables, given.where), directory.path
        ).recipe
        check_same(now, before.recipe, file)
        return given


def train(
    model: Any,
    *,
    method: str | Mapping[str, Any] | Line | Method = "grpo",
    data: Any = None,
    held_out: Any = None,
    reward: Any = None,
    env: Any = None,
    tools: Any = None,
    updates: int | None = None,
    seed: int | None = None,
    lr: float | None = None,
    dir: Directory | None = None,  # noqa: A002
    resume: bool = False,
    callbacks: object = (),
    show: Shown = "auto",
    **tables: Any,
) -> Run:
    """Trains a model to the end of a recipe, and returns the run.

        run = posttrain.train("HuggingFaceTB/SmolLM2-135M-Instruct", data=data, reward=function, updates=100)

    The keywords are those of Recipe and of Session; callbacks are one Callback or several. show: "table" in a
    notebook, "lines" for logs, "none"; "auto" takes what the place can show. Raises UserError, with the key,
    before anything is trained, and RunError for what ends a run, which says what is kept.
    """
    asked = {"method": method, "data": data, "held_out": held_out, "reward": reward, "env": env}
    asked |= {"tools": tools, "updates": updates, "seed": seed, "lr": lr, **tables}
    recipe = Recipe(model, **asked)
    with Session(recipe, dir=dir, resume=resume, callbacks=callbacks, show=show) as open_session:
        return open_session.run()


def evaluate(
    model: Any, *, data: Any, reward: Any = None, env: Any = None, **tables: Any
) -> dict[str, float]:
    """Accuracy, reward and length of a model's answers to these tasks, one each; nothing is trained.

    At eval.temperature, 0 if it is not given, and of eval.limit tasks, by default the first 200.
    """
    if "temperature" in (tables.get("sampling") or {}):
        problem = "answers are drawn at eval.temperature"
        raise UserError("sampling.temperature", problem, "eval={'temperature': ...}")
    data = list(data) if isinstance(data, Iterator) else data
    recipe = Recipe(model, data=data, reward=reward, env=env, **tables).with_held_out(data)
    if "model.path" in recipe.held:
        raise UserError("model", "a loaded model is copied into a run", "save it, and give its path")
    return evaluate_recipe(recipe.settings, None, silent)


def _title(recipe: Recipe) -> str:
    """What a run is called: its method, or the class of one that the program holds."""
    name = str(recipe.tables["method"].get("name")).rpartition(":")[2]
    held = recipe.held.get("method.name")
    if held is None or METHODS[name].title == held.title:
        return name
    own = type(held.method)
    return "own" if own.__module__.startswith("posttrain.") else own.__name__


def _recipe_of(recipe: Any, asked: Mapping[str, Any]) -> Recipe:
    if isinstance(recipe, Recipe):
        if asked:
            problem = f"{', '.join(asked)} beside a recipe"
            raise UserError("recipe", problem, "use recipe.replace, or give all to posttrain.Recipe")
        return recipe
    if isinstance(recipe, str | Path) and str(recipe).endswith(".toml") and not asked:
        return Recipe.read(recipe)
    return Recipe(recipe, **asked)


def _callbacks(given: object) -> Sequence[object]:
    """Several callbacks, or one; UserError for what would never be called."""
    several = given if isinstance(given, list | tuple) else [given]
    for each in several:
        if hasattr(each, "on_step_end"):
            problem, fix = (
                "a callback of transformers' Trainer is told other things",
                "posttrain.Callback(on_update=...)",
            )
            raise UserError("callbacks", problem, fix)
        if not any(callable(getattr(each, f.name, None)) for f in fields(Callback)):
            fix = "posttrain.Callback(on_update=...), or an object with one of its functions"
            raise UserError("callbacks", f"a {type(each).__name__} is no callback", fix)
    return several


def _save_given_model(recipe: Recipe, directory: RunDir) -> Path:
    """Where the program's model is now saved; the model itself is left as it is."""
    model, tokenizer = recipe.held["model.path"]
    own = {name: getattr(model, name) for name in ("config", "generation_config") if hasattr(model, name)}
    try:
        for name, each in own.items():  # transformers writes into them as it saves
            setattr(model, name, copy.deepcopy(each))
        save_pretrained(model, tokenizer, directory.start)
    finally:
        for name, each in own.items():
            setattr(model, name, each)
    return directory.start
