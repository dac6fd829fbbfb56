"""Send requests over HTTP, with retries, deadlines and a rate limit.

A request with a temporary failure (no connection, timeout, 408, 409, 425, 429, 5xx, an incomplete or
malformed answer) is sent again after a growing, jittered pause, or after the server's Retry-After, until
`retries` or `deadline_s` is used up. Other failures (401, 404, ...) are not retried.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import httpx

from posttrain.base.usercode import cause
from posttrain.verifiers.judge.rate import turn
from posttrain.verifiers.judge.replies import RequestError, complaint, retry_after

_PASSING = frozenset({408, 409, 425, 429})
_LONGEST_PAUSE_S = 60.0
_MOST_BYTES = 16 << 20
_certificates = lru_cache(maxsize=1)(httpx.create_ssl_context)
"""Loads the certificates, once in a process, because that takes longer than a request to a local server."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class HttpConnection:
    """How requests to a server are sent, and sent again."""

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

    def __post_init__(self) -> None:
        for name in ("timeout_s", "deadline_s"):
            if not 0 < getattr(self, name) < 86_400:
                raise ValueError(f"{name} must be positive and under a day, not {getattr(self, name)}")
        for name in ("retries", "backoff_s", "requests_per_minute"):
            if not 0 <= getattr(self, name) < 1e9:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")
        if not 1 <= self.concurrency <= 256:
            raise ValueError(f"concurrency must lie in 1 ... 256, not {self.concurrency}")

    @property
    def longest_s(self) -> float:
        """Seconds that an answer may take: the deadline, and the last request that began within it."""
        return self.deadline_s + self.timeout_s

    def post_all(
        self,
        url: str,
        bodies: Sequence[bytes],
        *,
        headers: Mapping[str, str],
        parse: Callable[[Callable[[], bytes]], T],
        limited: str,
    ) -> list[T | RequestError]:
        """Post each body, `concurrency` at a time, and return the answers, or the errors, in order.

        parse: calls its argument, which sends the request, and parses the answer; it raises RequestError if
        that fails. limited: the key of the rate limit.
        """
        if not bodies:
            return []
        threads = min(self.concurrency, len(bodies))
        with (
            httpx.Client(
                headers=dict(headers),
                timeout=self.timeout_s,
                verify=_certificates(),
                limits=httpx.Limits(max_connections=threads),  # httpx allows 100 by default
            ) as client,
            ThreadPoolExecutor(threads) as pool,
        ):

            def send(body: bytes) -> T | RequestError:
                return self._try(lambda: parse(lambda: self._post(client, url, body)), limited)

            return list(pool.map(send, bodies))

    def _try(self, once: Callable[[], T], limited: str) -> T | RequestError:
        """Send a request, with retries; return the answer, or an error that counts the tries."""
        until = time.monotonic() + self.deadline_s
        tries, status, reason = 0, 0, "its turn does not come within the deadline"
        while True:
            wait = 0.0
            if self.requests_per_minute:
                turn_s = turn(limited, self.requests_per_minute, until - time.monotonic())
                if turn_s is None:
                    break
                wait = turn_s
            time.sleep(wait)
            tries += 1
            try:
                return once()
            except RequestError as failed:
                status, reason = failed.status, str(failed)
                pause = min(self.backoff_s * 2.0 ** min(tries - 1, 20), _LONGEST_PAUSE_S)
                pause = max(pause * random.uniform(0.5, 1.0), failed.after_s)
                if not failed.passing or tries > self.retries or time.monotonic() + pause >= until:
                    break
            time.sleep(pause)
        times = f" ({tries} tries)" if tries > 1 else ""
        return RequestError(f"{reason}{times}", status=status)

    def _post(self, client: httpx.Client, url: str, body: bytes) -> bytes:
        """Return the body of an answer with status 200. Raises RequestError for any other result."""
        until = time.monotonic() + self.timeout_s
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
