"""A tool for exact arithmetic, which parses and computes like the verifier math and runs no program."""

import re
from fractions import Fraction
from itertools import count

import mpmath  # type: ignore[import-untyped]

from mathcheck.exact import exact_value
from mathcheck.reading.lexer import normalise, tokenize
from mathcheck.scalars import read_scalar
from mathcheck.values import evaluate, width
from posttrain.envs.tools.call import text_tool
from posttrain.envs.tools.functions import ToolFunction
from posttrain.verifiers.sandbox import Level

TOOL = text_tool("calculator", "expression", "(12 - 5) * 3", "Computes an expression exactly.")
_DIGITS = 15


def of_level(level: Level) -> ToolFunction:
    """Return the tool, which needs no sandbox."""
    return ToolFunction(TOOL, f"{__name__}:calculator")


def calculator(expression: str) -> str:
    """Compute an expression as a whole number, a finite decimal, a fraction with decimals, or 15 digits.

    Raises an error that says why if it is not a number, is not defined, or is too large.

    >>> calculator("12 * 7 + 0.5"), calculator("1/3"), calculator("2 sqrt(2)")
    ('84.5', '1/3 = 0.333333333333333...', '2.82842712474619...')
    """
    if re.search(r"%\s*+[\d(.]", expression):
        raise ValueError("% means percent, not remainder")
    expr = read_scalar(tokenize(normalise(expression.replace("**", "^"))), units=False).expr
    value = exact_value(expr)
    if value is None:
        return f"{mpmath.nstr(evaluate(expr, {}, width(expr)), _DIGITS)}..."
    if value.denominator == 1:
        return str(value.numerator)
    if not _is_finite(value):
        return f"{value} = {mpmath.nstr(mpmath.mpf(value.numerator) / value.denominator, _DIGITS)}..."
    places = next(n for n in count() if (value * 10**n).denominator == 1)
    digits = str(abs(value * 10**places)).zfill(places + 1)
    return f"{'-' * (value < 0)}{digits[:-places]}.{digits[-places:]}"


def _is_finite(value: Fraction) -> bool:
    """Return whether the decimal expansion ends, so that 2 and 5 are the only prime factors below."""
    return bool(10 ** value.denominator.bit_length() % value.denominator == 0)
