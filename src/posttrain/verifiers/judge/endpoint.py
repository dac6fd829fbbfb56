"""A writer over HTTP, for servers with OpenAI's /chat/completions.

A request with a temporary failure (no connection, timeout, 408, 409, 425, 429, 5xx, an incomplete or
malformed answer) is sent again after a growing, jittered pause, or after the server's Retry-After, until
`retries` or `deadline_s` is used up. The result is then an error and never an empty answer. Other failures
(401, 404, ...) are not retried.
"""

import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import httpx

from posttrain.base.usercode import cause
from posttrain.types import UserError
from posttrain.verifiers.judge import usage
from posttrain.verifiers.judge.rate import turn
from posttrain.verifiers.judge.replies import RequestError, complaint, read_answer, retry_after, sendable
from posttrain.verifiers.judge.writer import Conversation, Written

_PASSING = frozenset({408, 409, 425, 429})
_LONGEST_PAUSE_S = 60.0
_MOST_BYTES = 16 << 20
MOST_LIKELY = 20
"""Tokens whose probabilities are requested: the maximum of the protocol. `body` may set another number."""
_certificates = lru_cache(maxsize=1)(httpx.create_ssl_context)
"""Loads the certificates, once in a process, because that takes longer than a request to a local server."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A model behind an OpenAI-compatible server. The key is read from the environment and not stored."""

    base_url: str
    """URL without /chat/completions, for example http://localhost:8000/v1."""
    model: str
    """Name of the model at the server."""
    api_key_env: str = ""
    """Environment variable with the key; empty: no key is sent."""
    timeout_s: float = 60.0
    """Seconds after which one request is given up and counts as failed."""
    retries: int = 4
    """Most further requests after one that failed."""
    backoff_s: float = 1.0
    """Seconds before the first retry; doubled for each further one, then multiplied by a random 0.5 to 1."""
    deadline_s: float = 300.0
    """Seconds for one answer with all retries, pauses and the wait for the rate limit."""
    requests_per_minute: float = 0.0
    """Rate limit of all processes on this machine together; 0: none."""
    concurrency: int = 8
    """Concurrent requests of each process."""
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
        for name in ("timeout_s", "deadline_s"):
            if not 0 < getattr(self, name) < 86_400:
                raise ValueError(f"{name} must be positive and under a day, not {getattr(self, name)}")
        for name in ("retries", "backoff_s", "requests_per_minute", "price_in", "price_out"):
            if not 0 <= getattr(self, name) < 1e9:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")
        if (self.price_in or self.price_out) and not self.log:
            raise ValueError("prices are read for the log only: name one, or leave them out")
        if not 1 <= self.concurrency <= 256:
            raise ValueError(f"concurrency must lie in 1 ... 256, not {self.concurrency}")

    @property
    def budget_s(self) -> float:
        """Seconds that an answer may take: the deadline, and the last request that began within it."""
        return self.deadline_s + self.timeout_s

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
        if not bodies:
            return []
        threads = min(self.concurrency, len(bodies))
        with (
            httpx.Client(
                headers=headers,
                timeout=self.timeout_s,
                verify=_certificates(),
                limits=httpx.Limits(max_connections=threads),  # httpx allows 100 by default
            ) as client,
            ThreadPoolExecutor(threads) as pool,
        ):
            return list(pool.map(lambda body: self._ask(client, body, options), bodies))

    def _body(self, conversation: Conversation, max_tokens: int, **how: Any) -> bytes:
        messages = [{"role": m["role"], "content": sendable(m["content"])} for m in conversation]
        fields = {"model": self.model, "messages": messages, self.limit_field: max_tokens}
        options = {name: value for name, value in how.items() if name not in self.omit}
        return json.dumps(fields | options | dict(self.body)).encode()

    def _ask(self, client: httpx.Client, body: bytes, options: Sequence[str]) -> Written:
        """Send a request, with retries, and return the answer."""
        until = time.monotonic() + self.deadline_s
        tries, reason = 0, "its turn does not come within the deadline"
        while True:
            wait = 0.0
            if self.requests_per_minute:
                remaining_s = until - time.monotonic()
                turn_s = turn(f"{self.base_url}\0{self.model}", self.requests_per_minute, remaining_s)
                if turn_s is None:
                    break
                wait = turn_s
            time.sleep(wait)
            tries += 1
            try:
                return self._once(client, body, options)
            except RequestError as failed:
                reason = str(failed)
                pause = min(self.backoff_s * 2.0 ** min(tries - 1, 20), _LONGEST_PAUSE_S)
                pause = max(pause * random.uniform(0.5, 1.0), failed.after_s)
                if not failed.passing or tries > self.retries or time.monotonic() + pause >= until:
                    break
            time.sleep(pause)
        times = f" ({tries} tries)" if tries > 1 else ""
        return Written(error=f"{self.base_url}: {reason}{times}")

    def _once(self, client: httpx.Client, body: bytes, options: Sequence[str]) -> Written:
        """Send a request once, log it, and return the answer. Raises RequestError if it fails."""
        begin = time.monotonic()
        try:
            written = read_answer(self._post(client, body, begin + self.timeout_s), options)
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

    def _post(self, client: httpx.Client, body: bytes, until: float) -> bytes:
        """Return the body of an answer with status 200. Raises RequestError for any other result."""
        url = f"{self.base_url.rstrip('/')}/chat/completions"
        received = bytearray()
        try:
            with client.stream("POST", url, content=body) as response:
                # The client's own timeout starts again with every byte.
                for part in response.iter_bytes():
                    received += part
                    if time.monotonic() > until:
                        raise httpx.ReadTimeout("the answer comes too slowly")
                    if len(received) > _MOST_BYTES:
                        raise RequestError(f"it sends more than {_MOST_BYTES >> 20} MiB", status=200)
        except httpx.TimeoutException:
            raise RequestError(f"no answer within {self.timeout_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise RequestError(cause(error), passing=not isinstance(error, httpx.InvalidURL)) from None
        status = response.status_code
        if status != 200:
            raise RequestError(
                f"status {status}{complaint(bytes(received))}",
                status=status,
                passing=status in _PASSING or status >= 500,
                after_s=retry_after(response.headers.get("Retry-After", "")),
            )
        return bytes(received)
