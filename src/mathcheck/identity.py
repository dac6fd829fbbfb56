"""Whether two expressions are the same: exactly, by simplification, or at random points to many digits."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction

from mathcheck.algebra import rational_identity, simplifies_to_zero
from mathcheck.exact import UndefinedError, exact
from mathcheck.reading.parser import UNKNOWN_BASE
from mathcheck.reading.tree import Call, Expr, Symbol, TooHardError, add, contains, symbols
from mathcheck.values import (
    MOST_WIDTH,
    Complex,
    UndecidedError,
    UnrealError,
    evaluate,
    gap,
    infinite,
    width,
)

_BASED = frozenset({"in base"})
_FACTORIAL, _STEPS = frozenset({"factorial"}), frozenset({"floor", "ceil"})
LEAST_POINTS = 4
_SCALES = (1, 1, 1, 1, 1, 1, 1, 10, 10, 100, 1, 1, 1000, -1000, 10**9, -(10**9))
"""The last ones lie beyond the kinks of |x - 400| and its like, on both sides."""
_MOST_WHOLE = (30, 6, 30, 6, 30, 6, 30, 6, 30, 6, 100, 6, 200, 200, 1000, 10**4)
"""So many that the last are beyond where n! + ⌊n / 40⌋ parts from n!."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Whether two things are the same, None if that was not decided, and how it was found."""

    same: bool | None
    how: str


def compare(
    left: Expr, right: Expr, tolerance: Fraction = Fraction(0), *, relative: bool = False
) -> Identity:
    """Whether left equals right, the gold; with a tolerance, numbers as far apart as that are equal.

    Expressions with variables are equal if they are at every point where both are real (or
    anywhere, if i occurs in them).
    """
    if left == right:
        return Identity(True, "the same")
    if contains(left, _BASED) or contains(right, _BASED):
        return Identity(False, "the digits or their base differ")
    if infinite(left) or infinite(right):
        return Identity(infinite(left) == infinite(right) != 0, "by its infinity")
    try:
        a, b = exact(left), exact(right)
    except UndefinedError as error:
        return Identity(False, str(error))
    if a is not None and b is not None:
        near = abs(a - b) <= (tolerance * abs(b) if relative else tolerance)
        how = "exactly" if a == b or not tolerance else f"{'within' if near else 'beyond'} the tolerance"
        return Identity(near, how)
    if not symbols(left) | symbols(right):
        return _constants(left, right, tolerance, relative=relative)
    return _functions(left, right)


def _constants(left: Expr, right: Expr, tolerance: Fraction, *, relative: bool) -> Identity:
    try:
        least = width(left, right)
    except UndecidedError:
        return _simplified(left, right)
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
    return _simplified(left, right)


def _functions(left: Expr, right: Expr) -> Identity:
    """By points, which refute; where they do not, rational functions are multiplied out."""
    found: bool | None = None
    with suppress(UndecidedError):
        found = at_points(left, right, width(left, right))
    if found is None:
        with suppress(UndecidedError):
            found = at_points(left, right, MOST_WIDTH)
    if found is False:
        return Identity(False, "at a random point")
    proved = rational_identity(left, right)
    if proved is not None:
        return Identity(proved, "by multiplying out")
    # A step may lie beyond the numbers whose factorials can be held.
    steps = contains(left, _STEPS) != contains(right, _STEPS)
    if found and not (steps and contains(add(left, right), _FACTORIAL)):
        return Identity(True, "at random points")
    return _simplified(left, right)


def _simplified(left: Expr, right: Expr) -> Identity:
    try:
        proved = simplifies_to_zero(left, right)
    except TooHardError:
        proved = False
    return Identity(True, "by simplification") if proved else Identity(None, "it could not be decided")


def at_points(left: Expr, right: Expr, w: int) -> bool | None:
    """Whether both agree at random points; None if too few points have values.

    Points of the real line count where both are real, and all that they are made of; where there are
    none of these, as for factorials, whole numbers; then points where they are complex.
    """
    names = sorted(symbols(left) | symbols(right))
    anywhere = contains(left, frozenset({"i"})) or contains(right, frozenset({"i"}))
    outside: list[bool] = []
    for points, digits in ((_reals, w), (_whole_numbers, MOST_WIDTH)):
        agreed = 0
        for a, b, inside in _pairs(left, right, points(names, seeded(left, right)), digits):
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


def same_family(given: Expr, gold: Expr) -> bool:
    """Whether the gold is f(x) + C, and the other such a sum too, with an f that differs by a constant."""
    ours, theirs = _without_constant(given, "CcKk"), _without_constant(gold, "C")
    if ours is None or theirs is None or symbols(ours) != symbols(theirs) or len(symbols(theirs)) != 1:
        return False
    left, right = add(ours, _elsewhere(theirs)), add(theirs, _elsewhere(ours))
    return compare(left, right).same is True


def _without_constant(expr: Expr, letters: str) -> Expr | None:
    """What is added to one of these letters, which stands nowhere else."""
    args = expr.args if isinstance(expr, Call) and expr.name == "add" else ()
    for i, letter in enumerate(args):
        rest = Call("add", (*args[:i], *args[i + 1 :]))
        if isinstance(letter, Symbol) and letter.name in letters and letter.name not in symbols(rest):
            return rest
    return None


def _elsewhere(expr: Expr) -> Expr:
    """A function of one variable at another place."""
    if isinstance(expr, Symbol):
        return Symbol("elsewhere")
    return Call(expr.name, tuple(map(_elsewhere, expr.args))) if isinstance(expr, Call) else expr


def proportional(left: Expr, right: Expr, *, positive: bool) -> Identity:
    """Whether left is right times a constant that is not 0, and above 0 if that is asked for."""
    names = sorted(symbols(left) | symbols(right))
    try:
        w = width(left, right)
        for points, digits in ((_reals, w), (_whole_numbers, MOST_WIDTH)):
            seen = list(_pairs(left, right, points(names, seeded(left, right)), digits))
            pairs = [(a, b) for a, b, inside in seen if inside] or [(a, b) for a, b, _ in seen]
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
    """The values of both where both have one, and whether all is real on the way to them.

    Ends when half of the points have been tried and none had values.
    """
    found = 0
    for number, point in enumerate(points):
        if number == len(_SCALES) // 2 and not found:
            return
        try:
            try:
                pair = evaluate(left, point, w, real=True), evaluate(right, point, w, real=True), True
            except UnrealError:
                pair = evaluate(left, point, w), evaluate(right, point, w), False
        except (UndefinedError, UndecidedError, TooHardError):
            continue
        found += 1
        yield pair


def seeded(*exprs: Expr) -> random.Random:
    """A source of random numbers that depends on these expressions alone."""
    return random.Random(hashlib.blake2b(repr(exprs).encode(), digest_size=16).digest())


def _rational(source: random.Random) -> Fraction:
    """Between 0.3 and 3, with a denominator that no period in the expressions divides."""
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
