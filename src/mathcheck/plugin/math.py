"""The verifier `math`."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal, get_args

from mathcheck.comparison import AnswerType, GoldError, compare, is_same_text, read_gold
from mathcheck.places import behind_lead, last_line
from mathcheck.quantities import Rules
from mathcheck.reading.tree import Answer
from mathcheck.variants import near_misses, placed
from posttrain.types import Task, UserError, Verdict
from posttrain.verifiers.answers import check_places
from posttrain.verifiers.protocol import Verifier, gold_answer, shown
from posttrain.verifiers.regions import after, boxed, spoken, tagged

Where = Literal["auto", "boxed", "after", "tag", "last"]
_WINDOW = 10_000
_KILLED_AFTER_S = 8.0


@dataclass(frozen=True, kw_only=True)
class Math(Verifier):
    """1 if the response's answer is, as mathematics, the task's; otherwise 0.

    Labels: right, wrong, no_answer (there is none at the place), unreadable (it is not in the
    grammar), too_hard (beyond the bounds, or not decided within a second of processor time).

    >>> math, task = Math(), Task(id="q", messages=(), answer=r"\\frac{1}{2}")
    >>> math(task, "So it is 0.5.").label, math(task, "Not 0.5, it is 0.6.").label
    ('right', 'wrong')
    """

    place: ClassVar[int] = 3
    name: str = "math"
    """Under which its score is recorded."""
    where: Where = "auto"
    """The part that counts: boxed, after (the marker), tag or last (line); auto: boxed, after or last."""
    marker: str = "####"
    """The answer stands behind the last one, up to the end of its line."""
    tag: str = "answer"
    """For where = tag: <answer> ... </answer>."""
    answer_type: AnswerType = "auto"
    """What the answers are, unless a task's own field answer_type says it; auto: what the gold looks like."""
    tolerance: float = 0.0
    """Greatest difference between numbers still right, unless a task's own field tolerance says it."""
    tolerance_is: Literal["absolute", "relative"] = "absolute"
    """Whether the tolerance is a difference, or a part of the gold."""
    unsimplified: bool = False
    """Whether 3 + 4 may stand for 7, unless a task's own field unsimplified says it."""
    best: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        check_places(self.marker, self.tag)
        if self.where not in get_args(Where):
            raise ValueError(f"where must be one of {', '.join(get_args(Where))}, not {self.where!r}")
        if self.answer_type not in get_args(AnswerType):
            raise ValueError(f"answer_type must be one of {', '.join(get_args(AnswerType))}")
        if not 0 <= self.tolerance < float("inf"):
            raise ValueError(f"tolerance must be 0 or more, not {self.tolerance}")
        if self.tolerance_is not in ("absolute", "relative"):
            raise ValueError(f"tolerance_is must be absolute or relative, not {self.tolerance_is!r}")

    def __call__(self, task: Task, response: str) -> Verdict:
        """Right where the answer found and the gold are the same."""
        self._rules(task)  # raises for a field without meaning, whatever the response says
        part, prose = answer_part(response, self.where, self.marker, self.tag)
        if part is None or not part.strip():
            self._gold(task)
            return Verdict(
                score=0.0, label="no_answer", reason="nothing stands where the answer is looked for"
            )
        if is_same_text(behind_lead(part) if prose else part, gold_answer(task)):
            return Verdict(score=1.0, label="right", reason=f"{shown(part)}: the same text")
        gold, rules = self._gold(task)
        result = compare(part, gold, rules, prose=prose)
        reason = f"{shown(part)}: {result.reason}"
        return Verdict(score=float(bool(result)), label=result.label, reason=reason)

    def vote(self, response: str) -> str | None:
        """Return what stands at the place of the answer, without white space."""
        part, _ = answer_part(response, self.where, self.marker, self.tag)
        return None if part is None else "".join(part.split())

    def golds(self, task: Task) -> list[str]:
        """The answer at its place, alone and in a sentence."""
        gold = gold_answer(task).strip()
        answer = placed(gold, self.where, self.marker, self.tag)
        return [answer, f"I first thought of 1, but it is not.\n{answer}"]

    def fakes(self, task: Task) -> list[str]:
        """Nothing, words, other answers near by, and the answer denied."""
        gold, rules = self._gold(task)
        wrong = near_misses(gold_answer(task).strip(), gold, rules)
        fakes = ["", " \n", "...", *(placed(text, self.where, self.marker, self.tag) for text in wrong)]
        return fakes if self.where in ("auto", "last") else [*fakes, gold_answer(task)]

    def check(self, task: Task) -> None:
        """UserError if the answer cannot be read as its type, or a field of the task has no meaning."""
        self._gold(task)

    def budget_s(self, task: Task) -> float | None:
        """Longer than any verdict takes, its first with the import of SymPy."""
        return _KILLED_AFTER_S

    # ------------------------------------------------------------------ the gold

    def _gold(self, task: Task) -> tuple[Answer, Rules]:
        """The answer as read, and the rules by which another is compared with it."""
        text = gold_answer(task)
        try:
            return read_gold(text, self._rules(task))
        except GoldError as error:
            raise UserError(
                task.source,
                f"the answer of task {task.id!r}, {shown(text)}, {error}",
                "mend the answer, or give the task another answer_type",
            ) from None

    def _rules(self, task: Task) -> Rules:
        """Those of the verifier, but for the task's own fields; UserError for one without meaning."""

        def said(name: str, fits: Callable[[Any], bool], fix: str = "") -> Any:
            value = task.fields.get(name, getattr(self, name))
            if not fits(value):
                raise UserError(task.source, f"task {task.id!r} has the {name} {value!r}", fix)
            return value

        kinds, ways = get_args(AnswerType), ("absolute", "relative")
        return Rules(
            kind=said("answer_type", lambda x: x in kinds, f"it is one of {', '.join(kinds)}"),
            tolerance=Fraction(str(said("tolerance", _is_tolerance))),
            relative=said("tolerance_is", lambda x: x in ways, "it is absolute or relative") == "relative",
            unsimplified=said("unsimplified", lambda x: isinstance(x, bool), "it is true or false"),
        )


def _is_tolerance(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


def answer_part(response: str, where: Where, marker: str, tag: str) -> tuple[str | None, bool]:
    r"""The text in which the answer stands, None if there is none, and whether that is a line of prose.

    Where "auto" that is the last balanced \boxed{}, else what follows the last marker, else the
    last line with a letter or digit. A box that ends what another place holds is the answer there.
    """
    response = spoken(response)
    if where in ("auto", "boxed"):
        found = _last_box(response)
        if found is not None or where == "boxed":
            return found, False
    if where == "after" or (where == "auto" and marker in response):
        part, prose = after(response, marker), False
    elif where == "tag":
        part, prose = tagged(response, tag), False
    else:
        part, prose = last_line(response), True
    box = None if part is None else boxed(part)
    if part is None or not box:  # an empty one is an answer that is not there
        return part if box is None else box, prose
    before, _, behind = part.rpartition(box)
    # Not where the box is a piece of what is said, as in -\boxed{7}, or denied.
    piece = re.search(r"[-+*/^<>]\s*\$?\s*\\boxed\s*\{?$|\\boxed.*\\boxed|\bnot\b|n't", before, re.DOTALL)
    return (part, prose) if piece or re.search(r"\w", behind) else (box, False)


def _last_box(response: str) -> str | None:
    r"""What stands in the last balanced \boxed{}; looks at the last one first, which mostly is it."""
    at = response.rfind("\\boxed")
    if at < 0:
        return None
    found = boxed(response[at : at + _WINDOW])
    return boxed(response) if found is None else found
