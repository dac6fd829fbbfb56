"""Intervals: from inequalities, their intersection, and their normal form by the order of their ends."""

from collections.abc import Sequence
from fractions import Fraction
from functools import cmp_to_key

from mathcheck.exact import UndefinedError, exact
from mathcheck.reading.tree import (
    ALL_REALS,
    INFINITY,
    Call,
    Expr,
    Numeral,
    Region,
    Relation,
    Scalar,
    Span,
    Symbol,
    UnreadableError,
    add,
    mul,
    neg,
    symbols,
)
from mathcheck.values import compared

_MIRRORED = {"<": ">", ">": "<", "≤": "≥", "≥": "≤"}


def comparison(relation: Relation) -> Region | None:
    """The interval of x < 3, 1 < x ≤ 2, x ≠ 3 or |2x - 1| < 3.

    None unless a lone variable, or the size of a x + b, stands against constants.
    """
    sides, signs = relation.sides, relation.signs
    if any(side.unit is not None for side in sides):
        return None
    at = [i for i, side in enumerate(sides) if symbols(side.expr)]
    if len(at) != 1:
        return None
    middle = sides[at[0]].expr
    if len(sides) == 2:
        sign = signs[0] if at == [0] else _MIRRORED.get(signs[0], signs[0])
        return _where(middle, sign, sides[1 - at[0]])
    if len(sides) != 3 or at != [1]:
        return None
    left = _where(middle, _MIRRORED.get(signs[0], ""), sides[0])
    right = _where(middle, signs[1], sides[2])
    one_way = {_MIRRORED.get(signs[0], ""), *signs[1:]}
    if left is None or right is None or one_way <= {"<", "≤"} or one_way <= {">", "≥"}:
        return None
    return both([left, right])


def _where(expr: Expr, sign: str, bound: Scalar) -> Region | None:
    """Where a variable, or the size of a x + b, is on this side of a constant."""
    if isinstance(expr, Symbol):
        return _half(sign, bound)
    line = _line(expr.args[0]) if isinstance(expr, Call) and expr.name == "abs" else None
    if line is None or line[0] == 0 or sign not in _MIRRORED:
        return None
    size, closed = bound.expr, sign in ("≤", "≥")
    order, zero = compared(size, Numeral(Fraction(0))), Numeral(Fraction(0))
    ends = _end(line, neg(size), size), _end(line, size, size)
    if sign in ("<", "≤"):
        return Region((Span(*ends, (closed, closed)),) if order > 0 or (order == 0 and closed) else ())
    if order < 0 or (order == 0 and closed):
        return ALL_REALS
    if order == 0:
        return without([_end(line, zero, zero)])
    low, high = ends
    return Region((Span(neg(INFINITY), low, (False, closed)), Span(high, INFINITY, (closed, False))))


def _end(line: tuple[Fraction, Fraction], value: Expr, size: Expr) -> Expr:
    """The x for which a x + b, with a made positive, is this value."""
    sign = 1 if line[0] > 0 else -1
    slope, shift = sign * line[0], sign * line[1]
    try:
        number = exact(value) if slope != 1 or shift else None
    except UndefinedError:
        number = None
    if number is not None:
        return Numeral((number - shift) / slope)
    moved = add(value, Numeral(-shift)) if shift else value
    return mul(Numeral(1 / slope), moved) if slope != 1 else moved


def _line(expr: Expr) -> tuple[Fraction, Fraction] | None:
    """(a, b) where the expression is a x + b with rational a and b; None if it is not."""
    if isinstance(expr, Symbol):
        return Fraction(1), Fraction(0)
    if isinstance(expr, Numeral):
        return Fraction(0), expr.value
    parts = [_line(arg) for arg in expr.args] if isinstance(expr, Call) else []
    known = [part for part in parts if part is not None]
    if not isinstance(expr, Call) or not known or len(known) < len(parts):
        return None
    if expr.name == "neg":
        return -known[0][0], -known[0][1]
    if expr.name == "add":
        return sum((a for a, _ in known), Fraction(0)), sum((b for _, b in known), Fraction(0))
    if expr.name == "div" and known[1][0] == 0 and known[1][1] != 0:
        return known[0][0] / known[1][1], known[0][1] / known[1][1]
    if expr.name != "mul" or sum(a != 0 for a, _ in known) > 1:
        return None
    slope, shift = Fraction(0), Fraction(1)
    for a, b in known:
        slope, shift = slope * b + shift * a, shift * b
    return slope, shift


def _half(sign: str, bound: Scalar) -> Region | None:
    value = bound.expr
    if sign in ("<", "≤"):
        return Region((Span(neg(INFINITY), value, (False, sign == "≤")),))
    if sign in (">", "≥"):
        return Region((Span(value, INFINITY, (sign == "≥", False)),))
    return without([value]) if sign == "≠" else None


def without(points: Sequence[Expr]) -> Region:
    """All real numbers but these."""
    region = ALL_REALS
    for point in points:
        holed = Region(
            (Span(neg(INFINITY), point, (False, False)), Span(point, INFINITY, (False, False))),
        )
        region = both([region, holed])
    return region


def both(regions: Sequence[Region]) -> Region:
    """What lies in each of the regions."""
    found = regions[0].spans
    for region in regions[1:]:
        pairs = [_common(left, right) for left in found for right in region.spans]
        found = tuple(span for span in pairs if span is not None)
    return Region(found)


def _common(left: Span, right: Span) -> Span | None:
    begin, end = max(left, right, key=cmp_to_key(_begins)), min(left, right, key=cmp_to_key(_ends))
    closed = begin.closed[0], end.closed[1]
    order = compared(begin.low, end.high)
    return None if order > 0 or (order == 0 and not all(closed)) else Span(begin.low, end.high, closed)


def merged(region: Region) -> tuple[Span, ...]:
    """The fewest intervals with the same points, in order; raises UnreadableError for (3, 1)."""
    spans = list[Span]()
    for span in region.spans:
        order = compared(span.low, span.high)
        if order > 0:
            raise UnreadableError("an interval ends before it begins")
        if order < 0 or all(span.closed):
            spans.append(span)
    found = list[Span]()
    for span in sorted(spans, key=cmp_to_key(_begins)):
        if found and _touch(found[-1], span):
            last = found.pop()
            end = max(last, span, key=cmp_to_key(_ends))
            found.append(Span(last.low, end.high, (last.closed[0], end.closed[1])))
        else:
            found.append(span)
    return tuple(found)


def _begins(left: Span, right: Span) -> int:
    """By where they begin, the closed one first of two at the same place."""
    return compared(left.low, right.low) or right.closed[0] - left.closed[0]


def _ends(left: Span, right: Span) -> int:
    """By where they end, the closed one last of two at the same place."""
    return compared(left.high, right.high) or left.closed[1] - right.closed[1]


def _touch(left: Span, right: Span) -> bool:
    order = compared(right.low, left.high)
    return order < 0 or (order == 0 and (right.closed[0] or left.closed[1]))
