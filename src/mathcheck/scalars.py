"""One value with what stands around it: money signs, units, percent, words that name what is counted."""

import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from mathcheck.exact import UndefinedError, exact
from mathcheck.reading.lexer import CURRENCIES, Token, tokens
from mathcheck.reading.parser import Parser
from mathcheck.reading.tree import (
    Call,
    Expr,
    Numeral,
    Scalar,
    Symbol,
    Unit,
    UnreadableError,
    mul,
    neg,
    symbols,
    word_set,
)
from mathcheck.reading.units import read_unit, unit_named

MOST_LABEL_WORDS = 6
MOST_UNIT_TOKENS = 16
LARGE = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
"""Powers of ten that stand as words behind a number."""
FRACTIONS = word_set(
    "halves thirds fourths fifths sixths sevenths eighths ninths tenths hundredths thousandths"
)
_AREA = re.compile(r"units? \^ (?:\{ )?([23])(?: \})?", re.IGNORECASE)
_IN_BRACES = r"\{ ([^{}]*(?:\{[^{}]*\}[^{}]*)*) \}"
_FRACTION_OF_UNITS = re.compile(f"frac {_IN_BRACES} {_IN_BRACES}")
_MICRO_OR_OHM = re.compile(r"(?<=µ) |(?<=\b[µmkMG]) (?=Omega)")
_POWERS = {"2": "square", "3": "cubic"}
_TEN = Numeral(Fraction(10))
_NOT_LABELS = word_set(
    "not no nor isn less more than minus plus times divided over half double twice squared cubed if when mod "
    "percent percentage dozen unless except without from to power factorial"
)


def scalar(tokens: Sequence[Token], *, units: bool = True) -> Scalar:
    """A value with its unit or label; raises UnreadableError or TooHardError.

    >>> from mathcheck.reading.lexer import tokens
    >>> scalar(tokens("18 eggs a day")).label, scalar(tokens("5 km")).unit.factor
    (('eggs', 'a', 'day'), Fraction(1000, 1))
    """
    quantity = _quantity(tokens) if units else None
    try:
        found = _scalar(tokens, units=units)
    except UnreadableError:
        if quantity is None or quantity.unit is None:
            raise
        return quantity
    return replace(found, quantity=quantity) if symbols(found.expr) else found


def _scalar(tokens: Sequence[Token], *, units: bool) -> Scalar:
    negative, money, rest = _money(tokens)
    parser = Parser(rest, units=units)
    expr = parser.expression()
    behind = parser.rest
    foreign = next((t for t in behind if t.kind not in ("word", "text", "sign", "number")), None)
    if foreign is not None:
        raise UnreadableError(f"{foreign.text[:20]!r} cannot stand there")
    after_words = [i for i in range(1, len(behind)) if behind[i - 1].kind in ("word", "text")]
    second = next((i for i in after_words if behind[i].kind == "number"), 0)
    if second and units:
        return _compound(expr, behind[:second], scalar(behind[second:]))
    if behind and behind[0].kind in ("word", "text") and behind[0].text.lower() in LARGE:
        expr = mul(expr, Call("pow", (_TEN, Numeral(Fraction(LARGE[behind[0].text.lower()])))))
        behind = behind[1:]
    words = [token.text.lower() for token in behind[:2]]
    if words == ["per", "cent"] or words[:1] == ["percent"]:
        expr, behind = Call("percent", (expr,)), behind[1 if words[0] == "percent" else 2 :]
    if negative:
        expr = neg(expr)
    if behind and units and not symbols(expr):
        expr, unit, label = _behind(expr, behind)
    elif behind:
        raise UnreadableError(f"{behind[0].text[:20]!r} cannot stand there")
    else:
        expr, unit = _temperature(expr)
        label = ()
    if money is not None:
        if unit is not None and unit != money:
            raise UnreadableError("it has two units")
        unit = money
    return Scalar(expr, unit, label)


def _compound(expr: Expr, behind: list[Token], rest: Scalar) -> Scalar:
    """2 hours 30 minutes, in basic units."""
    try:
        value, other = exact(expr), exact(rest.expr)
    except UndefinedError:
        value = other = None
    unit = read_unit(" ".join(token.text for token in behind[:MOST_UNIT_TOKENS]))
    if (
        value is None
        or other is None
        or unit is None
        or rest.unit is None
        or unit.dimension != rest.unit.dimension
        or not unit.dimension
        or value.denominator > 1
        or not 0 <= other * rest.unit.factor < unit.factor
    ):
        raise UnreadableError("two values stand behind one another")
    total = value * unit.factor + other * rest.unit.factor
    return Scalar(Numeral(total), Unit(Fraction(1), unit.dimension))


