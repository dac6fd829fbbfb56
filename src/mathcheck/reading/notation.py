r"""Unify notation: Unicode's signs as ASCII or LaTeX, and LaTeX without layout and synonyms."""

import re
import unicodedata

_SIGNS = (
    dict.fromkeys("×⋅·∙∗•⨯", "*")
    | dict.fromkeys("÷∕⁄", "/")
    | dict.fromkeys("−–—‒", "-")
    | dict.fromkeys("≤⩽", r"\le ")
    | dict.fromkeys("≥⩾", r"\ge ")
    | dict.fromkeys("\u00a0\u2009\u202f", r"\, ")
    | dict.fromkeys("°º", r"\degree ")
    | dict.fromkeys("’′", "'")
    | {"≠": r"\ne ", "≈": r"\approx ", "∞": r"\infty ", "√": r"\surd ", "∛": r"\cbrt ", "±": r"\pm "}
    | {"∪": r"\cup ", "∈": r"\in ", "∅": r"\emptyset ", "ℝ": r"\Reals ", "∖": r"\setminus ", "∓": r"\mp "}
    | {"⟨": r"\langle ", "⟩": r"\rangle ", "，": ", ", "∧": " and ", "∨": " or ", "∶": ":"}
    | {"\u212b": r"\text{angstrom}", "\u00c5": r"\text{angstrom}"}
    | {"∴": r"\therefore ", "✓": r"\checkmark ", "✔": r"\checkmark "}
    | {"⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil "}
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿˣ₀₁₂₃₄₅₆₇₈₉", "0123456789+-nx0123456789")
_RAISED, _LOWERED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿˣ]+"), re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_OVERLINED = re.compile("((?:\\d\u0305)+)")


def with_latex_signs(text: str) -> str:
    r"""Return the text in ASCII, with LaTeX commands for signs of mathematics.

    >>> with_latex_signs("x² ≤ ½")
    'x^{2} \\le  \\frac{1}{2}'
    """
    if text.isascii():
        return text
    text = _OVERLINED.sub(lambda m: "\\overline{" + m.group(1).replace("\u0305", "") + "}", text)
    text = _RAISED.sub(lambda m: "^{" + m.group().translate(_SUPERSCRIPTS) + "}", text)
    text = _LOWERED.sub(lambda m: "_{" + m.group().translate(_SUPERSCRIPTS) + "}", text)
    return "".join(_ascii(character) for character in text)


def _ascii(character: str) -> str:
    if character.isascii():
        return character
    if character in _SIGNS:
        return _SIGNS[character]
    if character in "\u2126\u00b5":  # the signs of ohm and micro, which differ from the letters
        character = unicodedata.normalize("NFKC", character)
    if unicodedata.category(character) == "Nd":
        return str(unicodedata.decimal(character))
    if unicodedata.category(character) == "Cf":
        return ""
    name = unicodedata.name(character, "")
    greek = re.fullmatch(r"GREEK (SMALL|CAPITAL) LETTER (\w+)", name)
    if greek:
        letter = greek.group(2).lower().replace("lamda", "lambda")
        return f"\\{letter if greek.group(1) == 'SMALL' else letter.capitalize()} "
    if name.startswith("VULGAR FRACTION"):
        above, _, below = unicodedata.normalize("NFKC", character).partition("⁄")
        return f"\\frac{{{above}}}{{{below}}}"
    return unicodedata.normalize("NFKC", character)


_PART = r"[^{}]*(?:\{[^{}]*\}[^{}]*)*"
"""Content of braces, with other braces one level deep."""
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


def simplify_latex(text: str) -> str:
    r"""Return the text without colours, sizes and spacing, and with \frac and \binom for their variants.

    >>> simplify_latex(r"\textcolor{red}{18}"), simplify_latex(r"{3\over 56}")
    (' {18}', '{\\frac{3}{56}}')
    """
    if "\\" not in text:
        return text
    text = _ROW.sub(r"\\\\ ", _FRACTION.sub(r"\\frac", text))
    text = _ALIGNED.sub(_chain, _SYSTEM.sub(_list_rows, _LAYOUT.sub(" ", text)))
    if re.search(r"\\(?:over|choose)(?![A-Za-z])", text):
        text = _INFIX.sub(_prefix, text)
        match = _INFIX.fullmatch(f"{{{text}}}")
        text = _prefix(match) if match else text
    text = _ORDINAL.sub("", _LONE.sub(r"\\\1{\2}", text))
    return _UNITS.sub(r"\1\2/\3", text)


def _chain(aligned: re.Match[str]) -> str:
    """Return rows without alignment: x &= 2 + 1 and &= 3 as x = 2 + 1 = 3, others as a list."""
    return _rows(_CONTINUED.sub(" ", aligned[2].replace("&", "")))


def _list_rows(system: re.Match[str]) -> str:
    """Return the equations of a system as a list; a system with further cells (piecewise) unchanged."""
    content = system["cases"] or system["braced"] or ""
    if _MISALIGNED.search(content):
        return system.group()
    return _rows(content.replace("&", ""))


def _rows(content: str) -> str:
    rows = (_ROW_END.sub("", row) for row in content.split(r"\\"))
    return ", ".join(row for row in rows if row.strip())


def _prefix(infix: re.Match[str]) -> str:
    r"""Return {a \over b} as {\frac{a}{b}}, without the outer braces in a mixed number."""
    above, name, below = infix.groups()
    prefix = f"\\{'frac' if name == 'over' else 'binom'}{{{above}}}{{{below}}}"
    return prefix if infix.string[: infix.start()][-1:].isdigit() else f"{{{prefix}}}"
