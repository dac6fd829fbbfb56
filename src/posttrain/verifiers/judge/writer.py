"""What a judge asks of a language model, whoever runs it: answers to conversations.

Two things write: `judge.endpoint: Endpoint`, over HTTP, and `runtime.writers: NativeWriter`, a model
in this process. A judge knows neither.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from posttrain.types import Message

Conversation = Sequence[Message]
"""Turns, the last of which is to be answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """An answer, or why there is none, with what it took.

    >>> Written(text="Score: 7", prompt_tokens=120, completion_tokens=4).failed
    False
    >>> Written(error="the endpoint answered 500 five times").failed
    True
    """

    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cut: bool = False
    """Whether it had to end because max_tokens were reached: its last word may be half a word."""
    chances: tuple[float, ...] = ()
    """Of each option that was asked about, to be the answer's first token; for `choose` alone."""
    error: str = ""
    """Why nothing was written, in one line; the text is then empty and means nothing."""

    @property
    def failed(self) -> bool:
        """Whether there is no answer. An empty answer is one."""
        return bool(self.error)


class Writer(Protocol):
    """Writes answers. Frozen and picklable; what it needs is opened in the process that first asks it."""

    @property
    def budget_s(self) -> float:
        """Seconds that one call of `write` with one conversation may take."""
        ...

    def write(
        self, conversations: Sequence[Conversation], *, max_tokens: int, temperature: float, seed: int
    ) -> list[Written]:
        """One answer for each conversation, in their order. What goes wrong with one is in its `error`."""
        ...

    def choose(self, conversations: Sequence[Conversation], options: Sequence[str]) -> list[Written]:
        """How likely each option is to be the first token of each answer, at temperature 1, in `chances`.

        An option is one character, and every token counts that is it up to blanks around it.
        """
        ...

    def require(self) -> None:
        """Nothing; raises UserError if it cannot write from here, as for want of a key or a model."""
        ...
