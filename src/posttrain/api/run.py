"""A finished or interrupted run: its metrics, rollouts, report, and answers of its model."""

import html
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from posttrain.api.answering import evaluate_recipe, sample_answers
from posttrain.api.export import export_run
from posttrain.api.recipe import Recipe
from posttrain.base.name_hints import did_you_mean
from posttrain.data import Data, Records, load_tasks
from posttrain.models.pretrained import silent
from posttrain.recipe.target import check_run, use_weights, weights_of
from posttrain.report import write
from posttrain.report.record import read, read_json_lines
from posttrain.run.tables import Metrics
from posttrain.run.track import METRICS
from posttrain.types import Message, Sampling, UserError


class Run(os.PathLike[str]):
    """A run directory. As `model=`, or as `reward=` of a reward model, it stands for its newest checkpoint.

    It holds no weights: each call that needs them loads the newest checkpoint, and releases it.
    """

    path: Path
    """The run directory (docs/reports.md)."""
    recipe: Recipe
    """The recipe that the run was started with."""

    def __init__(self, path: str | os.PathLike[str], recipe: Recipe | None = None) -> None:
        """recipe: with the objects of the program that made the run; by default read from the directory."""
        self.path = Path(path).expanduser()
        check_run(self.path)
        self.recipe = recipe or Recipe.read(self.path / "config.toml")

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"<Run {self.path}{f': {self.stopped}' if self.stopped else ''}>"

    @property
    def stopped(self) -> str | None:
        """Why the run ended before its last update; None if it did not, or is running."""
        file = self.path / "stopped.txt"
        return (
            file.read_text(encoding="utf-8").strip() if file.exists() else read(self.path).ended_early or None
        )

    @property
    def model(self) -> Path:
        """The newest checkpoint's model, or adapter, for from_pretrained; raises UserError without one."""
        newest = weights_of(self.path)
        model = newest.with_name("model")  # of a reward model too, whose adapter lacks the head
        return model if model.is_dir() else newest

    @property
    def metrics(self) -> Metrics:
        """The metrics of each update (docs/metrics.md); metrics["reward/mean"] is one metric by update."""
        return Metrics(read_json_lines(self.path / METRICS)[0])

    def sample(
        self, prompt: str | Sequence[Message], n: int = 1, *, seed: int = 0, **sampling: Any
    ) -> list[str]:
        """Sample n answers of the newest checkpoint to a question or a conversation.

        sampling: temperature, max_new_tokens and so on, in place of the recipe's.
        """
        if not isinstance(prompt, str) and not all(isinstance(message, Mapping) for message in prompt):
            problem = "a prompt is a text, or a list of messages {'role': ..., 'content': ...}"
            raise UserError("sample", problem, "ask one prompt at a time")
        content = prompt if isinstance(prompt, str) else [dict(message) for message in prompt]
        [task] = load_tasks(Data(path=Records.of([{"prompt": content}])))
        defaults = {f.name: getattr(self.recipe.settings.sampling, f.name) for f in fields(Sampling)}
        for name in sampling.keys() - defaults.keys():
            near = did_you_mean(name, defaults) or f"there are {', '.join(defaults)}"
            raise UserError("sample", f"unknown keyword {name!r}", near)
        try:
            if isinstance(sampling.get("stop"), str):
                sampling["stop"] = (sampling["stop"],)
            options = Sampling(**defaults | sampling)
        except (ValueError, TypeError) as error:
            raise UserError("sample", str(error)) from None
        recipe, adapter = use_weights(self.recipe.settings, self.path)
        answers = sample_answers(recipe, adapter, task.messages, n, options, seed, silent)
        return [answer.text for answer in answers]

    def evaluate(self, data: Any = None, limit: int | None = None) -> dict[str, float]:
        """Return accuracy, reward and length of the newest checkpoint on held-out tasks.

        data: other tasks, of any kind that a recipe takes. Raises UserError for an offline method, and if the
        reward was a function of another program.
        """
        recipe = self.recipe
        if data is not None:
            recipe = recipe.with_held_out(data)
        if limit is not None:
            recipe = recipe.replace(**{"eval.limit": limit})
        return evaluate_recipe(*use_weights(recipe.settings, self.path), silent)

    def export(
        self,
        out: str | os.PathLike[str],
        *,
        dtype: str = "float32",
        gguf: str | None = None,
        push: str | None = None,
        private: bool = False,
    ) -> Path:
        """Write the newest checkpoint's model to `out`, an adapter merged, and return that directory.

        The arguments are those of `posttrain model export`. Raises UserError if `out` exists.
        """
        out = Path(out).expanduser()
        return export_run(self.path, out, silent, dtype=dtype, gguf=gguf, push=push, private=private)

    def episodes(self, update: int | None = None) -> list[dict[str, Any]]:
        """Return the recorded rollouts of an update, by default the last (samples/, docs/reports.md)."""
        files = {int(file.stem): file for file in (self.path / "samples").glob("[0-9]*.jsonl")}
        if not files or (update is not None and update not in files):
            has = f"updates {min(files)} to {max(files)}" if files else "no samples"
            raise UserError(f"{self.path}, update {update}", f"it has {has}")
        return read_json_lines(files[max(files) if update is None else update])[0]

    def report(self) -> Path:
        """Write report.html, one page that works offline; a notebook shows it as the value of a cell."""
        return write(self.path)

    def _repr_html_(self) -> str:
        page = html.escape(self.report().read_text(encoding="utf-8"), quote=True)
        return f'<iframe srcdoc="{page}" width="100%" height="800" style="border:0"></iframe>'


def load(path: str | os.PathLike[str]) -> Run:
    """Return an earlier run, finished or not; raise UserError if the directory holds none."""
    return Run(path)
