"""[verifier.palindrome]: is the answer a palindrome?"""

from dataclasses import dataclass
from typing import ClassVar

from posttrain import Task, Verdict, Verifier


def is_palindrome(text: str) -> bool:
    """Return whether the letters of a text are the same in both directions."""
    letters = [c for c in text.casefold() if c.isalpha()]
    return bool(letters) and letters == letters[::-1]


@dataclass(frozen=True, kw_only=True)
class Palindrome(Verifier):
    """1 for a palindrome that begins with the task's answer, `partial` for any other, and 0 otherwise.

    Labels: right, elsewhere (a palindrome with another beginning), wrong.
    """

    partial: float = 0.0
    """The score of a palindrome that begins with other letters."""
    name: str = "palindrome"
    trusted: ClassVar[bool] = True  # no user code, and no way to hang: it runs in the process that trains
    best: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.partial < 1:
            raise ValueError(f"partial must lie in [0, 1), not {self.partial}")

    def __call__(self, task: Task, response: str) -> Verdict:
        """Judge one response; the same response always gets the same verdict."""
        if not is_palindrome(response):
            return Verdict(score=0.0, label="wrong", reason=f"{response[:60]!r} is no palindrome")
        if not response.strip().casefold().startswith(task.answer or ""):
            return Verdict(
                score=self.partial, label="elsewhere", reason=f"it does not begin with {task.answer}"
            )
        return Verdict(score=1.0, label="right", reason="a palindrome")

    def golds(self, task: Task) -> list[str]:
        """Return responses that must get the best score: a run tests its verifier before it trains."""
        return [f"{task.answer}{(task.answer or '')[::-1]}"]

    def fakes(self, task: Task) -> list[str]:
        """Return responses that must not."""
        return ["", "no", f"{task.answer}xyz"]
