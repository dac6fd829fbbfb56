"""What is said over the wire: a body of the OpenAI chat API as a question, and answers as such bodies.

Fields that would change what is drawn and that no engine here has are refused by name, so that nobody
believes that they were heeded; those that say something about the client are passed over.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from posttrain.types import Completion, Message, Sampling

MOST_ANSWERS = 128
MOST_STOPS = 16
ROLES = ("system", "developer", "user", "assistant", "tool")
"""A template writes a role between its marks, where any other word could make one."""
_PASSED_OVER = {
    "model",
    "user",
    "metadata",
    "store",
    "service_tier",
    "parallel_tool_calls",
    "safety_identifier",
}
_PASSED_OVER |= {"prompt_cache_key", "verbosity"}
_NEUTRAL: Mapping[str, Any] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "top_logprobs": 0,
    "logit_bias": {},
    "tools": [],
    "functions": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "modalities": ["text"],
}
"""Fields that are refused, and the values that ask for nothing; null asks for nothing too."""


class RefusedError(Exception):
    """A request that is not served: the status, and what is wrong with which field."""

    def __init__(
        self, what: str, *, field: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(what)
        self.status, self.field, self.code = status, field, code

    def body(self) -> dict[str, Any]:
        """As the API says it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.field, "code": self.code}}


@dataclass(frozen=True, kw_only=True)
class Question:
    """One request, checked."""

    messages: tuple[Message, ...]
    sampling: Callable[[int], Sampling]
    """How to draw, given the room that the prompt leaves in tokens."""
    count: int
    seed: int | None
    stream: bool
    usage: bool
    """Whether a stream ends with what it cost."""
    logprobs: bool


def question(body: bytes) -> Question:
    """The request in these bytes; RefusedError for what is none, and for what is not served.

    >>> question(b'{"messages": [{"role": "user", "content": "2 + 2?"}], "max_tokens": 4}').count
    1
    """
    given = _object(body)
    fields = _Fields(given)
    limit = fields.whole("max_completion_tokens", None, least=1) or fields.whole("max_tokens", None, least=1)
    stops = given.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    if (
        not isinstance(stops, list)
        or len(stops) > MOST_STOPS
        or not all(isinstance(s, str) and s for s in stops)
    ):
        raise RefusedError(f"stop is a text, or a list of at most {MOST_STOPS} texts", field="stop")
    try:
        drawn = Sampling(
            temperature=fields.number("temperature", 1.0),
            top_p=fields.number("top_p", 1.0),
            min_p=fields.number("min_p", 0.0),
            top_k=max(fields.whole("top_k", 0, least=-1) or 0, 0),  # clients say -1 for all
            stop=tuple(stops),
        )
    except ValueError as error:
        raise RefusedError(str(error), field=str(error).split()[0]) from None
    options = given.get("stream_options") or {}
    known = _PASSED_OVER | {"messages", "max_tokens", "max_completion_tokens", "stop", "temperature", "top_p"}
    known |= {"min_p", "top_k", "n", "seed", "stream", "stream_options", "logprobs"}
    for name in given.keys() - known:
        if given[name] is not None and given[name] != _NEUTRAL.get(name):
            raise RefusedError(f"{name} is not served here", field=name, code="unsupported_parameter")
    return Question(
        messages=_messages(given.get("messages")),
        sampling=lambda room: replace(drawn, max_new_tokens=min(limit or room, room)),
        count=fields.whole("n", 1, least=1, most=MOST_ANSWERS) or 1,
        seed=fields.whole("seed", None),
        stream=fields.flag("stream"),
        usage=isinstance(options, dict) and options.get("include_usage") is True,
        logprobs=fields.flag("logprobs"),
    )


