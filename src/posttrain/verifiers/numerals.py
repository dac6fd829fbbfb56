r"""Numbers in running text, read exactly.

A number is a whole numeric expression, never a part of one:

- ASCII digits with an optional decimal point: 7, 0.5, .5; a trailing full stop is punctuation.
- Thousands in groups of three, parted by commas, blanks, apostrophes or underscores: 1,234,567.5, 1 234 567.
  Any other comma separates numbers: "3,4" is two.
- A sign in front (+, -, −, –, － or ﹣; also "negative 5"), unless it joins two values: "x = -5" is -5.
- A currency sign ($, £, €, ¥), a % and a unit are ignored: "$5" is 5, "9 cm^2" is 9, "50%" is 50, never 0.5.
- Fractions and mixed numbers of whole numbers: 3/4, \frac{3}{4}, ¾, 2 1/2, 2\frac12, 2 and a half.
- Powers: 10^3, 2^{10}, 10³, and a power of ten times a number: 1.5e-3, 1.5 × 10^3, 1.5 \times 10^{3}.
- Thousand, million and so on behind a number, as a word or a letter: 5 million, 10k, $1.2M.

Any other expression is *unreadable*: a root or function of a number (\sqrt{5}, f(5)), a sum, product or
quotient that is not worked out (3 + 4, 2x, x/2), a range or ratio (3-5, 3 to 5, 3:4), a time, date or version
(12:30, 3/4/2024, 1.2.3), hex and binary literals, a numeral with its base, a tuple, a fraction over 0, and
anything longer than 1000 characters or with a power over 1000. A verifier treats it as a wrong answer, never
as one of its parts, and looks for no number before it. Digits behind a letter belong to a name (x2, a_5),
which is not a number. An expression ends with its line.
"""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from posttrain.verifiers.math.reading.units import read_unit, unit_named

MOST_CHARACTERS = 1000
MOST_EXPONENT = 1000
_MOST_BITS = 10_000
_MOST_DEPTH = 40
_WINDOW = 4000
"""Characters of a line that are read at once."""

# ---------------------------------------------------------------------- one way of writing

_BREAK = "\x1f"
"""Stands for layout that separates expressions."""
_MINUS = "-−–－﹣"
_CURRENCY = "$£€¥"
_SIGNS = str.maketrans(
    dict.fromkeys("⋅·∙", "×")
    | dict.fromkeys("∕⁄", "/")
    | {"∶": ":", "’": "'", "‑": "-", "‐": "-", "\xa0": " ", "\u03bc": "µ", "\u2126": "Ω"}
)
_RAISED = re.compile("[⁰¹²³⁴-⁹⁺⁻]+")
_DIGITS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_DIGIT = re.compile("[0-9¼-¾⅐-⅞]")
_THIN = re.compile("(?<=[0-9])[\u2009\u202f](?=[0-9])")
_TAG = re.compile(r"</?[A-Za-z][^<>]*>")
_WRAPPED = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it)|operatorname|boldsymbol)\s?\{([^{}]*)\}")
_WHOLE = r"(?:\{\s?([-−]?[0-9]{1,99})\s?\}|([0-9]))"
_FRAC = re.compile(rf"\\[dtc]?frac\s?{_WHOLE}\s?{_WHOLE}(?![0-9])")
_LATEX: Sequence[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle)(?![A-Za-z])|\\!", ""),
        (r"\{,\}|(?<=[0-9])\\[,;:]\s?(?=[0-9])", "'"),
        (r"\\[hv]space\*?\s?\{[^{}]*\}|\\q?quad(?![A-Za-z])|\\\\|\\[()\[\]]", _BREAK),
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
        (r"\\[A-Za-z]+", _BREAK),
        (r"\\.", _BREAK),
    )
]  # fmt: skip
_SUBSCRIPT = re.compile(r"(?<=[A-Za-z)}√π])\s?_\s?(?:\{[^{}]*\}|[A-Za-z0-9])")
_BASED = re.compile(r"(?<=[0-9)}])_\s?\{[^{}]*\}")


