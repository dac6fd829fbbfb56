"""What a server that speaks OpenAI's protocol has sent back: an answer, a complaint, or neither."""

import email.utils
import json
import math
import time
from collections.abc import Sequence
from typing import Any

from posttrain.verifiers.judge.writer import Written


class RequestError(Exception):
    """One request without an answer."""

    def __init__(self, why: str, *, status: int = 0, passing: bool = True, after_s: float = 0.0) -> None:
        super().__init__(why)
        self.status, self.passing, self.after_s = status, passing, after_s


def read_answer(body: bytes, options: Sequence[str] = ()) -> Written:
    """The answer in a response; RequestError if it is not of the form that the protocol gives it."""
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
    """What a message says: its text, or the texts among its parts; without any, its refusal or nothing.

    It has none where all that was written is thought, as when max_tokens end there: that is paid for as well.
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
    """The chance of each option to be the first token; RequestError if the server names no chances."""
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
    found = tuple(math.fsum(p for token, p in likely if token == option) for option in options)
    if not all(math.isfinite(chance) for chance in found):
        raise RequestError("a logprob is not finite", status=200, passing=False)
    return found


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def complaint(body: bytes) -> str:
    """What the server says is wrong, in brackets; empty if it says nothing readable."""
    try:
        said = json.loads(body)
        said = said[0] if isinstance(said, list) and said else said
        keys = ("error", "message", "detail") if isinstance(said, dict) else ()
        told = [said[key] for key in keys if key in said]
        said = told[0] if told else ""
        said = said.get("message", "") if isinstance(said, dict) else said
    except (ValueError, RecursionError):
        said = ""
    line = " ".join(str(said).split())[:200]
    return f" ({line})" if line else ""


def retry_after(header: str) -> float:
    """Seconds that a Retry-After asks for, given as a number or as a date; 0 if it says nothing.

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
    """The text without halves of surrogate pairs, which UTF-8 does not know."""
    return text.encode("utf-8", "replace").decode()
