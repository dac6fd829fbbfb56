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
_SYSTEM = re.compile(
    r"""\\left\s{0,9}\\\{\s{0,9}\\begin\{(?:aligned|array)\}(?:\{[lcr]{1,9}\})?(?P<braced>(?:[^\\]|\\(?!begin|end))*)
        \\end\{(?:aligned|array)\}\s{0,9}\\right\s{0,9}\.
    |\\begin\{cases\}(?P<cases>(?:[^\\]|\\(?!begin|end))*)\\end\{cases\}""",
    re.VERBOSE,
)
_MISALIGNED = re.compile(r"(?<!\\)&(?!\s*(?:=|[<>]|\\[lg]e))")
_ROW_END = re.compile(r"(?<!\\)[,;.]\s*$")
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
    text = _ALIGNED.sub(_chain, _SYSTEM.sub(_listed, _LAYOUT.sub(" ", text)))
    if re.search(r"\\(?:over|choose)(?![A-Za-z])", text):
        text = _INFIX.sub(_prefix, text)
        whole = _INFIX.fullmatch(f"{{{text}}}")
        text = _prefix(whole) if whole else text
    text = _ORDINAL.sub("", _LONE.sub(r"\\\1{\2}", text))
    return _UNITS.sub(r"\1\2/\3", text)


def _chain(aligned: re.Match[str]) -> str:
    """Rows without their alignment: x &= 2 + 1 and &= 3 as x = 2 + 1 = 3, others as a list."""
    return _rows(_CONTINUED.sub(" ", aligned[2].replace("&", "")))


def _listed(system: re.Match[str]) -> str:
    """The equations of a system as a list; with cells behind them, as a piecewise function has, as it is."""
    content = system["cases"] or system["braced"] or ""
    if _MISALIGNED.search(content):
        return system.group()
    return _rows(content.replace("&", ""))


def _rows(content: str) -> str:
    rows = (_ROW_END.sub("", row) for row in content.split(r"\\"))
    return ", ".join(row for row in rows if row.strip())


def _prefix(infix: re.Match[str]) -> str:
    r"""{a \over b} as {\frac{a}{b}}, but without the outer brackets in a mixed number."""
    above, name, below = infix.groups()
    prefix = f"\\{'frac' if name == 'over' else 'binom'}{{{above}}}{{{below}}}"
    return prefix if infix.string[: infix.start()][-1:].isdigit() else f"{{{prefix}}}"
