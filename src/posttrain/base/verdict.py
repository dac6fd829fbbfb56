"""Convert numbers and verdicts of code of users to plain types, which can be pickled and logged."""

import math
import numbers
from typing import Any

from posttrain.types import Verdict

LARGEST = 1e15
"""Largest absolute score or reward: float32, in which losses square their differences, ends at 3e38."""


def number(value: object) -> float | None:
    """Return a value as a float, whatever library it is of; None if it is not a number or is beyond LARGEST.

    >>> number(True), number("1"), number(float("nan")), number(1e16)
    (1.0, None, None, None)
    """
    if not isinstance(value, numbers.Real) and getattr(value, "shape", None) == ():
        value = value.item() if hasattr(value, "item") else value  # a 0-dimensional array or tensor
    if not isinstance(value, numbers.Real):
        return None
    try:
        result = float(value)
    except OverflowError:  # an int beyond the largest float
        return None
    return result if abs(result) <= LARGEST else None  # also None for NaN


def sound(verdict: Verdict) -> Verdict:
    """Return the verdict with numbers and text of plain types.

    Return a failed verdict if that is not possible: labelled not_a_number if the score, a part or a potential
    is not a finite number, and raised if the label or the reason is not text.

    >>> sound(Verdict(score=1.0, label="right", parts={"style": math.inf})).reason
    "the part 'style' is inf, not a finite number"
    """
    fields: Any = verdict
    try:
        return Verdict(
            score=None if fields.score is None else _finite(fields.score, "the score"),
            label=_text(fields.label, "label"),
            reason=_text(fields.reason, "reason"),
            parts={
                _text(str(name), "part"): _finite(value, f"the part {name!r:.60}")
                for name, value in fields.parts.items()
            },
            progress=tuple((int(tokens), _finite(phi, "a potential")) for tokens, phi in fields.progress),
            seconds=_finite(fields.seconds, "the time"),
        )
    except ValueError as error:
        return Verdict(score=None, label="not_a_number", reason=str(error))
    except (AttributeError, TypeError) as error:
        return Verdict(score=None, label="raised", reason=str(error))


def _finite(value: object, name: str) -> float:
    result = number(value)
    if result is None:
        if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
            raise ValueError(f"{name} is beyond {LARGEST:g}, which losses cannot square")
        written = str(float(value)) if isinstance(value, float) else type(value).__name__
        raise ValueError(f"{name} is {written}, not a finite number")
    return result


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"the {name} of the verdict is {type(value).__name__}, not text")
    return str.__str__(value)  # the plain text, where the user's class inherits str
