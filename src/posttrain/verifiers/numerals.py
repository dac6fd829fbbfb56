"""Numbers in running text, read exactly.

What counts as a number:

- ASCII digits with an optional decimal point: 7, 0.5, .5; a trailing full stop is punctuation.
- Thousands in groups of three: 1,234,567.5. Any other comma separates numbers: "3,4" is two.
- A sign directly in front (+, -, −, –, － or ﹣), unless a digit, a letter, or a closing bracket stands
  before it: "-5" and "x = -5" are -5, but "8-5" and "8 - 5" end in 5.
- A currency sign ($, £, €, ¥), before or after the sign of the number, and a % behind it are units and
  change nothing: "$5" is 5, and "50%" is 50, never 0.5.
- Powers of ten, 1.5e-3, and fractions of whole numbers, 3/4, read as exact fractions.
- LaTeX's spacing is ignored: 1{,}234, 1\\,234 and \\$5; \\frac{3}{4} is 3/4.

What does not: digits behind an ASCII letter or underscore (x2), dates and versions (3/4/2024, 1.2.3), a
fraction over 0, and anything longer than 1000 characters or with a power of ten over 1000. These
are *unreadable*: a verifier treats them as a wrong answer, never as one of their parts.
"""

import re
from collections import deque
from collections.abc import Iterator
from fractions import Fraction

MOST_CHARACTERS = 1000
MOST_EXPONENT = 1000

_TOKEN = re.compile(
    r"(?<![A-Za-z0-9_])(?:[0-9]+(?:[.,][0-9]+)*|(?<!\.)\.[0-9]+)(?:[eE][+-]?[0-9]{1,9}(?![A-Za-z0-9]))?(?:/[0-9]+)*"
)
_GROUPED = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_PLAIN = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE]([+-]?[0-9]+))?")
_SIGNED = re.compile(r"(?<![0-9A-Za-z)\]}%])[-+−–－﹣]$")
_MINUS = "-−–－﹣"
_CURRENCY = "$£€¥"
_FRAC = re.compile(r"(?<![0-9])\\[dt]?frac\s?(?:\{([0-9]{1,99})\}\{([0-9]{1,99})\}|([0-9])([0-9])(?![0-9]))")
_WRAPPED = re.compile(r"\\(?:text|mathrm|mathbf|textbf|boldsymbol)\s?\{([^{}]*)\}")
_MATHEMATICS = re.compile(
    r"\\(?:[dt]?frac|sqrt|d?binom|log|ln|sin|cos|tan|exp|pi|cdot|times)\b|\^\s?\{?\s?-?[0-9]|[0-9]\s?!|[0-9]\}?\s?\^\s?\{?[0-9]"
)
_FAR_MINUS = re.compile(rf"^(\s*\$?\s*)[{_MINUS}]\s*[{{(]?\s*(?=[0-9.$])")
_ALONE = re.compile(r"\s*[-+−–－﹣]?[$£€¥]?[-+−–－﹣]?([0-9.,eE/+-]+?)\s?%?\.?\s*")


def numbers(text: str) -> Iterator[Fraction | None]:
    """The numbers of a text in order; None for each that is unreadable.

    >>> [str(n) for n in numbers("-1,234.5 of $7, 50% or 3/4 on 3/4/2024")]
    ['-2469/2', '7', '50', '3/4', 'None']
    """
    text = _without_latex_spacing(text)
    for token in _TOKEN.finditer(text):
        yield from _values(token, text)


def last_number(text: str) -> tuple[bool, Fraction | None]:
    """Whether there is a number, and the last one; None if that is unreadable.

    >>> last_number("3, 4 and then 7."), last_number("none")
    ((True, Fraction(7, 1)), (False, None))
    """
    text = _without_latex_spacing(text)
    token = deque(_TOKEN.finditer(text), maxlen=1)
    if not token:
        return False, None
    return True, _values(token[0], text)[-1]


def part_numbers(text: str) -> Iterator[Fraction | None]:
    r"""The numbers of a part that is an answer: - 7 and -{7} are -7; within other mathematics none is read.

    >>> [*part_numbers(r"- \text{7}")], [*part_numbers(r"\sqrt{7}")], [*part_numbers("x^{7}")]
    ([Fraction(-7, 1)], [None], [None])
    """
    clean = _WRAPPED.sub(r"\1", _without_latex_spacing(text))
    return iter([None]) if _MATHEMATICS.search(clean) else numbers(_FAR_MINUS.sub(r"\1-", clean))


def whole_number(text: str) -> Fraction | None:
    """The number that a text consists of; None if it is anything else.

    >>> whole_number(" $1,234. "), whole_number("7 apples")
    (Fraction(1234, 1), None)
    """
    clean = _without_latex_spacing(text)
    if len(clean) > 2 * MOST_CHARACTERS or not _ALONE.fullmatch(clean):
        return None
    found = list(numbers(clean))
    return found[0] if len(found) == 1 else None


def _without_latex_spacing(text: str) -> str:
    if "\\" in text or "{" in text:
        for spacing in ("{,}", "\\,", "\\!", "\\;"):
            text = text.replace(spacing, "," if spacing == "{,}" else "")
        text = text.replace("\\$", "$").replace("\\%", "%")
        text = _FRAC.sub(lambda found: "/".join(part for part in found.groups() if part), text)
    return text


def _values(token: re.Match[str], text: str) -> list[Fraction | None]:
    """The numbers of one run of digits: one, or several where commas separate them."""
    if token.end() - token.start() > MOST_CHARACTERS:
        return [None]
    head, *below = token.group().split("/")
    sign = _sign(text, token.start())
    if below:
        return [_fraction(head, below, sign)]
    if _GROUPED.fullmatch(head):
        return [sign * Fraction(head.replace(",", ""))]
    pieces = [_plain(piece) for piece in head.split(",")]
    if pieces[0] is not None:
        pieces[0] *= sign
    return pieces


def _plain(piece: str) -> Fraction | None:
    parsed = _PLAIN.fullmatch(piece)
    if parsed is None or abs(int(parsed.group(2) or 0)) > MOST_EXPONENT:
        return None
    return Fraction(piece)


def _fraction(above: str, below: list[str], sign: int) -> Fraction | None:
    if _GROUPED.fullmatch(above):
        above = above.replace(",", "")
    if len(below) != 1 or not above.isdigit() or int(below[0]) == 0:
        return None
    return Fraction(sign * int(above), int(below[0]))


def _sign(text: str, start: int) -> int:
    """-1 if a minus stands directly in front of the number at `start` and is not a subtraction."""
    before = text[max(0, start - 4) : start]
    inner = before[-1:] in _MINUS and before[-2:-1] in _CURRENCY if len(before) > 1 else False
    if inner:  # $-5
        return -1
    if before and before[-1] in _CURRENCY:
        before = before[:-1]
    found = _SIGNED.search(before)
    return -1 if found is not None and found.group() in _MINUS else 1
