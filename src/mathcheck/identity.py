"""Decide whether two expressions are equal: exactly, by simplification, or at random points."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction

from mathcheck.algebra import rational_identity, simplifies_to_zero
from mathcheck.exact import UndefinedError, exact_value
from mathcheck.reading.parser import UNKNOWN_BASE
from mathcheck.reading.tree import Call, Expr, Symbol, TooHardError, add, contains, operands, symbols
from mathcheck.values import (
    MOST_WIDTH,
    Complex,
    UndecidedError,
    UnrealError,
    evaluate,
    gap,
    infinity_sign,
    width,
)

_BASED = frozenset({"in base"})
_FACTORIAL, _STEPS = frozenset({"factorial"}), frozenset({"floor", "ceil"})
LEAST_POINTS = 4
_SCALES = (1, 1, 1, 1, 1, 1, 1, 10, 10, 100, 1, 1, 1000, -1000, 10**9, -(10**9))
"""The last ones are beyond the kinks of |x - 400| and similar functions, on both sides."""
_MOST_WHOLE = (30, 6, 30, 6, 30, 6, 30, 6, 30, 6, 100, 6, 200, 200, 1000, 10**4)
"""The last ones are beyond the point where n! + ⌊n / 40⌋ parts from n!."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Whether two things are equal, None if undecided, and how that was found."""

    same: bool | None
    how: str


def compare(
    left: Expr, right: Expr, tolerance: Fraction = Fraction(0), *, relative: bool = False
) -> Identity:
    """Compare left with right, the gold; with a tolerance, numbers at most that far apart are equal.

    Expressions with variables are equal if they are equal at every point where both are real (or at every
    point, if i occurs in them).
    """
    if left == right:
        return Identity(True, "the same")
    if contains(left, _BASED) or contains(right, _BASED):
        return Identity(False, "the digits or their base differ")
    if infinity_sign(left) or infinity_sign(right):
        return Identity(infinity_sign(left) == infinity_sign(right) != 0, "by its infinity")
    try:
        a, b = exact_value(left), exact_value(right)
    except UndefinedError as error:
        return Identity(False, str(error))
    if a is not None and b is not None:
        near = abs(a - b) <= (tolerance * abs(b) if relative else tolerance)
        how = "exactly" if a == b or not tolerance else f"{'within' if near else 'beyond'} the tolerance"
        return Identity(near, how)
    if not symbols(left) | symbols(right):
        return _compare_constants(left, right, tolerance, relative=relative)
    return _compare_functions(left, right)


def _compare_constants(left: Expr, right: Expr, tolerance: Fraction, *, relative: bool) -> Identity:
    try:
        least = width(left, right)
    except UndecidedError:
        return _compare_simplified(left, right)
    for w in (least, MOST_WIDTH):
        try:
            a, b = evaluate(left, {}, w), evaluate(right, {}, w)
            if (
                tolerance
                and abs(a - b) <= (abs(b) if relative else 1) * tolerance.numerator / tolerance.denominator
            ):
                return Identity(True, "within the tolerance")
            return Identity(gap(a, b, w) == 0, f"to {5 * w // 2} digits")
        except UndefinedError as error:
            return Identity(False, str(error))
        except UndecidedError:
            continue
    return _compare_simplified(left, right)


def _compare_functions(left: Expr, right: Expr) -> Identity:
    """Compare at points, which can refute; if they do not, multiply out rational functions."""
    agree: bool | None = None
    with suppress(UndecidedError):
        agree = agree_at_points(left, right, width(left, right))
    if agree is None:
        with suppress(UndecidedError):
            agree = agree_at_points(left, right, MOST_WIDTH)
    if agree is False:
        return Identity(False, "at a random point")
    proved = rational_identity(left, right)
    if proved is not None:
        return Identity(proved, "by multiplying out")
    # A step of floor or ceil may lie beyond the numbers whose factorials can be computed.
    steps = contains(left, _STEPS) != contains(right, _STEPS)
    if agree and not (steps and contains(add(left, right), _FACTORIAL)):
        return Identity(True, "at random points")
    return _compare_simplified(left, right)


def _compare_simplified(left: Expr, right: Expr) -> Identity:
    try:
        proved = simplifies_to_zero(left, right)
    except TooHardError:
        proved = False
    return Identity(True, "by simplification") if proved else Identity(None, "it could not be decided")


