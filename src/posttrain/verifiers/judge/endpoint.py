"""A writer over HTTP, for servers with OpenAI's /chat/completions.

`connection` sends its requests, with retries; a request that fails in the end is an error and never an empty
answer.
"""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from posttrain.types import UserError
from posttrain.verifiers.judge import usage
from posttrain.verifiers.judge.connection import HttpConnection
from posttrain.verifiers.judge.replies import RequestError, read_answer, sendable
from posttrain.verifiers.judge.writer import Conversation, Written

MOST_LIKELY = 20
"""Tokens whose probabilities are requested: the maximum of the protocol. `body` may set another number."""


@dataclass(frozen=True, kw_only=True)
class Endpoint(HttpConnection):
    """A model behind an OpenAI-compatible server. The key is read from the environment and not stored."""

    base_url: str
    """URL without /chat/completions, for example http://localhost:8000/v1."""
    model: str
    """Name of the model at the server."""
    api_key_env: str = ""
    """Environment variable with the key; empty: no key is sent."""
    price_in: float = 0.0
    """Price of 10^6 prompt tokens, for the logged cost."""
    price_out: float = 0.0
    """Price of 10^6 completion tokens."""
    log: str = ""
    """File to which each request appends a line of JSON: status, tokens, cost, seconds; empty: no log."""
    limit_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """The server's field for the maximal number of tokens of an answer."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """Additional fields of every request."""
    omit: tuple[Literal["seed", "temperature"], ...] = ()
    """Fields to leave out of requests, for servers that refuse them."""

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url must begin with http:// or https://, not {self.base_url[:40]!r}")
        if self.base_url.rstrip("/").endswith("/chat/completions"):
            raise ValueError("base_url must end before /chat/completions, which is added to it")
        super().__post_init__()
        for name in ("price_in", "price_out"):
            if not 0 <= getattr(self, name) < 1e9:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")
        if (self.price_in or self.price_out) and not self.log:
            raise ValueError("prices are read for the log only: name one, or leave them out")

    @property
    def budget_s(self) -> float:
        """Seconds that an answer may take."""
        return self.longest_s

    def require(self) -> None:
        """UserError if the variable that should hold the key is not set."""
        if self.api_key_env and not os.environ.get(self.api_key_env):
            raise UserError(
                "api_key_env",
                f"the environment variable {self.api_key_env} is not set, and the key of {self.base_url} "
                "is read from it",
                f"export {self.api_key_env}=...",
            )

    def write(
        self, conversations: Sequence[Conversation], *, max_tokens: int, temperature: float, seed: int
    ) -> list[Written]:
        """Answer each conversation. Raises UserError if the key is missing."""
        return self._ask_all(
            [self._body(c, max_tokens, temperature=temperature, seed=seed) for c in conversations]
        )

    def choose(self, conversations: Sequence[Conversation], options: Sequence[str]) -> list[Written]:
        """Return the probability of each option to begin each answer, from the MOST_LIKELY top tokens.

        An option that is not among these tokens has probability 0.
        """
        fields = {"temperature": 1.0, "logprobs": True, "top_logprobs": MOST_LIKELY}
        return self._ask_all([self._body(c, 1, **fields) for c in conversations], options)

    def _ask_all(self, bodies: Sequence[bytes], options: Sequence[str] = ()) -> list[Written]:
        self.require()
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.api_key_env:
            headers["Authorization"] = f"Bearer {os.environ[self.api_key_env].strip()}"
        answers = self.post_all(
            f"{self.base_url.rstrip('/')}/chat/completions",
            bodies,
            headers=headers,
            parse=lambda post: self._once(post, options),
            limited=f"{self.base_url}\0{self.model}",
        )
        return [
            answer if isinstance(answer, Written) else Written(error=f"{self.base_url}: {answer}")
            for answer in answers
        ]

    def _body(self, conversation: Conversation, max_tokens: int, **how: Any) -> bytes:
        messages = [{"role": m["role"], "content": sendable(m["content"])} for m in conversation]
        fields = {"model": self.model, "messages": messages, self.limit_field: max_tokens}
        options = {name: value for name, value in how.items() if name not in self.omit}
        return json.dumps(fields | options | dict(self.body)).encode()

    def _once(self, post: Callable[[], bytes], options: Sequence[str]) -> Written:
        """Send a request once, log it, and return the answer. Raises RequestError if it fails."""
        begin = time.monotonic()
        try:
            written = read_answer(post(), options)
        except RequestError as failed:
            self._record(failed.status, begin, Written(error=str(failed)))
            raise
        self._record(200, begin, written)
        return written

    def _record(self, status: int, begin: float, written: Written) -> None:
        if self.log:
            tokens = (written.prompt_tokens, written.completion_tokens)
            usage.record(
                self.log,
                model=self.model,
                status=status,
                seconds=time.monotonic() - begin,
                prompt_tokens=tokens[0],
                completion_tokens=tokens[1],
                price=usage.cost(*tokens, self.price_in, self.price_out),
                error=written.error,
            )
