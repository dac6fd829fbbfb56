"""What a model says, in the words of the OpenAI chat API: answers at once, or as they grow."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.serving.wire import ChatMessage
from posttrain.types import Completion


@dataclass(frozen=True, kw_only=True)
class Spoken:
    """What every body of one answer begins with."""

    id: str
    model: str

    def whole(
        self,
        answers: Sequence[Completion],
        prompt: int,
        read: Callable[[Completion], ChatMessage],
        tokens: Callable[[Completion], Any] | None,
    ) -> dict[str, Any]:
        """All answers at once, as `read`; `tokens` says the log-probabilities, if they were asked for."""
        choices = []
        for n, answer in enumerate(answers):
            said = read(answer)
            message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
            if said.calls:
                message |= {"content": said.content or None, "tool_calls": self.calls(said, n)}
            choices.append(
                {
                    "index": n,
                    "message": message,
                    "logprobs": tokens(answer) if tokens else None,
                    "finish_reason": reason(answer, said),
                }
            )
        return self._body("chat.completion", choices) | {"usage": usage(prompt, answers)}

    def calls(self, said: ChatMessage, index: int) -> list[dict[str, Any]]:
        """The calls of one answer; their ids are theirs alone."""
        return [
            {
                "id": f"{self.id}-{index}-{n}",
                "type": "function",
                "function": {"name": each.name, "arguments": each.arguments},
            }
            for n, each in enumerate(said.calls)
        ]

    def chunk(
        self,
        index: int,
        text: str = "",
        ending: str | None = None,
        logprobs: Any = None,
        said: ChatMessage | None = None,
        *,
        first: bool = False,
    ) -> dict[str, Any]:
        """A piece of one answer, or its end; or the calls that it makes. The first alone says whose it is:
        clients add up what the pieces say."""
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        if first or text:
            delta["content"] = text
        if said:
            delta["tool_calls"] = [{"index": n} | each for n, each in enumerate(self.calls(said, index))]
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": ending}
        return self._body("chat.completion.chunk", [choice])

    def cost(self, prompt: int, answers: Sequence[Completion]) -> dict[str, Any]:
        """The last chunk of a stream that was asked for what it cost."""
        return self._body("chat.completion.chunk", []) | {"usage": usage(prompt, answers)}

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
            "choices": choices,
        }


def reason(answer: Completion, said: ChatMessage) -> str:
    """Why an answer ended, in the API's words."""
    return "length" if answer.stop == "length" else "tool_calls" if said.calls else "stop"


def usage(prompt: int, answers: Sequence[Completion]) -> dict[str, int]:
    """Tokens that were read and drawn."""
    drawn = sum(len(answer.tokens) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}


def logprobs(pieces: Sequence[str], logp: Sequence[float]) -> dict[str, Any]:
    """The tokens drawn with log π of each, before top-k, top-p and min-p."""
    content = [
        {"token": piece, "logprob": value, "bytes": list(piece.encode()), "top_logprobs": []}
        for piece, value in zip(pieces, logp, strict=True)
    ]
    return {"content": content, "refusal": None}


def before_stop(text: str, stops: Sequence[str]) -> str:
    """A text up to the first of these strings, which ended it.

    >>> before_stop("6X +2", ["+2", "X +"]), before_stop("6X", ["+2"])
    ('6', '6X')
    """
    return text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]


class Growing:
    """The text of an answer while its tokens come, never more of it than is sure.

    A character may take several tokens, and a stop string several steps; what may yet be one is held back.
    Reads each token a bounded number of times, however long the answer.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str]) -> None:
        self._decode, self._back = decode, max((len(stop) - 1 for stop in stops), default=0)
        self._tokens: list[int] = []
        """Those of the last two pieces of text, of which the older ones were `_known`."""
        self._known = 0
        self._sure = self._said = ""

    def more(self, tokens: Sequence[int]) -> str:
        """What these tokens, which follow those given before, add."""
        self._tokens += tokens
        fresh = self._decode(self._tokens)
        if len(self._tokens) > self._known and not fresh.endswith("\ufffd"):
            known = self._decode(self._tokens[: self._known])
            self._sure += fresh[len(known) :]
            del self._tokens[: self._known]
            self._known = len(self._tokens)
        return self.rest(self._sure[: max(len(self._sure) - self._back, len(self._said))])

    def rest(self, text: str) -> str:
        """What of a text, the whole or what is sure of it, has not been said."""
        added = text[len(self._said) :]
        self._said += added
        return added


def event(body: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(body)}\n\n".encode()
