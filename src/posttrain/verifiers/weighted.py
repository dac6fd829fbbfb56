"""A weighted sum of verifiers."""

import math
from dataclasses import dataclass

from posttrain.types import Task, UserError, Verdict
from posttrain.verifiers.protocol import Verifier


@dataclass(frozen=True, kw_only=True)
class Part:
    """One term of the sum: weight times the verifier's score."""

    verifier: Verifier
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ValueError(f"a weight must be finite, not {self.weight}")


@dataclass(frozen=True, kw_only=True)
class Weighted:
    """Σ weight · score over the parts; each part's own score is kept in `Verdict.parts`.

    The label is that of the first part. If a part cannot judge, the whole cannot, and carries
    that part's label: a broken part is never counted as 0. A weight of 0 only records the part.

    >>> from posttrain.verifiers.answers import Number
    >>> from posttrain.verifiers.patterns import Format
    >>> both = Weighted(parts=(Part(verifier=Number(where="tag")), Part(verifier=Format(), weight=0.5)))
    >>> verdict = both(Task(id="q", messages=(), answer="7"), "<answer>7</answer>")
    >>> verdict.score, verdict.label, dict(verdict.parts)
    (1.0, 'right', {'number': 1.0, 'format': 0.0})
    """

    parts: tuple[Part, ...]
    name: str = "weighted"

    def __post_init__(self) -> None:
        names = [part.verifier.name for part in self.parts]
        if not names:
            raise ValueError("a weighted sum needs at least one part")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two parts are called {twice[0]!r}; give each its own name")

    @property
    def trusted(self) -> bool:
        """Whether every part is."""
        return all(part.verifier.trusted for part in self.parts)

    @property
    def best(self) -> float | None:
        """Σ weight · best; None if a part's best is unknown or a weight is negative."""
        total = 0.0
        for part in self.parts:
            if part.weight < 0 or (part.weight > 0 and part.verifier.best is None):
                return None
            total += part.weight * (part.verifier.best or 0.0)
        return total

    def __call__(self, task: Task, response: str) -> Verdict:
        """The sum, or the failure of the first part that fails."""
        total, scores, reasons, label = 0.0, {}, [], ""
        for part in self.parts:
            name = part.verifier.name
            verdict = part.verifier(task, response)
            if verdict.score is None:
                return Verdict(score=None, label=verdict.label, reason=f"{name}: {verdict.reason}")
            total += part.weight * verdict.score
            scores[name] = verdict.score
            reasons.append(f"{name}: {verdict.reason}")
            label = label or verdict.label
        if not math.isfinite(total):
            return Verdict(score=None, label="not_a_number", reason=f"the weighted sum is {total}")
        return Verdict(score=total, label=label, reason="; ".join(reasons), parts=scores)

    def golds(self, task: Task) -> list[str]:
        """Those golds of the trusted parts that satisfy all of them; UserError if none does.

        None are named if a part is not trusted, which may refuse what the others propose.
        """
        counted = [part.verifier for part in self.parts if part.weight > 0]
        known = [verifier for verifier in counted if verifier.trusted and verifier.best is not None]
        proposed = dict.fromkeys(gold for verifier in known for gold in verifier.golds(task))
        kept = [gold for gold in proposed if all(v(task, gold).score == v.best for v in known)]
        if proposed and not kept:
            raise UserError(
                f"no response satisfies {' and '.join(v.name for v in known)} together",
                where=self.name,
                mend="for example, number with where = 'tag' reads what format asks for",
            )
        return kept if self.best is not None and len(known) == len(counted) else []

    def fakes(self, task: Task) -> list[str]:
        """The fakes of all parts that count: each costs at least one of them its score."""
        if self.best is None:
            return [""]
        counted = [part.verifier for part in self.parts if part.weight > 0]
        return list(dict.fromkeys(["", *(fake for verifier in counted for fake in verifier.fakes(task))]))

    def check(self, task: Task) -> None:
        """UserError if a part refuses the task."""
        for part in self.parts:
            part.verifier.check(task)
