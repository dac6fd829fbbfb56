"""Tools of MCP servers (Model Context Protocol): of programs, over their pipes, and of URLs.

A server's tools are listed once, when a recipe is read, over a connection that ends there. For calls each
worker opens one connection and keeps it for all its episodes, so these episodes share the state of the
server. With `fresh` each call has a connection of its own, in which the earlier calls of the episode are
repeated first. A connection whose server ended or was late is closed, and opened again for the next call.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from posttrain.base.libraries import require
from posttrain.envs.tools.call import Bounds, Tool, ToolResult
from posttrain.errors import RunError, UserError

KEY = "task.tools.mcp"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""Names of tools that every format can write."""
_GRACE_S = 2.0


@dataclass(frozen=True, kw_only=True)
class McpServer:
    """A server of tools by the Model Context Protocol: a program that speaks it over its pipes, or a URL."""

    name: str
    """A name of your choice; precedes the names of those of its tools that another tool has too, as in
    files_read."""
    command: str = ""
    """The program, such as python or npx; it has posttrain's rights, environment and working directory."""
    args: tuple[str, ...] = ()
    """Its arguments, as in ["server.py"]."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables; the record of the run contains them, so export secrets instead."""
    url: str = ""
    """Instead of command: the address of a server, as in http://localhost:8000/mcp (streamable HTTP)."""
    token_env: str = ""
    """The environment variable with the bearer token for the url; if empty, none is sent."""
    only: tuple[str, ...] = ()
    """The tools to offer, by their names at the server; if empty, all."""
    fresh: bool = False
    """Whether each call has its own process, where the earlier calls of the episode are repeated first.
    Otherwise each worker keeps one process, and its episodes share the state."""
    start_s: float = 60.0
    """Seconds to start, or to connect."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"the name of a server has letters, digits, _, - and dots, not {self.name!r}")
        if bool(self.command.strip()) == bool(self.url):
            raise ValueError(f"the server {self.name!r} must have either a command or a url")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, not {self.url[:40]!r}")
        if unread := [
            key for key in (("args", "env", "fresh") if self.url else ("token_env",)) if getattr(self, key)
        ]:
            has = "url" if self.url else "command"
            raise ValueError(f"the server {self.name!r} has a {has}, which {unread[0]} does nothing for")
        if not 0 < self.start_s < math.inf:
            raise ValueError(f"start_s must be positive, not {self.start_s:g}")

    @property
    def operation(self) -> str:
        """The attempt to connect, in words for errors."""
        line = " ".join([self.url or self.command, *self.args])[:200]
        return f"{'reach' if self.url else 'start'} the MCP server {self.name!r} by '{line}'"

    def start(self) -> Any:
        """Return a Connection, for a program to a new process. Raises RunError if it fails."""
        try:
            from posttrain.envs.tools.mcp_client import Connection
        except ImportError as error:  # of an earlier version of the library
            raise UserError(
                KEY, f"the library mcp cannot be used: {error}", "pip install 'posttrain[mcp]'"
            ) from None

        return Connection(self)

    def tools(self) -> list[Tool]:
        """Return its tools in order. Raises UserError if that fails, or if a tool cannot be called."""
        require("mcp", KEY)
        if self.token_env and not os.environ.get(self.token_env):
            problem = (
                f"the environment variable {self.token_env} is not set, which holds the token of {self.url}"
            )
            raise UserError(KEY, problem, f"export {self.token_env}=...")
        try:
            connection = self.start()
            try:
                tools = connection.tools()
            finally:
                connection.close(_GRACE_S)
        except RunError as error:
            raise UserError(KEY, str(error)) from None
        names = [tool.name for tool in tools]
        if missing := [name for name in self.only if name not in names]:
            problem = f"the MCP server {self.name!r} has no tool {missing[0]!r}; it has {', '.join(names)}"
            raise UserError(KEY, problem)
        tools = [tool for tool in tools if not self.only or tool.name in self.only]
        if not tools:
            raise UserError(KEY, f"the MCP server {self.name!r} offers no tools")
        if malformed := [tool.name for tool in tools if not _NAME.fullmatch(tool.name)]:
            problem = (
                f"the MCP server {self.name!r} has a tool {malformed[0][:80]!r}, a name that no call can hold"
            )
            raise UserError(KEY, problem, "name those you want in 'only'")
        return tools


@dataclass(frozen=True)
class McpTool:
    """A tool of a server."""

    tool: Tool
    server: McpServer
    name_at_server: str

    @property
    def state_key(self) -> str:
        """The server, whose tools share one state."""
        return f"mcp:{self.server.name}"

    def ready(self) -> None:
        """Connect to the server; if that fails, the call reports it."""
        if not self.server.fresh:
            with suppress(RunError):
                _connection(self.server)

    def __call__(
        self, arguments: Mapping[str, Any], state: Any, bounds: Bounds, seed: str
    ) -> tuple[ToolResult, Any]:
        """Return the result as text; with `fresh` the state is the calls of the episode.

        Raises RunError if the server does not start.
        """
        if not self.server.fresh:
            connection = _connection(self.server)
            result = connection.call(self.name_at_server, arguments, bounds)
            if result.label in ("timeout", "died"):
                connection.close()
            return result, None
        calls = tuple(state or ())
        connection = self.server.start()
        try:
            for name, earlier in calls:
                connection.call(name, earlier, bounds)
            result = connection.call(self.name_at_server, arguments, bounds)
        finally:
            connection.close()
        is_closed = result.label in ("timeout", "died")  # a call that ends the server is not repeated
        return result, calls if is_closed else (*calls, (self.name_at_server, dict(arguments)))


def tools_of_server(server: McpServer, used_names: Sequence[str]) -> list[McpTool]:
    """Return the tools of a server; the server's name precedes names that are in use."""
    tools = []
    for tool in server.tools():
        name = f"{server.name}_{tool.name}" if tool.name in used_names else tool.name
        tools.append(McpTool(Tool(name, tool.description, tool.parameters), server, tool.name))
    return tools


_CONNECTIONS: dict[str, Any] = {}
"""The open connections of this worker, by server."""


def _connection(server: McpServer) -> Any:
    """Return this worker's connection to a server. Raises RunError if it cannot be opened."""
    connection = _CONNECTIONS.pop(repr(server), None)
    if connection is None or not connection.alive:
        if connection:
            connection.close()
        connection = server.start()
    return _CONNECTIONS.setdefault(repr(server), connection)
