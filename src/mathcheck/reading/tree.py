"""Trees of parsed answers: expressions, and answers made of expressions.

All classes are frozen and hold plain values. Nothing here computes.
"""

from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from typing import TypeVar

T = TypeVar("T")


class UnreadableError(Exception):
    """A text is not in the grammar; the message says why."""


class TooHardError(Exception):
    """An answer is beyond the bounds: too many digits, too deep, too large a power."""


@dataclass(frozen=True, slots=True)
class Numeral:
    """A numeral as written: 7, 0.5, 1.2e3, 0.(3), or the mixed number 1 1/2."""

    value: Fraction


@dataclass(frozen=True, slots=True)
class Symbol:
    """A variable: x, x_1, alpha."""

    name: str


@dataclass(frozen=True, slots=True)
class Constant:
    """One of pi, e, i and oo (infinity)."""

    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """An operation or function on arguments: add, mul, div, pow, neg, root, sin, ..."""

    name: str
    args: "tuple[Expr, ...]"


Expr = Numeral | Symbol | Constant | Call


@dataclass(frozen=True, slots=True)
class Unit:
    """A known unit: its factor to the basic units, and their powers. km/h is 5/18 of m¹ s⁻¹."""

    factor: Fraction
    dimension: tuple[tuple[str, int], ...]
    name: str = field(default="", compare=False)
    """The unit as written after a value."""


@dataclass(frozen=True, slots=True)
class Scalar:
    """One expression, perhaps with a unit or with words for what is counted."""

    expr: Expr
    unit: Unit | None = None
    label: tuple[str, ...] = ()
    quantity: "Scalar | None" = field(default=None, compare=False)
    """The other reading of a number with letters: 10 m as ten metres, if expr is 10 times m."""
    called: bool = field(default=False, compare=False)
    """Whether it is written as f(x), a letter followed by another in brackets."""


@dataclass(frozen=True, slots=True)
class Many:
    """Several answers. brackets: {} a set, () or [] or <> a tuple, : a ratio, "" a list."""

    items: "tuple[Answer, ...]"
    brackets: str
    within: bool = False
    """Whether it follows x ∈, where a pair is an interval."""


@dataclass(frozen=True, slots=True)
class Span:
    """An interval of the real line; a single point where both ends are closed and the same."""

    low: Expr
    high: Expr
    closed: tuple[bool, bool]


@dataclass(frozen=True, slots=True)
class Region:
    """A union of intervals; without intervals the empty set."""

    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix as rows of equal length."""

    rows: tuple[tuple[Expr, ...], ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """Sides joined by signs: = < > ≤ ≥ ≠ ≈."""

    sides: tuple[Scalar, ...]
    signs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Words:
    """Text in small letters and single spaces."""

    text: str


@dataclass(frozen=True, slots=True)
class Letters:
    """The options that an answer chooses, as capital letters."""

    letters: frozenset[str]


Answer = Scalar | Many | Region | Matrix | Relation | Words | Letters

INFINITY = Constant("oo")
ANY_INTEGER = Symbol("any integer")
"""The letter that an answer declares to be any integer."""
ALL_REALS = Region((Span(Call("neg", (INFINITY,)), INFINITY, (False, False)),))


def word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


def operands(expr: Expr, name: str) -> tuple[Expr, ...]:
    """Return the arguments of a call of this name; () for anything else."""
    return expr.args if isinstance(expr, Call) and expr.name == name else ()


def add(first: Expr, second: Expr) -> Expr:
    """Return left + right, with sums flattened."""
    return Call("add", (*(operands(first, "add") or (first,)), second))


def mul(first: Expr, second: Expr) -> Expr:
    """Return left · right, with products flattened."""
    return Call("mul", (*(operands(first, "mul") or (first,)), second))


def neg(expr: Expr) -> Expr:
    return Call("neg", (expr,))


def symbols(expr: Expr) -> frozenset[str]:
    """Return the names of the variables of an expression."""
    if isinstance(expr, Symbol):
        return frozenset({expr.name})
    if isinstance(expr, Call):
        return frozenset().union(*(symbols(arg) for arg in expr.args))
    return frozenset()


def names(answer: "Answer | Expr") -> frozenset[str]:
    """Return the names of the variables of an answer."""
    if isinstance(answer, Numeral | Symbol | Constant | Call):
        return symbols(answer)
    return frozenset().union(*(names(part) for part in _parts(answer)))


def _parts(answer: "Answer") -> "tuple[Answer | Expr, ...]":
    if isinstance(answer, Scalar):
        return (answer.expr,)
    if isinstance(answer, Many):
        return answer.items
    if isinstance(answer, Relation):
        return answer.sides
    if isinstance(answer, Region):
        return tuple(end for span in answer.spans for end in (span.low, span.high))
    return tuple(cell for row in answer.rows for cell in row) if isinstance(answer, Matrix) else ()


def rename_variable(answer: T, old: str, new: str) -> T:
    """Return the answer, or expression, with another name for a variable.

    >>> rename_variable(Scalar(Call("mul", (Symbol("k"), Constant("pi")))), "k", "n").expr.args
    (Symbol(name='n'), Constant(name='pi'))
    """
    if isinstance(answer, tuple):
        return tuple(rename_variable(part, old, new) for part in answer)  # type: ignore[return-value]
    if isinstance(answer, Symbol):
        return Symbol(new) if answer.name == old else answer  # type: ignore[return-value]
    if not isinstance(answer, Call | Scalar | Many | Relation | Region | Span | Matrix):
        return answer
    values = {f.name: rename_variable(getattr(answer, f.name), old, new) for f in fields(answer)}
    return replace(answer, **values)


def contains(expr: Expr, names: frozenset[str]) -> bool:
    """Return whether an operation or constant of one of these names occurs.

    >>> contains(Call("sin", (Constant("pi"),)), frozenset({"pi"}))
    True
    """
    if isinstance(expr, Call):
        return expr.name in names or any(contains(arg, names) for arg in expr.args)
    return isinstance(expr, Constant) and expr.name in names


def branches(expr: Expr) -> tuple[Expr, ...]:
    """Return the expressions that ± and ∓ stand for: the upper and the lower one, or just `expr`."""
    if not contains(expr, frozenset({"plus_minus", "minus_plus"})):
        return (expr,)
    return (_signed(expr, "plus_minus"), _signed(expr, "minus_plus"))


def _signed(expr: Expr, plus: str) -> Expr:
    if not isinstance(expr, Call):
        return expr
    args = tuple(_signed(arg, plus) for arg in expr.args)
    if expr.name not in ("plus_minus", "minus_plus"):
        return Call(expr.name, args)
    last = args[-1] if expr.name == plus else neg(args[-1])
    return last if len(args) == 1 else add(args[0], last)
