"""Units of measure: their names, dimensions and sizes, as exact fractions."""

import re
from fractions import Fraction

from mathcheck.reading.tree import Unit

_TABLE = """
m                 | meter metre  | m             | 1                                   | n µ m c d k
s                 | second       | s             | 1                                   | n µ m
g                 | gram gramme  | g             | 1                                   | n µ m k
A                 | ampere amp   | A             | 1                                   | p n µ m k
K                 | kelvin       | K             | 1                                   | n µ m
mol               | mole         | mol           | 1                                   | p n µ m k
L                 | liter litre  | m3            | 1/1000                              | n µ m c d h
l                 |              | m3            | 1/1000                              | µ m c
N                 | newton       | g m s-2       | 1000                                | n µ m k M
Nm                |              | g m2 s-2      | 1000                                | m k
J                 | joule        | g m2 s-2      | 1000                                | n µ m k M G T
W                 | watt         | g m2 s-3      | 1000                                | n µ m k M G T
Wh                |              | g m2 s-2      | 3600000                             | m k M G T
Pa                | pascal       | g m-1 s-2     | 1000                                | m h k M G
Hz                | hertz        | s-1           | 1                                   | m k M G T
V                 | volt         | g m2 s-3 A-1  | 1000                                | n µ m k M G
Ω Omega ohm       | ohm          | g m2 s-3 A-2  | 1000                                | µ m k M G
                  | kilohm       | g m2 s-3 A-2  | 1000000
                  | megohm       | g m2 s-3 A-2  | 1000000000
S                 |              | g-1 m-2 s3 A2 | 1/1000                              | µ m
F                 | farad        | g-1 m-2 s4 A2 | 1/1000                              | p n µ m
C                 | coulomb      | A s           | 1                                   | p n µ m k
H                 | henry        | g m2 s-2 A-2  | 1000                                | n µ m
T                 | tesla        | g s-2 A-1     | 1000                                | n µ m
Wb                | weber        | g m2 s-2 A-1  | 1000                                | n µ m
Ah                |              | A s           | 3600                                | m k
eV                | electronvolt | g m2 s-2      | 801088317/5000000000000000000000000 | m k M G T
cal               | calorie      | g m2 s-2      | 4184                                | k
bar               |              | g m-1 s-2     | 100000000                           | m k
Bq                | becquerel    | decay s-1     | 1                                   | k M G T
Gy                |              | gray          | 1                                   | n µ m k
Sv                | sievert      | sievert       | 1                                   | n µ m
bps               |              | bit s-1       | 1                                   | k M G T
B                 | byte         | bit           | 8                                   | k M G T
                  | bit          | bit           | 1                                   | k M G T
rad               | radian       |               | 1                                   | m
                  | parsec       | m             | 30856775814913673                   | k M G
inch inches in    |              | m             | 127/5000
ft foot feet      |              | m             | 381/1250
yd                | yard         | m             | 1143/1250
mi                | mile         | m             | 201168/125
                  | angstrom     | m             | 1/10000000000
AU                |              | m             | 149597870700
sec secs          |              | s             | 1
min mins          | minute       | s             | 60
h hr hrs          | hour         | s             | 3600
day days          |              | s             | 86400
                  | week         | s             | 604800
                  | month        | month         | 1
yr yrs            | year         | month         | 12
                  | decade       | month         | 120
century centuries |              | month         | 1200
                  | kilo         | g             | 1000
ton tons          | tonne        | g             | 1000000
lb lbs            | pound        | g             | 45359237/100000
oz                | ounce        | g             | 45359237/1600000
amu               |              | amu           | 1
gal               | gallon       | m3            | 473176473/125000000000
                  | quart        | m3            | 473176473/500000000000
                  | pint         | m3            | 473176473/1000000000000
ha                | hectare      | m2            | 10000
                  | acre         | m2            | 316160658/78125
mph               |              | m s-1         | 1397/3125
kph kmh           |              | m s-1         | 5/18
                  | knot         | m s-1         | 463/900
atm               | atmosphere   | g m-1 s-2     | 101325000
mmHg              |              | g m-1 s-2     | 26664477483/200000
                  | torr         | g m-1 s-2     | 2533125000/19
psi               |              | g m-1 s-2     | 8896443230521/1290320
                  | horsepower   | g m2 s-3      | 37284993579113511/50000000000
lbf               |              | g m s-2       | 8896443230521/2000000000
                  | dyne         | g m s-2       | 1/100
                  | erg          | g m2 s-2      | 1/10000
rpm               |              | turn s-1      | 1/60
rev               | revolution   | turn          | 1
ppm               |              | ppm           | 1
ppb               |              | ppm           | 1/1000
dB                | decibel      | dB            | 1
KiB               |              | bit           | 8192
MiB               |              | bit           | 8388608
GiB               |              | bit           | 8589934592
KB                |              | bit           | 8000
celsius           |              | celsius       | 1
fahrenheit        |              | fahrenheit    | 1
usd $             | dollar buck  | dollar        | 1
¢                 | cent         | dollar        | 1/100
eur €             | euro         | euro          | 1
sterling gbp £    | quid         | sterling      | 1
jpy ¥             | yen          | yen           | 1
inr rs ₹          | rupee        | rupee         | 1
"""
"""Columns: symbols, names (which have a plural), dimension, size, prefixes."""

