"""Group the pieces of a line into numeric expressions."""

import re
from fractions import Fraction

from mathcheck.numerals.notation import BREAK, CURRENCY, MINUS
from mathcheck.numerals.values import NumberSpan, Piece, values
from mathcheck.reading.units import find_unit, read_unit

_MOST_DEPTH = 40

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
_UNFINISHED = re.compile(r"\.\.\.|…|\.\(|\.?√|\u0305")
"""What follows a decimal that is not written to its end."""

_TIMES = re.compile(r"\s{0,2}[xX]\s{0,2}(?=[0-9]|\.[0-9])")
_NEXT = rf"(?=[{CURRENCY}]?[-−]?[{CURRENCY}]?[0-9.(√])"
_JOINED = re.compile(
    r"\s+(?:plus|minus|times|over|choose|mod|by|of|in|per|out of|(?:divided|multiplied) by|through|thru"
    rf"|(?:raised )?to the(?: power(?: of)?)?|(?:more|less|fewer|greater|larger|smaller) than)\s+{_NEXT}"
)
_TO = re.compile(rf"\s+(?:up )?(to|and)\s+{_NEXT}")
_CHANGED = re.compile(
    r"\b(?:round|increas|decreas|reduc|chang|ris|rose|fell|fall|gr[eo]w|drop|simplif|convert|down|up)",
    re.IGNORECASE,
)
"""Before "from 3 to 5", which then is not a range."""
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
"""Letters that, right after a number, are variables and not a unit."""
_BEFORE_MINUS = frozenset(("=", "≈", ":", "(", "[", "{", "≡", "is", "be", "are", "equals", "to"))
"""Tokens before a minus that is spaced from its number; after others it is a dash."""
_CONTINUED = re.compile(r"\s?[-+*/×÷^]")
"""Follows a ! that does not end a sentence."""
_TUPLE = re.compile(r"[\s0-9.,;'+−-]*")