def _quantity(tokens: Sequence[Token]) -> Scalar | None:
    """A number with the unit or the one word that stands behind it; None if the tokens are anything else."""
    for at in range(max(1, len(tokens) - MOST_UNIT_TOKENS), len(tokens)):
        if tokens[at].kind not in ("word", "text", "command"):
            continue
        phrase = _unit_phrase(tokens[at:])
        unit = read_unit(phrase)
        word = len(tokens) == at + 1 and tokens[at].kind == "word" and (len(phrase) > 1 or phrase.isupper())
        if unit is None and not word:
            continue
        parser = Parser(tokens[:at], units=False)
        try:
            expr = parser.expression()
        except UnreadableError:
            continue
        if not parser.rest and not symbols(expr):
            return Scalar(expr, replace(unit, name=phrase)) if unit else Scalar(expr, None, (phrase,))
    return None


def as_product(value: Scalar, variables: frozenset[str]) -> Scalar | None:
    """2hr, which was read as two hours, as 2 times h times r; None if these are not all variables there."""
    name = value.unit.name if value.unit is not None else ""
    letters = set(re.findall("[A-Za-z]", name))
    if not letters or not letters <= variables:
        return None
    parser = Parser(tokens(name), units=False)
    product = parser.expression()
    return None if parser.rest else Scalar(mul(value.expr, product))


def _unit_phrase(tokens: Sequence[Token]) -> str:
    r"""The tokens as units are written: \frac{m}{s^2} as m / (s^2), \mu m as µm and k \Omega as kOmega."""
    phrase = " ".join("µ" if t.kind == "command" and t.text == "mu" else t.text for t in tokens)
    phrase = _FRACTION_OF_UNITS.sub(r"\1 / ( \2 )", phrase)
    return _MICRO_OR_OHM.sub("", phrase)


def _money(tokens: Sequence[Token]) -> tuple[bool, Unit | None, list[Token]]:
    """Whether a minus stands before a currency sign, the currency, and the other tokens."""
    rest = list(tokens)
    signs = [token.text if token.kind in ("sign", "word") else "" for token in rest[:3]]
    if signs[:2] == ["US", "$"]:
        rest, signs = rest[1:], signs[1:]
    negative = signs[:1] == ["-"]
    for sign in signs[negative : negative + 1]:
        if sign in CURRENCIES:
            return negative, unit_named(sign), rest[negative + 1 :]
    return False, None, rest


def _behind(expr: Expr, behind: list[Token]) -> tuple[Expr, Unit | None, tuple[str, ...]]:
    """The value, unit and label that the tokens behind a constant make of it."""
    words = [token.text for token in behind]
    if words[0].lower() in ("degree", "degrees", "deg"):
        expr, words = Call("degree", (expr,)), words[1:]
    if isinstance(expr, Call) and expr.name == "degree" and words:
        scale = {"c": "celsius", "f": "fahrenheit"}.get(words[0].lower(), words[0].lower())
        if scale in ("celsius", "fahrenheit"):
            return expr.args[0], unit_named(scale), ()
    if not words:
        return expr, None, ()
    area = _AREA.fullmatch(" ".join(words))
    if area:
        return expr, None, (_POWERS[area[1]],)
    if not isinstance(expr, Call) or expr.name != "degree":
        preposition = words[0] == "in" and len(words) > 1 and words[1] != "^"
        for end in range(0 if preposition else min(len(words), MOST_UNIT_TOKENS), 0, -1):
            name = " ".join(words[:end])
            unit = read_unit(name)
            if unit is not None:
                _check_label(words[end:])
                return expr, replace(unit, name=name), ()
    if words[0].lower() in FRACTIONS:
        raise UnreadableError(f"{words[0][:20]!r} makes a fraction of the value")
    _check_label(words)
    return expr, None, tuple(words)


def _check_label(words: list[str]) -> None:
    """Raises UnreadableError unless these words only say what is counted."""
    if len(words) > MOST_LABEL_WORDS:
        raise UnreadableError("too many words behind the value")
    for word in words:
        if not re.fullmatch(r"[A-Za-z]+|'|-", word) or word.lower() in _NOT_LABELS or word.lower() in LARGE:
            raise UnreadableError(f"{word[:20]!r} cannot stand behind a value")


def _temperature(expr: Expr) -> tuple[Expr, Unit | None]:
    r"""20^\circ C, which the grammar reads as a product with C."""
    if isinstance(expr, Call) and expr.name == "mul" and len(expr.args) == 2:
        value, letter = expr.args
        if isinstance(value, Call) and value.name == "degree" and letter in (Symbol("C"), Symbol("F")):
            return value.args[0], unit_named("celsius" if letter == Symbol("C") else "fahrenheit")
    return expr, None
