"""Compare values with their units, labels, percent signs and degrees."""

from dataclasses import dataclass
from fractions import Fraction

from mathcheck.identity import Identity, compare
from mathcheck.reading.tree import Call, Expr, Numeral, Scalar, mul, neg, operands, symbols


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    kind: str = "auto"
    """Type of the gold answer."""
    tolerance: Fraction = Fraction(0)
    """Greatest difference that counts as equal."""
    relative: bool = False
    """Whether the tolerance is a share of the gold."""
    unsimplified: bool = False
    """Whether 3 + 4 may stand for 7."""


def compare_quantities(answer: Scalar, gold: Scalar, rules: Rules) -> Identity:
    """Compare a value with the gold. Raises TooHardError."""
    strict = rules.kind == "unit"
    if strict or answer.unit is not None or answer.label:
        gold = gold.quantity or gold
    if strict or gold.unit is not None or gold.label:
        answer = answer.quantity or answer
    if answer.quantity and gold.quantity and symbols(answer.expr) != symbols(gold.expr):  # 5 J and 5 N m
        answer, gold = answer.quantity, gold.quantity
    unit_problem = _other_unit(answer, gold, rules.kind)
    if unit_problem:
        return Identity(False, unit_problem)
    if is_percent(gold.expr) and not is_percent(answer.expr) and rules.kind == "unit":
        return Identity(False, "the percent sign is missing")
    expr, gold_expr = answer.expr, gold.expr
    if answer.unit is not None and gold.unit is not None and answer.unit.factor != gold.unit.factor:
        # The tolerance is in units of the gold.
        expr = mul(expr, Numeral(answer.unit.factor / gold.unit.factor))
    identity = _compare_values(expr, gold_expr, rules)
    if identity.same and not _is_worked_out(answer, gold, rules):
        return Identity(False, "the value is right, but it is not worked out")
    return identity


def _other_unit(answer: Scalar, gold: Scalar, kind: str) -> str:
    """Return why the unit is wrong; "" if it is right, or the gold has none."""
    if gold.unit is not None:
        if answer.unit is None:
            return (
                "the unit is missing" if kind == "unit" else "the unit is another one" if answer.label else ""
            )
        return "" if answer.unit.dimension == gold.unit.dimension else "the unit measures something else"
    if gold.label and (answer.unit is not None or answer.label):
        words, gold_words = ({_singular(word) for word in side.label} for side in (answer, gold))
        return "" if words & gold_words else "something else is counted"
    return "the unit is missing" if gold.label and kind == "unit" else ""


def _singular(word: str) -> str:
    """Return a counted word in small letters and without its s; symbols such as mX and MX are kept."""
    if len(word) <= 4 and not (word.islower() or word.istitle()):
        return word
    return word.lower().rstrip("s") or word.lower() if len(word) > 2 else word


def _compare_values(answer: Expr, gold: Expr, rules: Rules) -> Identity:
    """Compare by value. If only one side bears a degree sign, the numbers may be equal instead."""
    identity = compare(answer, gold, rules.tolerance, relative=rules.relative)
    degrees, gold_degrees = _degrees(answer), _degrees(gold)
    same_form = (degrees is None) == (gold_degrees is None)
    if identity.same or same_form or (rules.kind == "unit" and gold_degrees is not None):
        return identity
    return compare(degrees or answer, gold_degrees or gold, rules.tolerance, relative=rules.relative)


def _degrees(expr: Expr) -> Expr | None:
    if negated := operands(expr, "neg"):
        inner = _degrees(*negated)
        return None if inner is None else neg(inner)
    return next(iter(operands(expr, "degree")), None)


def is_percent(expr: Expr) -> bool:
    """Return whether the expression is a percentage, such as 50% or -50%."""
    return bool(operands(expr, "percent")) or any(map(is_percent, operands(expr, "neg")))


def _is_worked_out(answer: Scalar, gold: Scalar, rules: Rules) -> bool:
    if rules.unsimplified or rules.kind == "expression" or symbols(gold.expr) - {"base of log"}:
        return True
    return is_worked_out(answer.expr) or not is_worked_out(gold.expr)


def is_worked_out(expr: Expr) -> bool:
    """Return whether no sum or product of plain numbers is left; fractions, powers and roots may be.

    >>> three, four = Numeral(Fraction(3)), Numeral(Fraction(4))
    >>> is_worked_out(Call("add", (three, four))), is_worked_out(Call("div", (three, four)))
    (False, True)
    """
    if not isinstance(expr, Call):
        return True
    numbers = [arg for arg in expr.args if _is_plain(arg)]
    if expr.name in ("add", "mul") and len(numbers) > 1:
        return False
    if expr.name == "div" and len(numbers) == 2 and not all(_is_numeral(arg) for arg in numbers):
        return False
    return all(is_worked_out(arg) for arg in expr.args)


def _is_numeral(expr: Expr) -> bool:
    return isinstance(expr, Numeral) or any(map(_is_numeral, operands(expr, "neg")))


def _is_plain(expr: Expr) -> bool:
    """Return whether the expression is a numeral or a fraction of two numerals, with signs."""
    quotient = operands(expr, "div")
    if _is_numeral(expr) or (quotient and all(map(_is_numeral, quotient))):
        return True
    return any(map(_is_plain, operands(expr, "neg")))
