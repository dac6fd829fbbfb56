"""The verifier `math`: compare an answer with the gold as mathematics."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal, get_args

from mathcheck.comparison import AnswerType, GoldError, compare, is_same_text, read_gold
from mathcheck.exact import UndefinedError, exact_value
from mathcheck.prose import last_line, text_after_lead
from mathcheck.quantities import Rules, is_percent, is_worked_out
from mathcheck.reading.tree import (
    Answer,
    Letters,
    Many,
    Matrix,
    Region,
    Relation,
    Scalar,
    TooHardError,
    symbols,
)
from posttrain.types import Task, UserError, Verdict
from posttrain.verifiers.answers import check_places
from posttrain.verifiers.protocol import Verifier, gold_answer, quote
from posttrain.verifiers.regions import after, box_content, remove_thought, tag_content

Where = Literal["auto", "boxed", "after", "tag", "last"]
_WINDOW = 10_000
_KILLED_AFTER_S = 8.0


@dataclass(frozen=True, kw_only=True)
class Math(Verifier):
    """1 if the response's answer is, as mathematics, the task's; otherwise 0.

    Labels: right, wrong, no_answer (the place is missing or blank), unreadable (outside the grammar),
    too_hard (beyond the bounds, or not decided within a second of processor time).

    >>> math, task = Math(), Task(id="q", messages=(), answer=r"\\frac{1}{2}")
    >>> math(task, "So it is 0.5.").label, math(task, "Not 0.5, it is 0.6.").label
    ('right', 'wrong')
    """

    place: ClassVar[int] = 3
    name: str = "math"
    """Name under which the score is recorded."""
    where: Where = "auto"
    """The part that counts: boxed, after (the marker), tag or last (line); auto: boxed, after or last."""
    marker: str = "####"
    """The answer follows the last marker, up to the end of its line."""
    tag: str = "answer"
    """For where = tag: <answer> ... </answer>."""
    answer_type: AnswerType = "auto"
    """Type of the answers, unless a task's field answer_type sets it; auto: detected from the gold."""
    tolerance: float = 0.0
    """Greatest difference between numbers that is right, unless a task's field tolerance sets it."""
    tolerance_is: Literal["absolute", "relative"] = "absolute"
    """Whether the tolerance is a difference, or a share of the gold."""
    unsimplified: bool = False
    """Whether 3 + 4 may stand for 7, unless a task's field unsimplified sets it."""
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
        """Give 1 if the answer equals the gold."""
        self._rules(task)  # raises UserError for a wrong field, whatever the response is
        part, prose = answer_part(response, self.where, self.marker, self.tag)
        if part is None or not part.strip():
            self._gold(task)
            return Verdict(
                score=0.0, label="no_answer", reason="nothing stands where the answer is looked for"
            )
        if is_same_text(text_after_lead(part) if prose else part, gold_answer(task)):
            return Verdict(score=1.0, label="right", reason=f"{quote(part)}: the same text")
        gold, rules = self._gold(task)
        result = compare(part, gold, rules, prose=prose)
        reason = f"{quote(part)}: {result.reason}"
        return Verdict(score=float(bool(result)), label=result.label, reason=reason)

    def vote(self, response: str) -> str | None:
        """Return the text at the place of the answer, without white space."""
        part, _ = answer_part(response, self.where, self.marker, self.tag)
        return None if part is None else "".join(part.split())

    def golds(self, task: Task) -> list[str]:
        """Return the answer at its place, alone and after a sentence."""
        gold = gold_answer(task).strip()
        answer = _place(gold, self.where, self.marker, self.tag)
        return [answer, f"I first thought of 1, but it is not.\n{answer}"]

    def fakes(self, task: Task) -> list[str]:
        """Return blanks, words, answers near the gold, and the gold denied."""
        gold, rules = self._gold(task)
        wrong = _near_misses(gold_answer(task).strip(), gold, rules)
        fakes = ["", " \n", "...", *(_place(text, self.where, self.marker, self.tag) for text in wrong)]
        return fakes if self.where in ("auto", "last") else [*fakes, gold_answer(task)]

    def check(self, task: Task) -> None:
        """Raise UserError if the answer cannot be read as its type, or a field of the task is wrong."""
        self._gold(task)

    def budget_s(self, task: Task) -> float | None:
        """Return more than any verdict takes, including the import of SymPy."""
        return _KILLED_AFTER_S

    # ------------------------------------------------------------------ the gold

    def _gold(self, task: Task) -> tuple[Answer, Rules]:
        """Return the parsed answer of the task, and the rules for comparing others with it."""
        text = gold_answer(task)
        try:
            return read_gold(text, self._rules(task))
        except GoldError as error:
            raise UserError(
                task.source,
                f"the answer of task {task.id!r}, {quote(text)}, {error}",
                "mend the answer, or give the task another answer_type",
            ) from None

    def _rules(self, task: Task) -> Rules:
        """Return the rules of the verifier, overridden by the task's fields. Raises UserError."""

        def setting(name: str, fits: Callable[[Any], bool], fix: str = "") -> Any:
            value = task.fields.get(name, getattr(self, name))
            if not fits(value):
                raise UserError(task.source, f"task {task.id!r} has the {name} {value!r}", fix)
            return value

        kinds, ways = get_args(AnswerType), ("absolute", "relative")
        return Rules(
            kind=setting("answer_type", lambda x: x in kinds, f"it is one of {', '.join(kinds)}"),
            tolerance=Fraction(str(setting("tolerance", _is_tolerance))),
            relative=setting("tolerance_is", lambda x: x in ways, "it is absolute or relative") == "relative",
            unsimplified=setting("unsimplified", lambda x: isinstance(x, bool), "it is true or false"),
        )


