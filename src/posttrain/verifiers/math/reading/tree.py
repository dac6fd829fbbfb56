"""What an answer is once it has been read: expressions, and the answers made of them.

Everything is frozen and plain. Nothing here computes.
"""

from dataclasses import dataclass, field
from fractions import Fraction


class UnreadableError(Exception):
    """A text that is not in the grammar; the message says what is wrong."""


class TooHardError(Exception):
    """An answer beyond the bounds: too many digits, too deep, too large a power."""


@dataclass(frozen=True, slots=True)
class Number:
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


Expr = Number | Symbol | Constant | Call


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
class Choice:
    """The letters chosen, in capitals."""

    letters: frozenset[str]


Answer = Scalar | Many | Region | Matrix | Relation | Words | Choice

INFINITY = Constant("oo")
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
