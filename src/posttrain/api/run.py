"""A run that was made, finished or not: its metrics, its rollouts, its report, and its model to ask."""

import html
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from posttrain.api.answering import answers, evaluate_recipe
from posttrain.api.merge import merge_run
from posttrain.api.recipe import Recipe
from posttrain.base.name_hints import did_you_mean
from posttrain.data import Data, Records, load_tasks
from posttrain.models.pretrained import silent
from posttrain.recipe.target import check_run, newest_of, use_newest_weights
from posttrain.report import write
from posttrain.report.record import json_lines, read
from posttrain.run.tables import Metrics
from posttrain.run.track import METRICS
from posttrain.types import Message, Sampling, UserError


class Run(os.PathLike[str]):
    """A run directory. Given as `model=`, or as `reward=` of a reward model, it is its newest checkpoint.

    It holds no weights: each question loads the newest checkpoint, and lets it go.
    """

    path: Path
    """The run directory (docs/reports.md)."""
    recipe: Recipe
    """What was asked."""

    def __init__(self, path: str | os.PathLike[str], recipe: Recipe | None = None) -> None:
        """recipe: that of the program which made the run, with what it held; else it is read."""
        self.path = Path(path).expanduser()
        check_run(self.path)
        self.recipe = recipe or Recipe.read(self.path / "config.toml")

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"<Run {self.path}{f': {self.stopped}' if self.stopped else ''}>"

    @property
    def stopped(self) -> str | None:
        """What ended the run before its last update; None if nothing did, or it is going on."""
        file = self.path / "stopped.txt"
        return (
            file.read_text(encoding="utf-8").strip() if file.exists() else read(self.path).ended_early or None
        )

    @property
    def model(self) -> Path:
        """The newest checkpoint's model, or adapter, as from_pretrained loads it; UserError without one."""
        found = newest_of(self.path)
        whole = found.with_name("model")  # with a reward model's head, which an adapter has not
        return whole if whole.is_dir() else found

    @property
    def metrics(self) -> Metrics:
        """The lines of metrics, one an update (docs/metrics.md); metrics["reward/mean"] is that of each."""
        return Metrics(json_lines(self.path / METRICS)[0])

    def sample(
        self, prompt: str | Sequence[Message], n: int = 1, *, seed: int = 0, **sampling: Any
    ) -> list[str]:
        """n answers of the newest checkpoint to a question or a conversation.

        sampling: temperature, max_new_tokens and so on, in place of the recipe's.
        """
        if not isinstance(prompt, str) and not all(isinstance(message, Mapping) for message in prompt):
            problem = "a prompt is a text, or a list of messages {'role': ..., 'content': ...}"
            raise UserError("sample", problem, "ask one prompt at a time")
        asked = prompt if isinstance(prompt, str) else [dict(message) for message in prompt]
        [task] = load_tasks(Data(path=Records.of([{"prompt": asked}])))
        known = {f.name: getattr(self.recipe.settings.sampling, f.name) for f in fields(Sampling)}
        for name in sampling.keys() - known.keys():
            near = did_you_mean(name, known) or f"there are {', '.join(known)}"
            raise UserError("sample", f"unknown keyword {name!r}", near)
        try:
            if isinstance(sampling.get("stop"), str):
                sampling["stop"] = (sampling["stop"],)
            how = Sampling(**known | sampling)
        except (ValueError, TypeError) as error:
            raise UserError("sample", str(error)) from None
        recipe, adapter = use_newest_weights(self.recipe.settings, self.path)
        return [answer.text for answer in answers(recipe, adapter, task.messages, n, how, seed, silent)]

    def evaluate(self, data: Any = None, limit: int | None = None) -> dict[str, float]:
        """Accuracy, reward and length of the newest checkpoint on held-out tasks, of a method that samples.

        data: other tasks, of any kind that a recipe takes. UserError where nobody here can judge them, as of
        a run whose reward was a function of another program.
        """
        asked = self.recipe
        if data is not None:
            asked = asked.with_held_out(data)
        if limit is not None:
            asked = asked.replace(**{"eval.limit": limit})
        return evaluate_recipe(*use_newest_weights(asked.settings, self.path), silent)

    def merge(self, out: str | os.PathLike[str]) -> Path:
        """Write the model with the newest checkpoint's adapter merged to `out`, and return that directory.

        It is in float32; rounded to the run's dtype it is what the run sampled from. UserError if the run has
        no adapter (`model` is then whole), or if there is something at `out`.
        """
        return merge_run(self.path, Path(out).expanduser(), silent)

    def episodes(self, update: int | None = None) -> list[dict[str, Any]]:
        """The rollouts that were kept of an update, or of the last: lines of samples/ (docs/reports.md)."""
        files = {int(file.stem): file for file in (self.path / "samples").glob("[0-9]*.jsonl")}
        if not files or (update is not None and update not in files):
            has = f"updates {min(files)} to {max(files)}" if files else "no samples"
            raise UserError(f"{self.path}, update {update}", f"it has {has}")
        return json_lines(files[max(files) if update is None else update])[0]

    def report(self) -> Path:
        """Writes report.html, one page that works offline; in a notebook the run itself shows it."""
        return write(self.path)

    def _repr_html_(self) -> str:
        page = html.escape(self.report().read_text(encoding="utf-8"), quote=True)
        return f'<iframe srcdoc="{page}" width="100%" height="800" style="border:0"></iframe>'


def load(path: str | os.PathLike[str]) -> Run:
    """An earlier run, finished or not; UserError if there is none."""
    return Run(path)
