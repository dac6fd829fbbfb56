"""Intervals from inequalities, their intersection, and their normal form by the order of their ends."""

from collections.abc import Sequence
from fractions import Fraction
from functools import cmp_to_key

from mathcheck.exact import UndefinedError, exact_value
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
    operands,
    symbols,
)
from mathcheck.values import compare_order

_MIRRORED = {"<": ">", ">": "<", "≤": "≥", "≥": "≤"}


def solve_inequality(relation: Relation) -> Region | None:
    """Return the interval of x < 3, 1 < x ≤ 2, x ≠ 3 or |2x - 1| < 3.

    None unless a lone variable, or the absolute value of a x + b, is compared with constants.
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
    lower = _where(middle, _MIRRORED.get(signs[0], ""), sides[0])
    upper = _where(middle, signs[1], sides[2])
    one_way = {_MIRRORED.get(signs[0], ""), *signs[1:]}
    if lower is None or upper is None or one_way <= {"<", "≤"} or one_way <= {">", "≥"}:
        return None
    return intersection([lower, upper])


def _where(expr: Expr, sign: str, bound: Scalar) -> Region | None:
    """Return where a variable, or |a x + b|, satisfies the inequality with a constant."""
    if isinstance(expr, Symbol):
        return _half(sign, bound)
    content = operands(expr, "abs")
    line = _line(content[0]) if content else None
    if line is None or line[0] == 0 or sign not in _MIRRORED:
        return None
    size, closed = bound.expr, sign in ("≤", "≥")
    order, zero = compare_order(size, Numeral(Fraction(0))), Numeral(Fraction(0))
    ends = _end(line, neg(size), size), _end(line, size, size)
    if sign in ("<", "≤"):
        return Region((Span(*ends, (closed, closed)),) if order > 0 or (order == 0 and closed) else ())
    if order < 0 or (order == 0 and closed):
        return ALL_REALS
    if order == 0:
        return reals_without([_end(line, zero, zero)])
    low, high = ends
    return Region((Span(neg(INFINITY), low, (False, closed)), Span(high, INFINITY, (closed, False))))


def _end(line: tuple[Fraction, Fraction], value: Expr, size: Expr) -> Expr:
    """Return the x at which a x + b, with a made positive, has this value."""
    sign = 1 if line[0] > 0 else -1
    slope, shift = sign * line[0], sign * line[1]
    try:
        number = exact_value(value) if slope != 1 or shift else None
    except UndefinedError:
        number = None
    if number is not None:
        return Numeral((number - shift) / slope)
    moved = add(value, Numeral(-shift)) if shift else value
    return mul(Numeral(1 / slope), moved) if slope != 1 else moved


def _line(expr: Expr) -> tuple[Fraction, Fraction] | None:
    """Return (a, b) if the expression is a x + b with rational a and b, else None."""
    if isinstance(expr, Symbol):
        return Fraction(1), Fraction(0)
    if isinstance(expr, Numeral):
        return Fraction(0), expr.value
    results = [_line(arg) for arg in expr.args] if isinstance(expr, Call) else []
    lines = [part for part in results if part is not None]
    if not isinstance(expr, Call) or not lines or len(lines) < len(results):
        return None
    if expr.name == "neg":
        return -lines[0][0], -lines[0][1]
    if expr.name == "add":
        return sum((a for a, _ in lines), Fraction(0)), sum((b for _, b in lines), Fraction(0))
    if expr.name == "div" and lines[1][0] == 0 and lines[1][1] != 0:
        return lines[0][0] / lines[1][1], lines[0][1] / lines[1][1]
    if expr.name != "mul" or sum(a != 0 for a, _ in lines) > 1:
        return None
    slope, shift = Fraction(0), Fraction(1)
    for a, b in lines:
        slope, shift = slope * b + shift * a, shift * b
    return slope, shift


def _half(sign: str, bound: Scalar) -> Region | None:
    value = bound.expr
    if sign in ("<", "≤"):
        return Region((Span(neg(INFINITY), value, (False, sign == "≤")),))
    if sign in (">", "≥"):
        return Region((Span(value, INFINITY, (sign == "≥", False)),))
    return reals_without([value]) if sign == "≠" else None


def reals_without(points: Sequence[Expr]) -> Region:
    """Return all real numbers except these points."""
    region = ALL_REALS
    for point in points:
        holed = Region(
            (Span(neg(INFINITY), point, (False, False)), Span(point, INFINITY, (False, False))),
        )
        region = intersection([region, holed])
    return region


def intersection(regions: Sequence[Region]) -> Region:
    """Return the points that lie in each of the regions."""
    spans = regions[0].spans
    for region in regions[1:]:
        pairs = [_common(left, right) for left in spans for right in region.spans]
        spans = tuple(span for span in pairs if span is not None)
    return Region(spans)


def _common(left: Span, right: Span) -> Span | None:
    begin, end = max(left, right, key=cmp_to_key(_begins)), min(left, right, key=cmp_to_key(_ends))
    closed = begin.closed[0], end.closed[1]
    order = compare_order(begin.low, end.high)
    return None if order > 0 or (order == 0 and not all(closed)) else Span(begin.low, end.high, closed)


def merge(region: Region) -> tuple[Span, ...]:
    """Return the fewest intervals with the same points, in order. Raises UnreadableError for (3, 1)."""
    spans = list[Span]()
    for span in region.spans:
        order = compare_order(span.low, span.high)
        if order > 0:
            raise UnreadableError("an interval ends before it begins")
        if order < 0 or all(span.closed):
            spans.append(span)
    result = list[Span]()
    for span in sorted(spans, key=cmp_to_key(_begins)):
        if result and _touch(result[-1], span):
            last = result.pop()
            end = max(last, span, key=cmp_to_key(_ends))
            result.append(Span(last.low, end.high, (last.closed[0], end.closed[1])))
        else:
            result.append(span)
    return tuple(result)


def _begins(left: Span, right: Span) -> int:
    """Order by the lower end; of two at the same place the closed one is first."""
    return compare_order(left.low, right.low) or right.closed[0] - left.closed[0]


def _ends(left: Span, right: Span) -> int:
    """Order by the upper end; of two at the same place the closed one is last."""
    return compare_order(left.high, right.high) or left.closed[1] - right.closed[1]


def _touch(left: Span, right: Span) -> bool:
    order = compare_order(right.low, left.high)
    return order < 0 or (order == 0 and (right.closed[0] or left.closed[1]))
