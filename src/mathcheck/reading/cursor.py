"""A position in a sequence of tokens, and the names that runs of letters consist of."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TypeVar

from mathcheck.reading.lexer import GREEK, Token
from mathcheck.reading.tree import INFINITY, Constant, Numeral, TooHardError, UnreadableError

MOST_DEPTH = 40
MOST_TOKENS = 1500
MOST_LETTERS = 4
"""Single letters of a run: four variables may stand together, more are a word."""

T = TypeVar("T")

_TRIG = ("sin", "cos", "tan", "cot", "sec", "csc")
FUNCTIONS = (
    {name: name for name in _TRIG}
    | {f"{name}h": f"{name}h" for name in ("sin", "cos", "tan")}
    | {f"arc{name}": f"a{name}" for name in _TRIG}
    | {f"a{name}": f"a{name}" for name in ("sin", "cos", "tan")}
    | {name: name for name in ("ln", "lg", "log", "exp", "sqrt", "cbrt", "abs", "floor", "ceil")}
    | {"Re": "re", "Im": "im"}
)
CONSTANTS = dict.fromkeys(("infty", "infinity", "inf", "oo"), INFINITY) | {
    name: Constant(name) for name in ("pi", "e", "i")
}
_SHORT_GREEK = {"nu", "xi", "mu", "eta", "chi", "rho", "tau", "phi", "psi", "ell", "iota", "zeta"}
_WITHIN_RUNS = {*FUNCTIONS, *CONSTANTS, *GREEK} - {"e", "i", "inf", "Re", "Im"} - _SHORT_GREEK
_LONGEST_FIRST = sorted(_WITHIN_RUNS, key=lambda name: (-len(name), name))


def pieces(word: str) -> list[str] | None:
    """Return the names and single letters that a run of letters consists of; None if it is a word.

    >>> pieces("xsin"), pieces("pir"), pieces("apples")
    (['x', 'sin'], ['pi', 'r'], None)
    """
    if word in FUNCTIONS or word in CONSTANTS or word in GREEK:
        return [word]
    names, at, letters = list[str](), 0, 0
    while at < len(word) and letters <= MOST_LETTERS:
        name = next((n for n in _LONGEST_FIRST if word.startswith(n, at)), word[at])
        letters += name == word[at]
        names.append(name)
        at += len(name)
    return names if letters <= MOST_LETTERS else None


class Cursor:
    """Take tokens one after the other, and count how deep the reader is nested."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        if len(tokens) > MOST_TOKENS:
            raise TooHardError(f"more than {MOST_TOKENS} tokens")
        self._tokens = list(tokens)
        self._at = 0
        self._depth = 0

    @property
    def rest(self) -> list[Token]:
        """Tokens that are not taken yet."""
        return self._tokens[self._at :]

    @property
    def before(self) -> Token | None:
        return self._tokens[self._at - 1] if self._at else None

    @property
    def here(self) -> Token | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def next(self) -> Token:
        if self._at == len(self._tokens):
            raise UnreadableError("it ends too early")
        self._at += 1
        return self._tokens[self._at - 1]

    def back(self) -> None:
        """Return to the token taken last."""
        self._at -= 1

    def take(self, *texts: str) -> str | None:
        """Take the next token and return its text if it is one of these signs, else return None."""
        return self.next().text if self.at_sign(*texts) else None

    def need(self, text: str) -> None:
        """Take this sign. Raises UnreadableError if another token is next."""
        if self.take(text) is None:
            raise UnreadableError(f"{text!r} is missing")

    def at_sign(self, *texts: str) -> bool:
        token = self.here
        return token is not None and token.is_sign(*texts)

    def take_command(self, *names: str) -> bool:
        """Take the next token and return True if it is one of these commands."""
        token = self.here
        is_command = token is not None and token.is_command(*names)
        self._at += is_command
        return is_command

    def take_mixed_part(self) -> Numeral | None:
        r"""Take the proper fraction 1/2 or \frac{1}{2}; None if no such fraction is next."""
        texts = [token.text for token in self._tokens[self._at : self._at + 7]]
        if len(texts) >= 3 and texts[1] == "/":
            above, below, length = texts[0], texts[2], 3
        elif len(texts) == 7 and [texts[i] for i in (0, 1, 3, 4, 6)] == ["frac", "{", "}", "{", "}"]:
            above, below, length = texts[2], texts[5], 7
        elif len(texts) >= 2 and texts[0] == "frac" and len(texts[1]) == 2:
            above, below, length = texts[1][0], texts[1][1], 2
        else:
            return None
        if not (above.isdigit() and below.isdigit() and len(above + below) < 100 and int(above) < int(below)):
            return None
        self._at += length
        return Numeral(Fraction(int(above), int(below)))

    def take_digit(self) -> Numeral | None:
        """Take the first digit of the next number and leave the others; None if no number is next."""
        token = self.here
        if token is None or token.kind != "number" or not token.text.isdigit():
            return None
        if len(token.text) == 1:
            self._at += 1
        else:
            others = token.text[1:]
            value = Fraction(others) if token.value is not None else None
            self._tokens[self._at] = Token("number", others, value=value)
        return Numeral(Fraction(token.text[0]))

    def spell(self, names: list[str]) -> None:
        """Replace the word taken last by these names, of which the first counts as taken."""
        token = self._tokens[self._at - 1]
        self._tokens[self._at - 1 : self._at] = [Token("word", n, token.spaced) for n in names]
        if len(self._tokens) > 2 * MOST_TOKENS:
            raise TooHardError(f"more than {MOST_TOKENS} tokens")

    def deeper(self, parse: Callable[[], T]) -> T:
        """Return the result of `parse`, run one level deeper. Raises TooHardError beyond MOST_DEPTH."""
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise TooHardError(f"nested deeper than {MOST_DEPTH}")
        result = parse()
        self._depth -= 1
        return result
