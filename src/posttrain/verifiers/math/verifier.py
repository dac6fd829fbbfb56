"""The verifier `math`."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar, Literal, get_args

from posttrain.types import Task, UserError, Verdict
from posttrain.verifiers.cpu_limit import OverTimeError, within
from posttrain.verifiers.math import algebra
from posttrain.verifiers.math.answers import same
from posttrain.verifiers.math.denials import signed
from posttrain.verifiers.math.exact import UndefinedError
from posttrain.verifiers.math.places import (
    Where,
    behind_lead,
    has_prose,
    last_expression,
    last_line,
    part_of,
    ratios,
)
from posttrain.verifiers.math.quantities import Rules
from posttrain.verifiers.math.reading.cursor import CONSTANTS, FUNCTIONS
from posttrain.verifiers.math.reading.forms import gold_form
from posttrain.verifiers.math.reading.lexer import (
    GREEK,
    MOST_CHARACTERS,
    Token,
    any_integer,
    plain,
    tokens,
    unbold,
)
from posttrain.verifiers.math.reading.reader import read
from posttrain.verifiers.math.reading.tree import (
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
from posttrain.verifiers.math.reading.words import choice, is_option, is_text, phrase, words
from posttrain.verifiers.math.variants import near_misses, placed
from posttrain.verifiers.protocol import Verifier, gold_answer, shown

AnswerType = Literal[
    "auto", "number", "expression", "set", "tuple", "interval", "equation", "choice", "text", "matrix", "unit"
]
SECONDS = 1.0
_FACTORIAL = frozenset({"factorial"})
_WORDS: dict[str, Callable[[str], Answer]] = {"choice": choice, "text": words}
"""Of answers that are no mathematics, what reads them."""
_KILLED_AFTER_S = 8.0
_DECIMAL_COMMA = re.compile(r"\A(\s*[-+]?(?:0(?=\{)|\d+(?!\{,\}\d{3}(?!\d))))\{,\}(\d+)(?=[^\d.,;]*\Z)")
"""12{,}5 and 0{,}125, and not 1{,}234; 12,5 is a list."""


@dataclass(frozen=True, kw_only=True)
class Math(Verifier):
    """1 if the response's answer is, as mathematics, the task's; otherwise 0.

    Labels: right, wrong, no_answer (there is none at the place), unreadable (it is not in the
    grammar), too_hard (beyond the bounds, or not decided within a second of processor time).

    >>> math, task = Math(), Task(id="q", messages=(), answer=r"\\frac{1}{2}")
    >>> math(task, "So it is 0.5.").label, math(task, "Not 0.5, it is 0.6.").label
    ('right', 'wrong')
    """

    place: ClassVar[int] = 3
    name: str = "math"
    """Under which its score is recorded."""
    where: Where = "auto"
    """The part that counts: boxed, after (the marker), tag or last (line); auto: boxed, after or last."""
    marker: str = "####"
    """The answer stands behind the last one, up to the end of its line."""
    tag: str = "answer"
    """For where = tag: <answer> ... </answer>."""
    answer_type: AnswerType = "auto"
    """What the answers are, unless a task's own field answer_type says it; auto: what the gold looks like."""
    tolerance: float = 0.0
    """Greatest difference between numbers still right, unless a task's own field tolerance says it."""
    tolerance_is: Literal["absolute", "relative"] = "absolute"
    """Whether the tolerance is a difference, or a part of the gold."""
    unsimplified: bool = False
    """Whether 3 + 4 may stand for 7, unless a task's own field unsimplified says it."""
    best: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        if not self.marker.strip():
            raise ValueError("marker must not be blank")
        if not self.tag or not all(c.isalnum() or c in "_-" for c in self.tag):
            raise ValueError(f"tag must be a name such as answer, not {self.tag!r}")
        if self.where not in get_args(Where):
            raise ValueError(f"where must be one of {', '.join(get_args(Where))}, not {self.where!r}")
        if self.answer_type not in get_args(AnswerType):
            raise ValueError(f"answer_type must be one of {', '.join(get_args(AnswerType))}")
        if not 0 <= self.tolerance < float("inf"):
            raise ValueError(f"tolerance must be 0 or more, not {self.tolerance}")
        if self.tolerance_is not in ("absolute", "relative"):
            raise ValueError(f"tolerance_is must be absolute or relative, not {self.tolerance_is!r}")

    def __call__(self, task: Task, response: str) -> Verdict:
        """Right where the answer found and the gold are the same."""
        algebra.load()
        rules = self._rules(task)
        part, prose = part_of(response, self.where, self.marker, self.tag)
        if part is None or not part.strip():
            self._gold(task)
            return Verdict(
                score=0.0, label="no_answer", reason="nothing stands where the answer is looked for"
            )
        if _is_same_text(behind_lead(part) if prose else part, gold_answer(task)):
            return Verdict(score=1.0, label="right", reason=f"{shown(part)}: the same text")
        gold, rules = self._gold(task)
        try:
            with within(SECONDS):
                label, reason = self._judged(part, prose, gold, rules)
        except (TooHardError, RecursionError, MemoryError) as error:
            label, reason = "too_hard", str(error) or type(error).__name__
        except OverTimeError:
            label, reason = "too_hard", f"not decided within {SECONDS:g} s"
        return Verdict(score=float(label == "right"), label=label, reason=reason)

    def golds(self, task: Task) -> list[str]:
        """The answer at its place, alone and in a sentence."""
        gold = gold_answer(task).strip()
        answer = placed(gold, self.where, self.marker, self.tag)
        return [answer, f"I first thought of 1, but it is not.\n{answer}"]

    def fakes(self, task: Task) -> list[str]:
        """Nothing, words, other answers near by, and the answer denied."""
        gold, rules = self._gold(task)
        wrong = near_misses(gold_answer(task).strip(), gold, rules)
        fakes = ["", " \n", "...", *(placed(text, self.where, self.marker, self.tag) for text in wrong)]
        return fakes if self.where in ("auto", "last") else [*fakes, gold_answer(task)]

    def check(self, task: Task) -> None:
        """UserError if the answer cannot be read as its type, or a field of the task has no meaning."""
        self._gold(task)

    def budget_s(self, task: Task) -> float | None:
        """Longer than any verdict takes, its first with the import of SymPy."""
        return _KILLED_AFTER_S

    # ------------------------------------------------------------------ the gold

    def _gold(self, task: Task) -> tuple[Answer, Rules]:
        """The answer as read, and the rules by which another is compared with it."""
        text, rules = gold_answer(task), self._rules(task)
        try:
            if rules.kind == "auto":
                rules = replace(rules, kind=_kind(text))
            with within(SECONDS):
                return _parse_answer(text, rules.kind), rules
        except (UnreadableError, TooHardError, UndefinedError, RecursionError, OverTimeError) as error:
            raise UserError(
                task.source,
                f"the answer of task {task.id!r}, {shown(text)}, cannot be read as {rules.kind}: {error}",
                "mend the answer, or give the task another answer_type",
            ) from None

    def _rules(self, task: Task) -> Rules:
        """Those of the verifier, but for the task's own fields; UserError for one without meaning."""

        def said(name: str, fits: Callable[[Any], bool], fix: str = "") -> Any:
            value = task.fields.get(name, getattr(self, name))
            if not fits(value):
                raise UserError(task.source, f"task {task.id!r} has the {name} {value!r}", fix)
            return value

        kinds, ways = get_args(AnswerType), ("absolute", "relative")
        return Rules(
            kind=said("answer_type", lambda x: x in kinds, f"it is one of {', '.join(kinds)}"),
            tolerance=Fraction(str(said("tolerance", _is_tolerance))),
            relative=said("tolerance_is", lambda x: x in ways, "it is absolute or relative") == "relative",
            unsimplified=said("unsimplified", lambda x: isinstance(x, bool), "it is true or false"),
        )

    # ------------------------------------------------------------------ the response

    def _judged(self, part: str, prose: bool, gold: Answer, rules: Rules) -> tuple[str, str]:
        """The label and the reason."""
        try:
            given = _given(part, rules.kind, gold, prose=prose)
            if given is None:
                return "no_answer", f"{shown(part)} holds no expression"
            found = same(given, gold, rules)
        except (UnreadableError, UndefinedError) as error:
            return "unreadable", f"{shown(part)}: {error}"
        if found.same is None:
            return "too_hard", f"{shown(part)}: {found.how}"
        return ("right" if found.same else "wrong"), f"{shown(part)}: {found.how}"


def _is_tolerance(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


def _kind(gold: str) -> str:
    """The type of a gold that declares none: option, text, or what the grammar makes of it."""
    if is_option(gold):
        return "choice"
    bare = gold.strip().lstrip("\\")
    known = bare in FUNCTIONS or bare in CONSTANTS or bare in GREEK
    return "text" if is_text(gold) and phrase(gold) is None and not known else "auto"


def _parse_answer(text: str, kind: str) -> Answer:
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


def _is_same_text(part: str, gold: str) -> bool:
    """Whether two texts are the same but for white space, and dollar signs and a full stop around them."""

    def bare(text: str) -> str:
        text = text.strip(" \n\t$")
        text = text if text.endswith("..") else text.removesuffix(".")
        return " ".join(text.strip(" \n\t$").split())

    return bare(part) == bare(gold) != ""


def _given(part: str, kind: str, gold: Answer, *, prose: bool) -> Answer | None:
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
