"""A vLLM server over HTTP: single requests, and the answers that it streams.

    stream    consumes       lines that the server sends, each answer over a connection of its own
              waits for      nothing: `news` returns what has arrived
              unblocked by   `end`, which closes connections; the server drops an answer without a reader

Failures become a RunError of one line that names the server. A request is sent again only if the server has
not started to answer it: it was unreachable, or too busy.
"""

import asyncio
import json
import os
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from posttrain.base.usercode import cause
from posttrain.types import RunError

CONNECT_S = 10.0
"""Seconds within which a server must accept a connection."""
_PAUSE_S = 0.25
"""Seconds before a request is sent for the second time; doubled each time, up to _LONGEST_PAUSE_S."""
_LONGEST_PAUSE_S = 8.0
_BUSY = (429, 503)
_MESSAGE_LETTERS = 300
"""Letters of a server's error message that are shown."""
Part = dict[str, Any] | RunError | None
"""A part of an answer, the error that ends it, or None after its last part."""


class VllmServer:
    """A client for single requests; RunError if the server is unreachable, refuses or times out."""

    def __init__(self, url: str, deadline_s: float) -> None:
        """deadline_s: seconds within which the server must answer a request."""
        self.url, self.deadline_s = url.rstrip("/"), deadline_s
        self._client = httpx.Client(**self.settings(), timeout=httpx.Timeout(deadline_s, connect=CONNECT_S))

    def settings(self) -> dict[str, Any]:
        """Return the settings of a client: no proxy, and the key that vLLM itself reads."""
        key = os.environ.get("VLLM_API_KEY", "")
        return {
            "base_url": self.url,
            "headers": {"Authorization": f"Bearer {key}"} if key else {},
            "trust_env": False,
            # The server may close an idle connection at any time, which would fail the next request.
            "limits": httpx.Limits(max_connections=None, max_keepalive_connections=0),
        }

    def ask(self, path: str, body: Any = None, *, method: str = "POST", text: bool = False) -> Any:
        """Send a request and return its JSON answer, with `text` as it is; None if the answer is empty."""
        response = self._send(path, body, method)
        if response.status_code != httpx.codes.OK:
            raise self.fault(refusal(path, response.status_code, response.text))
        if text or not response.content:
            return response.text or None
        try:
            return response.json()
        except ValueError:
            raise self.fault(f"answered {path} with text that is not JSON") from None

    def offers(self, path: str) -> bool:
        """Return True if the server has this path."""
        return self._send(path, None, "GET").status_code != httpx.codes.NOT_FOUND

    def _send(self, path: str, body: Any, method: str) -> httpx.Response:
        start, tries = time.monotonic(), 0
        while True:
            try:
                return self._client.request(method, path, json=body)
            except httpx.TimeoutException as error:
                if isinstance(error, httpx.ConnectTimeout):
                    raise self.fault(f"does not take a connection within {CONNECT_S:g} s") from None
                raise self.fault(f"has not answered {path} within {self.deadline_s:g} s") from None
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                pause = pause_s(tries)
                tries += 1
                temporary = isinstance(error, httpx.ConnectError) and tries <= 2
                if not temporary or time.monotonic() - start + pause > self.deadline_s:
                    problem = f"is unreachable, or closed the connection at {path}: {cause(error)}"
                    raise self.fault(problem) from None
                time.sleep(pause)

    def fault(self, problem: str) -> RunError:
        return RunError(f"the vLLM server at {self.url}", problem)

    @contextmanager
    def expecting(self, problem: str) -> Iterator[None]:
        """Raise a RunError with this problem if a response lacks what the block reads."""
        try:
            yield
        except (KeyError, IndexError, TypeError, ValueError):
            raise self.fault(problem) from None

    def close(self) -> None:
        self._client.close()


def pause_s(tries: int) -> float:
    """Return the seconds to wait before the next try, after `tries` repeated failures."""
    return float(min(_PAUSE_S * 2.0 ** min(tries, 16), _LONGEST_PAUSE_S))


