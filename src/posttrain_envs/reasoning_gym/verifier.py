"""The verifier of reasoning-gym's problems: the library's scorers, each in a process that may crash."""

import json
import math
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal

from posttrain.base.libraries import preserve_globals, require
from posttrain.base.usercode import cause
from posttrain.process.fork import call_in_fork
from posttrain.process.tree import limit
from posttrain.process.workers import Failed
from posttrain.types import RunError, Task, UserError, Verdict
from posttrain.verifiers.protocol import Verifier, quote
from posttrain.verifiers.regions import remove_thought, tag_content
from posttrain_envs.reasoning_gym.rules import refusal
from posttrain_envs.reasoning_gym.tasks import dataset

_SCORED_S = 4
"""Processor time for one answer, in seconds."""
_BUSY = 60.0
"""Wall-clock time until a verdict is given up on a busy machine, as a multiple of its processor time."""
_MOST_BYTES = 1 << 16
"""Size of a score, or of the reason for its absence."""
_MOST_PARTIAL = 0.99
"""Greatest score of an answer that is not fully right."""
_FIELDS = {"generator": str, "options": Mapping, "question": str, "metadata": Mapping}


class BreaksError(Exception):
    """A scorer raised, hung, died or gave no number."""


@dataclass(frozen=True, kw_only=True)
class ReasoningGymScorer(Verifier):
    """1 if the generator's own scorer gives the answer full marks; otherwise 0, or with `partial` its score.

    If a scorer would run the answer, or reward text that is not an answer, it judges only answers of the form
    that the question requires. An answer on which it raises, hangs or dies is wrong, unless it does so on the
    gold as well (or on an empty answer, for a task without gold): then the verdict is an error.

    Labels: right, wrong, partial, no_answer (the part is missing or blank).
    """

    place: ClassVar[int] = 13
    name: str = "reasoning_gym"
    where: Literal["tag", "last_line", "all"] = "tag"
    """Place of the answer after the thought: between the last <answer> and </answer>, in the last line, or
    the whole response."""
    partial: bool = False
    """Give the scorer's partial scores. Many scorers give something for anything, and a method that compares
    the answers to a question makes as much of a difference of 0.01 as of 1."""
    best: ClassVar[float] = 1.0

    def __call__(self, task: Task, response: str) -> Verdict:
        """Give 1 if the score is 1. Raises RunError if the scorer fails on the gold."""
        answer = self._part(response)
        if not answer:
            return Verdict(score=0.0, label="no_answer", reason=f"there is no answer (where = {self.where})")
        try:
            score = _score_in_fork(task, answer)
        except BreaksError as error:
            try:
                _score_in_fork(task, task.answer or "")
            except BreaksError as gold_error:
                raise RunError(
                    f"the scorer of {task.fields['generator']}", f"it breaks by itself: {gold_error}"
                ) from None
            return Verdict(score=0.0, label="wrong", reason=f"the scorer breaks on {quote(answer)}: {error}")
        if isinstance(score, str):
            return Verdict(score=0.0, label="wrong", reason=f"{quote(answer)}: {score}")
        if score == 1.0:
            return Verdict(score=1.0, label="right", reason=f"{quote(answer)} has full marks")
        reason = f"{quote(answer)} is given {score:.3g}, not 1"
        if self.partial and score > 0:
            return Verdict(score=min(score, _MOST_PARTIAL), label="partial", reason=reason)
        return Verdict(score=0.0, label="wrong", reason=reason)

    def _part(self, response: str) -> str:
        """Return the answer, or ""."""
        text = remove_thought(response).strip()
        if self.where == "tag":
            return (tag_content(text, "answer") or "").strip()
        return text if self.where == "all" else text[text.rfind("\n") + 1 :].strip()

    def golds(self, task: Task) -> list[str]:
        """Return the library's own answer, if it has one."""
        return [] if task.answer is None else [self._placed(task.answer)]

    def fakes(self, task: Task) -> list[str]:
        """Return blanks, words, NaN, and programs."""
        return ["", *map(self._placed, ("I do not know.", "nan", "[print(1)]", "entry['answer']"))]

    def _placed(self, text: str) -> str:
        return f"<answer>{text}</answer>" if self.where == "tag" else text

    def check(self, task: Task) -> None:
        """Raise UserError if reasoning-gym did not make the task, or its answer does not fit the place."""
        wrong = [name for name, kind in _FIELDS.items() if not isinstance(task.fields.get(name), kind)]
        if wrong:
            problem = (
                f"task {task.id!r} is not from reasoning-gym: its field {wrong[0]!r} is missing or malformed"
            )
            raise UserError(task.source, problem, "ask them with [task.reasoning_gym]")
        if self.where == "last_line" and "\n" in (task.answer or "").strip():
            problem = f"the answer of task {task.id!r} has several lines"
            raise UserError("verifier.reasoning_gym.where", problem, "set it to 'tag'")

    def budget_s(self, task: Task) -> float | None:
        """Return the time for the answer and for the gold on a busy machine."""
        return 2 * _BUSY * _SCORED_S

    def require(self) -> None:
        require("reasoning_gym", f"verifier.{self.name}")


def _score_in_fork(task: Task, answer: str) -> float | str:
    """Return the score, or why the answer is refused, from a process of its own. Raises BreaksError."""
    with preserve_globals():
        scorer = _scorer(
            task.fields["generator"], json.dumps(task.fields["options"]), task.fields.get("difficulty")
        )
    outcome = call_in_fork(
        partial(_score_limited, scorer, task, answer), kind="scorer", most_bytes=_MOST_BYTES
    )
    if isinstance(outcome, Failed):
        raise BreaksError(f"nothing within {_SCORED_S} s of the processor, or its process died")
    has_score, result = json.loads(outcome.value)
    if not has_score:
        raise BreaksError(result)
    return result if isinstance(result, str) else float(result)


def _score_limited(scorer: Any, task: Task, answer: str) -> str:
    """Return the result of `_score` as JSON, or end this process after _SCORED_S s of processor time."""
    limit(resource.RLIMIT_CPU, _SCORED_S)
    return json.dumps(_score(scorer, task, answer))


def _score(scorer: Any, task: Task, answer: str) -> tuple[bool, float | str]:
    """Return whether the scorer succeeded, and the score or the reason for its absence."""
    gold, metadata, generator = task.answer, dict(task.fields["metadata"]), task.fields["generator"]
    if generator in ("arc_agi", "rearc"):
        metadata["output"] = tuple(map(tuple, metadata["output"]))  # JSON made lists of tuples
    try:
        if why := refusal(generator, answer, gold, metadata):
            return True, why
        entry = {"question": task.fields["question"], "answer": gold, "metadata": metadata}
        score = float(scorer.score_answer(answer, entry))
    except BaseException as error:  # sys.exit too
        return False, cause(error)
    return (True, score) if math.isfinite(score) else (False, f"the score is {score}")


@lru_cache(maxsize=256)
def _scorer(generator: str, options: str, level: int | None) -> Any:
    """Return the library's dataset, which holds the scorer."""
    return dataset(generator, json.loads(options), level)
