"""Parse responses of servers with OpenAI's protocol: answers, error messages, Retry-After."""

import email.utils
import json
import math
import time
from collections.abc import Sequence
from typing import Any

from posttrain.verifiers.judge.writer import Written


class RequestError(Exception):
    """A request failed; `passing` says whether a retry may succeed."""

    def __init__(self, why: str, *, status: int = 0, passing: bool = True, after_s: float = 0.0) -> None:
        super().__init__(why)
        self.status, self.passing, self.after_s = status, passing, after_s


def read_answer(body: bytes, options: Sequence[str] = ()) -> Written:
    """Parse the answer. Raises RequestError if it does not follow the protocol."""
    try:
        parsed = json.loads(body)
        choice = parsed["choices"][0]
        content = _content(choice["message"])
    except (ValueError, RecursionError):
        raise RequestError("the answer is not JSON", status=200) from None
    except (KeyError, IndexError, TypeError):
        raise RequestError("the answer has no choices[0].message.content", status=200) from None
    counts = parsed.get("usage")
    counts = counts if isinstance(counts, dict) else {}
    return Written(
        text=sendable(content),
        prompt_tokens=_count(counts.get("prompt_tokens")),
        completion_tokens=_count(counts.get("completion_tokens")),
        cut=choice.get("finish_reason") == "length",
        chances=_chances(choice, options) if options else (),
    )


def _content(message: Any) -> str:
    """Return a message's text, or the joined texts of its parts; without content its refusal, or "".

    The content is null if max_tokens ended the answer in its thought.
    """
    content = message["content"]
    if content is None:
        content = message.get("refusal") or ""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content if part["type"] == "text")
    if not isinstance(content, str):
        raise RequestError(f"the answer's content is {type(content).__name__}, not text", status=200)
    return content


def _chances(choice: Any, options: Sequence[str]) -> tuple[float, ...]:
    """Return the probability that each option is the first token. Raises RequestError without logprobs."""
    try:
        likely = [
            (str(t["token"]).strip(), math.exp(t["logprob"]))
            for t in choice["logprobs"]["content"][0]["top_logprobs"]
        ]
    except (KeyError, IndexError, TypeError, OverflowError):
        raise RequestError(
            "the answer has no logprobs.content[0].top_logprobs, which verdict = 'logprobs' reads",
            status=200,
            passing=False,
        ) from None
    chances = tuple(math.fsum(p for token, p in likely if token == option) for option in options)
    if not all(math.isfinite(chance) for chance in chances):
        raise RequestError("a logprob is not finite", status=200, passing=False)
    return chances


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def complaint(body: bytes) -> str:
    """Return the server's error message in brackets; "" without one."""
    try:
        reply = json.loads(body)
        reply = reply[0] if isinstance(reply, list) and reply else reply
        keys = ("error", "message", "detail") if isinstance(reply, dict) else ()
        message = next((reply[key] for key in keys if key in reply), "")
        message = message.get("message", "") if isinstance(message, dict) else message
    except (ValueError, RecursionError):
        message = ""
    line = " ".join(str(message).split())[:200]
    return f" ({line})" if line else ""


def retry_after(header: str) -> float:
    """Return the seconds of a Retry-After header, which is a number or a date; 0 if it is neither.

    >>> retry_after("2.5"), retry_after(""), retry_after("soon"), retry_after("-3")
    (2.5, 0.0, 0.0, 0.0)
    """
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(header).timestamp() - time.time()
        except ValueError:
            return 0.0
    return seconds if 0 < seconds < float("inf") else 0.0


def sendable(text: str) -> str:
    """Replace unpaired surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()