class LineScanner:
    """Read the numbers of one line from left to right into `found`."""

    def __init__(self, text: str, *, part: bool) -> None:
        self.text = text
        self.part = part
        self.found: list[NumberSpan] = []
        self._chain: list[Piece] = []
        self._stack: list[tuple[list[Piece], int, int]] = []
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
        """Process a token and return where the next one begins."""
        kind, text, start, end = token.lastgroup or "", token.group(), token.start(), token.end()
        if kind == "space":
            return end
        if kind == "number":
            return self._number(text, start, end)
        if kind in ("unreadable", "version"):
            self._operand(Piece("n", start, end, raw="?"))
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
        piece = Piece("n", start, end, raw=raw)
        before = self.text[max(0, start - 40) : start]
        if "." in raw and _UNFINISHED.match(self.text, end):
            piece.raw = "?"
        self._operand(piece)
        if len(self._chain) == 1 and before:
            if _NEGATIVE.search(before):
                self._chain.insert(0, Piece("-", start, start))
            elif _BEFORE.search(before):
                self._chain.insert(0, Piece("v", start, start))
        between = _BETWEEN.search(before) is not None
        return self._behind(piece, end, between=between)

    def _behind(self, piece: Piece, end: int, *, between: bool) -> int:
        """Process the words after a numeral that are its unit or an operation, and return their end."""
        text = self.text
        if percent := _PERCENT.match(text, end):
            piece.measured, piece.end = end, percent.end()
            end = percent.end()
        currency = text[max(0, piece.start - 1) : piece.start] in tuple(CURRENCY)
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
            self._chain.append(Piece("p", end, end))
        if times := _TIMES.match(text, end):
            self._chain.append(Piece("×", end, times.end()))
            return times.end()
        if joined := _JOINED.match(text, end):
            self._chain.append(Piece("~", end, joined.end()))
            return joined.end()
        joined = _TO.match(text, end)
        if joined and (between if joined[1] == "and" else not _CHANGED.search(text[:end])):
            self._chain.append(Piece("~", end, joined.end()))
            return joined.end()
        for pattern in (_UNIT_PRODUCT, _UNIT):
            unit = pattern.match(text, end)
            if unit and _is_unit(unit.group()):
                piece.measured, piece.end = piece.measured or end, unit.end()
                return unit.end()
        return end

    def _compound(self, end: int) -> int:
        """Return where 2 hours 30 minutes ends, if `end` is the end of the 2; 0 for other text."""
        last = 0
        while compound := _COMPOUND.match(self.text, end):
            large, small = find_unit(compound[1]), find_unit(compound[3])
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
            if _ATTACHED.fullmatch(word) and find_unit(word) is None:
                self._chain.append(Piece("v", start, end))
            elif any(letter.isdigit() for letter in word):  # 10C2
                last.raw = "?"
            last.end = end
            return end
        if _FUNCTIONS.fullmatch(word):
            self._operand(Piece("f", start, end))
        elif _VARIABLE.fullmatch(word) or (following in ("(", "^", "/") and following):
            power = _UNIT.match(self.text, start)
            if following == "^" and len(word) > 1 and power and _is_unit(power.group()):
                self._flush()
                return power.end()
            self._operand(Piece("v", start, end))
        else:
            self._flush()
        return end

    def _operator(self, text: str, start: int, end: int) -> None:
        last = self._chain[-1] if self._chain else None
        operand = last is not None and last.kind in "ngvp"
        attached = last is not None and operand and last.end == start
        if text in "√π":
            self._operand(Piece("f" if text == "√" else "v", start, end))
            return
        if text in "%°":
            if attached and last is not None:
                last.measured, last.end = last.measured or start, end
            return
        if text == "!":
            if attached and (self.part or _CONTINUED.match(self.text, end)):
                self._chain.append(Piece("p", start, end))
            else:
                self._flush()
            return
        spaced_before = start == 0 or self.text[start - 1].isspace()
        spaced_behind = end == len(self.text) or self.text[end].isspace()
        kind = {"**": "^", "*": "×", "—": "~", "<": "≤", ">": "≤", "<=": "≤", ">=": "≤", "!=": "≤"}.get(
            text, text
        )
        kind = "-" if kind in MINUS else "≤" if kind in "≥≠" else kind
        if operand:
            is_separate = {
                "-": spaced_before and not spaced_behind,
                "+": spaced_before and not spaced_behind,
                ":": spaced_behind and not spaced_before,
            }.get(kind, text in ("*", "**", "—", "<", ">") and spaced_before != spaced_behind)
            if not is_separate:
                self._chain.append(Piece(kind, start, end))
                return
            self._flush()
        elif last is not None:  # it follows another operator
            self._chain.append(Piece(kind, start, end))
            return
        quoting = text in "<>" and not (spaced_before and spaced_behind and self._before not in ("", BREAK))
        if (kind in "±≤" and not quoting) or (kind in "-+" and self._is_sign(start, spaced_behind)):
            self._chain.append(Piece(kind, start, end))
        else:
            self._flush()

    def _is_sign(self, start: int, spaced_behind: bool) -> bool:
        """Return whether a minus or plus without a value before it is the sign of the next number."""
        if spaced_behind:
            return self._before in _BEFORE_MINUS or (self.part and not self._before)
        return not re.match(r"[0-9A-Za-z)\]}%]", self.text[start - 1 : start] if start else "")

    # ------------------------------------------------------------------ expressions

    def _operand(self, piece: Piece) -> None:
        """Add a value to the pending expression if both are one, and else begin another expression."""
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

    def _touches(self, last: Piece, piece: Piece) -> bool:
        """Return whether two adjacent values are one expression; 7[1] is not."""
        if piece.kind == "g":
            return self.text[piece.start] != "["
        return last.kind != "g" or self.text[last.end - 1] != "]"

    def _is_bare(self, piece: Piece) -> bool:
        """Return whether only blanks and "and" follow the digits of a numeral."""
        return (
            self.text[piece.start + len(piece.raw) : piece.end].strip(" ") in ("", "and") and not piece.scale
        )

    def _open(self, start: int) -> None:
        group = Piece("g", start, start)
        self._operand(group)
        self._stack.append((self._chain, len(self.found), start))
        self._chain = []

    def _close(self, end: int) -> None:
        self._flush()
        chain, count, _ = self._stack.pop()
        group = chain[-1]
        group.numbers, group.end = self.found[count:], end
        del self.found[count:]
        self._chain = chain

    def _flush(self) -> None:
        """End the expression and add its values to `found`."""
        chain = self._chain
        self._chain = []
        while chain and chain[-1].kind not in "ngvpf":
            chain.pop()
        if not chain:
            return
        start, end = chain[0].start, chain[-1].measured or chain[-1].end
        if chain[0].kind == "-" and self.text[start - 1 : start] == "|" == self.text[end : end + 1]:
            self.found.append(NumberSpan(None, start, end))  # an absolute value
        elif len(chain) == 1 and chain[0].kind == "g":
            numbers = chain[0].numbers
            listed = len(numbers) > 1 and _TUPLE.fullmatch(self.text, start + 1, end - 1)
            self.found += [NumberSpan(None, start, end)] if listed else numbers
        elif any(piece.kind == "n" or piece.numbers for piece in chain):
            self.found += [NumberSpan(value, start, end) for value in values(chain)]


def _is_unit(phrase: str) -> bool:
    """Return whether a phrase names a unit of measure, such as cm^2 or units^2."""
    words = phrase.strip().lstrip("/").replace("×", "*").replace("(", "").replace(")", "")
    return read_unit(words) is not None or re.match(r"\s*(?:(?:square|cubic) )?units?\b", words) is not None
