"""Numbers and verdicts of code that need not keep to the types, as they can be sent and written down."""

import math
import numbers
from typing import Any

from posttrain.types import Verdict

LARGEST = 1e15
"""Of a score or reward. Losses square what a group's differ by, in float32, which ends at 3e38."""


def number(value: object) -> float | None:
    """The number that a value is, be it of another library; None if it is none, or beyond LARGEST.

    >>> number(True), number("1"), number(float("nan")), number(1e16)
    (1.0, None, None, None)
    """
    if not isinstance(value, numbers.Real) and getattr(value, "shape", None) == ():
        value = value.item() if hasattr(value, "item") else value  # a 0-dimensional array or tensor
    if not isinstance(value, numbers.Real):
        return None
    try:
        found = float(value)
    except OverflowError:  # an int beyond the largest float
        return None
    return found if abs(found) <= LARGEST else None  # NaN is not


def sound(verdict: Verdict) -> Verdict:
    """The verdict in numbers, text and classes of Python's and ours.

    A failed one if it cannot be: labelled not_a_number where its score, a part or a potential is no finite
    number, and raised where its label or its reason is no text.

    >>> sound(Verdict(score=1.0, label="right", parts={"style": math.inf})).reason
    "the part 'style' is inf, not a finite number"
    """
    given: Any = verdict
    try:
        return Verdict(
            score=None if given.score is None else _finite(given.score, "the score"),
            label=_text(given.label, "label"),
            reason=_text(given.reason, "reason"),
            parts={
                _text(str(name), "part"): _finite(value, f"the part {name!r:.60}")
                for name, value in given.parts.items()
            },
            progress=tuple((int(read), _finite(phi, "a potential")) for read, phi in given.progress),
            seconds=_finite(given.seconds, "the time"),
        )
    except ValueError as error:
        return Verdict(score=None, label="not_a_number", reason=str(error))
    except (AttributeError, TypeError) as error:
        return Verdict(score=None, label="raised", reason=str(error))


def _finite(value: object, what: str) -> float:
    found = number(value)
    if found is None:
        if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
            raise ValueError(f"{what} is beyond {LARGEST:g}, which losses cannot square")
        shown = str(float(value)) if isinstance(value, float) else type(value).__name__
        raise ValueError(f"{what} is {shown}, not a finite number")
    return found


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"the {what} of the verdict is {type(value).__name__}, not text")
    return str.__str__(value)  # of a class of the user's the text alone
