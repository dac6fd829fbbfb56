"""Unicode's signs of mathematics as ASCII or LaTeX."""

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
    r"""The text in ASCII, as far as it is mathematics.

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
    if character in "\u2126\u00b5":  # the signs of ohm and micro, which are letters of their own
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
