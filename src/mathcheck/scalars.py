"""Read one value with money signs, units, percent signs and words for what is counted."""

import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from mathcheck.exact import UndefinedError, exact_value
from mathcheck.reading.lexer import CURRENCIES, Token, tokenize
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
    operands,
    symbols,
    word_set,
)
from mathcheck.reading.units import find_unit, read_unit

MOST_LABEL_WORDS = 6
MOST_UNIT_TOKENS = 16
LARGE = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
"""Powers of ten that are written as words after a number."""
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


def read_scalar(tokens: Sequence[Token], *, units: bool = True) -> Scalar:
    """Parse a value with its unit or label. Raises UnreadableError or TooHardError.

    >>> from mathcheck.reading.lexer import tokenize
    >>> read_scalar(tokenize("18 eggs a day")).label, read_scalar(tokenize("5 km")).unit.factor
    (('eggs', 'a', 'day'), Fraction(1000, 1))
    """
    quantity = _quantity(tokens) if units else None
    try:
        value = _scalar(tokens, units=units)
    except UnreadableError:
        if quantity is None or quantity.unit is None:
            raise
        return quantity
    return replace(value, quantity=quantity) if symbols(value.expr) else value


def _scalar(tokens: Sequence[Token], *, units: bool) -> Scalar:
    negative, money, value_tokens = _split_currency(tokens)
    parser = Parser(value_tokens, units=units)
    expr = parser.expression()
    rest = parser.rest
    stray = next((t for t in rest if t.kind not in ("word", "text", "sign", "number")), None)
    if stray is not None:
        raise UnreadableError(f"{stray.text[:20]!r} is not expected there")
    after_words = [i for i in range(1, len(rest)) if rest[i - 1].is_word]
    second = next((i for i in after_words if rest[i].kind == "number"), 0)
    if second and units:
        return _compound_value(expr, rest[:second], read_scalar(rest[second:]))
    if rest and rest[0].is_word and rest[0].text.lower() in LARGE:
        expr = mul(expr, Call("pow", (_TEN, Numeral(Fraction(LARGE[rest[0].text.lower()])))))
        rest = rest[1:]
    words = [token.text.lower() for token in rest[:2]]
    if words == ["per", "cent"] or words[:1] == ["percent"]:
        expr, rest = Call("percent", (expr,)), rest[1 if words[0] == "percent" else 2 :]
    if negative:
        expr = neg(expr)
    if rest and units and not symbols(expr):
        expr, unit, label = _unit_or_label(expr, rest)
    elif rest:
        raise UnreadableError(f"{value_tokens[0].text[:20]!r} is not expected there")
    else:
        expr, unit = _temperature(expr)
        label = ()
    if money is not None:
        if unit is not None and unit != money:
            raise UnreadableError("it has two units")
        unit = money
    return Scalar(expr, unit, label)


def _compound_value(expr: Expr, behind: list[Token], rest: Scalar) -> Scalar:
    """Return 2 hours 30 minutes in basic units."""
    try:
        value, other = exact_value(expr), exact_value(rest.expr)
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
    """Return a number with the unit or the one word after it; None if the tokens are anything else."""
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
    """Return 2hr, which was read as two hours, as 2 · h · r; None unless h and r are among the variables."""
    name = value.unit.name if value.unit is not None else ""
    letters = set(re.findall("[A-Za-z]", name))
    if not letters or not letters <= variables:
        return None
    parser = Parser(tokenize(name), units=False)
    product = parser.expression()
    return None if parser.rest else Scalar(mul(value.expr, product))


def _unit_phrase(tokens: Sequence[Token]) -> str:
    r"""Return tokens as units are written: \frac{m}{s^2} as m / (s^2), \mu m as µm, k \Omega as kOmega."""
    phrase = " ".join("µ" if t.is_command("mu") else t.text for t in tokens)
    phrase = _FRACTION_OF_UNITS.sub(r"\1 / ( \2 )", phrase)
    return _MICRO_OR_OHM.sub("", phrase)


def _split_currency(tokens: Sequence[Token]) -> tuple[bool, Unit | None, list[Token]]:
    """Return whether a minus stands before a currency sign, the currency, and the other tokens."""
    rest = list(tokens)
    signs = [token.text if token.kind in ("sign", "word") else "" for token in rest[:3]]
    if signs[:2] == ["US", "$"]:
        rest, signs = rest[1:], signs[1:]
    negative = signs[:1] == ["-"]
    for sign in signs[negative : negative + 1]:
        if sign in CURRENCIES:
            return negative, find_unit(sign), rest[negative + 1 :]
    return False, None, rest


def _unit_or_label(expr: Expr, behind: list[Token]) -> tuple[Expr, Unit | None, tuple[str, ...]]:
    """Return the value, unit and label that the tokens after a constant give it."""
    words = [token.text for token in behind]
    if words[0].lower() in ("degree", "degrees", "deg"):
        expr, words = Call("degree", (expr,)), words[1:]
    degrees = operands(expr, "degree")
    if degrees and words:
        scale = {"c": "celsius", "f": "fahrenheit"}.get(words[0].lower(), words[0].lower())
        if scale in ("celsius", "fahrenheit"):
            return degrees[0], find_unit(scale), ()
    if not words:
        return expr, None, ()
    area = _AREA.fullmatch(" ".join(words))
    if area:
        return expr, None, (_POWERS[area[1]],)
    if not degrees:
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
    """Raise UnreadableError unless these words only name what is counted."""
    if len(words) > MOST_LABEL_WORDS:
        raise UnreadableError("too many words behind the value")
    for word in words:
        if not re.fullmatch(r"[A-Za-z]+|'|-", word) or word.lower() in _NOT_LABELS or word.lower() in LARGE:
            raise UnreadableError(f"{word[:20]!r} cannot stand behind a value")


def _temperature(expr: Expr) -> tuple[Expr, Unit | None]:
    r"""Return the value and unit of 20^\circ C, which the grammar reads as a product with C."""
    value, *others = operands(expr, "mul") or (expr,)
    degrees = operands(value, "degree")
    if degrees and others in ([Symbol("C")], [Symbol("F")]):
        return degrees[0], find_unit("celsius" if others == [Symbol("C")] else "fahrenheit")
    return expr, None
