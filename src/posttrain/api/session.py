"""Train from Python: a session of a recipe, or a whole run in one call."""

import gc
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

import torch

from posttrain.api.answering import evaluate_recipe
from posttrain.api.opening import open_session, run
from posttrain.api.recipe import Recipe
from posttrain.api.run import Run
from posttrain.errors import UserError
from posttrain.loop import session
from posttrain.loop.loop import Callback
from posttrain.methods.table import METHODS, Line, like
from posttrain.models.pretrained import silent
from posttrain.run.rundir import kept
from posttrain.types import Method

ProgressView = Literal["auto", "table", "lines", "none"]
Directory = str | os.PathLike[str]


class Session(session.LoopSession):
    """One run, stepped by a program; leaving its `with` block, or closing it, saves what was trained.

        with posttrain.Session(model, method="grpo", data=data, reward=reward, updates=100) as s:
            while not s.done:
                groups = s.sample()
                s.update(groups)
                s.publish()

    `step` does the rest of an update, `run` all that is left. loop/session.py has the order of these calls.
    """

    def __init__(
        self,
        recipe: Any,
        *,
        dir: Directory | None = None,  # noqa: A002 - the keyword of the API
        resume: bool = False,
        callbacks: object = (),
        show: ProgressView = "none",
        **keywords: Any,
    ) -> None:
        """recipe: a Recipe, its path, or a model with the keywords of Recipe.

        dir: the run directory, by default runs/METHOD-001, -002 ... resume: continue from its newest
        checkpoint. Raises UserError, with the key, before anything is trained.
        """
        self.recipe = _recipe_of(recipe, keywords)
        several = _callbacks(callbacks)
        if show not in get_args(ProgressView):
            raise UserError("show", f"{show!r} is not one of {', '.join(get_args(ProgressView))}")
        if resume not in (True, False):
            problem = "it continues from the newest checkpoint of dir, and is True or False"
            raise UserError("resume", problem, "for an older one give the checkpoint's model as model")
        path = None if dir is None else Path(dir).expanduser()
        parts = open_session(self.recipe.loaded, path, title=_title(self.recipe), resume=resume, view=show)
        if self.recipe.settings.model.loaded is not None:  # its weights are saved, and freed in memory
            self.recipe = self.recipe.replace(
                **{"model.loaded": None, "model.path": str(parts.run_dir.start)}
            )
        super().__init__(parts, several)
        weakref.finalize(self, parts.closing.close)  # if it is never closed, before modules are torn down

    def run(self) -> Run:
        """Step until all updates are done, and write the report, as `posttrain train` does.

        Raises RunError if the run fails; it names what was saved, and the report is written all the same.
        """
        run(self)
        return Run(self.run_dir.path, self.recipe)

    def finish(self, stop_asked: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """Step until all updates are done; on an error, save a checkpoint of what was trained."""
        try:
            return super().finish(stop_asked)
        except BaseException as error:
            self._save_at_exit(error)
            raise

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
        """Save a checkpoint of what was trained, and note the outcome on the error that ends the session."""
        try:
            path = self.save_whole()
            self._wait_for_writer()
        except Exception as failed:
            if error is None:
                raise
            error.add_note(f"what was trained since the last checkpoint cannot be saved: {failed}")
            return
        lost = 0 if path else self._open.learner.step_count - self._saved_steps
        if lost:
            text = f"not saved, optimiser steps since the last checkpoint: {lost}; a run resumes only between"
            text += " updates, and where no sampler is ahead; save() between updates, or set checkpoint.every"
            if error is None:
                warnings.warn(text, stacklevel=3)
            else:
                error.add_note(text)
        elif error is not None and path is not None:
            error.add_note(kept(self.run_dir.path))


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
    show: ProgressView = "auto",
    **tables: Any,
) -> Run:
    """Train a model to the end of a recipe, and return the run.

        run = posttrain.train("HuggingFaceTB/SmolLM2-135M-Instruct", data=data, reward=function, updates=100)

    The keywords are those of Recipe and of Session; callbacks are one Callback or several. show: "table" in a
    notebook, "lines" for logs, "none"; "auto" selects by the terminal. Raises UserError, with the key, before
    anything is trained, and RunError if the run fails, which names what was saved.
    """
    keywords = {"method": method, "data": data, "held_out": held_out, "reward": reward, "env": env}
    keywords |= {"tools": tools, "updates": updates, "seed": seed, "lr": lr, **tables}
    recipe = Recipe(model, **keywords)
    with Session(recipe, dir=dir, resume=resume, callbacks=callbacks, show=show) as open_session:
        return open_session.run()


def evaluate(
    model: Any, *, data: Any, reward: Any = None, env: Any = None, **tables: Any
) -> dict[str, float]:
    """Return accuracy, reward and length of a model's answers to these tasks, one answer each.

    Answers are sampled at eval.temperature, by default 0, for the first eval.limit tasks, by default 200.
    """
    if "temperature" in (tables.get("sampling") or {}):
        problem = "answers are drawn at eval.temperature"
        raise UserError("sampling.temperature", problem, "eval={'temperature': ...}")
    data = list(data) if isinstance(data, Iterator) else data
    recipe = Recipe(model, data=data, reward=reward, env=env, **tables).with_held_out(data)
    if recipe.settings.model.loaded is not None:
        raise UserError("model", "a loaded model is copied into a run", "save it, and give its path")
    return evaluate_recipe(recipe.settings, None, silent)


def _title(recipe: Recipe) -> str:
    """Return the name of a run: its method's, or the class of a method object."""
    name = recipe.tables["method"].get("name")
    if not isinstance(name, Line):
        return str(name).rpartition(":")[2]
    if METHODS[like(name)].title == name.title:
        return like(name)
    kind = type(name.method)
    return "own" if kind.__module__.startswith("posttrain.") else kind.__name__


def _recipe_of(recipe: Any, keywords: Mapping[str, Any]) -> Recipe:
    if isinstance(recipe, Recipe):
        if keywords:
            problem = f"{', '.join(keywords)} in addition to a recipe"
            raise UserError("recipe", problem, "use recipe.replace, or give all to posttrain.Recipe")
        return recipe
    if isinstance(recipe, str | Path) and str(recipe).endswith(".toml") and not keywords:
        return Recipe.read(recipe)
    return Recipe(recipe, **keywords)


def _callbacks(callbacks: object) -> Sequence[object]:
    """Return a list of one callback or several; raise UserError for an object that would never be called."""
    several = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
    for callback in several:
        if hasattr(callback, "on_step_end"):
            problem = "a callback of transformers' Trainer has other arguments"
            raise UserError("callbacks", problem, "posttrain.Callback(on_update=...)")
        if not any(callable(getattr(callback, f.name, None)) for f in fields(Callback)):
            fix = "posttrain.Callback(on_update=...), or an object with one of its functions"
            raise UserError("callbacks", f"a {type(callback).__name__} is not a callback", fix)
    return several
