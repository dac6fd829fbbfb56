r"""LaTeX in fewer forms: without what is only layout, and with one command for those that mean the same."""

import re

_PART = r"[^{}]*(?:\{[^{}]*\}[^{}]*)*"
"""What stands in brackets, with others one deep."""
_UNIT = r"\\(?:text|mathrm)\s{0,9}\{[^{}]*\}(?:\^(?:\d|\{-?\d\}))?"

_LAYOUT = re.compile(
    r"""\\(?:text)?color\s{0,9}\{[^{}]*\}
    |\\[hv]space\*?\s{0,9}\{[^{}]*\}
    |\\(?:boldsymbol|bm|underline|mathtt)(?=\s{0,9}\{)
    |\\(?:tiny|scriptsize|footnotesize|small|normalsize|large|Large|LARGE|huge|Huge|bf)(?![A-Za-z])
    |\\(?:therefore|checkmark)(?![A-Za-z])""",
    re.VERBOSE,
)
_ROW = re.compile(r"\\\\(?:\*|\s{0,9}\[-?[\d.]+\s{0,9}(?:pt|em|ex|mm|cm|mu)\])|\\cr(?![A-Za-z])")
_ALIGNED = re.compile(
    r"\\begin\{(aligned|(?:align|gather|equation)\*?)\}((?:[^\\]|\\(?!begin|end))*)\\end\{\1\}"
)
_CONTINUED = re.compile(r"\\\\(?=\s*=)")
_FRACTION = re.compile(r"\\(?:[dtc]|nice|s)frac(?![A-Za-z])")
_INFIX = re.compile(rf"(?<!\\)\{{({_PART})\\(over|choose)(?![A-Za-z])\s*({_PART})\}}")
_LONE = re.compile(r"\\(text|mathrm)\s+([A-Za-z])(?![A-Za-z])")
_UNITS = re.compile(rf"(\d(?:\\[,;: ]|[\s~])*)\\frac\s{{0,9}}\{{\s*({_UNIT})\s*\}}\s*\{{\s*({_UNIT})\s*\}}")
_ORDINAL = re.compile(
    r"(?<=\d)\s{0,9}\^\s{0,9}(\{\s*)?\\(?:text|mathrm)\s{0,9}\{\s*(?:st|nd|rd|th)\s*\}(?(1)\s*\})"
)


def simpler(text: str) -> str:
    r"""The text without colours, sizes, spaces and spacing of rows, and with \frac and \binom for their like.

    >>> simpler(r"\textcolor{red}{18}"), simpler(r"{3\over 56}")
    (' {18}', '{\\frac{3}{56}}')
    """
    if "\\" not in text:
        return text
    text = _ROW.sub(r"\\\\ ", _FRACTION.sub(r"\\frac", text))
    text = _ALIGNED.sub(_chain, _LAYOUT.sub(" ", text))
    if re.search(r"\\(?:over|choose)(?![A-Za-z])", text):
        text = _INFIX.sub(_prefix, text)
        whole = _INFIX.fullmatch(f"{{{text}}}")
        text = _prefix(whole) if whole else text
    text = _ORDINAL.sub("", _LONE.sub(r"\\\1{\2}", text))
    return _UNITS.sub(r"\1\2/\3", text)


def _chain(aligned: re.Match[str]) -> str:
    """Rows without their alignment: x &= 2 + 1 and &= 3 as x = 2 + 1 = 3, others as a list."""
    rows = _CONTINUED.sub(" ", aligned[2].replace("&", ""))
    return rows.replace(r"\\", ",")


def _prefix(infix: re.Match[str]) -> str:
    r"""{a \over b} as {\frac{a}{b}}, but without the outer brackets in a mixed number."""
    above, name, below = infix.groups()
    prefix = f"\\{'frac' if name == 'over' else 'binom'}{{{above}}}{{{below}}}"
    return prefix if infix.string[: infix.start()][-1:].isdigit() else f"{{{prefix}}}"
