"""Split LaTeX and plain text into tokens, the same for both notations.

Never fails: a character without meaning becomes a token that the grammar rejects. Linear in the length of
the text, which is at most MOST_CHARACTERS.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from mathcheck.reading.notation import simplify_latex, with_latex_signs
from mathcheck.reading.tree import UnreadableError, word_set
from mathcheck.reading.units import find_unit

MOST_CHARACTERS = 4000
MOST_DIGITS = 1000
MOST_POWER_OF_TEN = 1000
_MOST_ENDLESS = 60
"""Digits before "..." among which a repetition is sought."""

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
"""Bases of numerals that are written as words."""

_WITHIN_NUMBER = re.compile(r"(?<=\d)(?<!(?<![\d.])0)(?:\{,\}|,?\\!\s*|\\[,;:]\s?|\{\\,\})(?=\d{3}(?!\d))")
_SPACED_NUMBER = re.compile(
    r"\A\s*[-+$]*[1-9]\d{0,2}(?:(?:\s|~|\\ )\d{3})+(?![\d,/^_!]|(?:\s|~|\\ )*(?:\d|/|\\frac))"
)
"""Matches 1 000 000 at the beginning of an answer, but not a mixed number."""
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
"""Matches the declaration after k pi that k is any integer."""
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
r"""Matches units in \mathrm up to the end of a value."""
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
"""Digits that end in one digit three times, or in two or more digits twice."""
_BASE = re.compile(r"(?P<open>\( )?(?:in )?base (?P<name>\w{1,9})(?(open) \))(?!\S)")
_EXPONENT = re.compile(r"[eE]([+-]?\d+)(?![\w.(^])|[eE]([+-]?\d+)(?=\.(?!\d))")


@dataclass(frozen=True, slots=True)
class Token:
    r"""A piece of an answer.

    Kinds: number, word (letters), text (letters within \text), sign, command, begin, end, row, other.
    """

    kind: str
    text: str
    spaced: bool = False
    """White space stands before it."""
    value: Fraction | None = None
    """Value of a number; None if it has too many digits."""

    def is_sign(self, *texts: str) -> bool:
        return self.kind == "sign" and self.text in texts

    def is_command(self, *names: str) -> bool:
        return self.kind == "command" and self.text in names

    @property
    def is_word(self) -> bool:
        return self.kind in ("word", "text")

    @property
    def nesting(self) -> int:
        """1 for an opening bracket, -1 for a closing one, otherwise 0."""
        return self.is_sign(*OPENERS) - self.is_sign(*CLOSERS)


def normalise(text: str) -> str:
    r"""Return the text with signs of Unicode as ASCII or LaTeX, and without marks of mathematics and bold.

    >>> normalise("$x²$ is **½**"), normalise("from $5 to $7")
    ('x^{2} is \\frac{1}{2}', 'from $5 to $7')
    """
    text = _without_marks(text)
    text = _ANY_INTEGER.sub("", text)
    text = _SPACED_NUMBER.sub(lambda m: re.sub(r"(?<=\d)\D+", "", m.group()), text)
    return _WITHIN_NUMBER.sub("", text)


def integer_letter(text: str) -> str | None:
    r"""Return the letter that the end of a text declares to be any integer; None if it declares none.

    >>> integer_letter(r"2 k \pi, k \in \mathbb{Z}"), integer_letter("2πn, where n is an integer")
    ('k', 'n')
    """
    declaration = _ANY_INTEGER.search(_without_marks(text))
    return (declaration["member"] or declaration["named"] or declaration["last"]) if declaration else None


def _without_marks(text: str) -> str:
    text = simplify_latex(with_latex_signs(text))
    text = _MATH_BRACKETS.sub(" ", text)
    text = _SPACED_SIGN.sub(r"\1", text)
    text = _SET_NAMES.sub(r"\\Reals ", text)
    text = _MATH_DOLLARS.sub(lambda m: m.group(1) if m.group(1) is not None else " ", text)
    return unbold(text)


def unbold(text: str) -> str:
    """Return the text without the stars of **bold**."""
    return _BOLD.sub(r"\1", text)


def tokenize(text: str, *, thousands: bool = True) -> list[Token]:
    """Return the tokens of a plain text; 1,234 is one number unless it stands within brackets.

    >>> [t.text for t in tokenize(r"1,234 \\text{ m}/(1,234)")]
    ['1,234', 'm', '/', '(', '1', ',', '234', ')']
    """
    if len(text) > MOST_CHARACTERS:
        raise UnreadableError(f"longer than {MOST_CHARACTERS} characters")
    result: list[Token] = []
    at, depth, spaced = 0, 0, True
    while at < len(text):
        match = _TOKEN.match(text, at)
        assert match is not None
        kind, piece = match.lastgroup or "", match.group()
        if kind == "space":
            at, spaced = match.end(), True
            continue
        if kind == "number" or (text.startswith(".\\", at) and _REPEATING.match(text, at)):
            token = _number_token(text, at, spaced, thousands=thousands and depth == 0)
            result.append(token)
            at, spaced = at + len(token.text), False
            continue
        measured = kind == "text" and _follows_value(result, spaced) and bool(_MEASURES.match(text, at))
        added = _tokens_of_match(kind, piece, spaced, measured=measured)
        depth += sum(token.nesting for token in added)
        result += added
        at, spaced = match.end(), False if added else spaced
    for i in range(1, len(result) - 1):  # 3 x 10^8
        if result[i].text in ("x", "X") and result[i - 1].kind == result[i + 1].kind == "number":
            result[i] = Token("sign", "*", result[i].spaced)
    return _join_bases(result)


def _join_bases(tokens: list[Token]) -> list[Token]:
    """Rewrite 1011 base 2, 1011 in base two and 1011 (base 2) as 1011_2, if all digits are below the base."""
    result: list[Token] = []
    at = 0
    while at < len(tokens):
        token, at = tokens[at], at + 1
        result.append(token)
        if token.kind != "number" or not token.text.isdecimal():
            continue
        words = _BASE.match(" ".join(ahead.text.lower() for ahead in tokens[at : at + 5]))
        base = BASES.get(words["name"], words["name"]) if words else ""
        if words and base.isdecimal() and int(max(token.text)) < int(base) <= 36:
            result += [Token("sign", "_"), Token("number", base, value=Fraction(base))]
            at += words.group().count(" ") + 1
    return result


def _tokens_of_match(kind: str, piece: str, spaced: bool, *, measured: bool) -> list[Token]:
    """Return the tokens of a match that is neither space nor number; none for layout."""
    if kind == "text":
        command, _, content = piece[:-1].partition("{")
        return _tokens_of_text(content, spaced, upright=not command.startswith(r"\math"), measured=measured)
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
    """Return whether the tokens end in a numeral or unit, perhaps followed by / or ·.

    Before a space, a group or pi counts too.
    """
    last = before[-2:] if before and before[-1].text in ("/", "*") else before[-1:]
    return bool(last) and (last[0].kind in ("number", "text") or (spaced and last[0].text in ("}", "pi")))


def _tokens_of_text(content: str, spaced: bool, *, upright: bool, measured: bool) -> list[Token]:
    r"""Return the tokens of the content of \text{...}, whose words are of kind text, except and, or.

    A letter in \mathrm is a variable, unless it is a unit after a value.
    """
    result = []
    for token in tokenize(content):
        kind = token.kind
        unit = len(token.text) > 1 or (measured and find_unit(token.text) is not None)
        if kind == "word" and token.text not in JOINING and (upright or unit):
            kind = "text"
        result.append(Token(kind, token.text, token.spaced or spaced, token.value))
        spaced = False
    return result


def _number_token(text: str, at: int, spaced: bool, *, thousands: bool) -> Token:
    """Return the longest numeral that begins at `at`."""
    repeating = _REPEATING.match(text, at)
    if repeating:
        endless = _repeating_parts(repeating)
        if endless is not None:
            return Token("number", repeating.group(), spaced, _repeating_value(*endless))
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


def _repeating_parts(match: re.Match[str]) -> tuple[str, str, str] | None:
    """Return the digits before the point, those after it, and those that repeat; None if none do.

    >>> _repeating_parts(_REPEATING.match("0.1666...")), _repeating_parts(_REPEATING.match("3.14159..."))
    (('0', '1666', '6'), None)
    """
    integer, fixed = match["whole"] or "0", match["fixed"]
    if match["dots"] is None:
        ends = (match["first"] or "") + match["between"] + match["last"] if match["first"] else ""
        return integer, fixed, match["lined"] or match["digit"] or match["bracketed"] or ends
    again = _ONCE_MORE.fullmatch(fixed) if len(fixed) <= _MOST_ENDLESS else None
    if again is None:
        return None
    return integer, fixed, again[2] or again[3]


def _repeating_value(integer: str, fixed: str, repeated: str) -> Fraction | None:
    if len(integer) + len(fixed) + len(repeated) > MOST_DIGITS:
        return None
    shift = Fraction(10) ** len(fixed)
    return Fraction(int(integer + fixed)) / shift + Fraction(int(repeated), 10 ** len(repeated) - 1) / shift
