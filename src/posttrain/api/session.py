"""Training from Python: a session of a recipe, and the whole of it in one call."""

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

Shown = Literal["auto", "table", "lines", "none"]
Directory = str | os.PathLike[str]


class Session(session.LoopSession):
    """One run, stepped by a program; use it in a `with`, or close it: what was trained is then saved.

        with posttrain.Session(model, method="grpo", data=data, reward=reward, updates=100) as s:
            while not s.done:
                groups = s.sample()
                s.update(groups)
                s.publish()

    `step` does what is due of an update, `run` all that is left. See loop/session.py for what each verb
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
        if show not in get_args(Shown):
            raise UserError("show", f"{show!r} is none of {', '.join(get_args(Shown))}")
        if resume not in (True, False):
            problem = "it goes on from the newest checkpoint of dir, and is True or False"
            raise UserError("resume", problem, "for an older one give the checkpoint's model as model")
        path = None if dir is None else Path(dir).expanduser()
        parts = open_session(self.recipe.found, path, title=_title(self.recipe), resume=resume, view=show)
        if self.recipe.settings.model.loaded is not None:  # its weights are saved, and not kept in memory
            self.recipe = self.recipe.replace(
                **{"model.loaded": None, "model.path": str(parts.run_dir.start)}
            )
        super().__init__(parts, told)
        weakref.finalize(self, parts.closing.close)  # of one that nobody closes, while there are modules yet

    def run(self) -> Run:
        """Steps until all is done, and writes the report: what `posttrain train` does.

        Raises RunError for what ends a run; it says what is kept, and the directory has a report of it.
        """
        run(self)
        return Run(self.run_dir.path, self.recipe)

    def finish(self, stop_asked: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """Step until all is done; an error leaves a checkpoint of what was trained."""
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
    if recipe.settings.model.loaded is not None:
        raise UserError("model", "a loaded model is copied into a run", "save it, and give its path")
    return evaluate_recipe(recipe.settings, None, silent)


def _title(recipe: Recipe) -> str:
    """What a run is called: its method, or the class of one that the program holds."""
    name = recipe.tables["method"].get("name")
    if not isinstance(name, Line):
        return str(name).rpartition(":")[2]
    if METHODS[like(name)].title == name.title:
        return like(name)
    own = type(name.method)
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
