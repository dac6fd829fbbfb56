"""Turn what a reward function returns and logs into verdicts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from posttrain.base.verdict import LARGEST, number, sound
from posttrain.types import Verdict


def as_verdict(returned: object) -> Verdict:
    """Convert a returned value to a verdict; a failed one if it is not a score.

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
        numbers = {key: value for key, value in parts.items() if value is not None}
        total = number(math.fsum(numbers.values()))
        if total is None:
            return not_a_number(returned, f"a sum of at most {LARGEST:g}")
        return Verdict(score=total, label="scored", parts=numbers)
    value = number(returned)
    if value is None:
        return not_a_number(returned, f"a finite number (at most {LARGEST:g})")
    return Verdict(score=value, label="scored")


def not_a_number(returned: object, expected: str) -> Verdict:
    """Return a failed verdict that says what was returned and what was expected."""
    kind = type(returned).__name__
    text = f" {str(returned)[:80]}" if isinstance(returned, (float, str, tuple, list)) else ""
    reason = f"the function returned {kind}{text}, not {expected}"
    return Verdict(score=None, label="not_a_number", reason=reason)


def is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    """Return whether a value is a list, a tuple or a 1-dimensional array; a string is not."""
    shape = getattr(value, "shape", None)
    return isinstance(value, (list, tuple)) or (shape is not None and len(shape) == 1)


@dataclass(frozen=True)
class Notes:
    """Notes that a function logs on the responses of a group, through TRL's log_metric and log_extra."""

    by_response: list[dict[str, Any]]

    def metric(self, name: str, value: Any) -> None:
        """Log a number for the whole group."""
        self.extra(name, [value] * len(self.by_response))

    def extra(self, name: str, values: Sequence[Any]) -> None:
        """Log a number or a text for each response."""
        for notes, value in zip(self.by_response, values, strict=True):
            notes[name] = value


def add_notes(verdict: Verdict, notes: Mapping[str, Any]) -> Verdict:
    """Add logged numbers to the parts of a verdict, and logged texts to its reason."""
    if verdict.failed or not notes:
        return verdict
    parts = {name: known for name, value in notes.items() if (known := number(value)) is not None}
    texts = [f"{name}: {' '.join(str(notes[name]).split())}" for name in notes if name not in parts]
    reason = "; ".join(filter(None, [verdict.reason, *texts]))
    return sound(replace(verdict, parts=parts | dict(verdict.parts), reason=reason))
