"""The verifier `grammar`: parse the response by a Lark grammar."""

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from posttrain.base.libraries import require
from posttrain.process.cpu_limit import OverTimeError, within
from posttrain.types import Task, UserError, Verdict
from posttrain.verifiers.fences import last_fenced
from posttrain.verifiers.protocol import Verifier, quote
from posttrain.verifiers.regions import remove_thought

MOST_CHARACTERS = {"lalr": 100_000, "earley": 2_000}


@dataclass(frozen=True, kw_only=True)
class Grammar(Verifier):
    """1 if a Lark grammar derives the response, or its last fenced block; otherwise 0.

    The grammar is the task's field `grammar`, or else the option. LALR takes linear time; Earley parses any
    grammar, in up to cubic time. White space at both ends is ignored.

    Labels: right, wrong (not derived), over_limit (too long, or takes too much time),
    no_answer (blank).

    >>> sums, task = Grammar(grammar='start: /[0-9]+/ ("+" /[0-9]+/)*'), Task(id="q", messages=())
    >>> sums(task, "3+4").label, sums(task, "3+").label
    ('right', 'wrong')
    """

    grammar: str = ""
    """Grammar in Lark's notation, or the path of a .lark file; a task's field `grammar` overrides it."""
    start: str = "start"
    """The rule that must derive the response."""
    parser: Literal["lalr", "earley"] = "lalr"
    """lalr is fast; earley also parses grammars that are ambiguous or need more lookahead."""
    where: Literal["auto", "all", "fenced"] = "auto"
    """Text to parse: the whole response (all), its last fenced block (fenced), or that block if there is one
    and otherwise the text after the thought (auto)."""
    max_characters: int | None = None
    """Longest text to parse; by default 100,000 for lalr and 2,000 for earley."""
    time_limit_s: float = 5.0
    """CPU seconds after which parsing is given up."""
    place: ClassVar[int] = 9
    name: str = "grammar"
    best: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        if self.max_characters is not None and self.max_characters < 1:
            raise ValueError(f"max_characters must be 1 or more, not {self.max_characters}")
        if not 0 < self.time_limit_s < math.inf:
            raise ValueError(f"time_limit_s must be above 0, not {self.time_limit_s}")
        if self.grammar.endswith(".lark"):
            try:
                text = Path(self.grammar).expanduser().read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"grammar: {self.grammar} cannot be read: {error}") from None
            # The content replaces the path, because the pool caches verdicts by the fields of the verifier.
            object.__setattr__(self, "grammar", text)

    def __call__(self, task: Task, response: str) -> Verdict:
        from lark import LarkError

        text = response
        if self.where != "all":
            block = last_fenced(response)
            text = block if block is not None else remove_thought(response) if self.where == "auto" else ""
        text = text.strip()
        if not text:
            return Verdict(score=0.0, label="no_answer", reason="there is nothing to read")
        most = self.max_characters or MOST_CHARACTERS[self.parser]
        if len(text) > most:
            reason = f"{len(text)} characters are more than {most}"
            return Verdict(score=0.0, label="over_limit", reason=reason)
        reader = self._reader(task)
        try:
            with within(self.time_limit_s):
                reader.parse(text)
        except LarkError as error:
            at = f"line {getattr(error, 'line', '?')}, column {getattr(error, 'column', '?')}"
            return Verdict(score=0.0, label="wrong", reason=f"{quote(text)} does not fit, at {at}")
        except (RecursionError, OverTimeError) as error:
            return Verdict(score=0.0, label="over_limit", reason=str(error))
        return Verdict(score=1.0, label="right", reason=f"{quote(text)} fits")

    def _reader(self, task: Task) -> Any:
        """Return the parser. Raises UserError if the grammar is missing or invalid."""
        grammar = task.fields.get("grammar", self.grammar)
        if not isinstance(grammar, str) or not grammar.strip():
            raise UserError(
                task.source,
                f"there is no grammar for task {task.id!r}",
                "give one to the verifier, or the task a field 'grammar'",
            )
        try:
            return _compiled(grammar, self.start, self.parser)
        except ValueError as error:
            raise UserError(task.source, f"the grammar of task {task.id!r}: {error}") from None

    def golds(self, task: Task) -> list[str]:
        """Return the task's answer, if the grammar derives it, plain and fenced."""
        proposed = [] if not task.answer or self.where == "fenced" else [task.answer]
        proposed += [f"```\n{task.answer}\n```"] if task.answer and self.where != "all" else []
        return [gold for gold in proposed if self(task, gold).score == self.best]

    def fakes(self, task: Task) -> list[str]:
        """Return blank responses, which are wrong by any grammar."""
        return ["", " \n", "```\n\n```"] if self.where != "all" else ["", " \n"]

    def check(self, task: Task) -> None:
        """Raise UserError if the grammar is missing or invalid."""
        self._reader(task)

    def budget_s(self, task: Task) -> float | None:
        """Return the time limit with a margin for a loaded machine."""
        return 30.0 + 4 * self.time_limit_s

    def require(self) -> None:
        """Raise UserError if the library lark is not installed."""
        require("lark", "verifier.grammar")


@lru_cache(maxsize=64)
def _compiled(grammar: str, start: str, parser: str) -> Any:
    """Build the parser of a grammar. Raises ValueError if the grammar is invalid."""
    from lark import Lark
    from lark.exceptions import LarkError

    try:
        return Lark(grammar, start=start, parser=parser)
    except (LarkError, RecursionError, AssertionError, OSError) as error:
        raise ValueError(" ".join(str(error).split())[:200]) from None
