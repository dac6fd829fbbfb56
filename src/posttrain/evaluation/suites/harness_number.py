"""The verdict of lm-evaluation-harness on GSM8K, which compares texts and not numbers."""

import re
from dataclasses import dataclass
from typing import ClassVar

from posttrain.types import Task, Verdict
from posttrain.verifiers.protocol import Verifier, gold_answer, quote

_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")


@dataclass(frozen=True, kw_only=True)
class HarnessNumber(Verifier):
    """Score 1 if the last number of the response is written like the task's answer, otherwise 0.

    The parts are `flexible`, the same, and `strict`, for the first number behind "#### ". Commas, dollar
    signs and a full stop at the end are ignored; but 18.00 is not 18.

    Labels: right, wrong, no_answer.

    >>> verdict = HarnessNumber()(Task(id="q", messages=(), answer="18"), "#### 18. Or 18.00")
    >>> verdict.parts
    {'flexible': 0.0, 'strict': 1.0}
    """

    name: str = "harness_number"
    trusted: ClassVar[bool] = True
    best: ClassVar[float] = 1.0

    def __call__(self, task: Task, response: str) -> Verdict:
        gold, numbers = _bare(gold_answer(task)), _FLEXIBLE.findall(response)
        first = _STRICT.search(response)
        flexible = bool(numbers) and _bare(numbers[-1]) == gold
        strict = first is not None and _bare(first[1]) == gold
        last = quote(numbers[-1]) if numbers else "no number"
        return Verdict(
            score=float(flexible),
            label="right" if flexible else "wrong" if numbers else "no_answer",
            reason=f"{last} for {gold}",
            parts={"flexible": float(flexible), "strict": float(strict)},
        )

    def vote(self, response: str) -> str | None:
        """Return the last number without commas, dollar signs and full stop, or None."""
        numbers = _FLEXIBLE.findall(response)
        return _bare(numbers[-1]) if numbers else None


def _bare(number: str) -> str:
    return number.replace(",", "").replace("$", "").removesuffix(".")
