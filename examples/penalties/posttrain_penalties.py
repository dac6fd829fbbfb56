"""[verifier.repetition] and [verifier.language]: take off for repeating oneself, and for mixing scripts."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import regex

from posttrain import Task, UserError, Verdict, Verifier

Form = Literal["penalty", "factor"]

_WORDS = re.compile(r"\w{1,16}|[^\w\s]")
_LATEX = re.compile(r"\\[A-Za-z]+")
_VARIABLE = regex.compile(r"(?<![\p{Latin}\p{Greek}])[\p{Latin}\p{Greek}](?![\p{Latin}\p{Greek}])")
_LETTER = regex.compile(r"[\p{L}--[\p{Script=Common}\p{Script=Inherited}]]", flags=regex.V1)
_TOGETHER = {"Hiragana": ("Hiragana", "Katakana", "Han"), "Katakana": ("Hiragana", "Katakana", "Han")}
"""Scripts that one language writes side by side."""
SCRIPTS = (
    "Latin", "Han", "Cyrillic", "Arabic", "Devanagari", "Hangul", "Hiragana", "Katakana", "Greek", "Hebrew",
    "Thai", "Bengali", "Tamil", "Telugu", "Gujarati", "Gurmukhi", "Kannada", "Malayalam", "Oriya", "Sinhala",
    "Khmer", "Lao", "Myanmar", "Tibetan", "Georgian", "Armenian", "Ethiopic", "Mongolian", "Bopomofo",
)  # fmt: skip


def _verdict(share: float, form: Form, label: str, reason: str) -> Verdict:
    return Verdict(score=0.0 - share if form == "penalty" else 1.0 - share, label=label, reason=reason)


def _blank(form: Form) -> Verdict:
    return _verdict(1.0, form, "no_answer", "the response is blank")


@dataclass(frozen=True, kw_only=True)
class _Penalty(Verifier):
    """What takes off a share: from 0 as a penalty, from 1 as a factor."""

    form: Form = "penalty"
    """penalty: minus the share, for sums; factor: 1 − share, for products, gates and minima."""
    trusted: ClassVar[bool] = True

    @property
    def best(self) -> float:
        """What a response that nothing is taken from gets."""
        return 0.0 if self.form == "penalty" else 1.0

    def golds(self, task: Task) -> list[str]:
        """The task's answer, if nothing is taken from it."""
        proposed = [task.answer] if task.answer and task.answer.strip() else []
        return [gold for gold in proposed if self(task, gold).score == self.best]


@dataclass(frozen=True, kw_only=True)
class Repetition(_Penalty):
    """Takes off the share of n-grams that have occurred before in the response, 1 − different / all.

    As in Demystifying Long Chain-of-Thought Reasoning, arXiv:2502.03373, section 4.5, but one number for the
    response and not one for each token, and words or characters in place of tokens. A word is a run of
    at most 16 letters and digits, so that endless ones repeat; capitals do not matter; any other sign is a
    word of its own. A response of fewer than n of them repeats nothing. A blank one gets the worst score.

    Labels: clean, repeats, no_answer (blank).

    >>> task = Task(id="q", messages=())
    >>> Repetition(n=2)(task, "no no no no").score, Repetition(n=2, form="factor")(task, "no, yes").score
    (-0.6666666666666666, 1.0)
    """

    n: int = 4
    """Units in an n-gram."""
    unit: Literal["words", "characters"] = "words"
    """What an n-gram is made of; characters for languages without spaces, with an n of 20 or so."""
    name: str = "repetition"

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"n must be 1 or more, not {self.n}")

    def __call__(self, task: Task, response: str) -> Verdict:
        """The share of repeated n-grams, taken off."""
        if not response.strip():
            return _blank(self.form)
        text = response.casefold()
        units = _WORDS.findall(text) if self.unit == "words" else list(text)
        every, different = ngrams(units, self.n)
        reason = f"{every - different} of {every} {self.n}-grams have occurred before"
        share = (every - different) / every if every else 0.0
        return _verdict(share, self.form, "repeats" if share else "clean", reason)

    def fakes(self, task: Task) -> list[str]:
        """Nothing, and one word again and again."""
        return ["", "again " * (self.n + 1), "again" * 16 * (self.n + 1)]


def ngrams(units: Sequence[str], n: int) -> tuple[int, int]:
    """How many n-grams there are, and how many different ones.

    Names of n-grams are doubled in length until they are long enough, so that time and memory do not
    grow with n but for a logarithm.

    >>> ngrams("abcabcab", 3)
    (6, 3)
    """
    count = len(units) - n + 1
    if count < 1:
        return 0, 0
    known: dict[str, int] = {}
    names = np.array([known.setdefault(unit, len(known)) for unit in units], dtype=np.int64)
    length = 1
    while length < n:
        step = min(length, n - length)  # the last two halves may overlap
        pairs = names[:-step] * len(units) + names[step:]
        names = np.unique(pairs, return_inverse=True)[1].reshape(-1)
        length += step
    return count, len(np.unique(names))


