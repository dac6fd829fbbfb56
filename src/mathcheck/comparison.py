"""Read a gold and an answer as mathematics, and compare them.

>>> equal("1/2", "0.5")
Result(label='right', reason='exactly')
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, get_args

from mathcheck import algebra
from mathcheck.answers import same
from mathcheck.denials import signed
from mathcheck.exact import UndefinedError
from mathcheck.places import behind_lead, has_prose, last_expression, last_line, ratios
from mathcheck.quantities import Rules
from mathcheck.reading.cursor import CONSTANTS, FUNCTIONS
from mathcheck.reading.forms import gold_form
from mathcheck.reading.lexer import (
    GREEK,
    MOST_CHARACTERS,
    Token,
    any_integer,
    plain,
    tokens,
    unbold,
)
from mathcheck.reading.reader import read
from mathcheck.reading.tree import (
    ANY_INTEGER,
    Answer,
    Many,
    Relation,
    Scalar,
    TooHardError,
    UnreadableError,
    contains,
    renamed,
)
from mathcheck.reading.words import choice, is_option, is_text, phrase, words
from posttrain.process.cpu_limit import OverTimeError, within

AnswerType = Literal[
    "auto", "number", "expression", "set", "tuple", "interval", "equation", "choice", "text", "matrix", "unit"
]
SECONDS = 1.0
"""Processor time for one comparison."""

_FACTORIAL = frozenset({"factorial"})
_WORDS: dict[str, Callable[[str], Answer]] = {"choice": choice, "text": words}
"""Of answers that are no mathematics, what reads them."""
_DECIMAL_COMMA = re.compile(r"\A(\s*[-+]?(?:0(?=\{)|\d+(?!\{,\}\d{3}(?!\d))))\{,\}(\d+)(?=[^\d.,;]*\Z)")
"""12{,}5 and 0{,}125, and not 1{,}234; 12,5 is a list."""


class GoldError(ValueError):
    """The gold cannot be read as the type it should have."""


@dataclass(frozen=True, slots=True)
class Result:
    """Whether an answer equals a gold; true if it does."""

    label: Literal["right", "wrong", "no_answer", "unreadable", "too_hard"]
    """no_answer: it holds no expression; unreadable: it is outside the grammar; too_hard: it is beyond the
    bounds of size, or not decided in time."""
    reason: str
    """One line: what was compared, and how."""

    def __bool__(self) -> bool:
        return self.label == "right"


def equal(
    gold: str,
    answer: str,
    *,
    kind: AnswerType = "auto",
    tolerance: float = 0.0,
    relative: bool = False,
    unsimplified: bool = False,
) -> Result:
    """Return whether `answer` is `gold`: 0.5 is 1/2, {2, 1} is {1, 2}, x^2 - 1 is (x-1)(x+1).

    kind: what the gold is; auto: what it looks like. tolerance: greatest difference of numbers that is still
    right, as a share of the gold if `relative`. unsimplified: 3 + 4 may stand for 7. Raises GoldError.
    """
    if kind not in get_args(AnswerType):
        raise ValueError(f"kind must be one of {', '.join(get_args(AnswerType))}, not {kind!r}")
    rules = Rules(kind=kind, tolerance=Fraction(str(tolerance)), relative=relative, unsimplified=unsimplified)
    if is_same_text(answer, gold):
        return Result("right", "the same text")
    return compare(answer, *read_gold(gold, rules))


def read_gold(text: str, rules: Rules) -> tuple[Answer, Rules]:
    """Return the gold as read, and the rules with its type; raises GoldError."""
    algebra.load()
    try:
        if rules.kind == "auto":
            rules = replace(rules, kind=kind_of(text))
        with within(SECONDS):
            return parse_gold(text, rules.kind), rules
    except (UnreadableError, TooHardError, UndefinedError, RecursionError, OverTimeError) as error:
        raise GoldError(f"cannot be read as {rules.kind}: {error}") from None


def compare(answer: str, gold: Answer, rules: Rules, *, prose: bool = False) -> Result:
    """Return whether an answer is this gold. prose: it stands somewhere in a line of words."""
    try:
        with within(SECONDS):
            return _compared(answer, gold, rules, prose)
    except (TooHardError, RecursionError, MemoryError) as error:
        return Result("too_hard", str(error) or type(error).__name__)
    except OverTimeError:
        return Result("too_hard", f"not decided within {SECONDS:g} s")


def _compared(answer: str, gold: Answer, rules: Rules, prose: bool) -> Result:
    try:
        read_answer = parse_answer(answer, rules.kind, gold, prose=prose)
        if read_answer is None:
            return Result("no_answer", "it holds no expression")
        finding = same(read_answer, gold, rules)
    except (UnreadableError, UndefinedError) as error:
        return Result("unreadable", str(error))
    if finding.same is None:
        return Result("too_hard", finding.how)
    return Result("right" if finding.same else "wrong", finding.how)


def kind_of(gold: str) -> str:
    """Return the type of a gold that declares none: an option, text, or what the grammar makes of it."""
    if is_option(gold):
        return "choice"
    bare = gold.strip().lstrip("\\")
    known = bare in FUNCTIONS or bare in CONSTANTS or bare in GREEK
    return "text" if is_text(gold) and phrase(gold) is None and not known else "auto"


def parse_gold(text: str, kind: str) -> Answer:
    if kind in _WORDS:
        return _WORDS[kind](text)
    return gold_form(_whole(text, kind), kind)


def _tokens(text: str, kind: str, gold: Answer | None) -> list[Token]:
    """The tokens of a text; 3 to 4, which may be a range as well, is a ratio where the gold is one."""
    found = signed(tokens(text, thousands=kind not in ("set", "tuple", "interval", "matrix")))
    return ratios(found) if isinstance(gold, Many) and gold.brackets == ":" else found


def _whole(text: str, kind: str, gold: Answer | None = None) -> Answer:
    """The answer that the whole text is: the gold, or one that is to be compared with it."""
    if len(text) > MOST_CHARACTERS:
        raise UnreadableError(f"longer than {MOST_CHARACTERS} characters")
    text = phrase(text) or text
    clean = _DECIMAL_COMMA.sub(r"\1.\2", plain(text))
    found = _tokens(clean, kind, gold)
    if has_prose(found):
        raise UnreadableError("it is a sentence")
    return _read(found, text, kind)


def _read(found: list[Token], text: str, kind: str) -> Answer:
    """The answer that the tokens of a text are, with one name for the letter that is any integer in it."""
    answer = read(found, units=kind not in ("expression", "equation"))
    letter = any_integer(text)
    return answer if letter is None else renamed(answer, letter, ANY_INTEGER.name)


def is_same_text(part: str, gold: str) -> bool:
    """Whether two texts are the same but for white space, and dollar signs and a full stop around them."""

    def bare(text: str) -> str:
        text = text.strip(" \n\t$")
        text = text if text.endswith("..") else text.removesuffix(".")
        return " ".join(text.strip(" \n\t$").split())

    return bare(part) == bare(gold) != ""


def parse_answer(part: str, kind: str, gold: Answer, *, prose: bool) -> Answer | None:
    """The answer in a part of the response; None if there is no expression in it."""
    if len(part) > MOST_CHARACTERS:
        end, prose = last_line(part), True
        if end is None:
            raise UnreadableError(f"longer than {MOST_CHARACTERS} characters")
        part = end
    line = behind_lead(unbold(part)) if prose else part
    if prose and line != part and not (isinstance(gold, Scalar) and contains(gold.expr, _FACTORIAL)):
        line = line.rstrip().removesuffix("!")  # of the sentence
    if kind in _WORDS:
        return _WORDS[kind](line)
    try:
        return _whole(line, kind, gold)
    except UnreadableError:
        end = last_line(line)
        if end is None:
            raise
        found = _tokens(plain(behind_lead(unbold(end))), kind, gold)
        expression = last_expression(found, equation=isinstance(gold, Relation))
        return _read(expression, end, kind) if expression else None
