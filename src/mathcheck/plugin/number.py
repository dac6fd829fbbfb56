"""The verifier `number`: compare a number of the response with the answer."""

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

from mathcheck.numerals import last_number, numbers, part_numbers, whole_number
from posttrain.types import Task, UserError, Verdict
from posttrain.verifiers.answers import check_places, missing_place
from posttrain.verifiers.protocol import Verifier, gold_answer, quote
from posttrain.verifiers.regions import place_answer, region, remove_thought


@dataclass(frozen=True, kw_only=True)
class Number(Verifier):
    """1 if the response's number equals the task's answer; otherwise 0. Compared as exact fractions.

    `where` selects the number: `last`, the last one of the response; or `after`, `boxed` or `tag`, the only
    number in that part, in which two different numbers are not an answer. `mathcheck.numerals` documents how
    numbers may be written.

    Labels: right, wrong, no_answer (no such part, no number in it, or several).

    >>> number, task = Number(), Task(id="q", messages=(), answer="1234")
    >>> number(task, "So she pays $1,234.00.").label, number(task, "1234 or 1235").label
    ('right', 'wrong')
    """

    place: ClassVar[int] = 2
    name: str = "number"
    where: Literal["last", "after", "boxed", "tag"] = "last"
    marker: str = "####"
    """For where = after; the last one counts, up to the end of its line."""
    tag: str = "answer"
    """For where = tag: <answer> ... </answer>."""
    tolerance: float = 0.0
    """Greatest difference that is right."""
    trusted: ClassVar[bool] = True
    best: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        check_places(self.marker, self.tag)
        if not 0 <= self.tolerance < float("inf"):
            raise ValueError(f"tolerance must be 0 or more, not {self.tolerance}")

    def __call__(self, task: Task, response: str) -> Verdict:
        """Give 1 if |number - answer| <= tolerance."""
        gold = self._gold(task)
        if self.where == "last":
            has_number, value = last_number(remove_thought(response))
            missing = "the response has no number"
        else:
            has_number, value, missing = self._only(response)
        if not has_number:
            return Verdict(score=0.0, label="no_answer", reason=missing)
        if value is None:
            return Verdict(score=0.0, label="wrong", reason="the number cannot be read")
        right = abs(value - gold) <= Fraction(str(self.tolerance))
        sign = "=" if value == gold else "≈" if right else "≠"
        return Verdict(
            score=float(right),
            label="right" if right else "wrong",
            reason=f"{_spell_fraction(value)} {sign} {_spell_fraction(gold)}",
        )

    def vote(self, response: str) -> str | None:
        """Return the number as an exact fraction."""
        _, value = last_number(remove_thought(response)) if self.where == "last" else self._only(response)[:2]
        return None if value is None else str(value)

    def golds(self, task: Task) -> list[str]:
        """Return the answer at its place, alone and in a sentence."""
        gold = (task.answer or "").strip()
        return [f"It is {self._placed(gold)}", f"{self._placed(f'{gold}.')}\n", self._placed(gold)]

    def fakes(self, task: Task) -> list[str]:
        """Return blanks, words, a number near the gold, two numbers, and the gold at another place."""
        gold = self._gold(task)
        near = gold + 1 + 2 * Fraction(str(self.tolerance))
        fakes = ["", "I do not know.", self._placed(str(near)), self._placed(f"{gold} or {near}")]
        if self.where == "last":
            return [*fakes, f"{gold}, {near}"]
        # The right number at another place, and a last place without a number.
        return [*fakes, str(gold), f"{self._placed(str(gold))}\n{self._placed('none')}"]

    def check(self, task: Task) -> None:
        """Raise UserError if the answer is not one number."""
        self._gold(task)

    def _placed(self, text: str) -> str:
        return text if self.where == "last" else place_answer(text, self.where, self.marker, self.tag)

    def _gold(self, task: Task) -> Fraction:
        answer = gold_answer(task)
        value = whole_number(answer)
        if value is None:
            raise UserError(
                task.source,
                f"the answer of task {task.id!r}, {quote(answer)}, is not a number",
                "give a number such as 42, -1,234.5 or 3/4, or choose another verifier",
            )
        return value

    def _only(self, response: str) -> tuple[bool, Fraction | None, str]:
        """Return whether the part has exactly one number, that number, and why not."""
        part = region(response, "all" if self.where == "last" else self.where, self.marker, self.tag)
        if part is None:
            return False, None, missing_place(self.where, self.marker, self.tag)
        values: list[Fraction | None] = []
        # The line after a marker is prose: it may end with an exclamation mark and begin with a bullet.
        for value in numbers(part) if self.where == "after" else part_numbers(part):
            if value not in values:
                values.append(value)
            if len(values) > 1:
                return False, None, f"{quote(part)} has more than one number"
        return (True, values[0], "") if values else (False, None, f"{quote(part)} has no number")


def _spell_fraction(value: Fraction) -> str:
    """Return the number for a reason: exact, unless that is long.

    >>> _spell_fraction(Fraction(5, 2)), _spell_fraction(Fraction(10) ** 90)
    ('5/2', '1.00000e+90')
    """
    text = str(value)
    if len(text) <= 40:
        return text
    top, bottom = value.numerator, value.denominator
    shift = len(str(abs(top))) - len(str(bottom))
    scaled = Fraction(top, bottom) / Fraction(10) ** shift
    return f"{float(scaled):.5f}e{shift:+03d}"
