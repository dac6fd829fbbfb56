"""The verifier of reasoning-gym's problems: its own scorers, each asked in a process that may break."""

import json
import math
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal

from posttrain.base.libraries import require, unmoved
from posttrain.base.usercode import cause
from posttrain.process.fork import forked
from posttrain.process.tree import limit
from posttrain.process.workers import Failed
from posttrain.types import RunError, Task, UserError, Verdict
from posttrain.verifiers.protocol import Verifier, shown
from posttrain.verifiers.regions import spoken, tagged
from posttrain_envs.reasoning_gym.rules import refused
from posttrain_envs.reasoning_gym.tasks import dataset

_SCORED_S = 4
"""Seconds of the processor for one answer."""
_BUSY = 60.0
"""On a loaded machine it may take this many times as long before the verdict is given up."""
_MOST_BYTES = 1 << 16
"""Of a score, or of the reason why there is none."""
_MOST_PARTIAL = 0.99
"""What is not wholly right is paid less than what is."""
_FIELDS = {"generator": str, "options": Mapping, "question": str, "metadata": Mapping}


class BreaksError(Exception):
    """A scorer raised, hung, died or gave no number."""


@dataclass(frozen=True, kw_only=True)
class ReasoningGymScorer(Verifier):
    """1 if the generator's own scorer gives the answer full marks; otherwise 0, or with `partial` its score.

    Where a scorer would run the answer, or pay for what is no answer, it is asked only about answers of the
    form that the question wants. An answer on which it raises, hangs or dies is wrong, unless it does so on
    the gold as well (on an empty answer, where there is no gold): then there is no verdict.

    Labels: right, wrong, partial, no_answer (there is no such part, or it is blank).
    """

    place: ClassVar[int] = 13
    name: str = "reasoning_gym"
    where: Literal["tag", "last_line", "all"] = "tag"
    """Where the answer stands behind the thought: between the last <answer> and </answer>, in the last line,
    or everywhere."""
    partial: bool = False
    """Pay what the scorer gives for a part. Many give something for anything, and a method that compares the
    answers to a question makes as much of a difference of 0.01 as of 1."""
    best: ClassVar[float] = 1.0

    def __call__(self, task: Task, response: str) -> Verdict:
        """Right where the score is 1; RunError where the scorer breaks on the gold."""
        answer = self._part(response)
        if not answer:
            return Verdict(score=0.0, label="no_answer", reason=f"there is no answer (where = {self.where})")
        try:
            score = _apart(task, answer)
        except BreaksError as error:
            try:
                _apart(task, task.answer or "")
            except BreaksError as own:
                raise RunError(
                    f"the scorer of {task.fields['generator']}", f"it breaks by itself: {own}"
                ) from None
            return Verdict(score=0.0, label="wrong", reason=f"the scorer breaks on {shown(answer)}: {error}")
        if isinstance(score, str):
            return Verdict(score=0.0, label="wrong", reason=f"{shown(answer)}: {score}")
        if score == 1.0:
            return Verdict(score=1.0, label="right", reason=f"{shown(answer)} has full marks")
        reason = f"{shown(answer)} is given {score:.3g}, not 1"
        if self.partial and score > 0:
            return Verdict(score=min(score, _MOST_PARTIAL), label="partial", reason=reason)
        return Verdict(score=0.0, label="wrong", reason=reason)

    def _part(self, response: str) -> str:
        """The answer; empty if there is none."""
        said = spoken(response).strip()
        if self.where == "tag":
            return (tagged(said, "answer") or "").strip()
        return said if self.where == "all" else said[said.rfind("\n") + 1 :].strip()

    def golds(self, task: Task) -> list[str]:
        """The library's own answer, where it has one."""
        return [] if task.answer is None else [self._placed(task.answer)]

    def fakes(self, task: Task) -> list[str]:
        """Nothing, words, NaN, and programs."""
        return ["", *map(self._placed, ("I do not know.", "nan", "[print(1)]", "entry['answer']"))]

    def _placed(self, text: str) -> str:
        return f"<answer>{text}</answer>" if self.where == "tag" else text

    def check(self, task: Task) -> None:
        """UserError if the task is none of reasoning-gym's, or its answer cannot stand where it must."""
        wrong = [name for name, kind in _FIELDS.items() if not isinstance(task.fields.get(name), kind)]
        if wrong:
            problem = (
                f"task {task.id!r} is no problem of reasoning-gym: its field {wrong[0]!r} is missing or other"
            )
            raise UserError(task.source, problem, "ask them with [task.reasoning_gym]")
        if self.where == "last_line" and "\n" in (task.answer or "").strip():
            problem = f"the answer of task {task.id!r} has several lines"
            raise UserError("verifier.reasoning_gym.where", problem, "set it to 'tag'")

    def budget_s(self, task: Task) -> float | None:
        """Time for the answer and for the gold, on a busy computer."""
        return 2 * _BUSY * _SCORED_S

    def require(self) -> None:
        """UserError if the library is not installed."""
        require("reasoning_gym", f"verifier.{self.name}")


def _apart(task: Task, answer: str) -> float | str:
    """What the scorer gives, or why it is not asked, in a process of its own; BreaksError if nothing."""
    with unmoved():
        scorer = _scorer(
            task.fields["generator"], json.dumps(task.fields["options"]), task.fields.get("difficulty")
        )
    outcome = forked(partial(_limited, scorer, task, answer), kind="scorer", most_bytes=_MOST_BYTES)
    if isinstance(outcome, Failed):
        raise BreaksError(f"nothing within {_SCORED_S} s of the processor, or its process died")
    good, found = json.loads(outcome.value)
    if not good:
        raise BreaksError(found)
    return found if isinstance(found, str) else float(found)


def _limited(scorer: Any, task: Task, answer: str) -> str:
    """Return the same as JSON, or end this process after _SCORED_S seconds of the processor."""
    limit(resource.RLIMIT_CPU, _SCORED_S)
    return json.dumps(_scored(scorer, task, answer))


def _scored(scorer: Any, task: Task, answer: str) -> tuple[bool, float | str]:
    """(whether it went well, the score or why there is none)."""
    gold, metadata, generator = task.answer, dict(task.fields["metadata"]), task.fields["generator"]
    if generator in ("arc_agi", "rearc"):
        metadata["output"] = tuple(
            map(tuple, metadata["output"])
        )  # which it was before it was written as JSON
    try:
        if why := refused(generator, answer, gold, metadata):
            return True, why
        entry = {"question": task.fields["question"], "answer": gold, "metadata": metadata}
        score = float(scorer.score_answer(answer, entry))
    except BaseException as error:  # sys.exit too
        return False, cause(error)
    return (True, score) if math.isfinite(score) else (False, f"the score is {score}")


@lru_cache(maxsize=256)
def _scorer(generator: str, options: str, level: int | None) -> Any:
    """The library's dataset, which scores."""
    return dataset(generator, json.loads(options), level)
