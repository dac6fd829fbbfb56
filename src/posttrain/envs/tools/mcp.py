"""Tools of MCP servers (Model Context Protocol): of programs, over their pipes, and of URLs.

What a server offers is asked once, when a recipe is read, over a connection that ends there. For calls each
worker makes one, and keeps it for all that it plays: what the server remembers, all these episodes share.
With `fresh` each call has a connection of its own, in which the episode's earlier calls are made again first.
One whose server has ended or was late is closed, and made again for the next call.
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
"""Of a tool, as every format can write it."""
_GRACE_S = 2.0


@dataclass(frozen=True, kw_only=True)
class McpServer:
    """A server of tools by the Model Context Protocol: a program that speaks it over its pipes, or a URL."""

    name: str
    """Yours; before the names of those of its tools that another tool has too, as files_read."""
    command: str = ""
    """The program, as python or npx; it has posttrain's rights, environment and working directory."""
    args: tuple[str, ...] = ()
    """Its arguments, as ["server.py"]."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables besides; the run's record holds them, so export what is secret instead."""
    url: str = ""
    """In place of command: where a server listens, as http://localhost:8000/mcp (streamable HTTP)."""
    token_env: str = ""
    """The environment variable that holds the bearer token for the url; empty sends none."""
    only: tuple[str, ...] = ()
    """The tools that are offered, as the server calls them; empty: all."""
    fresh: bool = False
    """Whether each call has a process of its own, where the episode's earlier calls are made again first.
    Otherwise each worker keeps one process, whose state the episodes that it plays share."""
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
        """How it is connected to, for errors."""
        line = " ".join([self.url or self.command, *self.args])[:200]
        return f"{'reach' if self.url else 'start'} the MCP server {self.name!r} by '{line}'"

    def start(self) -> Any:
        """Return a Connection to it, to a process of its own if it is a program; RunError if that fails."""
        try:
            from posttrain.envs.tools.mcp_client import Connection
        except ImportError as error:  # of an earlier version of the library
            raise UserError(
                KEY, f"the library mcp cannot be used: {error}", "pip install 'posttrain[mcp]'"
            ) from None

        return Connection(self)

    def tools(self) -> list[Tool]:
        """Return what it offers, in its order; UserError if it cannot be asked, or that cannot be called."""
        require("mcp", KEY)
        if self.token_env and not os.environ.get(self.token_env):
            problem = (
                f"the environment variable {self.token_env} is not set, which holds the token of {self.url}"
            )
            raise UserError(KEY, problem, f"export {self.token_env}=...")
        try:
            connection = self.start()
            try:
                found = connection.tools()
            finally:
                connection.close(_GRACE_S)
        except RunError as error:
            raise UserError(KEY, str(error)) from None
        there = [tool.name for tool in found]
        if missing := [name for name in self.only if name not in there]:
            problem = f"the MCP server {self.name!r} has no tool {missing[0]!r}; it has {', '.join(there)}"
            raise UserError(KEY, problem)
        found = [tool for tool in found if not self.only or tool.name in self.only]
        if not found:
            raise UserError(KEY, f"the MCP server {self.name!r} offers no tools")
        if wrong := [tool.name for tool in found if not _NAME.fullmatch(tool.name)]:
            problem = (
                f"the MCP server {self.name!r} has a tool {wrong[0][:80]!r}, a name that no call can hold"
            )
            raise UserError(KEY, problem, "name those you want in 'only'")
        return found


@dataclass(frozen=True)
class Offered:
    """A tool of a server, which calls it by `called`."""

    tool: Tool
    server: McpServer
    called: str

    @property
    def keeper(self) -> str:
        """The server, whose tools have one state."""
        return f"mcp:{self.server.name}"

    def ready(self) -> None:
        """Connect to the server; where that fails, the call says so."""
        if not self.server.fresh:
            with suppress(RunError):
                _connection(self.server)

    def __call__(
        self, arguments: Mapping[str, Any], kept: Any, bounds: Bounds, seed: str
    ) -> tuple[ToolResult, Any]:
        """What the server returns, as text; with `fresh` the episode's calls are kept.

        RunError if it does not start.
        """
        if not self.server.fresh:
            connection = _connection(self.server)
            result = connection.call(self.called, arguments, bounds)
            if result.label in ("timeout", "died"):
                connection.close()
            return result, None
        made = tuple(kept or ())
        connection = self.server.start()
        try:
            for name, given in made:
                connection.call(name, given, bounds)
            result = connection.call(self.called, arguments, bounds)
        finally:
            connection.close()
        ended = result.label in ("timeout", "died")  # what ends a server is not done again
        return result, made if ended else (*made, (self.called, dict(arguments)))


def offered(server: McpServer, taken: Sequence[str]) -> list[Offered]:
    """The tools of a server; one whose name is taken has the server's before it."""
    made = []
    for tool in server.tools():
        name = f"{server.name}_{tool.name}" if tool.name in taken else tool.name
        made.append(Offered(Tool(name, tool.description, tool.parameters), server, tool.name))
    return made


_HELD: dict[str, Any] = {}
"""The connections that this worker keeps, by their servers."""


def _connection(server: McpServer) -> Any:
    """Return this worker's connection to a server, made if there is none; RunError if it cannot be."""
    held = _HELD.pop(repr(server), None)
    if held is None or not held.alive:
        if held:
            held.close()
        held = server.start()
    return _HELD.setdefault(repr(server), held)
