"""Unify notation: signs of Unicode and LaTeX as the signs from which expressions are read."""

import re
import unicodedata
from collections.abc import Sequence

from mathcheck.reading.units import read_unit

CURRENCY = "$£€¥"

BREAK = "\x1f"
"""Stands for layout that separates expressions."""
MINUS = "-−–－﹣"
_SIGNS = str.maketrans(
    dict.fromkeys("⋅·∙", "×")
    | dict.fromkeys("∕⁄", "/")
    | dict.fromkeys("∛∜", "√")
    | {"∶": ":", "’": "'", "‑": "-", "‐": "-", "\xa0": " ", "\u03bc": "µ", "\u2126": "Ω"}
)
_RAISED = re.compile("[⁰¹²³⁴-⁹⁺⁻]+")
_LOWERED = re.compile("[₀-₉]+")
_DIGITS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻₀₁₂₃₄₅₆₇₈₉", "0123456789+-0123456789")
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_THIN = re.compile("(?<=[0-9])[\u2009\u202f](?=[0-9])")
_TAG = re.compile(r"</?[A-Za-z][^<>]*>")
_WRAPPED = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it)|operatorname|boldsymbol)\s?\{([^{}]*)\}")
_WHOLE = r"(?:\{\s?([-−]?[0-9]{1,99})\s?\}|([0-9]))"
_FRAC = re.compile(rf"\\[dtc]?frac\s?{_WHOLE}\s?{_WHOLE}(?![0-9])")
_UNIT_NAME = r"\{\s?([A-Za-z]+(?:\^\{?-?[0-9]\}?)?)\s?\}"
_UNIT_FRAC = re.compile(rf"(?<=[0-9\s,;])\\[dtc]?frac\s?{_UNIT_NAME}\s?{_UNIT_NAME}")
_LATEX: Sequence[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle)(?![A-Za-z])|\\!", ""),
        (r"\{,\}|(?<=[0-9])\\[,;:]\s?(?=[0-9])", "'"),
        (r"\\[hv]space\*?\s?\{[^{}]*\}|\\q?quad(?![A-Za-z])|\\\\|\\[()\[\]]", BREAK),
        (r"\\[,;: ]|~", " "),
        (r"\\([$%#&])", r"\1"),
        (r"\\(?:times|cdot|ast)(?![A-Za-z])", "×"),
        (r"\\div(?![A-Za-z])", "÷"),
        (r"\\(?:pm|mp)(?![A-Za-z])", "±"),
        (r"\\(?:leq?(?:slant)?|geq?(?:slant)?|neq?|lt|gt)(?![A-Za-z])", "≤"),
        (r"\^\s?(?:\{\s?\\(?:circ|degree)\s?\}|\\(?:circ|degree))|\\degree(?![A-Za-z])", "°"),
        (r"\^\s?(?:\{\s?(st|nd|rd|th)\s?\}|(st|nd|rd|th)(?![a-z]))", r"\1\2"),
        (r"\\[dtc]?frac|\\(?:sqrt|d?binom|tbinom|overline|bar|[bp]?mod|log|ln|lg|exp|gcd|lcm|max|min|det)"
         r"(?![A-Za-z])|\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?(?![A-Za-z])", "√"),
        (r"\\mu\s?(?=[A-Za-z])", "µ"),
        (r"\\Omega(?![A-Za-z])", "Ω"),
        (r"\\(?:pi|alpha|beta|gamma|delta|epsilon|theta|lambda|mu|rho|sigma|tau|(?:var)?phi|omega)(?![A-Za-z])",
         "π"),
        (r"(?<=[-−–])\s?\\[A-Za-z]+\s?(?=\{)", ""),
        (r"\\[A-Za-z]+", BREAK),
        (r"\\.", BREAK),
    )
]  # fmt: skip
_SUBSCRIPT = re.compile(r"(?<=[A-Za-z)}√π])\s?_\s?(?:\{[^{}]*\}|[A-Za-z0-9])")
_BASED = re.compile(r"(?<=[0-9)}])_\s?\{[^{}]*\}")


def normalise(line: str) -> str:
    """Return the line without layout, with one notation for each operation."""
    if not line.isascii():
        line = _THIN.sub("'", line).translate(_SIGNS)
        line = _RAISED.sub(lambda match: f"^({match.group().translate(_DIGITS)})", line)
        line = _LOWERED.sub(lambda match: f"_{{{match.group().translate(_DIGITS)}}}", line)
        line = _VULGAR.sub(_spell_vulgar, line)
    line = _TAG.sub(BREAK, line)
    if "\\" in line or "{" in line:
        line = _WRAPPED.sub(r"\1", line)
        line = _FRAC.sub(_slash_fraction, line)
        line = _UNIT_FRAC.sub(_slash_unit, line)
        for pattern, replacement in _LATEX:
            line = pattern.sub(replacement, line)
    if "_" in line:
        line = _SUBSCRIPT.sub("", _BASED.sub("_0", line))
    return line


def _spell_vulgar(vulgar: re.Match[str]) -> str:
    """Return ½ as 1/2, separated from a whole number before it."""
    written = unicodedata.normalize("NFKC", vulgar.group()).replace("⁄", "/")
    return _separate_fraction(vulgar, written)


def _slash_fraction(frac: re.Match[str]) -> str:
    above, below = (frac[1] or frac[2]), (frac[3] or frac[4])
    if below[0] in MINUS:
        return frac.group()
    return _separate_fraction(frac, f"{above}/{below}")


def _slash_unit(frac: re.Match[str]) -> str:
    r"""Return \frac{m}{s^2} as m/s^2 if that is a unit."""
    unit = f"{frac[1]}/{frac[2]}".replace(" ", "")
    return frac.group() if read_unit(unit) is None else f" {unit}"


def _separate_fraction(match: re.Match[str], fraction: str) -> str:
    before = match.string[: match.start()].rstrip(" ")[-1:]
    if before.isdigit():
        return f" {fraction}"
    return f"({fraction})" if before.isalpha() or (before in ")}" and before) else fraction
