"""The verdict of lm-evaluation-harness on GSM8K: texts compared, not numbers."""

import re
from dataclasses import dataclass
from typing import ClassVar

from posttrain.types import Task, Verdict
from posttrain.verifiers.protocol import Verifier, gold_answer, shown

_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")


@dataclass(frozen=True, kw_only=True)
class HarnessNumber(Verifier):
    """1 if the last number of the response is written like the task's answer, otherwise 0.

    The parts are `flexible`, which is that, and `strict`: the first number behind "#### ". Commas and dollar
    signs count nothing, nor does a full stop at the end; but 18.00 is not 18.

    Labels: right, wrong, no_answer.

    >>> verdict = HarnessNumber()(Task(id="q", messages=(), answer="18"), "#### 18. Or 18.00")
    >>> verdict.parts
    {'flexible': 0.0, 'strict': 1.0}
    """

    name: str = "harness_number"
    trusted: ClassVar[bool] = True
    best: ClassVar[float] = 1.0

    def __call__(self, task: Task, response: str) -> Verdict:
        """The flexible verdict, with the strict one beside it."""
        gold, found = _bare(gold_answer(task)), _FLEXIBLE.findall(response)
        first = _STRICT.search(response)
        flexible = bool(found) and _bare(found[-1]) == gold
        strict = first is not None and _bare(first[1]) == gold
        last = shown(found[-1]) if found else "no number"
        return Verdict(
            score=float(flexible),
            label="right" if flexible else "wrong" if found else "no_answer",
            reason=f"{last} for {gold}",
            parts={"flexible": float(flexible), "strict": float(strict)},
        )

    def vote(self, response: str) -> str | None:
        """Return the last number as it is compared."""
        numbers = _FLEXIBLE.findall(response)
        return _bare(numbers[-1]) if numbers else None


def _bare(number: str) -> str:
    return number.replace(",", "").replace("$", "").removesuffix(".")