def refusal(path: str, status: int, body: str) -> str:
    """Return the error message of a response.

    >>> refusal("/v1/completions", 400, '{"error": {"message": "too long"}}')
    'refused /v1/completions with status 400: too long'
    """
    content: Any = body
    try:
        content = json.loads(body)
        content = content.get("error", content.get("detail", content))
        content = content.get("message", content) if isinstance(content, dict) else content
    except (ValueError, AttributeError):
        pass
    message = " ".join(str(content).split())[:_MESSAGE_LETTERS]
    return f"refused {path} with status {status}" + (f": {message}" if message else "")


class Streams:
    """The answers that a server is sending, at most `most` at once."""

    def __init__(self, server: VllmServer, most: int) -> None:
        self.server, self.most = server, most
        self._inbox: queue.SimpleQueue[tuple[int, Part]] = queue.SimpleQueue()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """Used by the thread below alone."""
        self.refused = ""
        """Why the server refused a request last, if it is being tried again."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def begin(self, ticket: int, path: str, body: dict[str, Any]) -> None:
        """Request an answer, whose parts `news` returns with this ticket."""
        self._loop.call_soon_threadsafe(self._begin, ticket, path, body)

    def _begin(self, ticket: int, path: str, body: dict[str, Any]) -> None:
        self._tasks[ticket] = self._loop.create_task(self._answer(ticket, path, body))

    def end(self, tickets: Iterable[int]) -> None:
        """Drop these answers and close the connections that are still open."""
        asyncio.run_coroutine_threadsafe(self._end(list(tickets)), self._loop).result()

    async def _end(self, tickets: list[int]) -> None:
        tasks = [self._tasks.pop(ticket) for ticket in tickets if ticket in self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def news(self, timeout_s: float) -> list[tuple[int, Part]]:
        """Return what arrived since the last call; wait up to `timeout_s` for the first part."""
        parts: list[tuple[int, Part]] = []
        try:
            parts.append(self._inbox.get(timeout=timeout_s) if timeout_s else self._inbox.get_nowait())
            while True:
                parts.append(self._inbox.get_nowait())
        except queue.Empty:
            return parts

    def close(self) -> None:
        """Close all connections and end the thread."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    async def _close(self) -> None:
        await self._end(list(self._tasks))
        if self._client:
            await self._client.aclose()

    # ------------------------------------------------------------------ in the thread

    _client: httpx.AsyncClient | None = None

    def _connect(self) -> httpx.AsyncClient:
        if self._client is None:
            settings = self.server.settings()
            settings["limits"] = httpx.Limits(max_connections=self.most, max_keepalive_connections=0)
            # An answer may wait long for its turn, so `ServerEngine.poll` checks the deadline.
            self._client = httpx.AsyncClient(**settings, timeout=httpx.Timeout(None, connect=CONNECT_S))
        return self._client

    async def _answer(self, ticket: int, path: str, body: dict[str, Any]) -> None:
        tries, until = 0, time.monotonic() + self.server.deadline_s
        try:
            while (why := await self._try_answer(ticket, path, body)) is not None:
                pause = pause_s(tries)
                tries += 1
                if time.monotonic() + pause > until:
                    raise self.server.fault(f"{why} ({tries} tries)")
                self.refused = why
                await asyncio.sleep(pause)
            self._inbox.put((ticket, None))
        except RunError as error:
            self._inbox.put((ticket, error))
        except Exception as error:
            self._inbox.put((ticket, self.server.fault(f"stopped an answer: {cause(error)}")))
        finally:
            self._tasks.pop(ticket, None)

    async def _try_answer(self, ticket: int, path: str, body: dict[str, Any]) -> str | None:
        """Return why the answer has not begun, or None when it is complete."""
        try:
            async with self._connect().stream("POST", path, json=body) as response:
                if response.status_code != httpx.codes.OK:
                    text = (await response.aread()).decode(errors="replace")
                    why = refusal(path, response.status_code, text)
                    if response.status_code in _BUSY:
                        return why
                    raise self.server.fault(why)
                self.refused = ""
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        return None
                    if line.startswith("data: "):
                        self._inbox.put((ticket, self._check_part(json.loads(line.removeprefix("data: ")))))
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            return f"is unreachable: {cause(error)}"
        raise self.server.fault("closed the connection before the end of an answer")

    def _check_part(self, part: Any) -> dict[str, Any]:
        if not isinstance(part, dict) or "error" in part:
            raise self.server.fault(refusal("to continue", 200, json.dumps(part)))
        return part
