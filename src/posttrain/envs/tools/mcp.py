"""Tools of MCP servers: programs of anybody's that offer tools over their pipes (Model Context Protocol).

What a server offers is asked once, when a recipe is read, by a process of it that ends there. For calls each
worker starts one, and keeps it for all that it plays: what the server remembers, all these episodes share.
With `fresh` each call has a process of its own, in which the episode's earlier calls are made again first.
A server that has died or was late is ended, and started again for the next call.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from posttrain.envs.tools.call import Bounds, Result, Tool
from posttrain.envs.tools.mcp_client import MOST_OF_A_LINE, Broken, Connection, Refused, TooLong
from posttrain.errors import RunError, UserError

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""Of a tool, as every format can write it."""
_GRACE_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Server:
    """A program that offers tools by the Model Context Protocol on its stdin and stdout."""

    name: str
    """Yours; before the names of those of its tools that another tool has too, as files_read."""
    command: str
    """The program, as python or npx; it has posttrain's rights, environment and working directory."""
    args: tuple[str, ...] = ()
    """Its arguments, as ["server.py"]."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables besides; the run's record holds them, so export what is secret instead."""
    only: tuple[str, ...] = ()
    """The tools that are offered, as the server calls them; empty: all."""
    fresh: bool = False
    """Whether each call has a process of its own, where the episode's earlier calls are made again first.
    Otherwise each worker keeps one process, whose state the episodes that it plays share."""
    start_s: float = 60.0
    """Seconds to start."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"the name of a server has letters, digits, _, - and dots, not {self.name!r}")
        if not self.command.strip():
            raise ValueError(f"the server {self.name!r} has no command")
        if not 0 < self.start_s < math.inf:
            raise ValueError(f"start_s must be positive, not {self.start_s:g}")

    @property
    def line(self) -> str:
        """How it is started, for errors."""
        return " ".join([self.command, *self.args])[:200]

    def start(self) -> tuple[Connection, Mapping[str, Any]]:
        """A process of it, and what that says of itself; RunError if it does not come up."""
        connection = None
        try:
            connection = Connection([self.command, *self.args], self.env)
            return connection, connection.initialise(self.start_s)
        except (Broken, Refused, TooLong) as error:
            words = connection.last_words() if connection else ""
            if connection:
                connection.close()
            operation = f"start the MCP server {self.name!r} by '{self.line}'"
            raise RunError(operation, f"{error}{words and ': '}{words}") from None

    def tools(self) -> list[Tool]:
        """What it offers, in its order; UserError if it does not start, or offers what cannot be called."""
        try:
            connection, said = self.start()
        except RunError as error:
            raise UserError("task.tools.mcp", str(error)) from None
        try:
            offers = isinstance(said.get("capabilities"), dict) and "tools" in said["capabilities"]
            found = (
                [_tool(each) for each in connection.pages("tools/list", "tools", self.start_s)]
                if offers
                else []
            )
        except (Broken, Refused, TooLong) as error:
            problem = f"the MCP server {self.name!r} ('{self.line}') does not say what it offers: {error}"
            raise UserError("task.tools.mcp", problem) from None
        finally:
            connection.close(_GRACE_S)
        there = [tool.name for tool in found]
        if missing := [name for name in self.only if name not in there]:
            problem = f"the MCP server {self.name!r} has no tool {missing[0]!r}; it has {', '.join(there)}"
            raise UserError("task.tools.mcp", problem)
        found = [tool for tool in found if not self.only or tool.name in self.only]
        if not found:
            raise UserError("task.tools.mcp", f"the MCP server {self.name!r} offers no tools")
        if wrong := [
            name for name in there if not _NAME.fullmatch(name) and (not self.only or name in self.only)
        ]:
            problem = (
                f"the MCP server {self.name!r} has a tool {wrong[0][:80]!r}, a name that no call can hold"
            )
            raise UserError("task.tools.mcp", problem, "name those you want in 'only'")
        return found


def _tool(entry: Any) -> Tool:
    """A tool as a server describes it."""
    entry = entry if isinstance(entry, Mapping) else {}
    schema = entry.get("inputSchema")
    schema = dict(schema) if isinstance(schema, Mapping) else {}
    fields = schema.get("properties")
    fields = fields if isinstance(fields, Mapping) else {}
    schema["properties"] = {str(k): v if isinstance(v, Mapping) else {} for k, v in fields.items()}
    if not isinstance(schema.get("required", []), list):
        del schema["required"]
    name, title = str(entry.get("name", "")), entry.get("title")
    return Tool(name, str(entry.get("description") or title or name), {"type": "object", **schema})


@dataclass(frozen=True)
class Offered:
    """A tool of a server, which calls it by `called`."""

    tool: Tool
    server: Server
    called: str

    @property
    def keeper(self) -> str:
        """The server, whose tools have one state."""
        return f"mcp:{self.server.name}"

    def ready(self) -> None:
        """Starts the server; where that fails, the call says so."""
        if not self.server.fresh:
            with suppress(RunError):
                _connection(self.server)

    def __call__(
        self, arguments: Mapping[str, Any], kept: Any, bounds: Bounds, seed: str
    ) -> tuple[Result, Any]:
        """What the server returns, as text; with `fresh` the episode's calls are kept.

        RunError if it does not start.
        """
        if not self.server.fresh:
            connection = _connection(self.server)
            result = _call(connection, self.called, arguments, bounds)
            if result.label in ("timeout", "died"):
                connection.close()
            return result, None
        made = tuple(kept or ())
        connection, _ = self.server.start()
        try:
            for name, given in made:
                _call(connection, name, given, bounds)
            result = _call(connection, self.called, arguments, bounds)
        finally:
            connection.close()
        ended = result.label in ("timeout", "died")  # what ends a server is not done again
        return result, made if ended else (*made, (self.called, dict(arguments)))


def offered(server: Server, taken: Sequence[str]) -> list[Offered]:
    """The tools of a server; one whose name is taken has the server's before it."""
    made = []
    for tool in server.tools():
        name = f"{server.name}_{tool.name}" if tool.name in taken else tool.name
        made.append(Offered(Tool(name, tool.description, tool.parameters), server, tool.name))
    return made


