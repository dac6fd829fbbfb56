"""Units of measure: their names, what they measure and how large they are, as exact fractions."""

import re
from fractions import Fraction

from posttrain.verifiers.math.reading.tree import Unit

_TABLE = """
m meter metre                     | m       | 1
mm millimeter millimetre          | m       | 1/1000
cm centimeter centimetre          | m       | 1/100
dm decimeter decimetre            | m       | 1/10
km kilometer kilometre            | m       | 1000
nm nanometer nanometre            | m       | 1/1000000000
inch inches in                    | m       | 127/5000
ft foot feet                      | m       | 381/1250
yd yard                           | m       | 1143/1250
mi mile                           | m       | 201168/125
s sec second                      | s       | 1
ms millisecond                    | s       | 1/1000
min minute mins                   | s       | 60
h hr hour hrs                     | s       | 3600
day                               | s       | 86400
week                              | s       | 604800
month                             | month   | 1
year yr yrs                       | month   | 12
decade                            | month   | 120
century centuries                 | month   | 1200
g gram gramme                     | g       | 1
mg milligram                      | g       | 1/1000
kg kilogram kilo                  | g       | 1000
ton tonne                         | g       | 1000000
lb lbs pound                      | g       | 45359237/100000
oz ounce                          | g       | 45359237/1600000
L l liter litre                   | m3      | 1/1000
mL ml milliliter millilitre       | m3      | 1/1000000
cL cl centiliter centilitre       | m3      | 1/100000
gal gallon                        | m3      | 473176473/125000000000
quart                             | m3      | 473176473/500000000000
pint                              | m3      | 473176473/1000000000000
ha hectare                        | m2      | 10000
acre                              | m2      | 316160658/78125
mph                               | m s-1   | 1397/3125
kph kmh                           | m s-1   | 5/18
N newton                          | g m s-2 | 1000
J joule                           | g m2 s-2 | 1000
kJ kilojoule                      | g m2 s-2 | 1000000
W watt                            | g m2 s-3 | 1000
kW kilowatt                       | g m2 s-3 | 1000000
kWh                               | g m2 s-2 | 3600000000
Pa pascal                         | g m-1 s-2 | 1000
kPa                               | g m-1 s-2 | 1000000
Hz hertz                          | s-1     | 1
kHz                               | s-1     | 1000
A ampere amp                      | A       | 1
V volt                            | g m2 s-3 A-1 | 1000
mol mole                          | mol     | 1
K kelvin                          | K       | 1
celsius                           | celsius | 1
fahrenheit                        | fahrenheit | 1
rad radian                        |         | 1
bit                               | bit     | 1
byte                              | bit     | 8
kB kilobyte                       | bit     | 8000
MB megabyte                       | bit     | 8000000
GB gigabyte                       | bit     | 8000000000
dollar usd buck $                 | dollar  | 1
cent ¢                            | dollar  | 1/100
euro eur €                        | euro    | 1
sterling gbp quid £               | sterling | 1
yen jpy ¥                         | yen     | 1
rupee inr rs ₹                    | rupee   | 1
"""

_FEWEST_LETTERS_FOLDED = 4
_MOST_EXPONENT = 6
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_POWERS_BEHIND = {"squared": 2, "cubed": 3}
_PIECE = re.compile(r"\s*([A-Za-z]+|[$€£¥₹¢]|\^\s*\{?\s*\(?\s*-?\s*\d\s*\)?\s*\}?|[*/])")


def _dimension(text: str) -> dict[str, int]:
    return {name: int(power or 1) for name, power in re.findall(r"([A-Za-z]+)(-?\d+)?", text)}


def _table() -> dict[str, Unit]:
    units: dict[str, Unit] = {}
    for line in _TABLE.strip().splitlines():
        names, dimension, factor = line.split("|")
        unit = Unit(Fraction(factor.strip()), tuple(sorted(_dimension(dimension).items())))
        for name in names.split():
            units[name] = unit
            if len(name) >= _FEWEST_LETTERS_FOLDED or name in ("day", "ton"):
                units[f"{name}s"] = unit
    return units


UNITS = _table()


def unit_named(word: str) -> Unit | None:
    """The unit of this name; long names in any case, short ones as written.

    >>> unit_named("Meters") == unit_named("m"), unit_named("M")
    (True, None)
    """
    unit = UNITS.get(word)
    if unit is None and len(word) >= _FEWEST_LETTERS_FOLDED - 1:
        unit = UNITS.get(word.casefold())
    return unit


def read_unit(phrase: str) -> Unit | None:
    """The unit that a phrase names; None if it names none that is known.

    >>> read_unit("km per hour").factor, read_unit("square meters") == read_unit("m ^ 2")
    (Fraction(5, 18), True)
    """
    pieces, end = [], 0
    while end < len(phrase.rstrip()):
        piece = _PIECE.match(phrase, end)
        if piece is None:
            return None
        pieces.append(piece.group(1))
        end = piece.end()
    factor, powers, sign, power = Fraction(1), dict[str, int](), 1, 1
    last: tuple[Unit, int] | None = None
    for piece_text in pieces:
        if piece_text in ("/", "per", "a", "each") and last is not None:
            sign, last = -1, None
        elif piece_text == "*" and last is not None:
            last = None
        elif piece_text in _POWERS:
            power = _POWERS[piece_text]
        elif last is not None and (piece_text.startswith("^") or piece_text in _POWERS_BEHIND):
            digits = re.sub(r"[^\d-]", "", piece_text)
            times = _POWERS_BEHIND[piece_text] if piece_text in _POWERS_BEHIND else int(digits)
            if abs(last[1] * times) > _MOST_EXPONENT:
                return None
            factor *= multiplied(last[0], last[1] * (times - 1), powers)
            last = (last[0], last[1] * times)
        else:
            unit = unit_named(piece_text)
            if unit is None or (piece_text == "a" and last is None):
                return None
            factor *= multiplied(unit, sign * power, powers)
            last, power = (unit, sign * power), 1
    if last is None or any(abs(n) > _MOST_EXPONENT for n in powers.values()):
        return None
    return Unit(factor, tuple(sorted((name, n) for name, n in powers.items() if n)))


def multiplied(unit: Unit, power: int, powers: dict[str, int]) -> Fraction:
    """The factor of unit ** power, whose dimension is counted into `powers`."""
    for name, n in unit.dimension:
        powers[name] = powers.get(name, 0) + n * power
    return Fraction(unit.factor**power)
