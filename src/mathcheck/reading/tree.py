"""What an answer is once it has been read: expressions, and the answers made of them.

Everything is frozen and plain. Nothing here computes.
"""

from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from typing import TypeVar

T = TypeVar("T")


class UnreadableError(Exception):
    """A text that is not in the grammar; the message says what is wrong."""


class TooHardError(Exception):
    """An answer beyond the bounds: too many digits, too deep, too large a power."""


@dataclass(frozen=True, slots=True)
class Numeral:
    """A numeral as it stands: 7, 0.5, 1.2e3, 0.(3), or the mixed number 1 1/2."""

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
    """A known unit: how many of the basic units it is, and which. km/h is 5/18 of m¹ s⁻¹."""

    factor: Fraction
    dimension: tuple[tuple[str, int], ...]
    name: str = field(default="", compare=False)
    """As it stands behind a value."""


@dataclass(frozen=True, slots=True)
class Scalar:
    """One expression, perhaps with a unit or with words that only name what is counted."""

    expr: Expr
    unit: Unit | None = None
    label: tuple[str, ...] = ()
    quantity: "Scalar | None" = field(default=None, compare=False)
    """The other reading of a number with letters: 10 m as ten metres, where expr is 10 times m."""
    called: bool = field(default=False, compare=False)
    """It is written as f(x), a letter with another in brackets."""


@dataclass(frozen=True, slots=True)
class Many:
    """Several answers; the brackets say how: {} a set, () or [] or <> in order, : a ratio, none a list."""

    items: "tuple[Answer, ...]"
    brackets: str
    within: bool = False
    """Behind x ∈, where a pair is an interval."""


@dataclass(frozen=True, slots=True)
class Span:
    """An interval of the real line; a single point where both ends are closed and the same."""

    low: Expr
    high: Expr
    closed: tuple[bool, bool]


@dataclass(frozen=True, slots=True)
class Region:
    """A union of intervals; none is the empty set."""

    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of equal length."""

    rows: tuple[tuple[Expr, ...], ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """Sides joined by signs: = < > ≤ ≥ ≠ ≈."""

    sides: tuple[Scalar, ...]
    signs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Words:
    """Text, folded to small letters and single spaces."""

    text: str


@dataclass(frozen=True, slots=True)
class Letters:
    """The letters chosen, in capitals."""

    letters: frozenset[str]


Answer = Scalar | Many | Region | Matrix | Relation | Words | Letters

INFINITY = Constant("oo")
ANY_INTEGER = Symbol("any integer")
"""The letter that an answer says to stand for every integer."""
ALL_REALS = Region((Span(Call("neg", (INFINITY,)), INFINITY, (False, False)),))


def word_set(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


def add(left: Expr, right: Expr) -> Expr:
    """left + right, with sums flattened."""
    head = left.args if isinstance(left, Call) and left.name == "add" else (left,)
    return Call("add", (*head, right))


def mul(left: Expr, right: Expr) -> Expr:
    """left · right, with products flattened."""
    head = left.args if isinstance(left, Call) and left.name == "mul" else (left,)
    return Call("mul", (*head, right))


def neg(expr: Expr) -> Expr:
    """-expr."""
    return Call("neg", (expr,))


def symbols(expr: Expr) -> frozenset[str]:
    """The names of its variables."""
    if isinstance(expr, Symbol):
        return frozenset({expr.name})
    if isinstance(expr, Call):
        return frozenset().union(*(symbols(arg) for arg in expr.args))
    return frozenset()


def names(answer: "Answer | Expr") -> frozenset[str]:
    """The names of the variables of an answer."""
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


def renamed(answer: T, old: str, new: str) -> T:
    """The answer, or expression, with another name for a variable.

    >>> renamed(Scalar(Call("mul", (Symbol("k"), Constant("pi")))), "k", "n").expr.args
    (Symbol(name='n'), Constant(name='pi'))
    """
    if isinstance(answer, tuple):
        return tuple(renamed(part, old, new) for part in answer)  # type: ignore[return-value]
    if isinstance(answer, Symbol):
        return Symbol(new) if answer.name == old else answer  # type: ignore[return-value]
    if not isinstance(answer, Call | Scalar | Many | Relation | Region | Span | Matrix):
        return answer
    changed = {f.name: renamed(getattr(answer, f.name), old, new) for f in fields(answer)}
    return replace(answer, **changed)


def contains(expr: Expr, names: frozenset[str]) -> bool:
    """Whether an operation or constant of one of these names occurs.

    >>> contains(Call("sin", (Constant("pi"),)), frozenset({"pi"}))
    True
    """
    if isinstance(expr, Call):
        return expr.name in names or any(contains(arg, names) for arg in expr.args)
    return isinstance(expr, Constant) and expr.name in names


def branches(expr: Expr) -> tuple[Expr, ...]:
    """The expressions that ± and ∓ stand for: one without them, else two, all upper and all lower signs."""
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
