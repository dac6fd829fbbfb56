"""Compare an output, or a returned value, with the expected one."""

import json
import math
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class OutputComparison:
    """Comparison of outputs: exact, lines, tokens, or float with a tolerance.

    >>> OutputComparison.parsed("float:1e-6")
    OutputComparison(how='float', tolerance=1e-06)
    """

    how: Literal["exact", "lines", "tokens", "float"]
    tolerance: float | None = None

    @classmethod
    def parsed(cls, text: object) -> "OutputComparison":
        """Parse the field `compare` of a task. Raises ValueError for an unknown comparison."""
        if text in ("exact", "lines", "tokens"):
            return cls(how=text)
        if isinstance(text, str) and text.startswith("float:"):
            try:
                tolerance = float(text[6:])
            except ValueError:
                tolerance = math.nan
            if 0 <= tolerance < math.inf:
                return cls(how="float", tolerance=tolerance)
        raise ValueError(f"compare is exact, lines, tokens or float:1e-6, not {text!r}")


def equal_text(output: str, expected: str, compare: OutputComparison) -> bool:
    """Return whether an output is the expected one.

    >>> lines = OutputComparison(how="lines")
    >>> equal_text("1 2 \\n\\n", "1 2", lines), equal_text("1  2", "1 2", lines)
    (True, False)
    >>> equal_text("0.3333333 x", "0.33333333 x", OutputComparison(how="float", tolerance=1e-6))
    True
    """
    if compare.how == "exact":
        return output == expected
    if compare.how == "lines":
        return _lines(output) == _lines(expected)
    tokens, expected_tokens = output.split(), expected.split()
    if compare.how == "tokens" or compare.tolerance is None:
        return tokens == expected_tokens
    return len(tokens) == len(expected_tokens) and all(
        _equal_tokens(g, w, compare.tolerance) for g, w in zip(tokens, expected_tokens, strict=True)
    )


def equal_value(got: Any, expected: Any, compare: OutputComparison) -> bool:
    """Return whether a returned value is the expected one; `lines` and `tokens` apply to strings only."""
    if compare.how in ("lines", "tokens") and type(got) is str and type(expected) is str:
        return equal_text(got, expected, compare)
    return same(got, expected, compare.tolerance)


def _equal_tokens(got: str, expected: str, tolerance: float) -> bool:
    if got == expected or not got.isascii() or "_" in got:
        return got == expected
    try:
        return close(_number(got), _number(expected), tolerance)
    except ValueError:
        return False


def _number(text: str) -> float:
    """Parse an int or a float. Raises ValueError for other text, and for floats that overflow to infinity."""
    with suppress(ValueError):
        return int(text)
    number = float(text)
    if math.isinf(number) and "inf" not in text.lower():
        raise ValueError(text)
    return number


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def same(got: Any, expected: Any, tolerance: float | None = None) -> bool:
    """Return whether a returned value is the expected one, which came from JSON.

    Types must agree exactly (1 is neither True nor 1.0), except for what JSON cannot express: a tuple
    equals a list, and a dictionary key equals its JSON spelling. With a tolerance, numbers
    may differ by that much, absolutely or relative to the expected one, whatever their type.

    >>> same((1, 2), [1, 2]), same(True, 1), same(1, 1.0), same({1: "a"}, {"1": "a"})
    (True, False, False, True)
    >>> same(2, 2.0000001, tolerance=1e-6), same(float("nan"), float("nan"))
    (True, True)
    """
    if isinstance(expected, list):
        alike = type(got) in (list, tuple) and len(got) == len(expected)
        return alike and all(same(g, e, tolerance) for g, e in zip(got, expected, strict=True))
    if isinstance(expected, dict):
        if type(got) is not dict or len(got) != len(expected):
            return False
        spelt = {_json_key(key): value for key, value in got.items()}
        return spelt.keys() == expected.keys() and all(
            same(spelt[k], v, tolerance) for k, v in expected.items()
        )
    if tolerance is not None and type(got) in (int, float) and type(expected) in (int, float):
        return close(got, expected, tolerance)
    if type(got) is not type(expected):
        return False
    return bool(got == expected) or (got != got and expected != expected)


def close(got: float, expected: float, tolerance: float) -> bool:
    """|got − expected| <= tolerance · max(1, |expected|), exactly; NaN is close to NaN."""
    if got == expected or (got != got and expected != expected):
        return True
    if not all(-float("inf") < x < float("inf") for x in (got, expected)):
        return False
    scale = max(Fraction(1), abs(Fraction(expected)))
    return abs(Fraction(got) - Fraction(expected)) <= Fraction(tolerance) * scale


def _json_key(key: object) -> str | None:
    """Return a dictionary key as JSON writes it; None if JSON cannot."""
    if type(key) is str:
        return key
    if key is None or type(key) in (bool, int, float):
        with suppress(ValueError):  # a number of thousands of digits
            return json.dumps(key)
    return None
