r"""Values of expressions at a point, to as many digits as decide whether two of them are equal.

Everything is computed to 4 w decimal digits, where w grows with the digits of the numerals, and no
value on the way may leave 10^-w ... 10^w, but for an exact 0. So what is left by a cancellation is
either less than 10^(-2.5 w), which is noise, or more than 10^-w, which is not; anything between, and
anything outside, is undecided. Where sin, cos or tanh level out, a difference is squared or worse:
1 - cos(10^-50) is 5 · 10^-101. So their slopes must keep to the same bounds.
"""

from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache
from typing import Any

import mpmath  # type: ignore[import-untyped]

from mathcheck.exact import UndefinedError, binomial, exact, factorial
from mathcheck.reading.tree import (
    INFINITY,
    Call,
    Constant,
    Expr,
    Numeral,
    Symbol,
    TooHardError,
    UnreadableError,
    symbols,
    word_set,
)

LEAST_WIDTH, MOST_WIDTH = 40, 400
_MOST_POWER = 10**6
_CANCELLING = word_set("add sin cos tan cot sec csc sinh cosh tanh asin acos atan ln lg log re im floor ceil")

Complex = Any
"""A real or complex number of mpmath, which has no types."""


class UndecidedError(Exception):
    """A value outside what the precision can tell from 0 or hold."""


class UnrealError(UndefinedError):
    """A value outside the real numbers, where only those are asked for."""


def width(*exprs: Expr) -> int:
    """The w that these expressions call for; UndecidedError if it is too large."""
    found = LEAST_WIDTH + sum(_digits(expr) for expr in exprs)
    if found > MOST_WIDTH:
        raise UndecidedError("too many digits")
    return found


def _digits(expr: Expr) -> int:
    if isinstance(expr, Numeral):
        return len(str(abs(expr.value.numerator))) + len(str(expr.value.denominator)) - 1
    return sum(_digits(arg) for arg in expr.args) if isinstance(expr, Call) else 0


def evaluate(expr: Expr, at: Mapping[str, Fraction], w: int, *, real: bool = False) -> Complex:
    """The value at a point; UndefinedError or UndecidedError where there is none.

    With `real`, UnrealError if it, or a value on the way to it, is not real.
    """
    with mpmath.workdps(4 * w):
        return _value(expr, at, w, real)


def gap(left: Complex, right: Complex, w: int) -> int:
    """0 if both values are the same, 1 if not; raises UndecidedError."""
    with mpmath.workdps(4 * w):
        distance = abs(left - right)
        noise, least, _ = _bounds(w)
        if distance <= noise:
            return 0
        if distance >= least:
            return 1
    raise UndecidedError("too close to tell")


def infinite(expr: Expr) -> int:
    """1 for ∞, -1 for -∞, 0 for anything else."""
    if expr == INFINITY:
        return 1
    if isinstance(expr, Call) and expr.name == "neg":
        return -infinite(expr.args[0])
    return 0


def compared(left: Expr, right: Expr) -> int:
    """-1, 0 or 1 as left is less than, the same as or more than right; both real constants or infinite."""
    left_far, right_far = infinite(left), infinite(right)
    if left_far or right_far:
        return (left_far > right_far) - (left_far < right_far)
    if symbols(left) or symbols(right):
        raise UnreadableError("the ends of an interval must be numbers")
    try:
        a, b = exact(left), exact(right)
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
    """Whether a value has no imaginary part."""
    return bool(value.imag == 0)


# ---------------------------------------------------------------------- one operation


def _value(expr: Expr, at: Mapping[str, Fraction], w: int, real: bool) -> Complex:
    if isinstance(expr, Numeral):
        return _clean(_real(expr.value), w, cancelling=False)
    if isinstance(expr, Symbol):
        return _real(at[expr.name])
    if isinstance(expr, Constant):
        if expr == INFINITY:
            raise UndefinedError("infinity is no number")
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
    """What is noise, the least that is not, and the most that can be held."""
    return mpmath.mpf(10) ** (-5 * w // 2), mpmath.mpf(10) ** -w, mpmath.mpf(10) ** w


def _clean(value: Complex, w: int, *, cancelling: bool) -> Complex:
    """The value without noise; raises if it is not finite, too large, or too small to be told from noise."""
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


def _power(w: int, base: Complex, exponent: Complex) -> Complex:
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
        return -_power(w, -value, 1 / mpmath.mpf(n))
    return _power(w, value, 1 / mpmath.mpf(n))


def _rounded(w: int, value: Complex, rounds: Callable[[Complex], Complex]) -> Complex:
    """Rounded down or up, with noise next to a whole number removed before."""
    if not is_real(value):
        raise UndefinedError("only real numbers are rounded")
    nearest = mpmath.nint(value)
    return nearest if gap(value, nearest, w) == 0 else rounds(value)


def _counted(value: Complex) -> Fraction:
    if not is_real(value) or not mpmath.isint(value) or abs(value) > 10**4:
        raise UndefinedError("that is no count")
    return Fraction(int(value.real))


def _plain(function: Callable[..., Complex]) -> Callable[..., Complex]:
    return lambda w, *args: function(*args)


_NAMESAKES = word_set("sin cos tan cot sec csc sinh cosh tanh asin acos atan acot asec acsc sqrt re im")
_SLOPES: dict[str, Callable[..., Complex]] = {
    **dict.fromkeys(("sin", "csc"), mpmath.cos),
    **dict.fromkeys(("cos", "sec"), mpmath.sin),
    "cosh": mpmath.sinh,
    "tanh": mpmath.sech,
}
"""Of functions that level out, up to a factor."""
_OPERATIONS: dict[str, Callable[..., Complex]] = {
    **{name: _plain(getattr(mpmath, name)) for name in _NAMESAKES},
    "add": _plain(lambda *args: mpmath.fsum(args)),
    "mul": _plain(lambda *args: mpmath.fprod(args)),
    "div": _plain(lambda above, below: above / below),
    "neg": _plain(lambda value: -value),
    "abs": _plain(abs),
    "percent": _plain(lambda value: value / 100),
    "degree": _plain(lambda value: value * mpmath.pi / 180),
    "pow": _power,
    "exp": _exp,
    "root": _root,
    "cbrt": lambda w, value: _root(w, value, mpmath.mpf(3)),
    "ln": _plain(mpmath.log),
    "lg": _plain(lambda value: mpmath.log(value) / mpmath.log(10)),
    "log": _plain(lambda value, base: mpmath.log(value) / mpmath.log(base)),
    "floor": lambda w, value: _rounded(w, value, mpmath.floor),
    "ceil": lambda w, value: _rounded(w, value, mpmath.ceil),
    "factorial": _plain(lambda n: _real(factorial(_counted(n)))),
    "binomial": _plain(lambda n, k: _real(binomial(_counted(n), _counted(k)))),
}
