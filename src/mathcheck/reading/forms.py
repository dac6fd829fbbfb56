"""The forms in which answers are compared: golds as their type, lists as sets, x = 3 as its value."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from mathcheck.reading.reader import interval
from mathcheck.reading.spans import merged
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
    symbols,
)

_FUNCTION_NAMES = frozenset("fghFGPQpqTAVSCNR")
_SIZE_AND_TRIG = frozenset({"abs", "sin", "cos", "tan", "cot", "sec", "csc"})
_MINUS_ONE = neg(Numeral(Fraction(1)))


def gold_form(gold: Answer, kind: str) -> Answer:
    """The gold in the form in which its kind is compared; UnreadableError if it is not of that kind."""
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
    wanted = {
        "number": Scalar,
        "expression": Scalar,
        "unit": Scalar,
        "set": Many,
        "tuple": Many,
        "interval": Region,
        "equation": Relation | Region,
        "matrix": Matrix,
    }.get(kind)
    if wanted is not None and not isinstance(gold, wanted):
        raise UnreadableError("it is no answer of this kind")
    if kind == "number" and isinstance(gold, Scalar) and symbols(gold.expr) - {"base of log"}:
        raise UnreadableError("a number has no variables")
    if isinstance(gold, Region) and not is_symbolic(gold):
        return Region(merged(gold))
    return gold


def assigned(relation: Relation) -> Scalar | None:
    """The value that a lone variable, or f(x), is said to have; None if there is no such side.

    In x = a = b the value is b, and what lies between is not looked at here.
    """
    sides = relation.sides
    if is_name(sides[0]):
        return sides[-1]
    return sides[0] if len(sides) == 2 and is_name(sides[1]) else None


def is_name(side: Scalar) -> bool:
    """Whether a side of an equation only names something: x, or f(x)."""
    expr = side.expr
    if side.called:
        return True
    if isinstance(expr, Call) and expr.name == "mul" and len(expr.args) == 2:
        function, argument = expr.args
        return (
            isinstance(function, Symbol) and function.name in _FUNCTION_NAMES and isinstance(argument, Symbol)
        )
    return isinstance(expr, Symbol)


def defined(relation: Relation) -> tuple[str, str] | None:
    """The function or sequence that an equation defines, and its argument: f and x of f(x) = x^2.

    None if it defines a variable, or its value does not depend on the argument.
    """
    value = assigned(relation)
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
    """How many sides at the front only name the value: one, or x_1 = x_2 where the gold is a number."""
    if not is_name(sides[0]):
        return 0
    stems = [stem(side.expr.name) if isinstance(side.expr, Symbol) else "" for side in sides]
    others = (i for i in range(1, len(sides)) if not stems[i] or stems[i] != stems[0])
    return 1 if symbols(gold.expr) else min(next(others, len(sides)), len(sides) - 1)


def stem(name: str) -> str:
    """A name without its subscript.

    >>> stem("x_1")
    'x'
    """
    return name.partition("_")[0]


def with_name(relation: Relation, gold: Scalar) -> Relation:
    """f(3) = 20, or where the gold is a number m + n = 20, |S| = 20 and sin A = 20, as x = 20."""
    at = next((i for i in (0, -1) if _is_label(relation.sides[i].expr, symbols(gold.expr))), None)
    if at is None or (at and len(relation.sides) > 2):
        return relation
    sides = list(relation.sides)
    sides[at] = Scalar(Symbol("label"))
    return replace(relation, sides=tuple(sides))


def _is_label(expr: Expr, variables: frozenset[str]) -> bool:
    """Whether it cannot be computed and so only says what these variables, or a number, are."""
    if not isinstance(expr, Call):
        return False
    if _is_called(expr):
        function, argument = expr.args
        plain = isinstance(argument, Symbol) or _is_called(argument) or not symbols(argument)
        return symbols(function).isdisjoint(variables) and (plain or not variables)
    if expr.name == "div" and all(_letters(arg)[:1] == ["d"] for arg in expr.args):  # dy/dx
        return "d" not in variables
    letters = _letters(expr.args[0] if expr.name in _SIZE_AND_TRIG else expr)
    return not variables and len(set(letters)) == len(letters) > 0


def _is_called(expr: Expr) -> bool:
    r"""Whether it is f(3), f^{-1}(3) or f(g(3)), and no product such as p(p + 1)."""
    if not isinstance(expr, Call) or expr.name != "mul" or len(expr.args) != 2:
        return False
    function, argument = expr.args
    if isinstance(function, Call) and function.name == "pow" and function.args[1] == _MINUS_ONE:
        function = function.args[0]
    if not isinstance(function, Symbol) or function.name not in _FUNCTION_NAMES:
        return False
    if isinstance(argument, Call) and argument.name == "pow":
        return False
    return function.name not in symbols(argument) or _is_called(argument)


def _letters(expr: Expr) -> list[str]:
    """The letters of which nothing but sums, products and quotients is made; none if there is more."""
    if isinstance(expr, Symbol):
        return [expr.name]
    if not isinstance(expr, Call) or expr.name not in ("add", "mul", "div"):
        return []
    first, *others = expr.args
    taken = [arg.args[0] if isinstance(arg, Call) and arg.name == "neg" else arg for arg in others]
    parts = [_letters(arg) for arg in (first, *taken)]
    return [letter for part in parts for letter in part] if all(parts) else []


def both_signs(value: Scalar) -> Answer:
    """The two values of ±, or the value itself."""
    exprs = branches(value.expr)
    if len(exprs) == 1:
        return value
    return Many(tuple(replace(value, expr=expr, quantity=None) for expr in exprs), "{}")


def as_set(answer: Answer) -> Many:
    """A list or a single value as a set; UnreadableError if it is anything else."""
    if isinstance(answer, Scalar | Relation):
        answer = Many((answer,), "{}")
    if not isinstance(answer, Many) or answer.brackets not in ("", "{}"):
        raise UnreadableError("it is no answer of this kind")
    return answer


def as_tuple(answer: Answer) -> Many:
    """A list as a tuple; UnreadableError if it is anything else."""
    if not isinstance(answer, Many) or answer.brackets not in ("", "()", "[]", "⟨⟩", ":"):
        raise UnreadableError("it is no answer of this kind")
    return Many(answer.items, "()") if answer.brackets == "" else answer


def named(items: Sequence[Answer]) -> dict[str, Scalar] | None:
    """x = 1, y = 2 by the names, which differ; None for anything else."""
    found: dict[str, Scalar] = {}
    for item in items:
        if (
            not isinstance(item, Relation)
            or item.signs != ("=",)
            or not isinstance(item.sides[0].expr, Symbol)
        ):
            return None
        found[item.sides[0].expr.name] = item.sides[1]
    return found if len(found) == len(items) > 1 else None


def elements(items: Sequence[Answer]) -> list[Answer]:
    """The elements with x = 1 or x = 2 read as 1 and 2, and ± as two values."""
    found: list[Answer] = []
    for item in items:
        value = assigned(item) if isinstance(item, Relation) and set(item.signs) == {"="} else item
        values = both_signs(value) if isinstance(value, Scalar) else item
        found += values.items if isinstance(values, Many) and values is not item else [values]
    return found


def is_symbolic(region: Region) -> bool:
    """Whether its ends have variables."""
    return any(symbols(span.low) | symbols(span.high) for span in region.spans)