_HELD: dict[str, Connection] = {}
"""The processes of servers that this worker keeps, by how each is started."""


def _connection(server: Server) -> Connection:
    """The process of a server in this worker, started if there is none; RunError if it cannot be."""
    key = json.dumps([server.name, server.command, server.args, dict(server.env)])
    if key not in _HELD or not _HELD[key].alive:
        _HELD.pop(key, None)
        _HELD[key], _ = server.start()
    return _HELD[key]


def _call(connection: Connection, name: str, arguments: Mapping[str, Any], bounds: Bounds) -> Result:
    """What a call comes to."""
    try:
        given = {"name": name, "arguments": dict(arguments)}
        said = connection.request("tools/call", given, bounds.deadline_s)
    except Refused as error:
        return Result(bounds.cut(f"raised: {error}").text, "raised")
    except TooLong:
        return Result(
            f"cut: a result of more than {MOST_OF_A_LINE >> 20} MiB, of which nothing is read", "cut"
        )
    except Broken as error:
        return Result(f"{error.label}: {error.reason}", error.label)
    text = _text(said).encode("utf-8", "replace").decode()
    return Result(bounds.cut(f"raised: {text}").text, "raised") if said.get("isError") else bounds.cut(text)


def _text(said: Mapping[str, Any]) -> str:
    """The texts of a result, one below the other; of other content only what it is."""
    content = said.get("content")
    shown = (
        [_part(each) for each in content if isinstance(each, Mapping)] if isinstance(content, list) else []
    )
    if not shown and said.get("structuredContent") is not None:
        return json.dumps(said["structuredContent"], ensure_ascii=False)
    return "\n".join(shown)


def _part(content: Mapping[str, Any]) -> str:
    """One part of a result.

    >>> _part({"type": "text", "text": "5"}), _part({"type": "image", "mimeType": "image/png"})
    ('5', '[image, image/png]')
    """
    resource = content.get("resource")
    text = resource.get("text") if isinstance(resource, Mapping) else content.get("text")
    if isinstance(text, str):
        return text
    told = {**(resource if isinstance(resource, Mapping) else {}), **content}
    words = [str(told[key])[:100] for key in ("type", "mimeType", "uri") if isinstance(told.get(key), str)]
    return f"[{', '.join(words)}]"