class _Fields:
    """Fields of an object, each of its type or refused; null is as if it were not there."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given

    def flag(self, name: str) -> bool:
        found = self.given.get(name)
        if found is not None and not isinstance(found, bool):
            raise RefusedError(f"{name} is true or false", field=name)
        return bool(found)

    def number(self, name: str, default: float) -> float:
        found = self.given.get(name)
        if found is None:
            return default
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise RefusedError(f"{name} is a number", field=name)
        return float(found)

    def whole(
        self, name: str, default: int | None, *, least: int = -(2**63), most: int = 2**63 - 1
    ) -> int | None:
        found = self.given.get(name)
        if found is None:
            return default
        if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= most:
            between = f"from {least} to {most}" if most < 2**63 - 1 else f"of at least {least}"
            raise RefusedError(f"{name} is a whole number {between}", field=name)
        return found


def _object(body: bytes) -> dict[str, Any]:
    try:
        # The standard's numbers only: NaN is no JSON.
        given = json.loads(body, parse_constant=lambda name: float(f"no{name}"))
    except (ValueError, RecursionError):
        raise RefusedError("the body is no JSON") from None
    if not isinstance(given, dict):
        raise RefusedError("the body is no JSON object")
    return given


def _messages(given: Any) -> tuple[Message, ...]:
    if not isinstance(given, list) or not given:
        raise RefusedError("messages is a list of at least one message", field="messages")
    return tuple(_message(each, f"messages[{n}]") for n, each in enumerate(given))


def _message(given: Any, where: str) -> Message:
    if not isinstance(given, dict) or given.get("role") not in ROLES:
        raise RefusedError(f"a message has a role, one of {', '.join(ROLES)}", field=where)
    if given.get("tool_calls"):
        raise RefusedError("tool calls are not served here", field=f"{where}.tool_calls")
    content = given.get("content")
    if isinstance(content, list):  # parts, of which this serves texts
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise RefusedError("a part of a message is text", field=f"{where}.content")
        content = "".join(map(str, parts))
    if not isinstance(content, str):
        raise RefusedError("the content of a message is text", field=f"{where}.content")
    role = "system" if given["role"] == "developer" else given["role"]
    return {"role": role, "content": content}


# ---------------------------------------------------------------------- answers


@dataclass(frozen=True, kw_only=True)
class Spoken:
    """What every body of one answer begins with."""

    id: str
    model: str

    def whole(
        self, answers: Sequence[Completion], prompt: int, tokens: Callable[[Completion], Any] | None
    ) -> dict[str, Any]:
        """All answers at once; `tokens` says the log-probabilities, if they were asked for."""
        choices = [
            {
                "index": n,
                "message": {"role": "assistant", "content": answer.text, "refusal": None},
                "logprobs": tokens(answer) if tokens else None,
                "finish_reason": reason(answer),
            }
            for n, answer in enumerate(answers)
        ]
        return self._body("chat.completion", choices) | {"usage": usage(prompt, answers)}

    def chunk(self, index: int, text: str, ending: str | None = None, logprobs: Any = None) -> dict[str, Any]:
        """A piece of one answer, or its end."""
        delta = {"role": "assistant", "content": text} if text or ending is None else {}
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


def reason(answer: Completion) -> str:
    """Why an answer ended, in the API's words."""
    return "length" if answer.stop == "length" else "stop"


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


class Growing:
    """The text of an answer while its tokens come, never more of it than is sure.

    A character may take several tokens, and a stop string several steps; what may yet be one is held back.
    Reads each token a bounded number of times, however long the answer.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str]) -> None:
        self._decode, self._back = decode, max((len(stop) - 1 for stop in stops), default=0)
        self._read = self._from = 0
        self._sure = self._said = ""

    def more(self, tokens: Sequence[int]) -> str:
        """What these tokens, which begin with those given before, add."""
        fresh = self._decode(list(tokens[self._from :]))
        if len(tokens) > self._read and not fresh.endswith("\ufffd"):
            known = self._decode(list(tokens[self._from : self._read]))
            self._sure += fresh[len(known) :]
            self._from, self._read = self._read, len(tokens)
        return self._say(self._sure[: max(len(self._sure) - self._back, len(self._said))])

    def rest(self, text: str) -> str:
        """What is left of the whole text."""
        return self._say(text)

    def _say(self, text: str) -> str:
        added = text[len(self._said) :]
        self._said += added
        return added


def events(bodies: Iterator[dict[str, Any]]) -> Iterator[bytes]:
    """Server-sent events, and the word that ends them."""
    for body in bodies:
        yield f"data: {json.dumps(body)}\n\n".encode()
    yield b"data: [DONE]\n\n"
