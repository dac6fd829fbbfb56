"""The verifier `model`: score a response, or each of its steps, by a reward model from transformers.

outcome   ...ForSequenceClassification with one label: the score is its output at the last token.
process   ...ForTokenClassification with one or two labels: the probability that a step is good, read at
          the separator after each step. The score is the last, minimum, mean or product of these, and each
          is the potential Φ of the state after its step.

Step i is rewarded Φ_i - Φ_(i-1), with Φ_0 = 0, and the end of the response score - Φ_n. The rewards of a
response sum to its score, so the optimal policy is the same as for the score alone.

Source: Ng, Harada and Russell 1999 (potential-based shaping); step labels as in Lightman et al. 2023,
arXiv:2305.20050. Ensembles: Coste et al. 2023, arXiv:2310.02743 (mean, worst case, uncertainty).

scorer.py needs PyTorch and transformers. It is imported when a model is first used, so that the other
verifiers of a recipe start without these.
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

from posttrain.base.atomic_files import put
from posttrain.process.shared import call_in_shared_process
from posttrain.process.workers import Failed
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
    from posttrain.verifiers.model.scorer import Scorer, ScorerRow

_LOCK_S = 1800.0


@dataclass(frozen=True, kw_only=True)
class RewardModel(Verifier):
    """Score responses by one reward model, or by an ensemble of several.

    Label: scored. Without a score: too_long (unless the option too_long sets one), not_a_number.
    Verdict.parts of an ensemble: std, and each model's score as model_1, model_2 ...
    Verdict.progress of kind process: (characters read, Φ) after each step.
    """

    paths: tuple[str, ...]
    """Directories, runs or Hub ids with safetensors; several are an ensemble. A run is read with the
    model.template_args of its recipe."""
    place: ClassVar[int] = 15
    name: str = "model"
    """Name under which the score is recorded."""
    kind: Kind = "outcome"
    """outcome: one score per response; process: one per step."""
    separator: str = "\n\n"
    """For kind = process: text between steps; by default a blank line."""
    over_steps: OverSteps = "last"
    """For kind = process: the score is the last step's, or the min, mean or product of all steps."""
    ensemble: OverModels = "mean"
    """How the scores of several models are combined: mean, min, or lower (mean - k std)."""
    k: float = 1.0
    """For ensemble = lower: number of standard deviations to subtract."""
    mean: tuple[float, ...] = ()
    """Subtracted from the scores of each model, one for each path; empty: 0."""
    std: tuple[float, ...] = ()
    """Divisor of the scores of each model, one for each path; empty: 1."""
    reference: str = ""
    """A JSONL file of {"prompt", "response"} on which each model's scores get mean 0 and variance 1."""
    thoughts: bool = False
    """Whether the model also reads a response's thoughts, and not only the text after them."""
    chat_template: str = ""
    """A Jinja template in place of the tokenizer's own; "none" for plain text."""
    max_tokens: int = 0
    """Longest conversation; 0: the model's context length. Longer ones are not cut but too_long."""
    too_long: float | None = None
    """Score of a response beyond max_tokens; by default it has no score and is masked."""
    dtype: Dtype = "float32"
    """auto: bfloat16 where the device is fast in it. In bfloat16 a score depends slightly on its batch."""
    device: str = "cpu"
    """cpu, cuda, cuda:1, or auto for the GPU if there is one. Worker processes share one copy."""
    batch: int = 8
    """Responses in one forward pass of the model."""
    deadline_s: float = 300.0
    """Seconds for one call, with its wait for calls of other workers; the first one includes loading the
    models."""

    def __post_init__(self) -> None:
        if not self.paths or len(set(self.paths)) < len(self.paths):
            raise ValueError("paths must name one or more models, each once")
        for name in ("mean", "std"):
            numbers: tuple[float, ...] = getattr(self, name)
            if numbers and (len(numbers) != len(self.paths) or self.reference):
                raise ValueError(f"{name} has one number for each path, and none beside a reference")
            if not all(math.isfinite(number) for number in numbers):
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
        """Raise ValueError for an option that has no effect with the others."""
        if self.kind == "outcome" and (self.separator != "\n\n" or self.over_steps != "last"):
            raise ValueError("separator and over_steps are read for kind = 'process' only")
        if self.k != 1.0 and self.ensemble != "lower":
            raise ValueError("k is read for ensemble = 'lower' only")
        if self.ensemble != "mean" and len(self.paths) == 1:
            raise ValueError(f"ensemble = {self.ensemble!r} is for several paths")

    def __call__(self, task: Task, response: str) -> Verdict:
        return self.judge_all([(task, response)])[0]

    def judge_all(self, pairs: Sequence[tuple[Task, str]]) -> list[Verdict]:
        """Judge each response; scores are the same as alone up to float rounding.

        In a worker the models of the process that the workers share judge; its failure is a verdict.
        """
        outcome = call_in_shared_process(RewardModel._judge_here, self, pairs)
        if isinstance(outcome, Failed):
            return [Verdict(score=None, label=outcome.label, reason=outcome.reason)] * len(pairs)
        verdicts: list[Verdict] = outcome.value
        return verdicts

    def _judge_here(self, pairs: Sequence[tuple[Task, str]]) -> list[Verdict]:
        """Judge each response by models that this process loads."""
        scorers = [self._scorer(path) for path in self.paths]
        members: list[list[list[float] | None]] = [
            [self._scaled(numbers, scale) for numbers in self._numbers(scorer, pairs)]
            for scorer, scale in zip(scorers, self._scales(), strict=True)
        ]
        return [self._verdict(response, [m[i] for m in members]) for i, (_, response) in enumerate(pairs)]

    def _numbers(self, scorer: "Scorer", pairs: Sequence[tuple[Task, str]]) -> list[list[float] | None]:
        """Return one model's outputs for each response, one per step; None if it is too long."""
        rows = [self._row(scorer, task, self._read(response)[1]) for task, response in pairs]
        fitting = [i for i, row in enumerate(rows) if len(row.tokens) <= scorer.most]
        out: list[list[float] | None] = [None] * len(rows)
        for start in range(0, len(fitting), self.batch):
            places = fitting[start : start + self.batch]
            for i, numbers in zip(places, scorer.numbers([rows[i] for i in places]), strict=True):
                out[i] = numbers
        return out

    def _row(self, scorer: "Scorer", task: Task, response: str) -> "ScorerRow":
        if self.kind == "outcome":
            return scorer.outcome(task.messages, response)
        return scorer.process(task.messages, steps(response, self.separator), self.separator)

    def _read(self, response: str) -> tuple[int, str]:
        """Return (begin, text) of what is read of a response, without the line breaks after a thought."""
        begin, end = (0, len(response)) if self.thoughts else speech(response)
        text = response[begin:end].lstrip("\n") if begin else response[:end]
        return end - len(text), text

    def _scaled(self, numbers: list[float] | None, scale: Scale) -> list[float] | None:
        """Return Φ of each step and then the score, on the scale of this model."""
        if numbers is None:
            return None
        score = over_steps(numbers, self.over_steps)
        return [scale(number) for number in (*numbers, score)]

    def _verdict(self, response: str, members: Sequence[list[float] | None]) -> Verdict:
        scored = [member for member in members if member is not None]
        if len(scored) < len(members):
            reason = "the conversation is longer than the model takes"
            return Verdict(score=self.too_long, label="too_long", reason=reason)
        if not all(math.isfinite(number) for member in scored for number in member):
            return Verdict(score=None, label="not_a_number", reason="a model's number is not finite")
        *potentials, score = [
            over_models([m[j] for m in scored], self.ensemble, self.k) for j in range(len(scored[0]))
        ]
        scores = [member[-1] for member in scored]
        parts = {f"model_{n}": value for n, value in enumerate(scores, start=1)} if len(scores) > 1 else {}
        if parts:
            parts["std"] = deviation(scores)
        reason = f"scores {', '.join(f'{s:.3g}' for s in scores)}"
        progress: tuple[tuple[int, float], ...] = ()
        if self.kind == "process":
            begin, text = self._read(response)
            ends = [begin + step.end for step in steps(text, self.separator)]
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

    def _cached_scale(self, path: str) -> Scale:
        """Return a model's scale on the reference, from a file next to it, which the first call writes."""
        source = Path(self.reference).expanduser()
        cache_file = source.with_name(f"{source.name}.{self._digest(path, source)}.scale.json")
        try:
            with FileLock(f"{cache_file}.lock", timeout=_LOCK_S):
                if cache_file.exists():
                    return Scale(**json.loads(cache_file.read_text()))
                scale = self._measure_scale(path, source)
                put(cache_file, json.dumps({"mean": scale.mean, "std": scale.std}))
                return scale
        except Timeout:
            raise UserError("", f"another process has held {cache_file}.lock for {_LOCK_S:.0f} s") from None
        except OSError as error:
            raise UserError(
                self.reference,
                f"the scale cannot be kept beside the reference: {error}",
                "make its directory writable, or give mean and std",
            ) from None

    def _measure_scale(self, path: str, source: Path) -> Scale:
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
        """Return a digest of everything that a scale depends on."""
        from posttrain.models.loading import dtype_of
        from posttrain.verifiers.model.scorer import directory

        try:
            digest = hashlib.sha256(source.read_bytes())
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
        digest.update(json.dumps([str(local.resolve()), stats, options]).encode())
        return digest.hexdigest()[:16]

    def check(self, task: Task) -> None:
        """Raise UserError if the task has no prompt."""
        if not any(message["content"].strip() for message in task.messages):
            raise UserError(task.source, f"task {task.id!r} has no prompt")

    def budget_s(self, task: Task) -> float:
        return self.deadline_s

    def require(self) -> None:
        """Raise UserError if a model is missing or of another kind. Write the scales for the workers."""
        from posttrain.verifiers.model.scorer import check_config, directory, load

        for path in self.paths:
            check_config(directory(path), self.kind)
        if self.reference:
            for path in self.paths:
                _reference_scale(self, path)
            load.cache_clear()


@lru_cache(maxsize=64)
def _reference_scale(verifier: RewardModel, path: str) -> Scale:
    return verifier._cached_scale(path)
