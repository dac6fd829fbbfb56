"""The verifier `exact`: compare a part of the response with the task's answer, as text."""

from dataclasses import dataclass
from typing import ClassVar

from posttrain.types import Task, Verdict
from posttrain.verifiers.protocol import Verifier, gold_answer, quote
from posttrain.verifiers.regions import Where, place_answer, region


@dataclass(frozen=True, kw_only=True)
class Exact(Verifier):
    """1 if the response, or the part at `where`, is the task's answer letter for letter; otherwise 0.

    Labels: right, wrong, no_answer (the part is missing or blank).

    >>> exact, task = Exact(casefold=True), Task(id="q", messages=(), answer="Paris")
    >>> exact(task, " paris\\n").label, exact(task, "Paris, France").label
    ('right', 'wrong')
    """

    place: ClassVar[int] = 1
    name: str = "exact"
    where: Where = "all"
    """The part compared: all, after (the marker), boxed (the last box) or tag (between the last tags)."""
    marker: str = "####"
    tag: str = "answer"
    strip: bool = True
    """Ignore white space around both."""
    casefold: bool = False
    """Ignore the difference between capital and small letters."""
    trusted: ClassVar[bool] = True
    best: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        check_places(self.marker, self.tag)

    def __call__(self, task: Task, response: str) -> Verdict:
        """Compare both texts after stripping and folding."""
        gold = self._normal(gold_answer(task))
        part = region(response, self.where, self.marker, self.tag)
        if part is None or not part.strip():
            reason = missing_place(self.where, self.marker, self.tag)
            return Verdict(score=0.0, label="no_answer", reason=reason)
        answer = self._normal(part)
        if answer == gold:
            return Verdict(score=1.0, label="right", reason=f"{quote(answer)} is the answer")
        return Verdict(score=0.0, label="wrong", reason=f"{quote(answer)} is not {quote(gold)}")

    def golds(self, task: Task) -> list[str]:
        """Return the answer, at the place that is compared."""
        return [place_answer(gold_answer(task), self.where, self.marker, self.tag)]

    def fakes(self, task: Task) -> list[str]:
        """Return blanks, altered answers, and the answer outside the place that is compared."""
        gold = gold_answer(task).strip()
        wrong = [f"{gold}.x", f"x {gold}", gold + gold, "not " + gold, gold[: len(gold) // 2]]
        places = [place_answer(w, self.where, self.marker, self.tag) for w in wrong]
        return ["", " \n", *places, *([] if self.where == "all" else [gold])]

    def check(self, task: Task) -> None:
        gold_answer(task)

    def _normal(self, text: str) -> str:
        text = text.strip() if self.strip else text
        return text.casefold() if self.casefold else text


def check_places(marker: str, tag: str) -> None:
    if not marker.strip():
        raise ValueError("marker must not be blank")
    if not tag or not all(c.isalnum() or c in "_-" for c in tag):
        raise ValueError(f"tag must be a name such as answer, not {tag!r}")


def missing_place(where: str, marker: str, tag: str) -> str:
    return {
        "after": f"nothing stands after {marker!r}",
        "boxed": "there is no \\boxed{...}",
        "tag": f"there is no <{tag}>...</{tag}>",
    }.get(where, "the response is empty")
