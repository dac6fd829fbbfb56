"""Verifiers of a response's form: a regular expression, and sections between tags."""

import re
from collections import deque
from dataclasses import dataclass
from typing import ClassVar

from posttrain.types import Task, UserError, Verdict
from posttrain.verifiers.protocol import Verifier, gold_answer, quote


@dataclass(frozen=True, kw_only=True)
class Regex(Verifier):
    """1 if a pattern is found in the response; otherwise 0.

    If the pattern has a group named `answer`, that group of the last match, stripped, must be the task's
    answer. Patterns are Python's; flags such as (?i) come first. Regex is not trusted: a pattern that takes
    exponential time is stopped by the deadline of the pool.

    Labels: right, wrong (the group is another text), no_answer (no match).

    >>> regex, task = Regex(pattern=r"x = (?P<answer>\\d+)"), Task(id="q", messages=(), answer="7")
    >>> regex(task, "x = 6, so x = 7").label, regex(task, "y = 7").label
    ('right', 'no_answer')
    """

    pattern: str
    place: ClassVar[int] = 10
    name: str = "regex"
    best: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{self.pattern!r} is not a regular expression: {error}") from None

    @property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self.pattern)  # re caches compiled patterns

    def __call__(self, task: Task, response: str) -> Verdict:
        """Search the pattern, and compare its group `answer`, if it has one, with the answer."""
        compares = "answer" in self._compiled.groupindex
        if compares:
            last = deque(self._compiled.finditer(response), maxlen=1)
            match = last[0] if last else None
        else:
            match = self._compiled.search(response)
        if match is None:
            return Verdict(score=0.0, label="no_answer", reason=f"no match of {quote(self.pattern)}")
        if not compares:
            return Verdict(score=1.0, label="right", reason=f"{quote(match.group())} matches")
        answer, gold = (match["answer"] or "").strip(), gold_answer(task).strip()
        if answer == gold:
            return Verdict(score=1.0, label="right", reason=f"{quote(answer)} is the answer")
        return Verdict(score=0.0, label="wrong", reason=f"{quote(answer)} is not {quote(gold)}")

    def check(self, task: Task) -> None:
        """Raise UserError if the pattern has a group `answer` and the task no answer."""
        if "answer" in self._compiled.groupindex:
            gold_answer(task)


@dataclass(frozen=True, kw_only=True)
class Format(Verifier):
    """1 if the response is <think>...</think><answer>...</answer> and nothing else; otherwise 0.

    Each tag occurs once, in this order; no section is blank; there is only white space outside the sections.

    Labels: good_format, bad_format.

    >>> task = Task(id="q", messages=())
    >>> Format()(task, "<think>3 + 4</think> <answer>7</answer>").label
    'good_format'
    >>> Format()(task, "<answer>7</answer>").reason
    '<think> occurs 0 times'
    """

    place: ClassVar[int] = 11
    name: str = "format"
    tags: tuple[str, ...] = ("think", "answer")
    """Names of the sections, in order."""
    trusted: ClassVar[bool] = True
    best: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        if not self.tags or len(set(self.tags)) != len(self.tags):
            raise ValueError(f"tags must be different names, not {self.tags}")
        for tag in self.tags:
            if not tag or not all(c.isalnum() or c in "_-" for c in tag):
                raise ValueError(f"a tag must be a name such as think, not {tag!r}")

    def __call__(self, task: Task, response: str) -> Verdict:
        """Check the sections; the reason names the first fault."""
        wrong = self._wrong(response)
        if wrong:
            return Verdict(score=0.0, label="bad_format", reason=wrong)
        return Verdict(score=1.0, label="good_format", reason="every section is there, in order")

    def _wrong(self, response: str) -> str:
        end = 0
        for tag in self.tags:
            for mark in (f"<{tag}>", f"</{tag}>"):
                count = response.count(mark)
                if count != 1:
                    return f"{mark} occurs {count} times"
            start = response.index(f"<{tag}>")
            if start < end:
                return f"<{tag}> stands too early"
            if response[end:start].strip():
                return f"{quote(response[end:start].strip())} stands outside the sections"
            start += len(tag) + 2
            close = response.find(f"</{tag}>", start)
            if close < 0:
                return f"</{tag}> stands before <{tag}>"
            if not response[start:close].strip():
                return f"<{tag}> is blank"
            end = close + len(tag) + 3
        rest = response[end:].strip()
        return f"{quote(rest)} stands outside the sections" if rest else ""

    def golds(self, task: Task) -> list[str]:
        """Return sections with the task's answer in the last one: plain, boxed, and after ####."""
        answer = (task.answer or "an answer").strip()
        sections = "".join(f"<{tag}>Step by step.</{tag}>\n" for tag in self.tags[:-1])
        last = self.tags[-1]
        marked = (answer, f"\\boxed{{{answer}}}", f"#### {answer}")
        return [f"{sections}<{last}>{text}</{last}>" for text in marked]

    def fakes(self, task: Task) -> list[str]:
        """Return the empty response, the bare answer, and good responses with one fault."""
        good = self.golds(task)[0]
        first = self.tags[0]
        return [
            "",
            task.answer or "an answer",
            f"{good} so",
            f"so {good}",
            good + good,
            good.replace(f"</{first}>", ""),
            good.replace(f"<{first}>", f"</{first}>"),
            "".join(f"<{tag}> </{tag}>" for tag in self.tags),
            *(["".join(f"<{tag}>x</{tag}>" for tag in reversed(self.tags))] if len(self.tags) > 1 else []),
        ]

    def check(self, task: Task) -> None:
        """Raise UserError if the task's answer contains one of the tags."""
        for tag in self.tags:
            if task.answer and (f"<{tag}>" in task.answer or f"</{tag}>" in task.answer):
                raise UserError(task.source, f"the answer of task {task.id!r} contains the tag {tag}")
