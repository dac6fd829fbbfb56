"""Tokens of LaTeX and plain text, the same for both ways of writing.

Never fails: a character that means nothing becomes a token that the grammar refuses. Linear in
the length of the text, of which no more than MOST_CHARACTERS may be given.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from mathcheck.reading.latex import simpler
from mathcheck.reading.signs import with_latex_signs
from mathcheck.reading.tree import UnreadableError, word_set
from mathcheck.reading.units import unit_named

MOST_CHARACTERS = 4000
MOST_DIGITS = 1000
MOST_POWER_OF_TEN = 1000
_MOST_ENDLESS = 60
"""Digits before ... among which a repetition is looked for."""

_GREEK = word_set(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron rho sigma tau "
    "upsilon phi chi psi omega"
)
GREEK = _GREEK | {name.capitalize() for name in _GREEK} | {"varphi", "varepsilon", "vartheta", "ell"}
CURRENCIES = frozenset("$€£¥₹¢")
JOINING = frozenset({"and", "or"})
OPENERS, CLOSERS = ("(", "[", "{", "{{", "⟨"), (")", "]", "}", "}}", "⟩")
_NUMERALS = "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
BASES = {name: str(base) for base, name in enumerate(_NUMERALS.split(), 2)}
"""Bases that are written as words."""

_WITHIN_NUMBER = re.compile(r"(?<=\d)(?<!(?<![\d.])0)(?:\{,\}|,?\\!\s*|\\[,;:]\s?|\{\\,\})(?=\d{3}(?!\d))")
_SPACED_NUMBER = re.compile(
    r"\A\s*[-+$]*[1-9]\d{0,2}(?:(?:\s|~|\\ )\d{3})+(?![\d,/^_!]|(?:\s|~|\\ )*(?:\d|/|\\frac))"
)
"""1 000 000 at the beginning of an answer; what is followed by a fraction is a mixed number."""
_MATH_DOLLARS = re.compile(r"\$\$|(?<!\\)\$(?=\S)([^$]*)(?<=[^\s\\$])\$(?!\d)")
_MATH_BRACKETS = re.compile(r"(?<!\\)\\[()\[\]]")
_BOLD = re.compile(r"(?<![\w)}\]*])\*\*(?=[^\s*])([^*]*)\*\*")
_SPACED_SIGN = re.compile(r"(?:\\math(?:bin|rel|punct)\s{0,9}|(?<![A-Za-z]))\{\s{0,9}(:|\\colon)\s{0,9}\}")
_GAP = r"(?:\s|~|\\[,;:! ]|\\q?quad(?![A-Za-z])|\\text(?=\s?\{)|[{}]){0,6}"
_ANY_INTEGER = re.compile(
    rf"""(?:[,;(]|\\q?quad(?![A-Za-z])|(?:\s|\\text\s?\{{\s{{0,3}})(?=(?:where|for|with)\b)){_GAP}(?:(?:where|for|with)\b{_GAP})?(?:
        (?P<member>(?![xyz])[a-z]){_GAP}\\in{_GAP}(?:\\mathbb{_GAP})?Z
        |(?P<named>(?![xyz])[a-z]){_GAP}(?:(?:is|be)\s)?{_GAP}(?:an?y?\s)?{_GAP}integer
        |(?:(?:any|all|some|every|an)\s)?{_GAP}integers?{_GAP}(?P<last>(?![xyz])[a-z])
    )(?![A-Za-z]){_GAP}[).]*\s*\Z""",
    re.VERBOSE,
)
"""Behind k pi what k is."""
_SET_NAMES = re.compile(r"\\mathbb\s*\{?\s*R\s*\}?")

_DROPPED = word_set(
    "left right big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr displaystyle textstyle limits quad "
    "qquad middle"
)
_COMMANDS = (
    dict.fromkeys(("cdot", "times", "ast"), "*")
    | dict.fromkeys(("le", "leq", "leqslant"), "≤")
    | dict.fromkeys(("ge", "geq", "geqslant"), "≥")
    | dict.fromkeys(("ne", "neq"), "≠")
    | dict.fromkeys(("approx", "simeq"), "≈")
    | dict.fromkeys(("vert", "lvert", "rvert", "mid"), "|")
    | {"div": "/", "pm": "±", "mp": "∓", "lt": "<", "gt": ">", "langle": "⟨", "rangle": "⟩", "colon": ":"}
    | {"lbrace": "{{", "rbrace": "}}", "lbrack": "[", "rbrack": "]", "lparen": "(", "rparen": ")"}
)
_PAIRS = {"<=": "≤", ">=": "≥", "!=": "≠", "**": "^", "==": "=", "~=": "≈"}

_TOKEN = re.compile(
    r"""(?P<space>\s+|\\[,;:!>\s]|~(?!=))
    |(?P<number>(?:\d+(?:\.\d+)?|\.\d+))
    |(?P<environment>\\(?:begin|end)\s{0,9}\{[A-Za-z]{1,20}\*?\})
    |(?P<text>\\(?:text(?:bf|it|rm|tt|normal)?|[mh]box|math(?:rm|bf|it|sf)|operatorname|rm)\s{0,9}
        \{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})
    |(?P<row>\\\\)
    |(?P<escaped>\\[{}|%$&\#_])
    |(?P<command>\\[A-Za-z]+)
    |(?P<word>[A-Za-z]+)
    |(?P<sign><=|>=|!=|\*\*|==|~=|[-+*/^_()\[\]{}|,;:=<>!%.'&$€£¥₹¢])
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_MEASURES = re.compile(
    r"""(?:\\mathrm\s{0,9}\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|\^(?:\d|\{-?\d\})|[/\s~]|\\cdot|\\[,;:])+(?:[.,=)\]]|$)""",
)
"""Units in \\mathrm up to the end of a value."""
_GROUPED = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+(?:(?![\d,])(?:\.\d+)?|(?=,\D|,$))")
_REPEATING = re.compile(
    r"""(?P<whole>\d*)\.(?P<fixed>\d*)(?:
        (?P<open>\{)?\\(?:overline|bar|dot)\s{0,9}(?:\{(?P<lined>\d+)\}|(?P<digit>\d))(?(open)\}|(?!\d*\\dot))
        |\((?P<bracketed>\d+)\)
        |\\dot\s{0,9}\{?(?P<first>\d)\}?(?P<between>\d*)\\dot\s{0,9}\{?(?P<last>\d)\}?
        |(?P<dots>\s?(?:\.\.\.|\\(?:ldots|dots|cdots)(?![A-Za-z]))))""",
    re.VERBOSE,
)
_ONCE_MORE = re.compile(r"(\d*?)(?:(\d)\2\2+|(\d{2,}?)\3+)")
"""Digits that end in one that stands three times, or in two or more that stand twice."""
_BASE = re.compile(r"(?P<open>\( )?(?:in )?base (?P<name>\w{1,9})(?(open) \))(?!\S)")
_EXPONENT = re.compile(r"[eE]([+-]?\d+)(?![\w.(^])|[eE]([+-]?\d+)(?=\.(?!\d))")


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of an answer.

    Kinds: number, word (letters), text (letters within \\text), sign, command, begin, end, row, other.
    """

    kind: str
    text: str
    spaced: bool = False
    """White space stands before it."""
    value: Fraction | None = None
    """Of a number; None if it has too many digits."""


def plain(text: str) -> str:
    r"""The text with Unicode's signs as ASCII or LaTeX, and without the marks of mathematics and of bold.

    >>> plain("$x²$ is **½**"), plain("from $5 to $7")
    ('x^{2} is \\frac{1}{2}', 'from $5 to $7')
    """
    text = _unmarked(text)
    text = _ANY_INTEGER.sub("", text)
    text = _SPACED_NUMBER.sub(lambda m: re.sub(r"(?<=\d)\D+", "", m.group()), text)
    return _WITHIN_NUMBER.sub("", text)


def any_integer(text: str) -> str | None:
    r"""The letter that a text says to be any integer, at its end; None if it says nothing of this kind.

    >>> any_integer(r"2 k \pi, k \in \mathbb{Z}"), any_integer("2πn, where n is an integer"), any_integer("n")
    ('k', 'n', None)
    """
    found = _ANY_INTEGER.search(_unmarked(text))
    return (found["member"] or found["named"] or found["last"]) if found else None


def _unmarked(text: str) -> str:
    text = simpler(with_latex_signs(text))
    text = _MATH_BRACKETS.sub(" ", text)
    text = _SPACED_SIGN.sub(r"\1", text)
    text = _SET_NAMES.sub(r"\\Reals ", text)
    text = _MATH_DOLLARS.sub(lambda m: m.group(1) if m.group(1) is not None else " ", text)
    return unbold(text)


def unbold(text: str) -> str:
    """The text without the stars of **bold**."""
    return _BOLD.sub(r"\1", text)


def tokens(text: str, *, thousands: bool = True) -> list[Token]:
    """The tokens of a plain text; 1,234 is one number unless it stands within brackets.

    >>> [t.text for t in tokens(r"1,234 \\text{ m}/(1,234)")]
    ['1,234', 'm', '/', '(', '1', ',', '234', ')']
    """
    if len(text) > MOST_CHARACTERS:
        raise UnreadableError(f"longer than {MOST_CHARACTERS} characters")
    found: list[Token] = []
    at, depth, spaced = 0, 0, True
    while at < len(text):
        match = _TOKEN.match(text, at)
        assert match is not None
        kind, piece = match.lastgroup or "", match.group()
        if kind == "space":
            at, spaced = match.end(), True
            continue
        if kind == "number" or (text.startswith(".\\", at) and _REPEATING.match(text, at)):
            token = _number(text, at, spaced, thousands=thousands and depth == 0)
            found.append(token)
            at, spaced = at + len(token.text), False
            continue
        measured = kind == "text" and _follows_value(found, spaced) and bool(_MEASURES.match(text, at))
        added = _spelt(kind, piece, spaced, measured=measured)
        depth += sum((t.text in OPENERS) - (t.text in CLOSERS) for t in added if t.kind == "sign")
        found += added
        at, spaced = match.end(), False if added else spaced
    for i in range(1, len(found) - 1):  # 3 x 10^8
        if found[i].text in ("x", "X") and found[i - 1].kind == found[i + 1].kind == "number":
            found[i] = Token("sign", "*", found[i].spaced)
    return _based(found)


def _based(found: list[Token]) -> list[Token]:
    """1011 base 2, 1011 in base two and 1011 (base 2) as 1011_2, where the base has all these digits."""
    read: list[Token] = []
    at = 0
    while at < len(found):
        token, at = found[at], at + 1
        read.append(token)
        if token.kind != "number" or not token.text.isdecimal():
            continue
        words = _BASE.match(" ".join(ahead.text.lower() for ahead in found[at : at + 5]))
        base = BASES.get(words["name"], words["name"]) if words else ""
        if words and base.isdecimal() and int(max(token.text)) < int(base) <= 36:
            read += [Token("sign", "_"), Token("number", base, value=Fraction(base))]
            at += words.group().count(" ") + 1
    return read


def _spelt(kind: str, piece: str, spaced: bool, *, measured: bool) -> list[Token]:
    """The tokens of one match that is neither space nor number; none for what is only layout."""
    if kind == "text":
        command, _, content = piece[:-1].partition("{")
        return _textual(content, spaced, upright=not command.startswith(r"\math"), measured=measured)
    if kind == "environment":
        return [Token("begin" if piece.startswith(r"\begin") else "end", piece, spaced)]
    if kind == "command":
        name = piece[1:]
        if name in _DROPPED:
            return []
        if name in _COMMANDS:
            return [Token("sign", _COMMANDS[name], spaced)]
        return [Token("command", name, spaced)]
    if kind == "escaped":
        sign = {r"\{": "{{", r"\}": "}}", r"\|": "|"}.get(piece, piece[1:])
        return [Token("sign", sign, spaced)]
    if kind == "sign":
        return [Token("sign", _PAIRS.get(piece, piece), spaced)]
    return [Token(kind, piece, spaced)]


def _follows_value(before: list[Token], spaced: bool) -> bool:
    """Whether a numeral or unit (before a space also a group or pi), perhaps with / or ·, stands there."""
    last = before[-2:] if before and before[-1].text in ("/", "*") else before[-1:]
    return bool(last) and (last[0].kind in ("number", "text") or (spaced and last[0].text in ("}", "pi")))


def _textual(content: str, spaced: bool, *, upright: bool, measured: bool) -> list[Token]:
    r"""What stands in \text{...}: its words are text, but and, or.

    A letter of \mathrm is a variable, unless it is a unit behind a value.
    """
    found = []
    for token in tokens(content):
        kind = token.kind
        unit = len(token.text) > 1 or (measured and unit_named(token.text) is not None)
        if kind == "word" and token.text not in JOINING and (upright or unit):
            kind = "text"
        found.append(Token(kind, token.text, token.spaced or spaced, token.value))
        spaced = False
    return found


def _number(text: str, at: int, spaced: bool, *, thousands: bool) -> Token:
    """The numeral at a place, as long as it goes."""
    repeating = _REPEATING.match(text, at)
    if repeating:
        endless = _endless(repeating)
        if endless is not None:
            return Token("number", repeating.group(), spaced, _repeating(*endless))
    grouped = _GROUPED.match(text, at) if thousands else None
    match = grouped or _TOKEN.match(text, at)
    assert match is not None
    digits, end, power = match.group().replace(",", ""), match.end(), 0
    scientific = _EXPONENT.match(text, end)
    if scientific:
        written, end = scientific.group(1) or scientific.group(2), scientific.end()
        power = int(written) if len(written) <= len(str(MOST_POWER_OF_TEN)) + 1 else MOST_POWER_OF_TEN + 1
    value = None
    if len(digits) <= MOST_DIGITS and abs(power) <= MOST_POWER_OF_TEN:
        value = Fraction(digits) * Fraction(10) ** power
    return Token("number", text[at:end], spaced, value)


def _endless(found: re.Match[str]) -> tuple[str, str, str] | None:
    """What stands before the point, what follows it once, and what repeats; None if nothing does.

    >>> _endless(_REPEATING.match("0.1666...")), _endless(_REPEATING.match("3.14159..."))
    (('0', '1666', '6'), None)
    """
    whole, fixed = found["whole"] or "0", found["fixed"]
    if found["dots"] is None:
        ends = (found["first"] or "") + found["between"] + found["last"] if found["first"] else ""
        return whole, fixed, found["lined"] or found["digit"] or found["bracketed"] or ends
    again = _ONCE_MORE.fullmatch(fixed) if len(fixed) <= _MOST_ENDLESS else None
    if again is None:
        return None
    return whole, fixed, again[2] or again[3]


def _repeating(whole: str, fixed: str, repeated: str) -> Fraction | None:
    if len(whole) + len(fixed) + len(repeated) > MOST_DIGITS:
        return None
    shift = Fraction(10) ** len(fixed)
    return Fraction(int(whole + fixed)) / shift + Fraction(int(repeated), 10 ** len(repeated) - 1) / shift
