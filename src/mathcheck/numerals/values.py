"""Compute the values of numeric expressions, as exact fractions."""

import re
from dataclasses import dataclass, field
from fractions import Fraction

MOST_CHARACTERS = 1000
MOST_EXPONENT = 1000
_MOST_BITS = 10_000

_GROUPED = re.compile(r"[0-9]{1,3}(?:([,'_])[0-9]{3})(?:\1[0-9]{3})*(?:\.[0-9]+)?")
_PLAIN = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE]([+-]?[0-9]+))?")
_DECIMAL_COMMA = re.compile(r"[0-9]{1,3}(?:\.[0-9]{3})+,[0-9]+")


@dataclass(slots=True)
class Piece:
    """A part of an expression.

    Kinds: n numeral, g group in brackets, v variable, f function, p postfix such as !; any other kind is an
    operator.
    """

    kind: str
    start: int
    end: int
    raw: str = ""
    scale: int = 0
    """Power of ten after a numeral."""
    more: Fraction = Fraction(0)
    """The half of "and a half"."""
    numbers: "list[NumberSpan]" = field(default_factory=list)
    """Numbers within a group."""
    spaced: bool = False
    """Whether only blanks separate it from the numeral before it."""
    measured: int = 0
    """Start of its unit or percent sign; 0 if it has none."""


@dataclass(slots=True)
class NumberSpan:
    """The value of an expression, None if it is unreadable, and its position."""

    value: Fraction | None
    start: int
    end: int


_POWER = r"\^(?:[-+]?n|g)"
_LISTED = re.compile("n(?:_n)*")
_FRACTION = re.compile("(?:n_)*n/n")
_POWERED = re.compile(f"[ng]{_POWER}")
_SCIENTIFIC = re.compile(f"n×n{_POWER}")


def values(chain: list[Piece]) -> list[Fraction | None]:
    """Return the values of an expression: one, or several if only blanks or commas separate numerals."""
    sign = 1
    if len(chain) > 1 and chain[0].kind in ("-", "+"):
        sign, chain = (-1 if chain[0].kind == "-" else 1), chain[1:]
    shape = "".join(("_" if piece.spaced else "") + piece.kind for piece in chain)
    if shape == "g":
        numbers = chain[0].numbers
        value = numbers[0].value if len(numbers) == 1 else None
        return [None if value is None else sign * value]
    values: list[Fraction | None] = [None]
    if _LISTED.fullmatch(shape):
        values = _list_values(chain)
    elif _FRACTION.fullmatch(shape):
        values = [_fraction_value(chain)]
    elif _POWERED.fullmatch(shape):
        values = [_power_value(chain)]
    elif _SCIENTIFIC.fullmatch(shape) and chain[2].raw == "10":
        mantissa, power = _single_value(chain[0]), _power_value(chain[2:])
        values = [None if mantissa is None or power is None else mantissa * power]
    if values[0] is not None:
        values[0] *= sign
    return values


def _list_values(chain: list[Piece]) -> list[Fraction | None]:
    if len(chain) == 1:
        return _numeral_values(chain[0])
    together = _grouped_value(chain)
    return (
        [together] if together is not None else [value for piece in chain for value in _numeral_values(piece)]
    )


def _grouped_value(chain: list[Piece]) -> Fraction | None:
    """Return 1 234 567 as one number; None if the numerals are not groups of digits."""
    spaced = "'".join(piece.raw for piece in chain)
    if (
        not _GROUPED.fullmatch(spaced)
        or spaced[0] == "0"
        or any(piece.scale or piece.more for piece in chain)
    ):
        return None
    return _single_value(Piece("n", 0, 0, raw=spaced))


def _fraction_value(chain: list[Piece]) -> Fraction | None:
    """Return the value of 3/4 or 2 3/4."""
    *integer, above, _, below = chain
    if not below.raw.isdigit() or int(below.raw[:MOST_CHARACTERS]) == 0 or len(below.raw) > MOST_CHARACTERS:
        return None
    top = _single_value(above)
    if top is None or top.denominator > 1 or below.scale or "." in above.raw:
        return None
    fraction = top / int(below.raw)
    if not integer:
        return fraction
    before = _single_value(integer[0]) if len(integer) == 1 else _grouped_value(integer)
    proper = before is not None and before.denominator == 1 and fraction < 1
    return before + fraction if proper and before is not None else None


def _power_value(chain: list[Piece]) -> Fraction | None:
    """Return the value of 10^3, 2^-3 or (-2)^{3}."""
    base, exponent = (
        piece.numbers[0].value if piece.kind == "g" and len(piece.numbers) == 1 else _single_value(piece)
        for piece in (chain[0], chain[-1])
    )
    if base is None or exponent is None or exponent.denominator > 1 or abs(exponent) > MOST_EXPONENT:
        return None
    times = -exponent.numerator if chain[-2].kind == "-" else exponent.numerator
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits * abs(times) > _MOST_BITS or (base == 0 and times <= 0):
        return None
    return Fraction(base**times)


def _single_value(piece: Piece) -> Fraction | None:
    """Return the value of a numeral, if it has exactly one."""
    values = _numeral_values(piece) if piece.kind == "n" else [None]
    return values[0] if len(values) == 1 else None


def _numeral_values(piece: Piece) -> list[Fraction | None]:
    """Return the values of a numeral: one, or several if commas separate them."""
    raw = piece.raw
    if len(raw) > MOST_CHARACTERS:
        return [None]
    values: list[Fraction | None]
    if _GROUPED.fullmatch(raw):
        values = [Fraction(re.sub("[,'_]", "", raw))]
    else:
        pieces = raw.split(",")
        values = [_decimal_value(number) for number in pieces]
        groups = len(pieces) > 1 and len(pieces[-1].partition(".")[0]) == 3  # 1,23,456 has no meaning
        if None in values or groups or _DECIMAL_COMMA.fullmatch(raw):
            return [None]
    if values[-1] is not None:
        values[-1] = values[-1] * 10**piece.scale + piece.more
    return values


def _decimal_value(numeral: str) -> Fraction | None:
    parsed = _PLAIN.fullmatch(numeral)
    if parsed is None or abs(int(parsed.group(2) or 0)) > MOST_EXPONENT:
        return None
    return Fraction(numeral)
