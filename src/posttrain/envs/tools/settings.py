"""The table [task.tools]: the tools of an episode, and their limits."""

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
from posttrain.envs.tools.functions import ToolFunction, describe_function
from posttrain.envs.tools.mcp import McpServer, tools_of_server
from posttrain.types import UserError
from posttrain.verifiers import sandbox
from posttrain.verifiers.function import Function


class ToolRunner(Protocol):
    """A tool and the code that runs it: frozen, can be pickled, and holds no state of an episode."""

    @property
    def tool(self) -> Tool:
        """The description of the tool for the policy."""
        ...

    @property
    def state_key(self) -> str:
        """The key of the state that the next call continues from; tools with one key share it."""
        ...

    def ready(self) -> None:
        """Load what calls share, before any deadline runs."""
        ...

    def __call__(
        self, arguments: Mapping[str, Any], state: Any, bounds: Bounds, seed: str
    ) -> tuple[ToolResult, Any]:
        """Return the result of a call, and the state for the next call with this `state_key`.

        Raises RunError if the sandbox or the server fails, and not the call itself.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Tools(Bounds):
    """Tools that the policy may call before it answers."""

    builtin: tuple[Annotated[str, OneOf("tools")], ...] = ()
    """calculator: exact arithmetic; python: keeps names between calls; shell: bash, keeps files; or one of a
    plugin."""
    functions: tuple[str, ...] = ()
    """Functions of yours, as module:function or path/to/file.py:function; hints and docstring describe the
    arguments."""
    corpus: str = ""
    """Text or records, the documents of which the tool `search` finds; read as [task.text] does."""
    mcp: tuple[McpServer, ...] = ()
    """Servers that offer tools by the Model Context Protocol; see below."""
    format: FormatName = "auto"
    """The format of calls; auto: that of the chat template, or plain if it shows no tools."""
    max_turns: int = 8
    """Responses of an episode; the last one is its answer."""
    max_calls: int = 4
    """Calls of one response that are made."""
    episode_calls: int = 0
    """Calls of an episode that are made; 0: as many as its responses may make."""
    call_reward: float | str = 0.0
    """Reward of each call that is made, below 0 a price; or the name of a function that returns it."""
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
        """The function that returns the reward of a call, if it is one. Raises UserError if it cannot."""
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
        """Return the tools, ready to be sent to workers. Raises UserError if two have the same name."""
        runners: list[ToolRunner] = []
        runners += [kinds("tools")[name].load()(self.level) for name in self.builtin]
        runners += [ToolFunction(describe_function(name), name) for name in self.functions]
        if self.corpus:
            name, options = f"{search.__name__}:search", {"corpus": self.corpus}
            runners.append(ToolFunction(search.TOOL, name, options, first={"query": "a"}))
        for server in self.mcp:
            runners += tools_of_server(server, [runner.tool.name for runner in runners])
        twice = [name for name, n in Counter(runner.tool.name for runner in runners).items() if n > 1]
        if twice:
            raise UserError("task.tools", f"two tools are called {twice[0]!r}")
        return tuple(runners)

    def require(self) -> None:
        """Raise UserError if this machine lacks something that a tool needs."""
        if any(isinstance(runner, Cells) for runner in self.runners()):
            sandbox.require(self.level, where="task.tools.level")
        if self.corpus:
            search.check_corpus(self.corpus)