def agree_at_points(left: Expr, right: Expr, w: int) -> bool | None:
    """Return whether both agree at random points; None if too few points have values.

    Real points count at which both expressions and all their parts are real. If there are too few, as for
    factorials, whole numbers are tried, and last the points at which values are complex.
    """
    names = sorted(symbols(left) | symbols(right))
    anywhere = contains(left, frozenset({"i"})) or contains(right, frozenset({"i"}))
    outside: list[bool] = []
    for points, digits in ((_reals, w), (_whole_numbers, MOST_WIDTH)):
        agreed = 0
        for a, b, inside in _pairs(left, right, points(names, random_source(left, right)), digits):
            same = gap(a, b, digits) == 0
            if not (inside or anywhere):
                outside.append(same)
            elif not same:
                return False
            else:
                agreed += 1
        if agreed >= LEAST_POINTS:
            return True
    return all(outside) if len(outside) >= LEAST_POINTS else None


def is_same_family(answer: Expr, gold: Expr) -> bool:
    """Return whether both are f(x) + C, with functions f that differ by a constant."""
    answer_part, gold_part = _without_constant(answer, "CcKk"), _without_constant(gold, "C")
    if answer_part is None or gold_part is None:
        return False
    if symbols(answer_part) != symbols(gold_part) or len(symbols(gold_part)) != 1:
        return False
    left = add(answer_part, _at_another_point(gold_part))
    right = add(gold_part, _at_another_point(answer_part))
    return compare(left, right).same is True


def _without_constant(expr: Expr, letters: str) -> Expr | None:
    """Return what is added to one of these letters, if the letter occurs nowhere else."""
    args = operands(expr, "add")
    for i, letter in enumerate(args):
        rest = Call("add", (*args[:i], *args[i + 1 :]))
        if isinstance(letter, Symbol) and letter.name in letters and letter.name not in symbols(rest):
            return rest
    return None


def _at_another_point(expr: Expr) -> Expr:
    """Return the expression with its one variable replaced by another."""
    if isinstance(expr, Symbol):
        return Symbol("elsewhere")
    return Call(expr.name, tuple(map(_at_another_point, expr.args))) if isinstance(expr, Call) else expr


def compare_up_to_factor(left: Expr, right: Expr, *, positive: bool) -> Identity:
    """Return whether left is a nonzero constant times right; with `positive`, a positive constant."""
    names = sorted(symbols(left) | symbols(right))
    try:
        w = width(left, right)
        for points, digits in ((_reals, w), (_whole_numbers, MOST_WIDTH)):
            values = list(_pairs(left, right, points(names, random_source(left, right)), digits))
            pairs = [(a, b) for a, b, inside in values if inside] or [(a, b) for a, b, _ in values]
            if len(pairs) < LEAST_POINTS:
                continue
            top, bottom = pairs[0]
            if top == 0 or bottom == 0 or (positive and (top * bottom).real < 0):
                return Identity(False, "at a random point")
            same = all(gap(a * bottom, b * top, digits) == 0 for a, b in pairs)
            return Identity(same, "at random points" if same else "at a random point")
    except UndecidedError:
        pass
    return Identity(None, "it could not be decided")


def _pairs(
    left: Expr, right: Expr, points: Iterator[dict[str, Fraction]], w: int
) -> Iterator[tuple[Complex, Complex, bool]]:
    """Yield the values of both at points where both have one, and whether they and all their parts are real.

    Stop if none of the first half of the points has values.
    """
    count = 0
    for number, point in enumerate(points):
        if number == len(_SCALES) // 2 and not count:
            return
        try:
            try:
                pair = evaluate(left, point, w, real=True), evaluate(right, point, w, real=True), True
            except UnrealError:
                pair = evaluate(left, point, w), evaluate(right, point, w), False
        except (UndefinedError, UndecidedError, TooHardError):
            continue
        count += 1
        yield pair


def random_source(*exprs: Expr) -> random.Random:
    """Return a random number generator seeded by these expressions alone."""
    return random.Random(hashlib.blake2b(repr(exprs).encode(), digest_size=16).digest())


def _rational(source: random.Random) -> Fraction:
    """Draw a number from 0.3 to 3 whose denominator divides no period in the expressions."""
    below = source.randrange(10**12, 10**13)
    return Fraction(source.randrange(3 * below // 10, 3 * below), below)


def _reals(names: list[str], source: random.Random) -> Iterator[dict[str, Fraction]]:
    for number, scale in enumerate(_SCALES):
        signed = number % 2 and abs(scale) < 1000
        yield {
            name: _rational(source)
            * (scale if name != UNKNOWN_BASE.name else 1)
            * (source.choice((1, -1)) if signed and name != UNKNOWN_BASE.name else 1)
            for name in names
        }


def _whole_numbers(names: list[str], source: random.Random) -> Iterator[dict[str, Fraction]]:
    for most in _MOST_WHOLE:
        yield {
            name: Fraction(source.randrange(2 if name == UNKNOWN_BASE.name else 1, most)) for name in names
        }
