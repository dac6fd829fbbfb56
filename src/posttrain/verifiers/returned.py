"""What a reward function returns, or logs beside it, as verdicts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from posttrain.base.verdict import LARGEST, number, sound
from posttrain.types import Verdict


def as_verdict(returned: object) -> Verdict:
    """The verdict that a returned value stands for; a failed one if it stands for none.

    >>> as_verdict(0.5).score, as_verdict({"length": 0.5, "style": 1}).score
    (0.5, 1.5)
    >>> as_verdict(float("nan")).label, as_verdict("0.5").label, as_verdict(None).score
    ('not_a_number', 'not_a_number', None)
    """
    if isinstance(returned, Verdict):
        return sound(returned)
    if isinstance(returned, Mapping):
        parts = {str(key): number(value) for key, value in returned.items()}
        bad = [(key, returned[key]) for key in returned if number(returned[key]) is None]
        if bad or not parts:
            return not_a_number(bad[0] if bad else returned, "named numbers")
        known = {key: value for key, value in parts.items() if value is not None}
        total = number(math.fsum(known.values()))
        if total is None:
            return not_a_number(returned, f"a sum of at most {LARGEST:g}")
        return Verdict(score=total, label="scored", parts=known)
    value = number(returned)
    if value is None:
        return not_a_number(returned, f"a finite number (at most {LARGEST:g})")
    return Verdict(score=value, label="scored")


def not_a_number(returned: object, wanted: str) -> Verdict:
    """The failed verdict on what is returned in place of something else."""
    kind = type(returned).__name__
    text = f" {str(returned)[:80]}" if isinstance(returned, (float, str, tuple, list)) else ""
    reason = f"the function returned {kind}{text}, not {wanted}"
    return Verdict(score=None, label="not_a_number", reason=reason)


def is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    """A list, a tuple, or a 1-dimensional array; not a string or a dictionary."""
    shape = getattr(value, "shape", None)
    return isinstance(value, (list, tuple)) or (shape is not None and len(shape) == 1)


@dataclass(frozen=True)
class Noted:
    """What a function logs of the responses of a group, as TRL lets it."""

    each: list[dict[str, Any]]

    def metric(self, name: str, value: Any) -> None:
        """A number of the whole group."""
        self.extra(name, [value] * len(self.each))

    def extra(self, name: str, values: Sequence[Any]) -> None:
        """A number or a text of each response."""
        for notes, value in zip(self.each, values, strict=True):
            notes[name] = value


def with_notes(verdict: Verdict, notes: Mapping[str, Any]) -> Verdict:
    """The verdict with numbers as parts, and texts behind its reason."""
    if verdict.failed or not notes:
        return verdict
    parts = {name: known for name, value in notes.items() if (known := number(value)) is not None}
    texts = [f"{name}: {' '.join(str(notes[name]).split())}" for name in notes if name not in parts]
    reason = "; ".join(filter(None, [verdict.reason, *texts]))
    return sound(replace(verdict, parts=parts | dict(verdict.parts), reason=reason))
