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
from posttrain.envs.tools.call import OUTCOMES, TOOLS, ToolResult, WrittenCall, arguments_of
from posttrain.envs.tools.settings import ToolRunner, Tools
from posttrain.envs.tools.template_support import Shown, example, result_messages, shown_by, with_tools
from posttrain.errors import RunError, UserError
from posttrain.types import Task, Verdict
from posttrain.verifiers.protocol import Verifier

_BUSY = 20.0
"""On a loaded machine a box may take so many times its deadline."""


@dataclass(frozen=True, slots=True)
class Stand:
    task: Task
    turns: int = 0
    """Responses so far, all of which called a tool."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Calls so far, and those of each class but ok."""
    kept: Mapping[str, Any] = field(default_factory=dict)
    """What the next call of a tool goes on from, by the tool's keeper."""


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """The policy calls tools, is shown what they return, and answers; the verifier says what that is worth.

    A call that cannot be made, and a tool that raises, hangs or dies, is a line for the policy. Only where
    what is ours breaks does the episode end, without a score.
    """

    judge: Verifier
    runners: tuple[ToolRunner, ...]
    settings: Tools
    shown: Shown = field(default_factory=Shown)
    trusted: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _ = self.settings.call_judge

    def __reduce__(self) -> tuple[Callable[..., "ToolUse"], tuple[Any, ...]]:
        # Being unpickled, which workers do, loads the tools, so that loading is not counted as a call.
        return _load, (self.judge, self.runners, self.settings, self.shown)

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
            raise UserError(task.source, f"task {task.id!r} asks nothing")
        tools = [each.tool for each in self.runners]
        messages, schemas = with_tools(task.messages, tools, self.shown)
        return Start(state=Stand(task), messages=messages, tools=schemas)

    def example(self) -> str:
        """A call of the first tool."""
        return example(self.runners[0].tool, self.shown.called)

    def reply(self, state: Stand, response: str) -> Turn:
        """What the calls of a response return; without any, or at the last turn, the verdict on its words."""
        words, calls = self.shown.read(response, [each.tool for each in self.runners])
        if not calls or state.turns + 1 >= self.settings.max_turns:
            counts = Counter(state.counts) + Counter(calls=len(calls), too_many=len(calls))
            verdict = self.judge(state.task, words if calls else response)
            parts = {**verdict.parts, **{f"{TOOLS}{name}": float(n) for name, n in counts.items()}}
            parts.setdefault(f"{TOOLS}calls", 0.0)
            return Turn(state=state, done=True, verdict=replace(verdict, parts=parts), reward=verdict.score)
        try:
            return self._answered(state, calls)
        except (RunError, OSError) as error:
            return broken_turn(state, "INFRA_ERROR", str(error)[:300])

    def _answered(self, state: Stand, calls: list[WrittenCall]) -> Turn:
        """The results of the calls of one response."""
        counts, kept, earned = Counter(state.counts) + Counter(calls=len(calls)), dict(state.kept), 0.0
        said: list[tuple[str, str]] = []
        most = self.settings.max_calls
        if self.settings.episode_calls:
            made = sum(
                n if name == "calls" else -n for name, n in state.counts.items() if name not in OUTCOMES
            )
            most = min(most, max(0, self.settings.episode_calls - made))
        for call in calls[:most]:
            result = self._result(call, kept, state.task.id)
            if result.label in OUTCOMES:
                worth = self._worth(state.task, call, result)
                if worth.score is None:
                    return broken_turn(state, worth.label, f"call_reward: {worth.reason}")
                earned += worth.score
            said.append((call.name[:60] or "tool", result.text))
            counts[result.label] += result.label != "ok"
        if (more := len(calls) - most) > 0:
            counts["too_many"] += more
            said.append(
                ("tool", f"too_many: of {len(calls)} calls the first {most} were made, the rest was not")
            )
        return Turn(
            state=Stand(state.task, state.turns + 1, dict(+counts), kept),
            messages=result_messages(said, self.shown),
            reward=earned or None,
        )

    def _worth(self, task: Task, call: WrittenCall, result: ToolResult) -> Verdict:
        """What a call that was made earns."""
        judge = self.settings.call_judge
        if judge is None:
            return Verdict(score=float(self.settings.call_reward), label="scored")
        about = {"tool": call.name, "arguments": call.arguments, "outcome": result.label}
        return judge(replace(task, fields={**task.fields, **about}), result.text)

    def _result(self, call: WrittenCall, kept: dict[str, Any], seed: str) -> ToolResult:
        """What a call comes to; what its tool goes on from is put into `kept`."""
        if call.fault:
            return ToolResult(f"{call.fault}: {call.reason}", call.fault)
        runner = next((each for each in self.runners if each.tool.name == call.name), None)
        if runner is None:
            there = ", ".join(each.tool.name for each in self.runners)
            return ToolResult(f"unknown: there is no tool {call.name[:60]!r}; there are {there}", "unknown")
        try:
            arguments = arguments_of(runner.tool, call)
        except ValueError as error:
            return ToolResult(f"arguments: {str(error)[:300]}", "arguments")
        before = kept.get(runner.keeper)
        result, kept[runner.keeper] = runner(arguments, before, self.settings, seed)
        return result


def _load(judge: Verifier, runners: tuple[ToolRunner, ...], settings: Tools, shown: Shown) -> ToolUse:
    for each in runners:
        each.ready()
    return ToolUse(judge=judge, runners=runners, settings=settings, shown=shown)