def _plain(line: str) -> str:
    """The line with one way of writing each operation, and without layout."""
    if not line.isascii():
        line = _THIN.sub("'", line).translate(_SIGNS)
        line = _RAISED.sub(lambda found: f"^({found.group().translate(_DIGITS)})", line)
        line = _VULGAR.sub(_spelt_out, line)
    line = _TAG.sub(_BREAK, line)
    if "\\" in line or "{" in line:
        line = _WRAPPED.sub(r"\1", line)
        line = _FRAC.sub(_slashed, line)
        for pattern, plain in _LATEX:
            line = pattern.sub(plain, line)
    if "_" in line:
        line = _SUBSCRIPT.sub("", _BASED.sub("_0", line))
    return line


def _spelt_out(vulgar: re.Match[str]) -> str:
    """½ as 1/2, apart from a whole number before it."""
    written = unicodedata.normalize("NFKC", vulgar.group()).replace("⁄", "/")
    return _apart(vulgar, written)


def _slashed(frac: re.Match[str]) -> str:
    above, below = (frac[1] or frac[2]), (frac[3] or frac[4])
    if below[0] in _MINUS:
        return frac.group()
    return _apart(frac, f"{above}/{below}")


def _apart(found: re.Match[str], fraction: str) -> str:
    before = found.string[: found.start()].rstrip(" ")[-1:]
    if before.isdigit():
        return f" {fraction}"
    return f"({fraction})" if before.isalpha() or (before in ")}" and before) else fraction


# ---------------------------------------------------------------------- tokens

