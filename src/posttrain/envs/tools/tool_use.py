"""Episodes in which a policy calls tools before it answers.

start    waits for   nothing: the question, and the tools
reply    waits for   the tools that the response calls, each within its deadline; or for the verifier
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from posttrain.base.chat import Chat
from posttrain.envs.protocol import Start, Turn, broken_turn
from posttrain.envs.repair import Judge
from posttrain.envs.tools.call import COUNTED, OUTCOMES, Call, Result, arguments_of
from posttrain.envs.tools.choice import Runner, Tools
from posttrain.envs.tools.template import Shown, result_message, shown_by
from posttrain.errors import RunError, UserError
from posttrain.types import Message, Task

_BUSY = 20.0
"""On a loaded machine a box may take so many times its deadline."""


@dataclass(frozen=True, slots=True)
class Stand:
    """Where an episode stands."""

    task: Task
    turns: int = 0
    """Responses so far, all of which called a tool."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Calls so far, and those of each class but ok."""
    kept: Mapping[str, Any] = field(default_factory=dict)
    """What the next call of a tool goes on from, by the tool's name."""


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """The policy calls tools, is shown what they return, and answers; the verifier says what that is worth.

    A call that cannot be made, and a tool that raises, hangs or dies, is a line for the policy. Only where
    what is ours breaks does the episode end, without a score.
    """

    judge: Judge
    runners: tuple[Runner, ...]
    settings: Tools
    shown: Shown = field(default_factory=Shown)
    trusted: ClassVar[bool] = False

    def __reduce__(self) -> tuple[Callable[..., "ToolUse"], tuple[Any, ...]]:
        # Being unpickled, which workers do, loads the tools, so that loading is not counted as a call.
        return _loaded, (self.judge, self.runners, self.settings, self.shown)

    @property
    def max_turns(self) -> int:
        """Responses of an episode."""
        return self.settings.max_turns

    @property
    def reply_s(self) -> float:
        """Seconds that the calls of a reply may take before what is ours is given up."""
        return _BUSY * self.settings.deadline_s * self.settings.max_calls * self.settings.max_turns

    def suited(self, chat: Chat) -> "ToolUse":
        """The same as this template can show it."""
        return replace(self, shown=shown_by(chat, self.settings.format))

    def start(self, task: Task) -> Start:
        """The task's question with the tools; UserError if it has none."""
        if not task.messages:
            raise UserError(f"task {task.id!r} asks nothing", where=task.source)
        if self.shown.tools:
            tools = tuple(each.tool.schema for each in self.runners)
            return Start(state=Stand(task), messages=task.messages, tools=tools)
        first, *rest = task.messages
        said = f"{first['content']}\n\n" if first["role"] == "system" else ""
        system = {"role": "system", "content": said + self.description()}
        rest = rest if said else [first, *rest]
        return Start(state=Stand(task), messages=(system, *rest))

    def description(self) -> str:
        """The tools in words, each with a call as it is written."""
        lines = ["You can call tools, and are then shown what they return:"]
        for each in self.runners:
            lines.append(f"{self.example(each)} {each.tool.description}")
            told = {name: schema.get("description") for name, schema in each.tool.properties.items()}
            lines += [f"  {name}: {text}" for name, text in told.items() if text]
        return "\n".join([*lines, "Answer without a call when you know the answer."])

    def example(self, runner: Runner | None = None) -> str:
        """A call of a tool, of the first if none is named."""
        tool = (runner or self.runners[0]).tool
        given = tool.example or {name: _example(schema) for name, schema in tool.properties.items()}
        return self.shown.called.write(tool, given)

    def reply(self, state: Stand, response: str) -> Turn:
        """What the calls of a response return; without any, or at the last turn, the verdict on its words."""
        words, calls = self.shown.called.read(response)
        if not calls or state.turns + 1 >= self.settings.max_turns:
            counts = Counter(state.counts) + Counter(calls=len(calls), too_many=len(calls))
            verdict = self.judge(state.task, words if calls else response)
            parts = {**verdict.parts, **{f"{COUNTED}{name}": float(n) for name, n in counts.items()}}
            parts.setdefault(f"{COUNTED}calls", 0.0)
            return Turn(state=state, done=True, verdict=replace(verdict, parts=parts), reward=verdict.score)
        try:
            return self._answered(state, calls)
        except (RunError, OSError) as error:
            return broken_turn(state, "INFRA_ERROR", str(error)[:300])

    def _answered(self, state: Stand, calls: list[Call]) -> Turn:
        """The results of the calls of one response."""
        counts, kept, made = Counter(state.counts) + Counter(calls=len(calls)), dict(state.kept), 0
        said: list[tuple[str, str]] = []
        for call in calls[: self.settings.max_calls]:
            result, goes_on = self._result(call, kept.get(call.name), state.task.id)
            if result.label in OUTCOMES:
                kept[call.name], made = goes_on, made + 1
            said.append((call.name[:60] or "tool", result.text))
            counts[result.label] += result.label != "ok"
        if (more := len(calls) - self.settings.max_calls) > 0:
            counts["too_many"] += more
            most = self.settings.max_calls
            said.append(
                ("tool", f"too_many: of {len(calls)} calls the first {most} were made, the rest was not")
            )
        return Turn(
            state=Stand(state.task, state.turns + 1, dict(+counts), kept),
            messages=self._messages(said),
            reward=made * self.settings.call_reward or None,
        )

    def _result(self, call: Call, kept: Any, seed: str) -> tuple[Result, Any]:
        """What a call comes to, and what its tool goes on from."""
        if call.fault:
            return Result(f"{call.fault}: {call.reason}", call.fault), kept
        runner = next((each for each in self.runners if each.tool.name == call.name), None)
        if runner is None:
            there = ", ".join(each.tool.name for each in self.runners)
            return Result(f"unknown: there is no tool {call.name[:60]!r}; there are {there}", "unknown"), kept
        try:
            arguments = arguments_of(runner.tool, call)
        except ValueError as error:
            return Result(f"arguments: {str(error)[:300]}", "arguments"), kept
        return runner(arguments, kept, self.settings, seed)

    def _messages(self, said: list[tuple[str, str]]) -> tuple[Message, ...]:
        if self.shown.results:
            return tuple(result_message(name, text, n) for n, (name, text) in enumerate(said))
        # One, as many templates want turns to alternate.
        return ({"role": "user", "content": "\n".join(f"{name}: {text}" for name, text in said)},)


def _loaded(judge: Judge, runners: tuple[Runner, ...], settings: Tools, shown: Shown) -> ToolUse:
    for each in runners:
        each.ready()
    return ToolUse(judge=judge, runners=runners, settings=settings, shown=shown)


_EXAMPLES: dict[str, Any] = {
    "string": "text",
    "integer": 1,
    "number": 0.5,
    "boolean": True,
    "array": [],
    "object": {},
}


def _example(schema: Mapping[str, Any]) -> Any:
    """A value that a schema allows, for most schemas."""
    kind = schema.get("type", "string")
    return (schema.get("enum") or [_EXAMPLES.get(kind if isinstance(kind, str) else kind[0], "text")])[0]