_FEWEST_LETTERS_FOLDED = 4
_MOST_EXPONENT = 6
_PREFIXES = {
    "p": ("pico", -12),
    "n": ("nano", -9),
    "µ": ("micro", -6),
    "m": ("milli", -3),
    "c": ("centi", -2),
    "d": ("deci", -1),
    "h": ("hecto", 2),
    "k": ("kilo", 3),
    "M": ("mega", 6),
    "G": ("giga", 9),
    "T": ("tera", 12),
}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_POWERS_BEHIND = {"squared": 2, "cubed": 3}
_DIGIT = r"\s*-?\s*\d\s*"
_PIECE = re.compile(
    rf"\s*([A-Za-zµΩ]+|[$€£¥₹¢]|\^\s*(?:\{{\s*(?:{_DIGIT}|\({_DIGIT}\)\s*)\}}|\({_DIGIT}\)|-?\s*\d)|[*/()])"
)


def _dimension(text: str) -> dict[str, int]:
    return {name: int(power or 1) for name, power in re.findall(r"([A-Za-z]+)(-?\d+)?", text)}


def _table() -> dict[str, Unit]:
    units: dict[str, Unit] = {}
    for line in _TABLE.strip("\n").splitlines():
        symbols, names, dimension, factor, *prefixes = (column.strip() for column in line.split("|"))
        unit = Unit(Fraction(factor), tuple(sorted(_dimension(dimension).items())))
        for letter in ["", *"".join(prefixes).split()]:
            prefix, power = _PREFIXES.get(letter, ("", 0))
            scaled = Unit(unit.factor * Fraction(10) ** power, unit.dimension)
            for symbol in symbols.split():
                units.setdefault(letter + symbol, scaled)
                if letter == "µ" and symbol != "s":  # 5 us may be a word
                    units.setdefault(f"u{symbol}", scaled)
            for name in names.split():
                units[prefix + name] = units[f"{prefix}{name}s"] = scaled
    return units


UNITS = _table()


def find_unit(word: str) -> Unit | None:
    """Return the unit of this name, or None. Case matters for short names only.

    >>> find_unit("Meters") == find_unit("m"), find_unit("kV").factor == find_unit("kilovolt").factor
    (True, True)
    >>> find_unit("M"), find_unit("kv")
    (None, None)
    """
    unit = UNITS.get(word)
    if unit is None and len(word) >= _FEWEST_LETTERS_FOLDED - 1:
        unit = UNITS.get(word.casefold())
    return unit


def read_unit(phrase: str) -> Unit | None:
    """Return the unit that a phrase names; None if it is unknown.

    >>> read_unit("km per hour").factor, read_unit("square meters") == read_unit("m ^ 2")
    (Fraction(5, 18), True)
    >>> read_unit("J / (kg * K)") == read_unit("m^2 s^-2 K^-1")
    True
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
    bracketed = False
    for before, piece_text in zip(["", *pieces], pieces, strict=False):
        if before == ")" and (piece_text.startswith("^") or piece_text in _POWERS_BEHIND):
            return None
        if piece_text == "(" and not bracketed and before in ("/", "per"):
            bracketed = True
        elif piece_text == ")" and bracketed and last is not None:
            bracketed, sign = False, 1
        elif piece_text in ("/", "per", "a", "each") and last is not None:
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
            factor *= _multiply(last[0], last[1] * (times - 1), powers)
            last = (last[0], last[1] * times)
        else:
            unit = find_unit(piece_text)
            if unit is None or (piece_text == "a" and last is None):
                return None
            factor *= _multiply(unit, sign * power, powers)
            last, power = (unit, sign * power), 1
    if last is None or bracketed or any(abs(n) > _MOST_EXPONENT for n in powers.values()):
        return None
    return Unit(factor, tuple(sorted((name, n) for name, n in powers.items() if n)))


def _multiply(unit: Unit, power: int, powers: dict[str, int]) -> Fraction:
    """Return the factor of unit ** power, and add its dimension to `powers`."""
    for name, n in unit.dimension:
        powers[name] = powers.get(name, 0) + n * power
    return Fraction(unit.factor**power)