_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)\.?"
)
_DAY = r"[0-9]{1,2}(?:st|nd|rd|th)?"
_TOKEN = re.compile(
    rf"""(?P<unreadable>(?<![A-Za-z])(?:{_MONTH}\s{_DAY},?\s|{_DAY}\s(?:of\s)?{_MONTH},?\s)[0-9]{{4}}(?![0-9])
        |0[xX][0-9A-Fa-f]+|0[bB][01]+(?![0-9A-Za-z])|0[oO][0-7]+)
    |(?P<number>(?:[0-9]+(?:[.,'_][0-9]+)*|\.[0-9]+)(?:[eE][+-]?[0-9]{{1,9}}(?![A-Za-z0-9]))?)
    |(?P<version>[A-Za-z]+[0-9]+(?:\.[0-9]+)+)
    |(?P<word>[A-Za-z](?:[A-Za-z0-9_]|'(?=[A-Za-z]))*)
    |(?P<arrow><<|>>|[-=]+>|<[-=]*-)
    |(?P<operator>\*\*|[<>!]=|[-−–－﹣—+*×÷/^:±≤≥≠<>√π!%°])
    |(?P<bracket>[(){{}}\[\]])
    |(?P<space>[\s$£€¥]+)
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_GROUPED = re.compile(r"[0-9]{1,3}(?:([,'_])[0-9]{3})(?:\1[0-9]{3})*(?:\.[0-9]+)?")
_PLAIN = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE]([+-]?[0-9]+))?")
_DECIMAL_COMMA = re.compile(r"[0-9]{1,3}(?:\.[0-9]{3})+,[0-9]+")
_GOES_ON = re.compile(r"\.\.\.|…|\.\(|\.?√|\u0305")
"""Behind a decimal: what is written is not all of it."""

_TIMES = re.compile(r"\s{0,2}[xX]\s{0,2}(?=[0-9]|\.[0-9])")
_NEXT = rf"(?=[{_CURRENCY}]?[-−]?[{_CURRENCY}]?[0-9.(√])"
_JOINED = re.compile(
    r"\s+(?:plus|minus|times|over|choose|mod|by|of|in|per|out of|(?:divided|multiplied) by|through|thru"
    rf"|(?:raised )?to the(?: power(?: of)?)?|(?:more|less|fewer|greater|larger|smaller) than)\s+{_NEXT}"
)
_TO = re.compile(rf"\s+(?:up )?(to|and)\s+{_NEXT}")
_CHANGED = re.compile(
    r"\b(?:round|increas|decreas|reduc|chang|ris|rose|fell|fall|gr[eo]w|drop|simplif|convert|down|up)",
    re.IGNORECASE,
)
"""Before "from 3 to 5", which then is no range."""
_HALF = re.compile(r"\s+and\s+(?:a|one)[\s-](half|third|quarter)(?![A-Za-z])")
_MIXED_AND = re.compile(r"\s+and\s+(?=[0-9]{1,3}\s?/\s?[0-9]{1,3}(?![0-9/]))")
_PERCENT = re.compile(r"\s?%|\s?percent(?![A-Za-z])")
_BEHIND = re.compile(
    r"\s+(?:squared|cubed|factorial|thirds|fourths|fifths|sixths|sevenths|eighths|ninths|tenths|hundredths|thousandths)"
    r"(?![A-Za-z])"
)
_SCALE = re.compile(r"\s{0,2}(hundred|thousand|million|billion|trillion)(?![A-Za-z])", re.IGNORECASE)
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_LETTER = re.compile(r"(?:[kKMB]|bn)(?![A-Za-z0-9^/])")
_MONEY_LETTER = re.compile(r"\s?(?:[kKmMbBtT]|[mbt]n)(?![A-Za-z0-9^/])")
_LETTERS = {"k": 3, "m": 6, "b": 9, "t": 12}
_BASE_UNIT = r"[A-Za-zµΩ]+(?:\s?\^\s?(?:[({]\s?-?[0-9]\s?[)}]|-?[0-9]))?"
_UNIT = re.compile(
    rf"\s{{0,2}}/?\s?(?:(?:square|cubic|sq|cu)\.?\s)?{_BASE_UNIT}(?:\s?[/×*]\s?{_BASE_UNIT})*(?![A-Za-z0-9^])"
)
_UNIT_PRODUCT = re.compile(rf"\s{{0,2}}{_BASE_UNIT}(?:(?:\s?[/×*]\s?|\s){_BASE_UNIT}){{1,4}}(?![A-Za-z0-9^])")
_COMPOUND = re.compile(
    r"\s{0,2}([A-Za-z]{1,9})(?:,|\s+and)?\s{0,2}([0-9]+(?:\.[0-9]+)?)\s{0,2}([A-Za-z]{1,9})(?![A-Za-z0-9])"
)
_BEFORE = re.compile(
    r"(?:\b(?:half|third|fourth|quarter|fifth|tenth|square|cube|reciprocal|opposite|inverse|factorial|logarithm|log)"
    r"\s+of(?:\s+the)?|\b(?:root|power)(?:\s+of)?|\b(?:twice|double|triple|half|base|mod|modulo))\s+$",
    re.IGNORECASE,
)
_NEGATIVE = re.compile(r"\b(?:negative|minus)\s+$", re.IGNORECASE)
_BETWEEN = re.compile(r"\bbetween\s+$", re.IGNORECASE)
_FUNCTIONS = re.compile("log|l[ng]|(?:arc)?(?:sin|cos|tan)|cot|csc|exp|sqrt|cbrt")
_VARIABLE = re.compile(r"[b-zXYZN](?:_[A-Za-z0-9]+|[0-9]+)?|pi")
_ATTACHED = re.compile(r"[eijnquvwxyz]{1,3}|pi")
"""Letters that, right behind a number, are variables and no unit."""
_BEFORE_MINUS = frozenset(("=", "≈", ":", "(", "[", "{", "≡", "is", "be", "are", "equals", "to"))
"""Before a minus that stands apart from its number; elsewhere it is a dash."""
_CONTINUED = re.compile(r"\s?[-+*/×÷^]")
"""Behind a !, which then is no end of a sentence."""
_TUPLE = re.compile(r"[\s0-9.,;'+−-]*")


@dataclass(slots=True)
class _Piece:
    """A part of an expression.

    Kinds: n is a numeral, g what stands in brackets, v a variable, f a function, p a postfix such as !; any
    other is an operator.
    """

    kind: str
    start: int
    end: int
    raw: str = ""
    scale: int = 0
    """Power of ten behind a numeral."""
    more: Fraction = Fraction(0)
    """Of "and a half"."""
    numbers: "list[_Found]" = field(default_factory=list)
    """Of a group."""
    spaced: bool = False
    """Only blanks part it from the numeral before it."""
    measured: int = 0
    """Where its unit or percent sign begins, if it has one."""


@dataclass(slots=True)
class _Found:
    """The value of an expression, None if it is unreadable, and where it stands."""

    value: Fraction | None
    start: int
    end: int


class _Line:
    """Reads the numbers of one line from left to right."""

    def __init__(self, text: str, *, part: bool) -> None:
        self.text = text
        self.part = part
        self.found: list[_Found] = []
        self._chain: list[_Piece] = []
        self._stack: list[tuple[list[_Piece], int, int]] = []
        self._before = ""
        """The token before, without blanks."""
        at = 0
        while at < len(text):
            token = _TOKEN.match(text, at)
            assert token is not None
            at = self._take(token)
            if token.lastgroup != "space":
                self._before = token.group()
        while self._stack:
            self._close(len(text))
        self._flush()

    # ------------------------------------------------------------------ tokens

    def _take(self, token: re.Match[str]) -> int:
        """Where the next token begins."""
        kind, text, start, end = token.lastgroup or "", token.group(), token.start(), token.end()
        if kind == "space":
            return end
        if kind == "number":
            return self._number(text, start, end)
        if kind in ("unreadable", "version"):
            self._operand(_Piece("n", start, end, raw="?"))
        elif kind == "word":
            return self._word(text, start, end)
        elif kind == "operator":
            self._operator(text, start, end)
        elif kind == "bracket" and text in "([{" and len(self._stack) < _MOST_DEPTH:
            self._open(start)
        elif kind == "bracket" and text in ")]}" and self._stack:
            self._close(end)
        else:
            self._flush()
        return end

    def _number(self, raw: str, start: int, end: int) -> int:
        piece = _Piece("n", start, end, raw=raw)
        before = self.text[max(0, start - 40) : start]
        if "." in raw and _GOES_ON.match(self.text, end):
            piece.raw = "?"
        self._operand(piece)
        if len(self._chain) == 1 and before:
            if _NEGATIVE.search(before):
                self._chain.insert(0, _Piece("-", start, start))
            elif _BEFORE.search(before):
                self._chain.insert(0, _Piece("v", start, start))
        between = _BETWEEN.search(before) is not None
        return self._behind(piece, end, between=between)

    def _behind(self, piece: _Piece, end: int, *, between: bool) -> int:
        """Where the words end that belong to a numeral, as its unit or an operation."""
        text = self.text
        if percent := _PERCENT.match(text, end):
            piece.measured, piece.end = end, percent.end()
            end = percent.end()
        currency = text[max(0, piece.start - 1) : piece.start] in tuple(_CURRENCY)
        if scale := _SCALE.match(text, end):
            piece.scale, piece.end = _SCALES[scale[1].lower()], scale.end()
            end = scale.end()
        elif letter := (_MONEY_LETTER if currency else _LETTER).match(text, end):
            piece.scale, piece.end = _LETTERS[letter.group().strip()[0].lower()], letter.end()
            end = letter.end()
        elif half := _HALF.match(text, end):
            piece.more = Fraction(1, {"half": 2, "third": 3, "quarter": 4}[half[1]])
            piece.end = end = half.end()
        elif mixed := _MIXED_AND.match(text, end):
            if piece.raw.isdigit() and len(self._chain) == 1 and not between:
                piece.end = mixed.end()
                return mixed.end()
        elif compound := self._compound(end):
            piece.raw, piece.end = "?", compound
            return compound
        elif _BEHIND.match(text, end):
            self._chain.append(_Piece("p", end, end))
        if times := _TIMES.match(text, end):
            self._chain.append(_Piece("×", end, times.end()))
            return times.end()
        if joined := _JOINED.match(text, end):
            self._chain.append(_Piece("~", end, joined.end()))
            return joined.end()
        joined = _TO.match(text, end)
        if joined and (between if joined[1] == "and" else not _CHANGED.search(text[:end])):
            self._chain.append(_Piece("~", end, joined.end()))
            return joined.end()
        for pattern in (_UNIT_PRODUCT, _UNIT):
            unit = pattern.match(text, end)
            if unit and _is_unit(unit.group()):
                piece.measured, piece.end = piece.measured or end, unit.end()
                return unit.end()
        return end

    def _compound(self, end: int) -> int:
        """Where 2 hours 30 minutes ends, of which the 2 ends here; 0 if it is no such time or length."""
        last = 0
        while compound := _COMPOUND.match(self.text, end):
            large, small = unit_named(compound[1]), unit_named(compound[3])
            if large is None or small is None or large.dimension != small.dimension or not large.dimension:
                break
            if large.factor <= small.factor:
                break
            last, end = compound.end(), compound.end(2)
        return last

    def _word(self, word: str, start: int, end: int) -> int:
        last = self._chain[-1] if self._chain else None
        attached = last is not None and last.end == start
        following = self.text[end : end + 1]
        if attached and last is not None and last.kind == "n":
            if _ATTACHED.fullmatch(word) and unit_named(word) is None:
                self._chain.append(_Piece("v", start, end))
            elif any(letter.isdigit() for letter in word):  # 10C2
                last.raw = "?"
            last.end = end
            return end
        if _FUNCTIONS.fullmatch(word):
            self._operand(_Piece("f", start, end))
        elif _VARIABLE.fullmatch(word) or (following in ("(", "^", "/") and following):
            power = _UNIT.match(self.text, start)
            if following == "^" and len(word) > 1 and power and _is_unit(power.group()):
                self._flush()
                return power.end()
            self._operand(_Piece("v", start, end))
        else:
            self._flush()
        return end

    def _operator(self, text: str, start: int, end: int) -> None:
        last = self._chain[-1] if self._chain else None
        operand = last is not None and last.kind in "ngvp"
        attached = last is not None and operand and last.end == start
        if text in "√π":
            self._operand(_Piece("f" if text == "√" else "v", start, end))
            return
        if text in "%°":
            if attached and last is not None:
                last.measured, last.end = last.measured or start, end
            return
        if text == "!":
            if attached and (self.part or _CONTINUED.match(self.text, end)):
                self._chain.append(_Piece("p", start, end))
            else:
                self._flush()
            return
        spaced_before = start == 0 or self.text[start - 1].isspace()
        spaced_behind = end == len(self.text) or self.text[end].isspace()
        kind = {"**": "^", "*": "×", "—": "~", "<": "≤", ">": "≤", "<=": "≤", ">=": "≤", "!=": "≤"}.get(
            text, text
        )
        kind = "-" if kind in _MINUS else "≤" if kind in "≥≠" else kind
        if operand:
            apart = {
                "-": spaced_before and not spaced_behind,
                "+": spaced_before and not spaced_behind,
                ":": spaced_behind and not spaced_before,
            }.get(kind, text in ("*", "**", "—", "<", ">") and spaced_before != spaced_behind)
            if not apart:
                self._chain.append(_Piece(kind, start, end))
                return
            self._flush()
        elif last is not None:  # behind another operator
            self._chain.append(_Piece(kind, start, end))
            return
        if (kind in "±≤" and text not in "<>") or (kind in "-+" and self._is_sign(start, spaced_behind)):
            self._chain.append(_Piece(kind, start, end))
        else:
            self._flush()

    def _is_sign(self, start: int, spaced_behind: bool) -> bool:
        """Whether a minus or plus with no value before it is the sign of what follows."""
        if spaced_behind:
            return self._before in _BEFORE_MINUS or (self.part and not self._before)
        return not re.match(r"[0-9A-Za-z)\]}%]", self.text[start - 1 : start] if start else "")

    # ------------------------------------------------------------------ expressions

    def _operand(self, piece: _Piece) -> None:
        """Adds a value to the expression before it if it is a part of that, and else begins another."""
        last = self._chain[-1] if self._chain else None
        if last is None:
            self._chain = [piece]
            return
        gap = self.text[last.end : piece.start]
        if last.kind == "n" and piece.kind == "n" and gap.strip(" ") == "" and self._is_bare(last):
            piece.spaced = True
            self._chain.append(piece)
        elif (
            last.kind not in "ngvp"
            or (not gap and self._touches(last, piece))
            or (
                last.kind in "ng"
                and gap.strip(" ") == ""
                and (piece.kind == "f" or self.text[piece.start] == "π")
            )
        ):
            self._chain.append(piece)
        else:
            self._flush()
            self._chain = [piece]

    def _touches(self, last: _Piece, piece: _Piece) -> bool:
        """Whether two values without anything between them are one expression; 7[1] is not."""
        if piece.kind == "g":
            return self.text[piece.start] != "["
        return last.kind != "g" or self.text[last.end - 1] != "]"

    def _is_bare(self, piece: _Piece) -> bool:
        """Whether nothing but blanks and "and" stands behind the digits of a numeral."""
        return (
            self.text[piece.start + len(piece.raw) : piece.end].strip(" ") in ("", "and") and not piece.scale
        )

    def _open(self, start: int) -> None:
        group = _Piece("g", start, start)
        self._operand(group)
        self._stack.append((self._chain, len(self.found), start))
        self._chain = []

    def _close(self, end: int) -> None:
        self._flush()
        chain, known, _ = self._stack.pop()
        group = chain[-1]
        group.numbers, group.end = self.found[known:], end
        del self.found[known:]
        self._chain = chain

    def _flush(self) -> None:
        """Ends the expression and adds what it is worth to the numbers found."""
        chain = self._chain
        self._chain = []
        while chain and chain[-1].kind not in "ngvpf":
            chain.pop()
        if not chain:
            return
        start, end = chain[0].start, chain[-1].measured or chain[-1].end
        if chain[0].kind == "-" and self.text[start - 1 : start] == "|" == self.text[end : end + 1]:
            self.found.append(_Found(None, start, end))  # a size
        elif len(chain) == 1 and chain[0].kind == "g":
            numbers = chain[0].numbers
            listed = len(numbers) > 1 and _TUPLE.fullmatch(self.text, start + 1, end - 1)
            self.found += [_Found(None, start, end)] if listed else numbers
        elif any(piece.kind == "n" or piece.numbers for piece in chain):
            self.found += [_Found(value, start, end) for value in _values(chain)]


def _is_unit(phrase: str) -> bool:
    """Whether a phrase names a unit of measure, as cm^2 does, or units^2."""
    words = phrase.strip().lstrip("/").replace("×", "*").replace("(", "").replace(")", "")
    return read_unit(words) is not None or re.match(r"\s*(?:(?:square|cubic) )?units?\b", words) is not None


# ---------------------------------------------------------------------- values

_POWER = r"\^(?:[-+]?n|g)"
_LISTED = re.compile("n(?:_n)*")
_FRACTION = re.compile("(?:n_)*n/n")
_POWERED = re.compile(f"[ng]{_POWER}")
_SCIENTIFIC = re.compile(f"n×n{_POWER}")


def _values(chain: list[_Piece]) -> list[Fraction | None]:
    """The values of an expression: one, or several where only blanks or commas part numerals."""
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
        values = _listed(chain)
    elif _FRACTION.fullmatch(shape):
        values = [_mixed(chain)]
    elif _POWERED.fullmatch(shape):
        values = [_power(chain)]
    elif _SCIENTIFIC.fullmatch(shape) and chain[2].raw == "10":
        mantissa, power = _single(chain[0]), _power(chain[2:])
        values = [None if mantissa is None or power is None else mantissa * power]
    if values[0] is not None:
        values[0] *= sign
    return values


def _listed(chain: list[_Piece]) -> list[Fraction | None]:
    if len(chain) == 1:
        return _numeral(chain[0])
    together = _grouped(chain)
    return [together] if together is not None else [value for piece in chain for value in _numeral(piece)]


def _grouped(chain: list[_Piece]) -> Fraction | None:
    """1 234 567 as one number; None if the numerals are no such groups."""
    spaced = "'".join(piece.raw for piece in chain)
    if (
        not _GROUPED.fullmatch(spaced)
        or spaced[0] == "0"
        or any(piece.scale or piece.more for piece in chain)
    ):
        return None
    return _single(_Piece("n", 0, 0, raw=spaced))


def _mixed(chain: list[_Piece]) -> Fraction | None:
    """3/4 or 2 3/4."""
    *whole, above, _, below = chain
    if not below.raw.isdigit() or int(below.raw[:MOST_CHARACTERS]) == 0 or len(below.raw) > MOST_CHARACTERS:
        return None
    top = _single(above)
    if top is None or top.denominator > 1 or below.scale or "." in above.raw:
        return None
    fraction = top / int(below.raw)
    if not whole:
        return fraction
    before = _single(whole[0]) if len(whole) == 1 else _grouped(whole)
    proper = before is not None and before.denominator == 1 and fraction < 1
    return before + fraction if proper and before is not None else None


def _power(chain: list[_Piece]) -> Fraction | None:
    """10^3, 2^-3 or (-2)^{3}."""
    base, exponent = (
        piece.numbers[0].value if piece.kind == "g" and len(piece.numbers) == 1 else _single(piece)
        for piece in (chain[0], chain[-1])
    )
    if base is None or exponent is None or exponent.denominator > 1 or abs(exponent) > MOST_EXPONENT:
        return None
    times = -exponent.numerator if chain[-2].kind == "-" else exponent.numerator
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits * abs(times) > _MOST_BITS or (base == 0 and times <= 0):
        return None
    return Fraction(base**times)


def _single(piece: _Piece) -> Fraction | None:
    """The one value of a numeral."""
    values = _numeral(piece) if piece.kind == "n" else [None]
    return values[0] if len(values) == 1 else None


def _numeral(piece: _Piece) -> list[Fraction | None]:
    """The values of a numeral: one, or several where commas separate them."""
    raw = piece.raw
    if len(raw) > MOST_CHARACTERS:
        return [None]
    values: list[Fraction | None]
    if _GROUPED.fullmatch(raw):
        values = [Fraction(re.sub("[,'_]", "", raw))]
    else:
        pieces = raw.split(",")
        values = [_decimal(each) for each in pieces]
        groups = len(pieces) > 1 and len(pieces[-1].partition(".")[0]) == 3  # 1,23,456 has no meaning
        if None in values or groups or _DECIMAL_COMMA.fullmatch(raw):
            return [None]
    if values[-1] is not None:
        values[-1] = values[-1] * 10**piece.scale + piece.more
    return values


def _decimal(numeral: str) -> Fraction | None:
    parsed = _PLAIN.fullmatch(numeral)
    if parsed is None or abs(int(parsed.group(2) or 0)) > MOST_EXPONENT:
        return None
    return Fraction(numeral)


# ---------------------------------------------------------------------- texts


def numbers(text: str) -> Iterator[Fraction | None]:
    """Yield the numbers of a text in order; None for each that is unreadable.

    >>> [str(n) for n in numbers("-1,234.5, $7, 50% or 3/4, on 3/4/2024")]
    ['-2469/2', '7', '50', '3/4', 'None']
    """
    yield from (found.value for found in _read(text, part=False))


def part_numbers(text: str) -> Iterator[Fraction | None]:
    r"""Yield the numbers of a part that is an answer: there - 7 at the beginning is -7, and 5! a factorial.

    >>> [*part_numbers(r"- \text{7}")], [*part_numbers(r"\sqrt{7}")], [*part_numbers("7!")]
    ([Fraction(-7, 1)], [None], [None])
    """
    yield from (found.value for found in _read(text, part=True))


def last_number(text: str) -> tuple[bool, Fraction | None]:
    """Return whether there is a number, and the last one; None if that is unreadable.

    >>> last_number("3, 4 and then 7."), last_number("none"), last_number("7 or 10^x")
    ((True, Fraction(7, 1)), (False, None), (True, None))
    """
    for line in reversed(text.split("\n")):
        end = len(line)
        while end > 0:
            start = max(0, end - _WINDOW)
            if found := _numbers(line[start:end], part=False):
                cut = start > 0 and found[-1].start == 0
                return True, None if cut else found[-1].value
            end = start
    return False, None


def whole_number(text: str) -> Fraction | None:
    """Return the number that a text consists of; None if it is anything else.

    >>> whole_number(" $1,234. "), whole_number("7 apples")
    (Fraction(1234, 1), None)
    """
    if len(text) > 2 * MOST_CHARACTERS or "\n" in text.strip():
        return None
    clean = _plain(text.strip())
    found = _Line(clean, part=False).found
    if len(found) != 1:
        return None
    around = clean[: found[0].start] + clean[found[0].end :]
    return found[0].value if not around.strip(f" %.{_CURRENCY}") else None


def _read(text: str, *, part: bool) -> Iterator[_Found]:
    for line in text.split("\n"):
        for start in range(0, len(line), _WINDOW):
            yield from _numbers(line[start : start + _WINDOW], part=part)


def _numbers(line: str, *, part: bool) -> list[_Found]:
    return _Line(_plain(line), part=part).found if _DIGIT.search(line) else []
