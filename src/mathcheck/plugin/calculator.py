"""Exact arithmetic, as the verifier of mathematics reads and computes it; nothing runs as a program."""

import re
from fractions import Fraction
from itertools import count

import mpmath  # type: ignore[import-untyped]

from mathcheck.exact import exact
from mathcheck.reading.lexer import plain, tokens
from mathcheck.scalars import scalar
from mathcheck.values import evaluate, width
from posttrain.envs.tools.call import taking
from posttrain.envs.tools.functions import ToolFunction
from posttrain.verifiers.sandbox import Level

TOOL = taking("calculator", "expression", "(12 - 5) * 3", "Computes an expression exactly.")
_DIGITS = 15


def of_level(level: Level) -> ToolFunction:
    """Return what runs the tool; it needs no sandbox."""
    return ToolFunction(TOOL, f"{__name__}:calculator")


def calculator(expression: str) -> str:
    """The value: a whole number, a finite decimal, a fraction with its decimals, or else 15 digits.

    Raises an error that says why for what is no number, is not defined, or is too large to compute.

    >>> calculator("12 * 7 + 0.5"), calculator("1/3"), calculator("2 sqrt(2)")
    ('84.5', '1/3 = 0.333333333333333...', '2.82842712474619...')
    """
    if re.search(r"%\s*+[\d(.]", expression):
        raise ValueError("% is percent, and no remainder")
    read = scalar(tokens(plain(expression.replace("**", "^"))), units=False).expr
    value = exact(read)
    if value is None:
        return f"{mpmath.nstr(evaluate(read, {}, width(read)), _DIGITS)}..."
    if value.denominator == 1:
        return str(value.numerator)
    if not _finite(value):
        return f"{value} = {mpmath.nstr(mpmath.mpf(value.numerator) / value.denominator, _DIGITS)}..."
    places = next(n for n in count() if (value * 10**n).denominator == 1)
    digits = str(abs(value * 10**places)).zfill(places + 1)
    return f"{'-' * (value < 0)}{digits[:-places]}.{digits[-places:]}"


def _finite(value: Fraction) -> bool:
    """Whether the decimals end: of no other primes than 2 and 5."""
    return bool(10 ** value.denominator.bit_length() % value.denominator == 0)
