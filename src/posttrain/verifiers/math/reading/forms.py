"""The forms in which answers are compared: golds as their type, lists as sets, x = 3 as its value."""

from collections.abc import Sequence
from dataclasses import replace

from posttrain.verifiers.math.reading.reader import interval
from posttrain.verifiers.math.reading.spans import merged
from posttrain.verifiers.math.reading.tree import (
    Answer,
    Call,
    Many,
    Matrix,
    Region,
    Relation,
    Scalar,
    Symbol,
    UnreadableError,
    branches,
    symbols,
)

_FUNCTION_NAMES = frozenset("fghFGPQpqTAVSCNR")


def gold_form(gold: Answer, kind: str) -> Answer:
    """The gold in the form in which its kind is compared; UnreadableError if it is not of that kind."""
    if isinstance(gold, Scalar) and kind != "expression":
        gold = both_signs(gold)
    if kind == "auto" and isinstance(gold, Many) and gold.brackets == "[]" and len(gold.items) == 2:
        gold = interval(gold)
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
    if isinstance(expr, Call) and expr.name == "mul" and len(expr.args) == 2:
        function, argument = expr.args
        return (
            isinstance(function, Symbol) and function.name in _FUNCTION_NAMES and isinstance(argument, Symbol)
        )
    return isinstance(expr, Symbol)


def both_signs(value: Scalar) -> Answer:
    """The two values of ±, or the value itself."""
    exprs = branches(value.expr)
    if len(exprs) == 1:
        return value
    return Many(tuple(replace(value, expr=expr) for expr in exprs), "{}")


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
