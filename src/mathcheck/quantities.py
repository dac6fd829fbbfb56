"""Whether one value is another, with their units, labels, percent signs and degrees."""

from dataclasses import dataclass
from fractions import Fraction

from mathcheck.identity import Identity, compare
from mathcheck.reading.tree import Call, Expr, Numeral, Scalar, mul, symbols


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    kind: str = "auto"
    """Of the gold."""
    tolerance: Fraction = Fraction(0)
    """Greatest difference that is still equal."""
    relative: bool = False
    """Whether the tolerance is a part of the gold."""
    unsimplified: bool = False
    """Whether 3 + 4 may stand for 7."""


def same_quantity(given: Scalar, gold: Scalar, rules: Rules) -> Identity:
    """Whether a value is the gold one; raises TooHardError."""
    strict = rules.kind == "unit"
    if strict or given.unit is not None or given.label:
        gold = gold.quantity or gold
    if strict or gold.unit is not None or gold.label:
        given = given.quantity or given
    if given.quantity and gold.quantity and symbols(given.expr) != symbols(gold.expr):  # 5 J and 5 N m
        given, gold = given.quantity, gold.quantity
    refused = _other_unit(given, gold, rules.kind)
    if refused:
        return Identity(False, refused)
    if is_percent(gold.expr) and not is_percent(given.expr) and rules.kind == "unit":
        return Identity(False, "the percent sign is missing")
    ours, theirs = given.expr, gold.expr
    if given.unit is not None and gold.unit is not None and given.unit.factor != gold.unit.factor:
        # In units of the gold, in which a tolerance is too.
        ours = mul(ours, Numeral(given.unit.factor / gold.unit.factor))
    found = _compared(ours, theirs, rules)
    if found.same and not _is_worked_out(given, gold, rules):
        return Identity(False, "the value is right, but it is not worked out")
    return found


def _other_unit(given: Scalar, gold: Scalar, kind: str) -> str:
    """Why the unit is not the gold's; empty if it is, or none is asked for."""
    if gold.unit is not None:
        if given.unit is None:
            return (
                "the unit is missing" if kind == "unit" else "the unit is another one" if given.label else ""
            )
        return "" if given.unit.dimension == gold.unit.dimension else "the unit measures something else"
    if gold.label and (given.unit is not None or given.label):
        ours, theirs = ({_singular(word) for word in side.label} for side in (given, gold))
        return "" if ours & theirs else "something else is counted"
    return "the unit is missing" if gold.label and kind == "unit" else ""


def _singular(word: str) -> str:
    """A word of what is counted, in small letters and without its s; symbols, as mX and MX, stay the same."""
    if len(word) <= 4 and not (word.islower() or word.istitle()):
        return word
    return word.lower().rstrip("s") or word.lower() if len(word) > 2 else word


def _compared(given: Expr, gold: Expr, rules: Rules) -> Identity:
    """By value; an angle in degrees also by its number, where the other bears no sign."""
    found = compare(given, gold, rules.tolerance, relative=rules.relative)
    ours, theirs = _degrees(given), _degrees(gold)
    if found.same or (ours is None) == (theirs is None) or (rules.kind == "unit" and theirs is not None):
        return found
    return compare(ours or given, theirs or gold, rules.tolerance, relative=rules.relative)


def _degrees(expr: Expr) -> Expr | None:
    if isinstance(expr, Call) and expr.name == "neg":
        inner = _degrees(expr.args[0])
        return None if inner is None else Call("neg", (inner,))
    return expr.args[0] if isinstance(expr, Call) and expr.name == "degree" else None


def is_percent(expr: Expr) -> bool:
    """Whether it is 50% or -50%."""
    if isinstance(expr, Call) and expr.name == "neg":
        return is_percent(expr.args[0])
    return isinstance(expr, Call) and expr.name == "percent"


def _is_worked_out(given: Scalar, gold: Scalar, rules: Rules) -> bool:
    if rules.unsimplified or rules.kind == "expression" or symbols(gold.expr) - {"base of log"}:
        return True
    return is_worked_out(given.expr) or not is_worked_out(gold.expr)


def is_worked_out(expr: Expr) -> bool:
    """Whether no sum or product of plain numbers is left in it; a fraction, power or root may be.

    >>> three, four = Numeral(Fraction(3)), Numeral(Fraction(4))
    >>> is_worked_out(Call("add", (three, four))), is_worked_out(Call("div", (three, four)))
    (False, True)
    """
    if not isinstance(expr, Call):
        return True
    plain = [arg for arg in expr.args if _is_plain(arg)]
    if expr.name in ("add", "mul") and len(plain) > 1:
        return False
    if expr.name == "div" and len(plain) == 2 and not all(_is_numeral(arg) for arg in plain):
        return False
    return all(is_worked_out(arg) for arg in expr.args)


def _is_numeral(expr: Expr) -> bool:
    return isinstance(expr, Numeral) or (
        isinstance(expr, Call) and expr.name == "neg" and _is_numeral(expr.args[0])
    )


def _is_plain(expr: Expr) -> bool:
    """A numeral or a fraction of two, with signs."""
    if isinstance(expr, Call) and expr.name == "neg":
        return _is_plain(expr.args[0])
    return _is_numeral(expr) or (
        isinstance(expr, Call) and expr.name == "div" and all(_is_numeral(arg) for arg in expr.args)
    )
