"""Completions as bodies of the OpenAI chat API, complete or streamed."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.base.chat import Chat
from posttrain.serving.wire import ChatMessage
from posttrain.types import Completion


@dataclass(frozen=True, kw_only=True)
class AnswerBodies:
    """The bodies of one answer, whole or in chunks."""

    id: str
    model: str

    def complete(
        self,
        answers: Sequence[Completion],
        prompt: int,
        parse: Callable[[Completion], ChatMessage],
        tokens: Callable[[Completion], Any] | None,
    ) -> dict[str, Any]:
        """Return all answers in one body.

        parse: reads a completion as a message; tokens: makes the log-probabilities, if they were requested.
        """
        choices = []
        for n, answer in enumerate(answers):
            message = parse(answer)
            body: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
            if message.calls:
                body |= {"content": message.content or None, "tool_calls": self.calls(message, n)}
            choices.append(
                {
                    "index": n,
                    "message": body,
                    "logprobs": tokens(answer) if tokens else None,
                    "finish_reason": reason(answer, message),
                }
            )
        return self._body("chat.completion", choices) | {"usage": usage(prompt, answers)}

    def calls(self, message: ChatMessage, index: int) -> list[dict[str, Any]]:
        """Return the tool calls of one answer, with ids that are unique."""
        return [
            {
                "id": f"{self.id}-{index}-{n}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for n, call in enumerate(message.calls)
        ]

    def chunk(
        self,
        index: int,
        text: str = "",
        ending: str | None = None,
        logprobs: Any = None,
        message: ChatMessage | None = None,
        *,
        first: bool = False,
    ) -> dict[str, Any]:
        """Return a piece of one answer, its tool calls, or its end.

        Only the first chunk names the role, since clients concatenate what the chunks hold.
        """
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        if first or text:
            delta["content"] = text
        if message:
            delta["tool_calls"] = [{"index": n} | call for n, call in enumerate(self.calls(message, index))]
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": ending}
        return self._body("chat.completion.chunk", [choice])

    def usage_chunk(self, prompt: int, answers: Sequence[Completion]) -> dict[str, Any]:
        """Return the last chunk of a stream whose client asked for the usage."""
        return self._body("chat.completion.chunk", []) | {"usage": usage(prompt, answers)}

    def continuation(
        self,
        answer: Completion | None,
        prompt: Sequence[int],
        likeliest: list[dict[str, Any] | None] | None,
    ) -> dict[str, Any]:
        """Return the answer to a prompt of tokens; likeliest: the `prompt_logprobs` of that prompt."""
        text, ending = (answer.text, answer.stop) if answer else ("", "length")
        choice = {"index": 0, "text": text, "logprobs": None, "prompt_logprobs": likeliest}
        choice["finish_reason"] = "length" if ending == "length" else "stop"
        counts = usage(len(prompt), [answer] if answer else [])
        return self._body("text_completion", [choice]) | {"usage": counts}

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
            "choices": choices,
        }


def reason(answer: Completion, message: ChatMessage) -> str:
    """Return why an answer ended, as the API names it."""
    return "length" if answer.stop == "length" else "tool_calls" if message.calls else "stop"


def usage(prompt: int, answers: Sequence[Completion]) -> dict[str, int]:
    """Count the tokens of the prompt and of the answers."""
    completion = sum(len(answer.tokens) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def logprobs(answer: Completion, chat: Chat) -> dict[str, Any]:
    """Return the drawn tokens with log π of each, before top-k, top-p and min-p, and their alternatives."""
    content = [_token(*item) for item in zip(chat.pieces(answer.tokens), answer.logp_policy, strict=True)]
    for entry, likeliest in zip(content, answer.alternatives, strict=False):
        entry["top_logprobs"] = [_token(chat.pieces([token])[0], logp) for token, logp in likeliest]
    return {"content": [{"top_logprobs": [], **entry} for entry in content], "refusal": None}


def prompt_logprobs(tokens: Sequence[int], scored: Completion, chat: Chat) -> list[dict[str, Any] | None]:
    """Return for each token of a prompt the likeliest ones there and itself, with log π, as vLLM does.

    scored: the completion that has the tokens after the first as its own. Nothing precedes the first: None.
    """
    out: list[dict[str, Any] | None] = [None]
    for n, (token, logp) in enumerate(zip(scored.tokens, scored.logp_policy, strict=True)):
        likeliest = scored.alternatives[n] if scored.alternatives else []
        pairs = {other: (value, rank) for rank, (other, value) in enumerate(likeliest, start=1)}
        entries = {token: (logp, None)} | pairs
        out.append(
            {
                str(other): {"logprob": value, "rank": rank, "decoded_token": chat.pieces([other])[0]}
                for other, (value, rank) in entries.items()
            }
        )
    assert len(out) == len(tokens)
    return out


def _token(piece: str, logp: float) -> dict[str, Any]:
    return {"token": piece, "logprob": logp, "bytes": list(piece.encode())}


def before_stop(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first of these strings, which ended it.

    >>> before_stop("6X +2", ["+2", "X +"]), before_stop("6X", ["+2"])
    ('6', '6X')
    """
    return text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]


class StreamedText:
    """The text of an answer while its tokens arrive; only text that is final is returned.

    A character may take several tokens, and a stop string several steps; text that may be the start of a stop
    string is held back. Each token is decoded a bounded number of times, however long the answer.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str]) -> None:
        self._decode, self._held_back = decode, max((len(stop) - 1 for stop in stops), default=0)
        self._tokens: list[int] = []
        """Tokens of the last two pieces of text; the first `_decoded` belong to the older one."""
        self._decoded = 0
        self._final = self._returned = ""

    def more(self, tokens: Sequence[int]) -> str:
        """Return the text that these tokens add to the earlier ones."""
        self._tokens += tokens
        fresh = self._decode(self._tokens)
        if len(self._tokens) > self._decoded and not fresh.endswith("\ufffd"):
            self._final += fresh[len(self._decode(self._tokens[: self._decoded])) :]
            del self._tokens[: self._decoded]
            self._decoded = len(self._tokens)
        return self.rest(self._final[: max(len(self._final) - self._held_back, len(self._returned))])

    def rest(self, text: str) -> str:
        """Return the part of a text that was not returned yet."""
        fresh = text[len(self._returned) :]
        self._returned += fresh
        return fresh


def event(body: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(body)}\n\n".encode()
