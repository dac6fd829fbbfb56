r"""Evaluate expressions at a point, with enough digits to decide whether two values are equal.

Everything is computed to 4 w decimal digits, where w grows with the digits of the numerals, and no
intermediate value may leave 10^-w ... 10^w, except an exact 0. So what a cancellation leaves is either less
than 10^(-2.5 w), which is noise, or more than 10^-w, which is not; anything between, and anything outside,
is undecided. Where sin, cos or tanh level out, a difference is squared or worse: 1 - cos(10^-50) is 5 ·
10^-101. So their slopes must keep to the same bounds.
"""

from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache
from typing import Any

import mpmath  # type: ignore[import-untyped]

from mathcheck.exact import UndefinedError, binomial, exact_value, factorial
from mathcheck.reading.tree import (
    INFINITY,
    Call,
    Constant,
    Expr,
    Numeral,
    Symbol,
    TooHardError,
    UnreadableError,
    operands,
    symbols,
    word_set,
)

LEAST_WIDTH, MOST_WIDTH = 40, 400
_MOST_POWER = 10**6
_CANCELLING = word_set("add sin cos tan cot sec csc sinh cosh tanh asin acos atan ln lg log re im floor ceil")

Complex = Any
"""A real or complex number of mpmath, which has no types."""


class UndecidedError(Exception):
    """The precision cannot hold a value, or cannot tell it from 0."""


class UnrealError(UndefinedError):
    """A value that is not real, where only real values were requested."""


def width(*exprs: Expr) -> int:
    """Return the w that these expressions need. Raises UndecidedError if it is too large."""
    w = LEAST_WIDTH + sum(_digits(expr) for expr in exprs)
    if w > MOST_WIDTH:
        raise UndecidedError("too many digits")
    return w


def _digits(expr: Expr) -> int:
    if isinstance(expr, Numeral):
        return len(str(abs(expr.value.numerator))) + len(str(expr.value.denominator)) - 1
    return sum(_digits(arg) for arg in expr.args) if isinstance(expr, Call) else 0


def evaluate(expr: Expr, at: Mapping[str, Fraction], w: int, *, real: bool = False) -> Complex:
    """Return the value at a point. Raises UndefinedError, or UndecidedError for want of precision.

    With `real`, raises UnrealError if it or an intermediate value is not real.
    """
    with mpmath.workdps(4 * w):
        return _value(expr, at, w, real)


def gap(left: Complex, right: Complex, w: int) -> int:
    """Return 0 if both values are equal, 1 if they differ. Raises UndecidedError."""
    with mpmath.workdps(4 * w):
        distance = abs(left - right)
        noise, least, _ = _bounds(w)
        if distance <= noise:
            return 0
        if distance >= least:
            return 1
    raise UndecidedError("too close to tell")


def infinity_sign(expr: Expr) -> int:
    """Return 1 for ∞, -1 for -∞, 0 for anything else."""
    if negated := operands(expr, "neg"):
        return -infinity_sign(*negated)
    return int(expr == INFINITY)


def compare_order(left: Expr, right: Expr) -> int:
    """Return -1, 0 or 1 as left is less than, equal to or greater than right; both real constants or
    infinite.
    """
    left_far, right_far = infinity_sign(left), infinity_sign(right)
    if left_far or right_far:
        return (left_far > right_far) - (left_far < right_far)
    if symbols(left) or symbols(right):
        raise UnreadableError("the ends of an interval must be numbers")
    try:
        a, b = exact_value(left), exact_value(right)
        if a is not None and b is not None:
            return (a > b) - (a < b)
        w = width(left, right)
        x, y = evaluate(left, {}, w), evaluate(right, {}, w)
        if not (is_real(x) and is_real(y)):
            raise UnreadableError("the ends of an interval must be real")
        return gap(x, y, w) * (1 if x.real > y.real else -1)
    except UndefinedError as error:
        raise UnreadableError(str(error)) from None
    except UndecidedError as error:
        raise TooHardError(str(error)) from None


def is_real(value: Complex) -> bool:
    return bool(value.imag == 0)


# ---------------------------------------------------------------------- one operation


def _value(expr: Expr, at: Mapping[str, Fraction], w: int, real: bool) -> Complex:
    if isinstance(expr, Numeral):
        return _clean(_real(expr.value), w, cancelling=False)
    if isinstance(expr, Symbol):
        return _real(at[expr.name])
    if isinstance(expr, Constant):
        if expr == INFINITY:
            raise UndefinedError("infinity is not a number")
        return {"pi": +mpmath.pi, "e": +mpmath.e, "i": mpmath.mpc(0, 1)}[expr.name]
    if expr.name not in _OPERATIONS:
        raise UndefinedError(f"{expr.name} has no value")
    args = [_value(arg, at, w, real) for arg in expr.args]
    try:
        value = _OPERATIONS[expr.name](w, *args)
    except (ZeroDivisionError, ValueError, OverflowError):
        raise UndefinedError(f"{expr.name} is not defined there") from None
    if expr.name in _SLOPES:
        _clean(_SLOPES[expr.name](*args), w, cancelling=expr.name != "tanh")
    value = _clean(value, w, cancelling=expr.name in _CANCELLING)
    if real and not is_real(value):
        raise UnrealError(f"{expr.name} is not real there")
    return value


