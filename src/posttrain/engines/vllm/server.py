"""A vLLM server as HTTP shows it: what it is asked once, and the answers that it is sending.

    stream    consumes       the lines that the server sends, each answer over a connection of its own
              waits for      nothing that `heard` does not hand on
              unblocked by   `end`, which closes connections; the server gives up an answer nobody reads

What goes wrong becomes a RunError of one line that names the server. A request is sent again only while the
server has said nothing of it: it could not be reached, or was too busy to begin.
"""

import asyncio
import json
import os
import queue
import threading
import time
from collections.abc import Iterable
from typing import Any

import httpx

from posttrain.base.usercode import cause
from posttrain.types import RunError

CONNECT_S = 10.0
"""In which a server takes a connection."""
_PAUSE_S = 0.25
"""Before a request is sent for the second time; doubled each time, up to _LONGEST_PAUSE_S."""
_LONGEST_PAUSE_S = 8.0
_BUSY = (429, 503)
_SHOWN = 300
"""Letters of what a server says of a fault."""
Said = dict[str, Any] | RunError | None
"""A part of an answer, why there will be no other, or that it is over."""


class VllmServer:
    """What a vLLM server is asked once. RunError where it cannot be reached, refuses, or says nothing."""

    def __init__(self, url: str, deadline_s: float) -> None:
        """deadline_s: seconds in which it must have said what it was asked."""
        self.url, self.deadline_s = url.rstrip("/"), deadline_s
        self._client = httpx.Client(**self.settings(), timeout=httpx.Timeout(deadline_s, connect=CONNECT_S))

    def settings(self) -> dict[str, Any]:
        """How it is reached: not through a proxy, and with the key that vLLM itself reads."""
        key = os.environ.get("VLLM_API_KEY", "")
        return {
            "base_url": self.url,
            "headers": {"Authorization": f"Bearer {key}"} if key else {},
            "trust_env": False,
            # A connection that was kept may have been closed meanwhile, which is no fault of a request.
            "limits": httpx.Limits(max_connections=None, max_keepalive_connections=0),
        }

    def ask(self, path: str, said: Any = None, *, method: str = "POST") -> Any:
        """What it answers, as JSON; nothing if it answers with nothing."""
        return self._read(path, self._sent(path, said, method))

    def offers(self, path: str) -> bool:
        """Whether there is anything at a path."""
        return self._sent(path, None, "GET").status_code != httpx.codes.NOT_FOUND

    def _sent(self, path: str, said: Any, method: str) -> httpx.Response:
        begin, tries = time.monotonic(), 0
        while True:
            try:
                return self._client.request(method, path, json=said)
            except httpx.TimeoutException as error:
                if isinstance(error, httpx.ConnectTimeout):
                    raise self.fault(f"does not take a connection within {CONNECT_S:g} s") from None
                raise self.fault(f"has not answered {path} within {self.deadline_s:g} s") from None
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                pause = pause_s(tries)
                tries += 1
                passing = isinstance(error, httpx.ConnectError) and tries <= 2
                if not passing or time.monotonic() - begin + pause > self.deadline_s:
                    raise self.fault(f"is not there, or went away at {path}: {cause(error)}") from None
                time.sleep(pause)

    def _read(self, path: str, response: httpx.Response) -> Any:
        if response.status_code != httpx.codes.OK:
            raise self.fault(refusal(path, response.status_code, response.text))
        if not response.content:
            return None
        try:
            return response.json()
        except ValueError:
            raise self.fault(f"answered {path} with what is no JSON") from None

    def fault(self, what: str) -> RunError:
        """The error that says so of this server."""
        return RunError(f"the vLLM server at {self.url}", what)

    def close(self) -> None:
        self._client.close()


def pause_s(tries: int) -> float:
    """Seconds to wait before the next try, where so many have failed before the last."""
    return float(min(_PAUSE_S * 2.0 ** min(tries, 16), _LONGEST_PAUSE_S))


def refusal(path: str, status: int, body: str) -> str:
    """What a server said when it refused.

    >>> refusal("/v1/completions", 400, '{"error": {"message": "too long"}}')
    'refused /v1/completions with status 400: too long'
    """
    said: Any = body
    try:
        said = json.loads(body)
        said = said.get("error", said.get("detail", said))
        said = said.get("message", said) if isinstance(said, dict) else said
    except (ValueError, AttributeError):
        pass
    told = " ".join(str(said).split())[:_SHOWN]
    return f"refused {path} with status {status}" + (f": {told}" if told else "")


class Streams:
    """The answers that a server is sending, at most so many at once."""

    def __init__(self, server: VllmServer, most: int) -> None:
        self.server, self.most = server, most
        self._news: queue.SimpleQueue[tuple[int, Said]] = queue.SimpleQueue()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """Of the thread below alone."""
        self.refused = ""
        """Why the last that was refused has not begun, where it is tried again."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def begin(self, ticket: int, path: str, body: dict[str, Any]) -> None:
        """Asks for an answer, whose parts `heard` brings under this ticket."""
        self._loop.call_soon_threadsafe(self._begin, ticket, path, body)

    def _begin(self, ticket: int, path: str, body: dict[str, Any]) -> None:
        self._tasks[ticket] = self._loop.create_task(self._answer(ticket, path, body))

    def end(self, tickets: Iterable[int]) -> None:
        """Wants no more of these; of those that have not ended the connection is closed."""
        asyncio.run_coroutine_threadsafe(self._end(list(tickets)), self._loop).result()

    async def _end(self, tickets: list[int]) -> None:
        tasks = [self._tasks.pop(ticket) for ticket in tickets if ticket in self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def heard(self, timeout_s: float) -> list[tuple[int, Said]]:
        """What was said since this was last asked; waits so long for the first of it."""
        found: list[tuple[int, Said]] = []
        try:
            found.append(self._news.get(timeout=timeout_s) if timeout_s else self._news.get_nowait())
            while True:
                found.append(self._news.get_nowait())
        except queue.Empty:
            return found

    def close(self) -> None:
        """Ends all connections and the thread."""
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
            # Nothing is said of an answer that waits for its turn; whoever polls looks after the time.
            self._client = httpx.AsyncClient(**settings, timeout=httpx.Timeout(None, connect=CONNECT_S))
        return self._client

    async def _answer(self, ticket: int, path: str, body: dict[str, Any]) -> None:
        tries, until = 0, time.monotonic() + self.server.deadline_s
        try:
            while (why := await self._tried(ticket, path, body)) is not None:
                pause = pause_s(tries)
                tries += 1
                if time.monotonic() + pause > until:
                    raise self.server.fault(f"{why} ({tries} tries)")
                self.refused = why
                await asyncio.sleep(pause)
            self._news.put((ticket, None))
        except RunError as error:
            self._news.put((ticket, error))
        except Exception as error:
            self._news.put((ticket, self.server.fault(f"ended an answer: {cause(error)}")))
        finally:
            self._tasks.pop(ticket, None)

    async def _tried(self, ticket: int, path: str, body: dict[str, Any]) -> str | None:
        """Why the answer has not begun; None once it is over."""
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
                        self._news.put((ticket, self._part(json.loads(line.removeprefix("data: ")))))
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            return f"is not there: {cause(error)}"
        raise self.server.fault("ended an answer in its middle")

    def _part(self, said: Any) -> dict[str, Any]:
        if not isinstance(said, dict) or "error" in said:
            raise self.server.fault(refusal("to go on", 200, json.dumps(said)))
        return said
