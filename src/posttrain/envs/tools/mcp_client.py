"""Connections to MCP servers by the library mcp: over the pipes of a child process, or over HTTP.

The library's client is a task of this thread's event loop, which runs during requests only: between requests
nothing is read, and the server waits.

    request   writes        the request; the library answers requests of the server
              waits for     the answer, until the deadline; stderr is read and discarded
              unblocked by  the deadline, or the end of the server

An answer longer than MOST_OF_AN_ANSWER is never stored: that of a process is read to its end, and over HTTP
reading stops.
"""

import asyncio
import json
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx2
from mcp import Client
from mcp.client.streamable_http import MCP_SESSION_ID, streamable_http_client
from mcp.shared.message import SessionMessage
from mcp.types import CONNECTION_CLOSED, CallToolResult, ErrorData, Implementation
from mcp.types.jsonrpc import JSONRPCError, JSONRPCRequest, jsonrpc_message_adapter

from posttrain.base.usercode import cause
from posttrain.envs.tools.call import Bounds, Tool, ToolResult
from posttrain.envs.tools.mcp import McpServer
from posttrain.errors import RunError, describe_exit
from posttrain.process.child import Child
from posttrain.process.coroutines import run_coroutine
from posttrain.process.interpreter import AWAY_ENV

MOST_OF_AN_ANSWER = 4 << 20
"""Maximum bytes of a message of the server."""
_TOO_LONG = f"a result of more than {MOST_OF_AN_ANSWER >> 20} MiB, of which nothing is read"
_MOST_UNREAD = 1 << 20
"""Bytes that may wait for a process that does not read its stdin; beyond them messages are dropped."""
_END_S, _UNWIND_S = 2.0, 0.2
_LOOK_S = 0.002
"""Seconds between two reads of the pipes of a process, during a request."""

logging.getLogger("mcp").setLevel(logging.CRITICAL)  # it logs mistakes of servers with tracebacks


class _RequestError(Exception):
    """A request failed: the server refused it (raised), has ended (died), or is late (timeout)."""

    def __init__(self, label: str, reason: str) -> None:
        self.label = label
        super().__init__(reason)


