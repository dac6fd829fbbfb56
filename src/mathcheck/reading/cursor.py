"""A place in a sequence of tokens, and the names that runs of letters are made of."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TypeVar

from mathcheck.reading.lexer import GREEK, Token
from mathcheck.reading.tree import INFINITY, Constant, Numeral, TooHardError, UnreadableError

MOST_DEPTH = 40
MOST_TOKENS = 1500
MOST_LETTERS = 4
"""Of a run of letters that are no name: four variables may stand together, more are a word."""

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
    """Known names and single letters that a run of letters is made of; None if it is a word.

    >>> pieces("xsin"), pieces("pir"), pieces("apples")
    (['x', 'sin'], ['pi', 'r'], None)
    """
    if word in FUNCTIONS or word in CONSTANTS or word in GREEK:
        return [word]
    found, at, letters = list[str](), 0, 0
    while at < len(word) and letters <= MOST_LETTERS:
        name = next((n for n in _LONGEST_FIRST if word.startswith(n, at)), word[at])
        letters += name == word[at]
        found.append(name)
        at += len(name)
    return found if letters <= MOST_LETTERS else None


class Cursor:
    """Tokens that are taken one after the other; counts how deep the reader is nested."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        if len(tokens) > MOST_TOKENS:
            raise TooHardError(f"more than {MOST_TOKENS} tokens")
        self._tokens = list(tokens)
        self._at = 0
        self._depth = 0

    @property
    def rest(self) -> list[Token]:
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
        """Gives the token taken last back."""
        self._at -= 1

    def take(self, *texts: str) -> str | None:
        """The sign that stands next, taken, if it is one of these."""
        return self.next().text if self.at_sign(*texts) else None

    def need(self, text: str) -> None:
        """Takes this sign, which must stand next."""
        if self.take(text) is None:
            raise UnreadableError(f"{text!r} is missing")

    def at_sign(self, *texts: str) -> bool:
        """Whether one of these signs stands next."""
        token = self.here
        return token is not None and token.kind == "sign" and token.text in texts

    def take_command(self, *names: str) -> bool:
        """Whether one of these commands stands next; it is taken."""
        token = self.here
        found = token is not None and token.kind == "command" and token.text in names
        self._at += found
        return found

    def take_mixed_part(self) -> Numeral | None:
        r"""The proper fraction 1/2 or \frac{1}{2} that stands next, taken."""
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
        """The first digit of the number that stands next, taken; the others stay."""
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
        """Puts these names in the place of the word taken last; the first counts as taken."""
        token = self._tokens[self._at - 1]
        self._tokens[self._at - 1 : self._at] = [Token("word", n, token.spaced) for n in names]
        if len(self._tokens) > 2 * MOST_TOKENS:
            raise TooHardError(f"more than {MOST_TOKENS} tokens")

    def deeper(self, read: Callable[[], T]) -> T:
        """What `read` returns, one level deeper."""
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise TooHardError(f"nested deeper than {MOST_DEPTH}")
        found = read()
        self._depth -= 1
        return found
