"""Bring answers into comparable forms: golds by their type, lists as sets, x = 3 as its value."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from mathcheck.reading.reader import interval
from mathcheck.reading.spans import merge
from mathcheck.reading.tree import (
    Answer,
    Call,
    Expr,
    Many,
    Matrix,
    Numeral,
    Region,
    Relation,
    Scalar,
    Symbol,
    UnreadableError,
    branches,
    neg,
    operands,
    symbols,
)

_FUNCTION_NAMES = frozenset("fghFGPQpqTAVSCNR")
_SIZE_AND_TRIG = frozenset({"abs", "sin", "cos", "tan", "cot", "sec", "csc"})
_MINUS_ONE = neg(Numeral(Fraction(1)))


def gold_form(gold: Answer, kind: str) -> Answer:
    """Return the gold in the form for comparisons of its kind. Raises UnreadableError for another kind."""
    if isinstance(gold, Scalar) and kind != "expression":
        gold = both_signs(gold)
    if kind == "auto" and isinstance(gold, Many) and len(gold.items) == 2:
        gold = interval(gold) if gold.within or gold.brackets == "[]" else gold
    if kind == "set":
        gold = as_set(gold)
    elif kind == "tuple":
        gold = as_tuple(gold)
    elif kind == "interval" and isinstance(gold, Many):
        gold = interval(gold)
    expected_type = {
        "number": Scalar,
        "expression": Scalar,
        "unit": Scalar,
        "set": Many,
        "tuple": Many,
        "interval": Region,
        "equation": Relation | Region,
        "matrix": Matrix,
    }.get(kind)
    if expected_type is not None and not isinstance(gold, expected_type):
        raise UnreadableError("it is not an answer of this kind")
    if kind == "number" and isinstance(gold, Scalar) and symbols(gold.expr) - {"base of log"}:
        raise UnreadableError("a number has no variables")
    if isinstance(gold, Region) and not is_symbolic(gold):
        return Region(merge(gold))
    return gold


def assigned_value(relation: Relation) -> Scalar | None:
    """Return the value that an equation assigns to a lone variable or f(x); None if it assigns none.

    In x = a = b the value is b; a is not compared here.
    """
    sides = relation.sides
    if is_name(sides[0]):
        return sides[-1]
    return sides[0] if len(sides) == 2 and is_name(sides[1]) else None


def is_name(side: Scalar) -> bool:
    """Return whether a side of an equation is only a name: x, or f(x)."""
    if side.called or isinstance(side.expr, Symbol):
        return True
    factors = operands(side.expr, "mul")
    if len(factors) != 2 or not all(isinstance(factor, Symbol) for factor in factors):
        return False
    return symbols(factors[0]) <= _FUNCTION_NAMES


def defined_function(relation: Relation) -> tuple[str, str] | None:
    """Return the name and argument of the function or sequence that an equation defines: f, x of f(x) = x^2.

    None if it defines a variable, or the value does not depend on the argument.
    """
    value = assigned_value(relation)
    for side in relation.sides:
        if value is None or side is value:
            continue
        expr = side.expr
        name, argument = "", ""
        if side.called and isinstance(expr, Symbol):
            name, _, argument = expr.name.rstrip(")").partition("(")
        elif (side.called or is_name(side)) and isinstance(expr, Call) and isinstance(expr.args[1], Symbol):
            function, argument = expr.args[0], expr.args[1].name
            name = function.name if isinstance(function, Symbol) else "inverse"
        elif isinstance(expr, Symbol):
            name, _, argument = expr.name.partition("_")
        if len(argument) == 1 and argument in symbols(value.expr):
            return name, argument
    return None


def leading_names(sides: Sequence[Scalar], gold: Scalar) -> int:
    """Return how many sides at the front are only names: one, or for a numeric gold all of x_1 = x_2."""
    if not is_name(sides[0]):
        return 0
    stems = [stem(side.expr.name) if isinstance(side.expr, Symbol) else "" for side in sides]
    others = (i for i in range(1, len(sides)) if not stems[i] or stems[i] != stems[0])
    return 1 if symbols(gold.expr) else min(next(others, len(sides)), len(sides) - 1)


def stem(name: str) -> str:
    """Return a name without its subscript.

    >>> stem("x_1")
    'x'
    """
    return name.partition("_")[0]


def with_name(relation: Relation, gold: Scalar) -> Relation:
    """Return f(3) = 20 as x = 20; if the gold is a number, m + n = 20, |S| = 20 and sin A = 20 as well."""
    at = next((i for i in (0, -1) if _is_label(relation.sides[i].expr, symbols(gold.expr))), None)
    if at is None or (at and len(relation.sides) > 2):
        return relation
    sides = list(relation.sides)
    sides[at] = Scalar(Symbol("label"))
    return replace(relation, sides=tuple(sides))


def _is_label(expr: Expr, variables: frozenset[str]) -> bool:
    """Return whether an expression cannot be computed, so that it only names the variables or a number."""
    if not isinstance(expr, Call):
        return False
    if _is_called(expr):
        function, argument = expr.args
        is_simple = isinstance(argument, Symbol) or _is_called(argument) or not symbols(argument)
        return symbols(function).isdisjoint(variables) and (is_simple or not variables)
    if expr.name == "div" and all(_letters(arg)[:1] == ["d"] for arg in expr.args):  # dy/dx
        return "d" not in variables
    letters = _letters(expr.args[0] if expr.name in _SIZE_AND_TRIG else expr)
    return not variables and len(set(letters)) == len(letters) > 0


def _is_called(expr: Expr) -> bool:
    r"""Return whether the expression is f(3), f^{-1}(3) or f(g(3)), and not a product such as p(p + 1)."""
    factors = operands(expr, "mul")
    if len(factors) != 2:
        return False
    function, argument = factors
    power = operands(function, "pow")
    if power[1:] == (_MINUS_ONE,):
        function = power[0]
    if not isinstance(function, Symbol) or function.name not in _FUNCTION_NAMES:
        return False
    if operands(argument, "pow"):
        return False
    return function.name not in symbols(argument) or _is_called(argument)


def _letters(expr: Expr) -> list[str]:
    """Return the letters of sums, products and quotients of letters; empty if there is anything else."""
    if isinstance(expr, Symbol):
        return [expr.name]
    if not isinstance(expr, Call) or expr.name not in ("add", "mul", "div"):
        return []
    first, *others = expr.args
    unsigned = [(operands(arg, "neg") or (arg,))[0] for arg in others]
    parts = [_letters(arg) for arg in (first, *unsigned)]
    return [letter for part in parts for letter in part] if all(parts) else []


def both_signs(value: Scalar) -> Answer:
    """Return the set of both values of ±, or the value itself."""
    exprs = branches(value.expr)
    if len(exprs) == 1:
        return value
    return Many(tuple(replace(value, expr=expr, quantity=None) for expr in exprs), "{}")


def as_set(answer: Answer) -> Many:
    """Return a list or a single value as a set. Raises UnreadableError for anything else."""
    if isinstance(answer, Scalar | Relation):
        answer = Many((answer,), "{}")
    if not isinstance(answer, Many) or answer.brackets not in ("", "{}"):
        raise UnreadableError("it is not an answer of this kind")
    return answer


def as_tuple(answer: Answer) -> Many:
    """Return a list as a tuple. Raises UnreadableError for anything else."""
    if not isinstance(answer, Many) or answer.brackets not in ("", "()", "[]", "⟨⟩", ":"):
        raise UnreadableError("it is not an answer of this kind")
    return Many(answer.items, "()") if answer.brackets == "" else answer


def values_by_name(items: Sequence[Answer]) -> dict[str, Scalar] | None:
    """Return x = 1, y = 2 as {"x": 1, "y": 2}; None unless all items assign values to different names."""
    values: dict[str, Scalar] = {}
    for item in items:
        if (
            not isinstance(item, Relation)
            or item.signs != ("=",)
            or not isinstance(item.sides[0].expr, Symbol)
        ):
            return None
        values[item.sides[0].expr.name] = item.sides[1]
    return values if len(values) == len(items) > 1 else None


def elements(items: Sequence[Answer]) -> list[Answer]:
    """Return the elements, with x = 1 or x = 2 as 1 and 2, and ± as two values."""
    result: list[Answer] = []
    for item in items:
        value = assigned_value(item) if isinstance(item, Relation) and set(item.signs) == {"="} else item
        values = both_signs(value) if isinstance(value, Scalar) else item
        result += values.items if isinstance(values, Many) and values is not item else [values]
    return result


def is_symbolic(region: Region) -> bool:
    """Return whether the ends have variables."""
    return any(symbols(span.low) | symbols(span.high) for span in region.spans)