@dataclass(frozen=True, kw_only=True)
class Language(_Penalty):
    """Takes off the share of letters that belong to other scripts than the allowed ones, in Unicode's sense.

    The allowed scripts are the task's field `script` (a name, or a list of them); else `scripts`; else the
    commonest script of the task's last message that has letters. Japanese's three scripts go together.
    LaTeX commands, and Latin and Greek letters that stand alone, as variables do, are not counted. A
    response without letters has none of another script. A blank one gets the worst score.

    Labels: clean, mixed, no_answer (blank).

    >>> task = Task(id="q", messages=({"role": "user", "content": "How much is 3 + 4?"},))
    >>> Language()(task, "It is семь, 7").score, Language()(task, "x is 7, \\\\alpha").score
    (-0.5, 0.0)
    """

    scripts: tuple[str, ...] = ()
    """Unicode's names: Latin, Han, Cyrillic, ...; empty takes the task's own."""
    name: str = "language"

    def __post_init__(self) -> None:
        for script in self.scripts:
            if _letters_of(script) is None:
                raise ValueError(f"{script!r} is not the name of a script; Latin, Han and Cyrillic are")

    def __call__(self, task: Task, response: str) -> Verdict:
        """The share of letters of other scripts, taken off."""
        if not response.strip():
            return _blank(self.form)
        letters = _letters(response)
        every = sum(letters.values())
        allowed = self._allowed(task)
        own = {c for script in allowed for c in _found(script, letters)}
        others = [c for c in letters if c not in own]
        count = sum(letters[c] for c in others)
        first = f", as {others[0]!r}" if others else ""
        reason = f"{count} of {every} letters are not {' or '.join(allowed)}{first}"
        return _verdict(count / every if every else 0.0, self.form, "mixed" if count else "clean", reason)

    def fakes(self, task: Task) -> list[str]:
        """Nothing, and words of some other script."""
        words = {"Latin": "other words", "Cyrillic": "другие слова", "Han": "别的话", "Thai": "คำอื่น"}
        allowed = self._allowed(task)
        return ["", *[text for script, text in words.items() if script not in allowed][:1]]

    def check(self, task: Task) -> None:
        """UserError if the task's scripts are unknown."""
        self._allowed(task)

    def _allowed(self, task: Task) -> tuple[str, ...]:
        given = task.fields.get("script")
        if given is not None:
            named = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, list) else ()
            if not named or any(not isinstance(s, str) or _letters_of(s) is None for s in named):
                raise UserError(task.source, f"{given!r} does not name scripts", "Latin is one")
            return named
        return self.scripts or _own_scripts(task)


def _own_scripts(task: Task) -> tuple[str, ...]:
    """The commonest script of the last message with letters, and what is written together with it."""
    for message in reversed(task.messages):
        letters = _letters(message["content"])
        counts = {script: sum(letters[c] for c in _found(script, letters)) for script in SCRIPTS}
        if any(counts.values()):
            # A Japanese text may hold more Han than anything else.
            japanese = counts["Hiragana"] + counts["Katakana"] > 0
            most = max(counts, key=lambda script: counts[script])
            return _TOGETHER["Hiragana"] if japanese and most == "Han" else _TOGETHER.get(most, (most,))
    raise UserError(
        task.source,
        f"task {task.id!r} has no letters to tell its language from",
        "state scripts, as in scripts = ['Latin'], or give it a field 'script'",
    )


def _letters(text: str) -> Counter[str]:
    """How often each letter occurs, but for LaTeX commands and variables."""
    counts = Counter(_VARIABLE.sub(" ", _LATEX.sub(" ", text)))
    return Counter({c: counts[c] for c in _LETTER.findall("".join(counts))})


def _found(script: str, letters: Counter[str]) -> list[str]:
    """Those of these letters that belong to a script."""
    pattern = _letters_of(script)
    return [] if pattern is None else pattern.findall("".join(letters))


def _letters_of(script: str) -> "regex.Pattern[str] | None":
    """What matches a letter of a script; None if Unicode has no script of that name."""
    if not re.fullmatch(r"[A-Za-z_ ]+", script):
        return None
    try:
        return regex.compile(rf"[\p{{Script={script}}}&&\p{{L}}]", flags=regex.V1)
    except regex.error:
        return None
