"""The protocol of writers: language models that answer conversations for a judge.

A judge does not distinguish the two writers: `judge/endpoint.py: Endpoint`, over HTTP, and
`recipe/writers.py: NativeWriter`, a model in this process.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from posttrain.types import Message

Conversation = Sequence[Message]
"""Messages; the answer follows the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """An answer or an error, with the tokens used.

    >>> Written(text="Score: 7", prompt_tokens=120, completion_tokens=4).failed
    False
    >>> Written(error="the endpoint answered 500 five times").failed
    True
    """

    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cut: bool = False
    """Whether max_tokens ended the answer, so that its last word may be incomplete."""
    chances: tuple[float, ...] = ()
    """Probability of each option to be the answer's first token; from `choose` only."""
    error: str = ""
    """Reason in one line why the request failed; `text` is then meaningless."""

    @property
    def failed(self) -> bool:
        """Whether the request failed. An empty text without an error is an answer."""
        return bool(self.error)


class Writer(Protocol):
    """Write answers. Writers are frozen and picklable, and open models at the first request."""

    @property
    def budget_s(self) -> float:
        """Most seconds of one call of `write` with one conversation."""
        ...

    def write(
        self, conversations: Sequence[Conversation], *, max_tokens: int, temperature: float, seed: int
    ) -> list[Written]:
        """Answer each conversation, in their order. A failure is in the `error` of its answer."""
        ...

    def choose(self, conversations: Sequence[Conversation], options: Sequence[str]) -> list[Written]:
        """Return in `chances` the probability of each option as first token of each answer, at temperature 1.

        An option is one character; tokens that equal it after stripping white space are summed.
        """
        ...

    def require(self) -> None:
        """Raise UserError if it cannot write on this machine, for example without a key or a model."""
        ...
