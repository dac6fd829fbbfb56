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
from mathcheck.answers import compare_answers
from mathcheck.exact import UndefinedError
from mathcheck.prose import has_prose, join_ratios, join_signs, last_expression, last_line, text_after_lead
from mathcheck.quantities import Rules
from mathcheck.reading.cursor import CONSTANTS, FUNCTIONS
from mathcheck.reading.forms import gold_form
from mathcheck.reading.lexer import (
    GREEK,
    MOST_CHARACTERS,
    Token,
    integer_letter,
    normalise,
    tokenize,
    unbold,
)
from mathcheck.reading.reader import read
from mathcheck.reading.text_answers import is_option, is_text, read_choice, read_phrase, read_text
from mathcheck.reading.tree import (
    ANY_INTEGER,
    Answer,
    Many,
    Relation,
    Scalar,
    TooHardError,
    UnreadableError,
    contains,
    rename_variable,
)
from posttrain.process.cpu_limit import OverTimeError, within

AnswerType = Literal[
    "auto", "number", "expression", "set", "tuple", "interval", "equation", "choice", "text", "matrix", "unit"
]
SECONDS = 1.0
"""Processor time for one comparison."""

_FACTORIAL = frozenset({"factorial"})
_WORDS: dict[str, Callable[[str], Answer]] = {"choice": read_choice, "text": read_text}
"""Readers of answers that are not mathematics."""
_DECIMAL_COMMA = re.compile(r"\A(\s*[-+]?(?:0(?=\{)|\d+(?!\{,\}\d{3}(?!\d))))\{,\}(\d+)(?=[^\d.,;]*\Z)")
"""Matches 12{,}5 and 0{,}125, but not 1{,}234; 12,5 is a list."""


class GoldError(ValueError):
    """The gold cannot be read as the type it should have."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a comparison; true if the answer equals the gold."""

    label: Literal["right", "wrong", "no_answer", "unreadable", "too_hard"]
    """no_answer: the text holds no expression; unreadable: it is outside the grammar; too_hard: it is beyond
    the bounds of size, or was not decided in time."""
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
    """Return whether `answer` equals `gold`: 0.5 is 1/2, {2, 1} is {1, 2}, x^2 - 1 is (x-1)(x+1).

    kind: type of the gold; auto: detected. tolerance: greatest difference of numbers that is still right, as
    a share of the gold if `relative`. unsimplified: 3 + 4 may stand for 7. Raises GoldError.
    """
    if kind not in get_args(AnswerType):
        raise ValueError(f"kind must be one of {', '.join(get_args(AnswerType))}, not {kind!r}")
    rules = Rules(kind=kind, tolerance=Fraction(str(tolerance)), relative=relative, unsimplified=unsimplified)
    if is_same_text(answer, gold):
        return Result("right", "the same text")
    return compare(answer, *read_gold(gold, rules))


def read_gold(text: str, rules: Rules) -> tuple[Answer, Rules]:
    """Return the parsed gold, and the rules with its type. Raises GoldError."""
    algebra.load()
    try:
        if rules.kind == "auto":
            rules = replace(rules, kind=kind_of(text))
        with within(SECONDS):
            return parse_gold(text, rules.kind), rules
    except (UnreadableError, TooHardError, UndefinedError, RecursionError, OverTimeError) as error:
        raise GoldError(f"cannot be read as {rules.kind}: {error}") from None


def compare(answer: str, gold: Answer, rules: Rules, *, prose: bool = False) -> Result:
    """Compare an answer with a parsed gold. prose: the answer is somewhere in a line of words."""
    try:
        with within(SECONDS):
            return _compare_parsed(answer, gold, rules, prose)
    except (TooHardError, RecursionError, MemoryError) as error:
        return Result("too_hard", str(error) or type(error).__name__)
    except OverTimeError:
        return Result("too_hard", f"not decided within {SECONDS:g} s")


def _compare_parsed(answer: str, gold: Answer, rules: Rules, prose: bool) -> Result:
    try:
        parsed = parse_answer(answer, rules.kind, gold, prose=prose)
        if parsed is None:
            return Result("no_answer", "it holds no expression")
        identity = compare_answers(parsed, gold, rules)
    except (UnreadableError, UndefinedError) as error:
        return Result("unreadable", str(error))
    if identity.same is None:
        return Result("too_hard", identity.how)
    return Result("right" if identity.same else "wrong", identity.how)


def kind_of(gold: str) -> str:
    """Return the type of a gold that declares none: choice, text, or auto for what the grammar reads."""
    if is_option(gold):
        return "choice"
    bare = gold.strip().lstrip("\\")
    is_name = bare in FUNCTIONS or bare in CONSTANTS or bare in GREEK
    return "text" if is_text(gold) and read_phrase(gold) is None and not is_name else "auto"


def parse_gold(text: str, kind: str) -> Answer:
    if kind in _WORDS:
        return _WORDS[kind](text)
    return gold_form(_whole(text, kind), kind)


def _tokens(text: str, kind: str, gold: Answer | None) -> list[Token]:
    """Return the tokens of a text. If the gold is a ratio, 3 to 4 is one too, and otherwise a range."""
    result = join_signs(tokenize(text, thousands=kind not in ("set", "tuple", "interval", "matrix")))
    return join_ratios(result) if isinstance(gold, Many) and gold.brackets == ":" else result


def _whole(text: str, kind: str, gold: Answer | None = None) -> Answer:
    """Parse a text that consists of nothing but an answer or the gold."""
    if len(text) > MOST_CHARACTERS:
        raise UnreadableError(f"longer than {MOST_CHARACTERS} characters")
    text = read_phrase(text) or text
    clean = _DECIMAL_COMMA.sub(r"\1.\2", normalise(text))
    text_tokens = _tokens(clean, kind, gold)
    if has_prose(text_tokens):
        raise UnreadableError("it is a sentence")
    return _read(text_tokens, text, kind)


def _read(text_tokens: list[Token], text: str, kind: str) -> Answer:
    """Parse tokens, and rename the letter that the text declares to be any integer to ANY_INTEGER."""
    answer = read(text_tokens, units=kind not in ("expression", "equation"))
    letter = integer_letter(text)
    return answer if letter is None else rename_variable(answer, letter, ANY_INTEGER.name)


def is_same_text(part: str, gold: str) -> bool:
    """Return whether two texts are equal but for white space, and $ and a full stop around them."""

    def bare(text: str) -> str:
        text = text.strip(" \n\t$")
        text = text if text.endswith("..") else text.removesuffix(".")
        return " ".join(text.strip(" \n\t$").split())

    return bare(part) == bare(gold) != ""


def parse_answer(part: str, kind: str, gold: Answer, *, prose: bool) -> Answer | None:
    """Parse the answer in a part of the response; None if the part holds no expression."""
    if len(part) > MOST_CHARACTERS:
        end, prose = last_line(part), True
        if end is None:
            raise UnreadableError(f"longer than {MOST_CHARACTERS} characters")
        part = end
    line = text_after_lead(unbold(part)) if prose else part
    if prose and line != part and not (isinstance(gold, Scalar) and contains(gold.expr, _FACTORIAL)):
        line = line.rstrip().removesuffix("!")  # it ends the sentence
    if kind in _WORDS:
        return _WORDS[kind](line)
    try:
        return _whole(line, kind, gold)
    except UnreadableError:
        end = last_line(line)
        if end is None:
            raise
        line_tokens = _tokens(normalise(text_after_lead(unbold(end))), kind, gold)
        expression = last_expression(line_tokens, equation=isinstance(gold, Relation))
        return _read(expression, end, kind) if expression else None
