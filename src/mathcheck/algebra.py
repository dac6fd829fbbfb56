"""Identities that SymPy decides: rational functions exactly, others by simplification.

Trees of SymPy are built here, constructor by constructor; no text is ever passed to SymPy. Importing it
takes half a second, so call `load` before a clock starts.
"""

from collections.abc import Callable
from math import comb
from typing import Any

from mathcheck.exact import exact_value
from mathcheck.reading.tree import Call, Expr, Numeral, Symbol, TooHardError, symbols, word_set

MOST_TERMS = 1500
MOST_EXPONENT = 60
MOST_NODES = 120

SymPy = Any
"""A tree of SymPy, which has no types."""


def load() -> SymPy:
    import sympy  # type: ignore[import-untyped]

    return sympy


def rational_identity(left: Expr, right: Expr) -> bool | None:
    """Return whether two rational functions are identical; None if they are not rational, constant or too
    large.
    """
    above_left, below_left = _terms(left)
    above_right, below_right = _terms(right)
    most = max(above_left * below_right, above_right * below_left)
    if not symbols(left) | symbols(right) or most > MOST_TERMS:
        return None
    sympy = load()
    difference = sympy.together(tree_of(left) - tree_of(right))
    numerator, _ = sympy.fraction(difference)
    return bool(sympy.expand(numerator) == 0)


def simplifies_to_zero(left: Expr, right: Expr) -> bool:
    """Return whether SymPy simplifies left - right to 0."""
    if _nodes(left) + _nodes(right) > MOST_NODES:
        return False
    difference = tree_of(left) - tree_of(right)
    if difference == 0:
        return True
    # Constants too large for our own evaluation would also take SymPy too long.
    if not symbols(left) or symbols(left) != symbols(right):
        return False
    if max(*_terms(left, atoms=True), *_terms(right, atoms=True)) > MOST_TERMS:
        return False
    return bool(load().simplify(difference) == 0)


def _nodes(expr: Expr) -> int:
    return 1 + sum(_nodes(arg) for arg in expr.args) if isinstance(expr, Call) else 1


_TOO_MANY = 10**9
_NAMESAKES = word_set(
    "sin cos tan cot sec csc sinh cosh tanh asin acos atan acot asec acsc sqrt cbrt re im floor "
    "factorial binomial"
)


def _terms(expr: Expr, *, atoms: bool = False) -> tuple[int, int]:
    """Return upper bounds of the number of terms of numerator and denominator when multiplied out.

    The bound is _TOO_MANY if the expression is not a rational function; with `atoms`, other functions count
    as the product of their arguments' terms.
    """
    if not isinstance(expr, Call):
        return (1, 1) if atoms or isinstance(expr, Numeral | Symbol) else (_TOO_MANY, 1)
    bounds = [_terms(arg, atoms=atoms) for arg in expr.args]
    above, below = bounds[0]
    if expr.name == "pow":
        power = exact_value(expr.args[1])
        if power is None or power.denominator > 1:
            return (above * below * max(bounds[1]) if atoms else _TOO_MANY), 1
        n = abs(power.numerator)
        if max(above, below) > 1 and (n > MOST_EXPONENT or max(above, below) > MOST_TERMS):
            return _TOO_MANY, 1
        raised = (comb(above + n - 1, n) if above > 1 else 1), (comb(below + n - 1, n) if below > 1 else 1)
        return raised if power >= 0 else (raised[1], raised[0])
    if expr.name not in ("add", "mul", "div", "neg", "percent"):
        return (min(sum(a * b for a, b in bounds), _TOO_MANY) if atoms else _TOO_MANY), 1
    for a, b in bounds[1:]:
        if expr.name == "add":
            above, below = above * b + a * below, below * b
        elif expr.name == "mul":
            above, below = above * a, below * b
        else:
            above, below = above * b, below * a
        above, below = min(above, _TOO_MANY), min(below, _TOO_MANY)
    return above, below


def tree_of(expr: Expr) -> SymPy:
    """Return the expression as a tree of SymPy. Raises TooHardError for powers that SymPy would multiply
    out.
    """
    sympy = load()
    if isinstance(expr, Numeral):
        return sympy.Rational(expr.value.numerator, expr.value.denominator)
    if isinstance(expr, Symbol):
        return (
            sympy.Symbol(expr.name, positive=True) if expr.name == "base of log" else sympy.Symbol(expr.name)
        )
    if not isinstance(expr, Call):
        return {"pi": sympy.pi, "e": sympy.E, "i": sympy.I, "oo": sympy.oo}[expr.name]
    value = exact_value(expr)  # it bounds what SymPy would compute
    if value is not None:
        return sympy.Rational(value.numerator, value.denominator)
    build = _builders(sympy).get(expr.name)
    if build is None:
        raise TooHardError(f"{expr.name} is not given to SymPy")
    return build(*(tree_of(arg) for arg in expr.args))


def _builders(sympy: SymPy) -> dict[str, Callable[..., SymPy]]:
    hundredth, degree = sympy.Rational(1, 100), sympy.pi / 180

    def power(base: SymPy, exponent: SymPy) -> SymPy:
        if exponent.is_number and not (exponent.is_Rational and abs(exponent) <= 10**4):
            return sympy.Pow(base, exponent, evaluate=False)
        return sympy.Pow(base, exponent)

    return {
        **{name: getattr(sympy, name) for name in _NAMESAKES},
        "add": sympy.Add,
        "mul": sympy.Mul,
        "div": lambda above, below: above / below,
        "neg": lambda value: -value,
        "pow": power,
        "exp": sympy.exp,
        "abs": sympy.Abs,
        "ln": sympy.log,
        "lg": lambda value: sympy.log(value, 10),
        "log": sympy.log,
        "ceil": sympy.ceiling,
        "percent": lambda value: value * hundredth,
        "degree": lambda value: value * degree,
        "root": sympy.real_root,
    }