def _real(value: Fraction) -> Complex:
    return mpmath.mpf(value.numerator) / value.denominator


@cache
def _bounds(w: int) -> tuple[Complex, Complex, Complex]:
    """Return the greatest size of noise, the least size of a value, and the greatest one."""
    return mpmath.mpf(10) ** (-5 * w // 2), mpmath.mpf(10) ** -w, mpmath.mpf(10) ** w


def _clean(value: Complex, w: int, *, cancelling: bool) -> Complex:
    """Return the value without noise. Raises if it is not finite, too large, or indistinguishable from
    noise.
    """
    value = mpmath.mpmathify(value)
    if not mpmath.isfinite(value):
        raise UndefinedError("it is not finite")
    size = abs(value)
    if size == 0:
        return mpmath.mpf(0)
    noise, least, most = _bounds(w)
    if size < least:
        if cancelling and size < noise:
            return mpmath.mpf(0)
        raise UndecidedError("too small")
    if size > most:
        raise UndecidedError("too large")
    if value.imag == 0 or abs(value.imag) < noise:
        return value.real
    return mpmath.mpc(0, value.imag) if abs(value.real) < noise else value


def _power_value(w: int, base: Complex, exponent: Complex) -> Complex:
    if base == 0:
        if is_real(exponent) and exponent.real > 0:
            return mpmath.mpf(0)
        raise UndefinedError("0 to the power of 0 or less")
    if is_real(exponent) and mpmath.isint(exponent):
        bits = max(abs(mpmath.mag(base)) - 1, 0)
        if abs(exponent) > _MOST_POWER or abs(exponent) * bits > 4 * w:
            raise UndecidedError("too large a power")
        return mpmath.power(base, int(exponent.real))
    logarithm = _clean(mpmath.log(base), w, cancelling=True)
    return _exp(w, _clean(exponent * logarithm, w, cancelling=False))


def _exp(w: int, value: Complex) -> Complex:
    if abs(value.real) > 2.4 * w:
        raise UndecidedError("too large a power")
    return mpmath.exp(value)


def _root(w: int, value: Complex, index: Complex) -> Complex:
    if not is_real(index) or not mpmath.isint(index) or not 0 < index.real < 1000:
        raise UndefinedError("the index of a root is a whole number")
    n = int(index.real)
    if value == 0:
        return mpmath.mpf(0)
    if n % 2 and is_real(value) and value.real < 0:
        return -_power_value(w, -value, 1 / mpmath.mpf(n))
    return _power_value(w, value, 1 / mpmath.mpf(n))


def _round(w: int, value: Complex, rounds: Callable[[Complex], Complex]) -> Complex:
    """Round down or up, after removing noise next to a whole number."""
    if not is_real(value):
        raise UndefinedError("only real numbers are rounded")
    nearest = mpmath.nint(value)
    return nearest if gap(value, nearest, w) == 0 else rounds(value)


def _count(value: Complex) -> Fraction:
    if not is_real(value) or not mpmath.isint(value) or abs(value) > 10**4:
        raise UndefinedError("not a whole number up to 10000")
    return Fraction(int(value.real))


def _ignoring_width(function: Callable[..., Complex]) -> Callable[..., Complex]:
    return lambda w, *args: function(*args)


_NAMESAKES = word_set("sin cos tan cot sec csc sinh cosh tanh asin acos atan acot asec acsc sqrt re im")
_SLOPES: dict[str, Callable[..., Complex]] = {
    **dict.fromkeys(("sin", "csc"), mpmath.cos),
    **dict.fromkeys(("cos", "sec"), mpmath.sin),
    "cosh": mpmath.sinh,
    "tanh": mpmath.sech,
}
"""Slopes, up to a factor, of functions that level out."""
_OPERATIONS: dict[str, Callable[..., Complex]] = {
    **{name: _ignoring_width(getattr(mpmath, name)) for name in _NAMESAKES},
    "add": _ignoring_width(lambda *args: mpmath.fsum(args)),
    "mul": _ignoring_width(lambda *args: mpmath.fprod(args)),
    "div": _ignoring_width(lambda above, below: above / below),
    "neg": _ignoring_width(lambda value: -value),
    "abs": _ignoring_width(abs),
    "percent": _ignoring_width(lambda value: value / 100),
    "degree": _ignoring_width(lambda value: value * mpmath.pi / 180),
    "pow": _power_value,
    "exp": _exp,
    "root": _root,
    "cbrt": lambda w, value: _root(w, value, mpmath.mpf(3)),
    "ln": _ignoring_width(mpmath.log),
    "lg": _ignoring_width(lambda value: mpmath.log(value) / mpmath.log(10)),
    "log": _ignoring_width(lambda value, base: mpmath.log(value) / mpmath.log(base)),
    "floor": lambda w, value: _round(w, value, mpmath.floor),
    "ceil": lambda w, value: _round(w, value, mpmath.ceil),
    "factorial": _ignoring_width(lambda n: _real(factorial(_count(n)))),
    "binomial": _ignoring_width(lambda n, k: _real(binomial(_count(n), _count(k)))),
}