class Connection:
    """A connection to a server: to a new process, or to its URL.

    The process stays in the process group of posttrain; if this process is a worker, the server ends with it.
    """

    def __init__(self, server: McpServer) -> None:
        """Raises RunError if the server does not start within its start_s."""
        self._server, self._child = server, None
        try:
            if not server.url:
                self._child = Child(
                    [server.command, *server.args],
                    session=False,
                    with_parent=AWAY_ENV in os.environ and sys.platform == "linux",  # workers have one thread
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env={**os.environ, **server.env},
                )
        except (OSError, ValueError) as error:
            raise RunError(server.operation, str(error)) from None
        try:
            run_coroutine(self._open(_over_pipes(self._child) if self._child else _over_http(server)))
        except BaseException as error:
            words = self._child.last_words()[:200] if self._child else ""
            self.close()
            if isinstance(error, _RequestError):
                raise RunError(server.operation, f"{error}{words and ': '}{words}") from None
            raise

    @property
    def alive(self) -> bool:
        """Whether it can take requests, as far as this side knows."""
        return not self._task.done() and (self._child is None or self._child.code is None)

    def tools(self) -> list[Tool]:
        """Return the server's tools in order. Raises RunError if it does not list them."""
        try:
            tools = self._request(_listed, self._server.start_s)
        except _RequestError as error:
            raise RunError(f"{self._server.operation} and list its tools", str(error)) from None
        return [
            Tool(
                tool.name,
                tool.description or tool.title or tool.name,
                {"properties": {}, **tool.input_schema},
            )
            for tool in tools
        ]

    def call(self, name: str, arguments: Mapping[str, Any], bounds: Bounds) -> ToolResult:
        """Return the result of a call as text."""
        try:
            result = self._request(lambda client: client.call_tool(name, dict(arguments)), bounds.deadline_s)
        except _RequestError as error:
            if _TOO_LONG in str(error):
                return ToolResult(f"cut: {_TOO_LONG}", "cut")
            return ToolResult(bounds.cut(f"{error.label}: {error}").text, error.label)
        text = _text(result)
        return (
            ToolResult(bounds.cut(f"raised: {text}").text, "raised") if result.is_error else bounds.cut(text)
        )

    def close(self, grace_s: float = 0.0) -> None:
        """End the session and kill the process tree, which has `grace_s` seconds to end by itself."""
        self._task.cancel()
        run_coroutine(asyncio.wait({self._task}, timeout=_END_S))
        if self._child:
            self._child.close(grace_s)

    async def _open(self, transport: Any) -> None:
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(transport))
        await self._first(self._client, self._server.start_s)

    async def _hold(self, transport: Any) -> str:
        """Keep the client open until the task is cancelled; return why it ended before that."""
        us = Implementation(name="posttrain", version="1")
        try:
            async with Client(transport, cache=None, client_info=us) as client:
                self._client.set_result(client)
                await asyncio.Event().wait()
        except Exception as error:
            first: Exception = error
            while isinstance(first, ExceptionGroup):
                first = first.exceptions[0]
            return str(first) if isinstance(first, _RequestError) else cause(first)
        return "the connection was closed"

    def _request(self, ask: Callable[[Client], Awaitable[Any]], deadline_s: float) -> Any:
        return run_coroutine(self._first(ask(self._client.result()), deadline_s))

    async def _first(self, answer: Awaitable[Any], deadline_s: float) -> Any:
        """Return the answer, unless the connection ends or the deadline comes first."""
        request = asyncio.ensure_future(answer)
        await asyncio.wait({request, self._task}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        if request.done():
            try:
                return request.result()
            except Exception as error:
                closed = getattr(error, "code", None) == CONNECTION_CLOSED
                if (
                    closed
                ):  # over HTTP the only sign of an end, but a server may also use this code for errors
                    await asyncio.wait({self._task}, timeout=_UNWIND_S)
                if not self._task.done():
                    label = "died" if closed and not self._child else "raised"
                    raise _RequestError(label, str(error)) from None
        request.cancel()
        if not self._task.done():
            raise _RequestError("timeout", f"no result within {deadline_s:g} s")
        raise _RequestError("died", self._task.result())


async def _listed(client: Client) -> list[Any]:
    """Return the tools of all pages; none if the server does not claim to have any."""
    tools: list[Any] = []
    cursor: str | None = None
    while client.server_capabilities.tools and cursor != "":
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor or ""
    return tools


def _text(result: CallToolResult) -> str:
    """Return the texts of a result, one per line; of other content only its type."""
    parts = [_part(content.model_dump(by_alias=True, exclude={"data"})) for content in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return "\n".join(parts)


def _part(content: Mapping[str, Any]) -> str:
    """Return one part of a result.

    >>> _part({"type": "text", "text": "5"}), _part({"type": "image", "mimeType": "image/png"})
    ('5', '[image, image/png]')
    """
    about = {**content.get("resource", {}), **content}
    if "text" in about:
        return str(about["text"])
    return f"[{', '.join(str(about[key])[:100] for key in ('type', 'mimeType', 'uri') if about.get(key))}]"


@asynccontextmanager
async def _over_pipes(child: Child) -> AsyncIterator[Any]:
    """Yield the streams of messages from and to a process, one per line; other lines are ignored."""
    incoming, received = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    sent, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
    request: int | str = 0
    line = bytearray()

    async def read_pipe() -> None:
        while child.is_open(1):
            parts = child.exchange(0.0)
            await asyncio.sleep(0 if parts else _LOOK_S)
            for part in [part for stream, part in parts if stream == 1]:
                *ends, rest = part.split(b"\n")
                for end in ends:
                    line.extend(end)
                    message = _parsed(line) if len(line) <= MOST_OF_AN_ANSWER else _too_long(request)
                    line.clear()
                    if message:
                        await incoming.send(SessionMessage(message))
                line.extend(rest)
                del line[MOST_OF_AN_ANSWER + 1 :]
        code = child.wait(_END_S)
        child.exchange(0.0)  # reads its last output
        ending = "closed its stdout" if code is None else f"ended ({describe_exit(code)})"
        raise _RequestError("died", f"the server {ending}")

    async def write_pipe() -> None:
        nonlocal request
        async for post in outgoing:
            if isinstance(post.message, JSONRPCRequest):
                request = post.message.id
            if child.pending < _MOST_UNREAD:
                child.write(post.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")

    async with incoming, received, sent, outgoing, anyio.create_task_group() as tasks:
        tasks.start_soon(read_pipe)
        tasks.start_soon(write_pipe)
        yield received, sent
        tasks.cancel_scope.cancel()


def _too_long(request: int | str) -> JSONRPCError:
    return JSONRPCError(jsonrpc="2.0", id=request, error=ErrorData(code=0, message=_TOO_LONG))


def _parsed(line: bytearray) -> Any:
    """Return the message of a line, None if it holds none; half a character becomes a question mark."""
    try:
        text = json.dumps(json.loads(line), ensure_ascii=False).encode("utf-8", "replace")
        return jsonrpc_message_adapter.validate_json(text)
    except (ValueError, RecursionError):
        return None


@asynccontextmanager
async def _over_http(server: McpServer) -> AsyncIterator[Any]:
    """Yield the streams of messages from and to a URL."""
    headers = {"Accept-Encoding": "identity"}
    if server.token_env:
        headers["Authorization"] = f"Bearer {os.environ[server.token_env].strip()}"
    async with (
        httpx2.AsyncClient(headers=headers, timeout=None, event_hooks={"response": [_check]}) as http,
        streamable_http_client(server.url, http_client=http, max_sse_event_size=MOST_OF_AN_ANSWER) as streams,
    ):
        yield streams


async def _check(response: httpx2.Response) -> None:
    """Limit the size of a response. Raises for a refused authorisation or an expired session."""
    if response.status_code in (401, 403) or (
        response.status_code == 404 and MCP_SESSION_ID in response.request.headers
    ):
        response.raise_for_status()
    if response.headers.get("content-encoding", "identity") != "identity":
        # Only decompression would tell its size.
        raise httpx2.StreamError("it sends a compressed answer, which was not accepted")
    if response.request.method == "POST":
        events = response.headers.get("content-type", "").startswith("text/event-stream")
        response.stream = _Bounded(response.stream, httpx2.SSEError if events else httpx2.StreamError)


class _Bounded(httpx2.AsyncByteStream):
    """The body of an answer, which raises `error` beyond MOST_OF_AN_ANSWER."""

    def __init__(self, body: Any, error: type[Exception]) -> None:
        self._body, self._error = body, error

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for part in self._body:
            if (size := size + len(part)) > MOST_OF_AN_ANSWER:
                raise self._error(_TOO_LONG)
            yield part

    async def aclose(self) -> None:
        await self._body.aclose()
