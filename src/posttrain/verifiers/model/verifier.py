"""`model`: the score of a reward model from transformers, for a whole response or step by step.

outcome   ...ForSequenceClassification with one label: its number at the last token of the conversation.
process   ...ForTokenClassification with one or two labels: the probability that a step is good, read at
          the separator after each step. The last, the least, the mean or the product of them is the score,
          and each is the potential Φ of the state after its step.

With potentials a step earns Φ_i - Φ_(i-1), with Φ_0 = 0, and the end earns score - Φ_n: Φ of the end is 0.
So the rewards of a response sum to its score, and the best policy is that of the score alone.

Source: Ng, Harada and Russell 1999 (potential-based shaping); step labels as in Lightman et al. 2023,
arXiv:2305.20050. Ensembles: Coste et al. 2023, arXiv:2310.02743 (mean, worst case, uncertainty).

scorer.py, which needs PyTorch and transformers, is imported when a model is first asked for, so that the
other verifiers of a recipe start without them.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from filelock import FileLock, Timeout

from posttrain.base.files import put
from posttrain.types import Dtype, Task, UserError, Verdict
from posttrain.verifiers.combine.formula import deviation
from posttrain.verifiers.model.scores import (
    Kind,
    OverModels,
    OverSteps,
    Scale,
    over_models,
    over_steps,
    read_reference,
    scale_of,
    steps,
)
from posttrain.verifiers.protocol import Verifier
from posttrain.verifiers.regions import speech

if TYPE_CHECKING:
    from posttrain.verifiers.model.scorer import Row, Scorer

_LOCK_S = 1800.0


@dataclass(frozen=True, kw_only=True)
class RewardModel(Verifier):
    """The score of one reward model, or of an ensemble of several.

    Label: scored. Without a score: too_long (unless that has a score of its own), not_a_number.
    parts, of an ensemble: std, and each member's score as model_1, model_2 ...
    progress, of kind process: (characters read, Φ) after each step.
    """

    paths: tuple[str, ...]
    """Directories, runs or Hub ids with safetensors; several are an ensemble."""
    place: ClassVar[int] = 15
    name: str = "model"
    """Under which its score is recorded."""
    kind: Kind = "outcome"
    """outcome: one number a response; process: one a step."""
    separator: str = "\n\n"
    """Between steps, for kind = process: a blank line."""
    over_steps: OverSteps = "last"
    """The score of kind = process: the last step's, or the min, mean or product of all."""
    ensemble: OverModels = "mean"
    """The score of several models: mean, min, or lower: mean - k std."""
    k: float = 1.0
    """For ensemble = lower."""
    mean: tuple[float, ...] = ()
    """Subtracted from the scores of each model, one for each path; empty: 0."""
    std: tuple[float, ...] = ()
    """Each model's scores are divided by it; empty: 1."""
    reference: str = ""
    """A JSONL of {"prompt", "response"} on which the scores of each model have mean 0 and variance 1."""
    thoughts: bool = False
    """Read a response's thoughts, too, and not only what it says behind them."""
    chat_template: str = ""
    """A Jinja template in place of the tokenizer's own; "none" for plain text."""
    max_tokens: int = 0
    """The longest conversation; 0: as long as the model allows. A longer one is never cut."""
    too_long: float | None = None
    """The score of a response for which there is no room; not given: none, and it is masked."""
    dtype: Dtype = "float32"
    """In bfloat16 a score depends a little on what it is batched with; auto takes it where that is quick."""
    device: str = "cpu"
    """cpu, cuda, cuda:1, or auto for the GPU if there is one. Every worker process loads its own copy."""
    batch: int = 8
    """Responses that go through the model together."""
    deadline_s: float = 300.0
    """For one call, the loading of the models included when it is the first."""

    def __post_init__(self) -> None:
        if not self.paths or len(set(self.paths)) < len(self.paths):
            raise ValueError("paths must name one or more models, each once")
        for name in ("mean", "std"):
            given: tuple[float, ...] = getattr(self, name)
            if given and (len(given) != len(self.paths) or self.reference):
                raise ValueError(f"{name} has one number for each path, and none beside a reference")
            if not all(math.isfinite(number) for number in given):
                raise ValueError(f"{name} must be finite")
        if any(number <= 0 for number in self.std):
            raise ValueError("std must be positive")
        if not self.separator:
            raise ValueError("the separator must not be empty")
        if self.batch < 1 or self.max_tokens < 0:
            raise ValueError("batch must be 1 or more, and max_tokens 0 or more")
        if not (math.isfinite(self.k) and self.k >= 0 and 0 < self.deadline_s < 86_400):
            raise ValueError("k must be 0 or more, and deadline_s positive and under a day")
        self._check_read()
        if self.too_long is not None and not math.isfinite(self.too_long):
            raise ValueError("too_long must be finite")

    def _check_read(self) -> None:
        """ValueError for an option that the others leave unread."""
        if self.kind == "outcome" and (self.separator != "\n\n" or self.over_steps != "last"):
            raise ValueError("separator and over_steps are read for kind = 'process' only")
        if self.k != 1.0 and self.ensemble != "lower":
            raise ValueError("k is read for ensemble = 'lower' only")
        if self.ensemble != "mean" and len(self.paths) == 1:
            raise ValueError(f"ensemble = {self.ensemble!r} is for several paths")

    def __call__(self, task: Task, response: str) -> Verdict:
        """The verdict on one response."""
        return self.judge_all([(task, response)])[0]

    def judge_all(self, pairs: Sequence[tuple[Task, str]]) -> list[Verdict]:
        """The verdicts, each the same as alone up to float rounding."""
        scorers = [self._scorer(path) for path in self.paths]
        members: list[list[list[float] | None]] = [
            [self._scaled(numbers, scale) for numbers in self._numbers(scorer, pairs)]
            for scorer, scale in zip(scorers, self._scales(), strict=True)
        ]
        return [self._verdict(response, [m[i] for m in members]) for i, (_, response) in enumerate(pairs)]

    def _numbers(self, scorer: "Scorer", pairs: Sequence[tuple[Task, str]]) -> list[list[float] | None]:
        """What a model says of each response, at each step; None for one that has no room."""
        rows = [self._row(scorer, task, self._read(response)[1]) for task, response in pairs]
        fitting = [i for i, row in enumerate(rows) if len(row.tokens) <= scorer.most]
        out: list[list[float] | None] = [None] * len(rows)
        for start in range(0, len(fitting), self.batch):
            places = fitting[start : start + self.batch]
            for i, numbers in zip(places, scorer.numbers([rows[i] for i in places]), strict=True):
                out[i] = numbers
        return out

    def _row(self, scorer: "Scorer", task: Task, response: str) -> "Row":
        if self.kind == "outcome":
            return scorer.outcome(task.messages, response)
        return scorer.process(task.messages, steps(response, self.separator), self.separator)

    def _read(self, response: str) -> tuple[int, str]:
        """Where what is read of a response begins, and that, without the line breaks after a thought."""
        begin, end = (0, len(response)) if self.thoughts else speech(response)
        said = response[begin:end].lstrip("\n") if begin else response[:end]
        return end - len(said), said

    def _scaled(self, numbers: list[float] | None, scale: Scale) -> list[float] | None:
        """Φ of each step and then the score, on the scale of this model."""
        if numbers is None:
            return None
        whole = over_steps(numbers, self.over_steps)
        return [scale(number) for number in (*numbers, whole)]

    def _verdict(self, response: str, members: Sequence[list[float] | None]) -> Verdict:
        found = [member for member in members if member is not None]
        if len(found) < len(members):
            reason = "the conversation is longer than the model takes"
            return Verdict(score=self.too_long, label="too_long", reason=reason)
        if not all(math.isfinite(number) for member in found for number in member):
            return Verdict(score=None, label="not_a_number", reason="a model's number is not finite")
        *potentials, score = [
            over_models([m[j] for m in found], self.ensemble, self.k) for j in range(len(found[0]))
        ]
        each = [member[-1] for member in found]
        parts = {f"model_{n}": value for n, value in enumerate(each, start=1)} if len(each) > 1 else {}
        if parts:
            parts["std"] = deviation(each)
        reason = f"scores {', '.join(f'{s:.3g}' for s in each)}"
        progress: tuple[tuple[int, float], ...] = ()
        if self.kind == "process":
            begin, said = self._read(response)
            ends = [begin + step.end for step in steps(said, self.separator)]
            progress = tuple(zip(ends, potentials, strict=True))
            reason = f"steps {', '.join(f'{p:.3g}' for p in potentials)}"
        return Verdict(score=score, label="scored", reason=reason, parts=parts, progress=progress)

    def _scorer(self, path: str) -> "Scorer":
        from posttrain.verifiers.model.scorer import load

        return load(
            path,
            self.kind,
            dtype=self.dtype,
            device=self.device,
            template=self.chat_template,
            max_tokens=self.max_tokens,
        )

    def _scales(self) -> list[Scale]:
        """Return the scale of each model."""
        if self.reference:
            return [_reference_scale(self, path) for path in self.paths]
        means = self.mean or (0.0,) * len(self.paths)
        stds = self.std or (1.0,) * len(self.paths)
        return [Scale(mean=mean, std=std) for mean, std in zip(means, stds, strict=True)]

    def _kept_scale(self, path: str) -> Scale:
        """Return a model's scale on the reference, from the file beside it, which the first call writes."""
        source = Path(self.reference).expanduser()
        beside = source.with_name(f"{source.name}.{self._digest(path, source)}.scale.json")
        try:
            with FileLock(f"{beside}.lock", timeout=_LOCK_S):
                if beside.exists():
                    return Scale(**json.loads(beside.read_text()))
                scale = self._measured(path, source)
                put(beside, json.dumps({"mean": scale.mean, "std": scale.std}))
                return scale
        except Timeout:
            raise UserError("", f"another process has held {beside}.lock for {_LOCK_S:.0f} s") from None
        except OSError as error:
            raise UserError(
                self.reference,
                f"the scale cannot be kept beside the reference: {error}",
                "make its directory writable, or give mean and std",
            ) from None

    def _measured(self, path: str, source: Path) -> Scale:
        pairs = [
            (Task(id=str(n), messages=({"role": "user", "content": prompt},)), response)
            for n, (prompt, response) in enumerate(read_reference(source))
        ]
        scores = []
        for (task, _), numbers in zip(pairs, self._numbers(self._scorer(path), pairs), strict=True):
            if numbers is None:
                raise UserError(str(source), f"record {int(task.id) + 1} is longer than the model takes")
            scores.append(over_steps(numbers, self.over_steps))
        return scale_of(scores, str(source))

    def _digest(self, path: str, source: Path) -> str:
        """Of all that a scale depends on."""
        from posttrain.models.loading import dtype_of
        from posttrain.verifiers.model.scorer import directory

        try:
            seen = hashlib.sha256(source.read_bytes())
        except OSError as error:
            raise UserError(str(source), f"the reference cannot be read: {error}") from None
        local = directory(path)
        files = sorted(f for f in local.iterdir() if f.suffix in (".safetensors", ".json", ".jinja"))
        stats = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
        options = (
            self.kind,
            self.over_steps,
            self.separator,
            self.chat_template,
            dtype_of(self.dtype, self.device),
            self.max_tokens,
            self.thoughts,
        )
        seen.update(json.dumps([str(local.resolve()), stats, options]).encode())
        return seen.hexdigest()[:16]

    def check(self, task: Task) -> None:
        """UserError if there is no conversation to answer."""
        if not any(message["content"].strip() for message in task.messages):
            raise UserError(task.source, f"task {task.id!r} has no prompt")

    def budget_s(self, task: Task) -> float:
        """The deadline of a call."""
        return self.deadline_s

    def require(self) -> None:
        """UserError if a model is not there or not of this kind. Makes the scales that workers will read."""
        from posttrain.verifiers.model.scorer import check_config, directory, load

        for path in self.paths:
            check_config(directory(path), self.kind)
        if self.reference:
            for path in self.paths:
                _reference_scale(self, path)
            load.cache_clear()


@lru_cache(maxsize=64)
def _reference_scale(verifier: RewardModel, path: str) -> Scale:
    return verifier._kept_scale(path)