def _is_tolerance(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


def answer_part(response: str, where: Where, marker: str, tag: str) -> tuple[str | None, bool]:
    r"""Return the text that holds the answer, or None, and whether it is a line of prose.

    With "auto" that is the last balanced \boxed{}, else the text after the last marker, else the last line
    with a letter or digit. A box at the end of another place is the answer there.
    """
    response = remove_thought(response)
    if where in ("auto", "boxed"):
        content = _last_box(response)
        if content is not None or where == "boxed":
            return content, False
    if where == "after" or (where == "auto" and marker in response):
        part, prose = after(response, marker), False
    elif where == "tag":
        part, prose = tag_content(response, tag), False
    else:
        part, prose = last_line(response), True
    box = None if part is None else box_content(part)
    if part is None or not box:  # an empty box is a missing answer
        return part if box is None else box, prose
    before, _, behind = part.rpartition(box)
    # A box that is a part of an expression, as in -\boxed{7}, or denied, is not the answer.
    piece = re.search(r"[-+*/^<>]\s*\$?\s*\\boxed\s*\{?$|\\boxed.*\\boxed|\bnot\b|n't", before, re.DOTALL)
    return (part, prose) if piece or re.search(r"\w", behind) else (box, False)


def _last_box(response: str) -> str | None:
    r"""Return the content of the last balanced \boxed{}; scan the end of the response first, to save time."""
    at = response.rfind("\\boxed")
    if at < 0:
        return None
    content = box_content(response[at : at + _WINDOW])
    return box_content(response) if content is None else content


# ---------------------------------------------------------------------- responses that test the verifier


def _place(answer: str, where: str, marker: str, tag: str) -> str:
    """Return a response with the answer at the place where it is expected."""
    if where == "after":
        return f"{marker} {answer}"
    if where == "tag":
        return f"<{tag}>{answer}</{tag}>"
    if where == "last":
        return f"The answer is {answer}"
    return f"So it is \\boxed{{{answer}}}"


def _near_misses(text: str, gold: Answer, rules: Rules) -> list[str]:
    """Return answers that look like the gold and are wrong."""
    fakes = ["I do not know", "?", f"not {text}"]
    if isinstance(gold, Letters):
        other = next(letter for letter in "ABC" if letter not in gold.letters)
        return [*fakes, other, f"{other} or {min(gold.letters)}"]
    if isinstance(gold, Scalar):
        return [*fakes, *_other_values(text, gold, rules)]
    if isinstance(gold, Many):
        return [*fakes, *_other_lists(text, gold)]
    if isinstance(gold, Region | Matrix | Relation):
        return [*fakes, "10061"]
    return [*fakes, f"{text} {text}", f"{text} or not"]


def _other_values(text: str, gold: Scalar, rules: Rules) -> list[str]:
    if symbols(gold.expr):
        return [f"2 ({text}) + 1"]
    try:
        value = exact_value(gold.expr)
    except (UndefinedError, TooHardError):
        return []
    if value is None:
        return []
    reach = abs(value) * rules.tolerance if rules.relative else rules.tolerance
    near = value + 1 + 2 * reach
    fakes = [str(near), f"{value} or {near}", f"{value} + {near}"]
    if is_percent(gold.expr) and value:
        fakes += [str(100 * value), *([str(value)] if rules.kind == "unit" else [])]
    if not rules.unsimplified and rules.kind != "expression" and is_worked_out(gold.expr):
        fakes.append(f"{value - 1} + 1")
    if gold.unit is not None:
        fakes.append(
            f"{value} \\text{{ kPa}}" if ("m", -1) not in gold.unit.dimension else f"{value} \\text{{ kg}}"
        )
    return fakes


def _other_lists(text: str, gold: Many) -> list[str]:
    fakes = ["10061"]
    if gold.brackets == "" and text:
        fakes.append(f"{text}, 10061")
    values = [exact_value(item.expr) if isinstance(item, Scalar) else None for item in gold.items]
    exact_values = [value for value in values if value is not None]
    if gold.brackets == "()" and len(exact_values) == len(values) > 1 and exact_values[::-1] != exact_values:
        fakes.append("(" + ", ".join(str(Fraction(value)) for value in reversed(exact_values)) + ")")
    return fakes
