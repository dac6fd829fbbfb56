"""Evaluate expressions as exact fractions, where arithmetic suffices."""

import math
from collections.abc import Callable
from fractions import Fraction

from mathcheck.reading.tree import Call, Expr, Numeral, TooHardError

MOST_BITS = 12_000
MOST_FACTORIAL = 1000
MOST_INDEX = 64


class UndefinedError(Exception):
    """A value that does not exist, such as 1/0."""


def exact_value(expr: Expr) -> Fraction | None:
    """Return the value; None if it is irrational or not found by arithmetic. Raises UndefinedError or
    TooHardError.

    >>> two = Numeral(Fraction(2))
    >>> exact_value(Call("pow", (two, Call("neg", (two,))))), exact_value(Call("sqrt", (two,)))
    (Fraction(1, 4), None)
    """
    if isinstance(expr, Numeral):
        return expr.value
    if not isinstance(expr, Call) or expr.name not in _EXACT:
        return None
    args = [exact_value(arg) for arg in expr.args]
    values = [arg for arg in args if arg is not None]
    if len(values) < len(args):
        return None
    value = _EXACT[expr.name](*values)
    if value is not None:
        _check_size(value)
    return value


def _check_size(value: Fraction) -> None:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MOST_BITS:
        raise TooHardError(f"a number of more than {MOST_BITS} bits")


def _sum(*args: Fraction) -> Fraction:
    return sum(args, Fraction(0))


def _product(*args: Fraction) -> Fraction:
    value = Fraction(1)
    for arg in args:
        value *= arg
        _check_size(value)
    return value


def _quotient(above: Fraction, below: Fraction) -> Fraction:
    if below == 0:
        raise UndefinedError("a division by 0")
    return above / below


def _power_value(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator > 1:
        if base < 0 or exponent.denominator > MOST_INDEX:
            return None
        root = _root(base, Fraction(exponent.denominator))
        return None if root is None else _power_value(root, Fraction(exponent.numerator))
    if base == 0 and exponent <= 0:
        raise UndefinedError("0 to the power of 0 or less")
    if base in (0, 1):
        return base
    if base == -1:
        return Fraction(-1 if exponent.numerator % 2 else 1)
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits * abs(exponent) > MOST_BITS:
        raise TooHardError("too large a power")
    return Fraction(base**exponent.numerator)


def _root(base: Fraction, index: Fraction) -> Fraction | None:
    if index.denominator > 1 or not 0 < index <= MOST_INDEX:
        return None
    n = index.numerator
    if base < 0:
        inner = _root(-base, index) if n % 2 else None
        return None if inner is None else -inner
    above, below = _whole_root(base.numerator, n), _whole_root(base.denominator, n)
    return None if above is None or below is None else Fraction(above, below)


def _whole_root(number: int, n: int) -> int | None:
    """Return the integer whose n-th power is `number`, or None."""
    if n == 2:
        root = math.isqrt(number)
        return root if root * root == number else None
    low, high = 0, 1 << (number.bit_length() // n + 1)
    while low < high:
        middle = (low + high + 1) // 2
        if middle**n <= number:
            low = middle
        else:
            high = middle - 1
    return low if low**n == number else None


def factorial(value: Fraction) -> Fraction:
    """Return value!. Raises UndefinedError or TooHardError."""
    if value.denominator > 1 or value < 0:
        raise UndefinedError("a factorial of a number that is not whole")
    if value > MOST_FACTORIAL:
        raise TooHardError(f"a factorial of more than {MOST_FACTORIAL}")
    return Fraction(math.factorial(value.numerator))


def binomial(n: Fraction, k: Fraction) -> Fraction:
    """Return n over k. Raises UndefinedError or TooHardError."""
    if n.denominator > 1 or k.denominator > 1 or n < 0:
        raise UndefinedError("a binomial coefficient of a number that is not whole")
    if n > MOST_FACTORIAL:
        raise TooHardError(f"a binomial coefficient of more than {MOST_FACTORIAL}")
    return Fraction(math.comb(n.numerator, k.numerator) if k >= 0 else 0)


_EXACT: dict[str, Callable[..., Fraction | None]] = {
    "add": _sum,
    "mul": _product,
    "div": _quotient,
    "pow": _power_value,
    "neg": lambda value: -value,
    "abs": abs,
    "sqrt": lambda value: _root(value, Fraction(2)),
    "cbrt": lambda value: _root(value, Fraction(3)),
    "root": _root,
    "percent": lambda value: value / 100,
    "factorial": factorial,
    "binomial": binomial,
    "floor": lambda value: Fraction(math.floor(value)),
    "ceil": lambda value: Fraction(math.ceil(value)),
    "re": lambda value: value,
    "im": lambda value: Fraction(0),
}
