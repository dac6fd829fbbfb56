"""The table [task.tools]: which tools there are, and how much of them."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Protocol

from posttrain.base.kinds import OneOf, kinds
from posttrain.envs.tools import search
from posttrain.envs.tools.call import Bounds, Tool, ToolResult
from posttrain.envs.tools.cells import Cells
from posttrain.envs.tools.formats import FormatName
from posttrain.envs.tools.functions import ToolFunction as FunctionTool
from posttrain.envs.tools.functions import described
from posttrain.envs.tools.mcp import McpServer, offered
from posttrain.types import UserError
from posttrain.verifiers import sandbox
from posttrain.verifiers.function import Function


class ToolRunner(Protocol):
    """A tool with what runs it. It is frozen and can be pickled, and holds nothing of an episode."""

    @property
    def tool(self) -> Tool:
        """What the policy is told of it."""
        ...

    @property
    def keeper(self) -> str:
        """Under which an episode keeps what the next call goes on from; the same for tools that share it."""
        ...

    def ready(self) -> None:
        """Loads what calls share, before any clock runs."""
        ...

    def __call__(
        self, arguments: Mapping[str, Any], kept: Any, bounds: Bounds, seed: str
    ) -> tuple[ToolResult, Any]:
        """The result of a call, and what the episode keeps for the next one of its keeper.

        RunError where not the call but what is ours breaks.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Tools(Bounds):
    """Tools that the policy may call before it answers."""

    builtin: tuple[Annotated[str, OneOf("tools")], ...] = ()
    """calculator: exact arithmetic; python: it remembers; shell: bash whose files stay; or a plugin's."""
    functions: tuple[str, ...] = ()
    """Of yours, as module:function or path/to/file.py:function; hints and docstring say what each takes."""
    corpus: str = ""
    """Text or records whose documents the tool `search` finds, as [task.text] reads them."""
    mcp: tuple[McpServer, ...] = ()
    """Servers that offer tools by the Model Context Protocol; see below."""
    format: FormatName = "auto"
    """How calls are written; auto: as the chat template writes them, or plain where it shows no tools."""
    max_turns: int = 8
    """Responses of an episode; the last one is its answer."""
    max_calls: int = 4
    """Calls of one response that are made."""
    episode_calls: int = 0
    """Calls of an episode that are made; 0: as many as its responses may."""
    call_reward: float | str = 0.0
    """Earned by each call that is made, below 0 a price; or the name of a function that says it."""
    level: sandbox.Level = "strict"
    """The least isolation that python and shell accept: strict, landlock or rlimits."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.builtin or self.functions or self.corpus or self.mcp):
            raise ValueError("there is no tool: give builtin, functions, corpus or mcp")
        names = [server.name for server in self.mcp]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two servers are called {twice[0]!r}")
        if min(self.max_turns, self.max_calls) < 1:
            raise ValueError("max_turns and max_calls must be 1 or more")
        if self.episode_calls < 0:
            raise ValueError("episode_calls must be 0 (no bound) or more")

    @cached_property
    def call_judge(self) -> Function | None:
        """The function that says what a call is worth; UserError if it cannot."""
        if not isinstance(self.call_reward, str):
            return None
        judge = Function(function=self.call_reward)
        if judge.grouped:
            raise UserError(
                self.call_reward,
                "it takes a group's lists, and a call is judged alone",
                "write 'def reward(response, tool, arguments, outcome, **fields)'",
            )
        return judge

    def runners(self) -> tuple[ToolRunner, ...]:
        """The tools, ready to be sent to workers; UserError for one that cannot be, or two of a name."""
        made: list[ToolRunner] = []
        made += [kinds("tools")[name].load()(self.level) for name in self.builtin]
        made += [FunctionTool(described(name), name) for name in self.functions]
        if self.corpus:
            given = {"corpus": self.corpus}
            made.append(FunctionTool(search.TOOL, f"{search.__name__}:search", given, first={"query": "a"}))
        for server in self.mcp:
            made += offered(server, [each.tool.name for each in made])
        twice = [name for name, n in Counter(each.tool.name for each in made).items() if n > 1]
        if twice:
            raise UserError("task.tools", f"two tools are called {twice[0]!r}")
        return tuple(made)

    def require(self) -> None:
        """UserError if this machine lacks what a tool needs."""
        if any(isinstance(runner, Cells) for runner in self.runners()):
            sandbox.require(self.level, where="task.tools.level")
        if self.corpus:
            search.check(self.corpus)
