"""Read the numbers of a text: all, the last one, or the only one."""

import re
from collections.abc import Iterator
from fractions import Fraction

from mathcheck.numerals.notation import CURRENCY, normalise
from mathcheck.numerals.scanner import LineScanner
from mathcheck.numerals.values import MOST_CHARACTERS, NumberSpan

_WINDOW = 4000
"""Characters of a line that are read at a time."""
_DIGIT = re.compile("[0-9¼-¾⅐-⅞]")


def numbers(text: str) -> Iterator[Fraction | None]:
    """Yield the numbers of a text in order; None for each unreadable one.

    >>> [str(n) for n in numbers("-1,234.5, $7, 50% or 3/4, on 3/4/2024")]
    ['-2469/2', '7', '50', '3/4', 'None']
    """
    yield from (span.value for span in _read_lines(text, part=False))


def part_numbers(text: str) -> Iterator[Fraction | None]:
    r"""Yield the numbers of a part that is an answer, in which a leading - 7 is -7, and 5! a factorial.

    >>> [*part_numbers(r"- \text{7}")], [*part_numbers(r"\sqrt{7}")], [*part_numbers("7!")]
    ([Fraction(-7, 1)], [None], [None])
    """
    yield from (span.value for span in _read_lines(text, part=True))


def last_number(text: str) -> tuple[bool, Fraction | None]:
    """Return whether there is a number, and the last one; None if it is unreadable.

    >>> last_number("3, 4 and then 7."), last_number("none"), last_number("7 or 10^x")
    ((True, Fraction(7, 1)), (False, None), (True, None))
    """
    for line in reversed(text.split("\n")):
        end = len(line)
        while end > 0:
            start = max(0, end - _WINDOW)
            if spans := _line_numbers(line[start:end], part=False):
                is_cut = start > 0 and spans[-1].start == 0
                return True, None if is_cut else spans[-1].value
            end = start
    return False, None


def whole_number(text: str) -> Fraction | None:
    """Return the number that is the whole text; None if the text is anything else.

    >>> whole_number(" $1,234. "), whole_number("7 apples")
    (Fraction(1234, 1), None)
    """
    if len(text) > 2 * MOST_CHARACTERS or "\n" in text.strip():
        return None
    clean = normalise(text.strip())
    spans = LineScanner(clean, part=False).found
    if len(spans) != 1:
        return None
    around = clean[: spans[0].start] + clean[spans[0].end :]
    return spans[0].value if not around.strip(f" %.{CURRENCY}") else None


def _read_lines(text: str, *, part: bool) -> Iterator[NumberSpan]:
    for line in text.split("\n"):
        for start in range(0, len(line), _WINDOW):
            yield from _line_numbers(line[start : start + _WINDOW], part=part)


def _line_numbers(line: str, *, part: bool) -> list[NumberSpan]:
    return LineScanner(normalise(line), part=part).found if _DIGIT.search(line) else []
