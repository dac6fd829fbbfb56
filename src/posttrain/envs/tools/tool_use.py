"""Episodes in which a policy calls tools before it answers.

start    waits for   nothing: it returns the question and the tools
reply    waits for   the tools that the response calls, each until its deadline; or for the verifier
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from posttrain.base.chat import Chat
from posttrain.envs.protocol import Start, Turn, broken_turn
from posttrain.envs.tools.call import OUTCOMES, TOOLS, ToolResult, WrittenCall, arguments_of
from posttrain.envs.tools.settings import ToolRunner, Tools
from posttrain.envs.tools.template_support import Shown, example, find_display, result_messages, with_tools
from posttrain.errors import RunError, UserError
from posttrain.types import Task, Verdict
from posttrain.verifiers.protocol import Verifier

_LOAD_FACTOR = 20.0
"""On a loaded machine a sandbox may take this many times its deadline."""


@dataclass(frozen=True, slots=True)
class ToolState:
    """The state of an episode."""

    task: Task
    turns: int = 0
    """Number of earlier responses, all of which called a tool."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Number of earlier calls, and of those of each class except ok."""
    states: Mapping[str, Any] = field(default_factory=dict)
    """By state_key: the state that the next call of a tool continues from."""


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """The policy calls tools, sees their results, and answers; the verifier judges the answer.

    A call that cannot be made, and a tool that raises, hangs or dies, becomes a line for the policy. Only a
    failure of the sandbox or of posttrain ends the episode, without a score.
    """

    judge: Verifier
    runners: tuple[ToolRunner, ...]
    settings: Tools
    shown: Shown = field(default_factory=Shown)
    trusted: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _ = self.settings.call_judge

    def __reduce__(self) -> tuple[Callable[..., "ToolUse"], tuple[Any, ...]]:
        # Unpickling, in workers, loads the tools, so that the deadline of a call does not include loading.
        return _unpickle, (self.judge, self.runners, self.settings, self.shown)

    @property
    def max_turns(self) -> int:
        """Maximum responses of an episode."""
        return self.settings.max_turns

    @property
    def reply_s(self) -> float:
        """Seconds that the calls of a reply may take."""
        return _LOAD_FACTOR * self.settings.deadline_s * self.settings.max_calls * self.settings.max_turns

    def suited(self, chat: Chat) -> "ToolUse":
        """Return the environment with calls and results as this template supports them."""
        return replace(self, shown=find_display(chat, self.settings.format))

    def start(self, task: Task) -> Start:
        """Return the task's question with the tools. Raises UserError if it has none."""
        if not task.messages:
            raise UserError(task.source, f"task {task.id!r} asks nothing")
        tools = [runner.tool for runner in self.runners]
        messages, schemas = with_tools(task.messages, tools, self.shown)
        return Start(state=ToolState(task), messages=messages, tools=schemas)

    def state_key(self, state: ToolState) -> None:
        """Return None: what the tools returned is in the conversation alone."""

    def example(self) -> str:
        """Return a call of the first tool."""
        return example(self.runners[0].tool, self.shown.called)

    def reply(self, state: ToolState, response: str) -> Turn:
        """Return the results of the calls; without any, or at the last turn, the verdict on the words."""
        words, calls = self.shown.read(response, [runner.tool for runner in self.runners])
        if not calls or state.turns + 1 >= self.settings.max_turns:
            counts = Counter(state.counts) + Counter(calls=len(calls), too_many=len(calls))
            verdict = self.judge(state.task, words if calls else response)
            parts = {**verdict.parts, **{f"{TOOLS}{name}": float(n) for name, n in counts.items()}}
            parts.setdefault(f"{TOOLS}calls", 0.0)
            return Turn(state=state, done=True, verdict=replace(verdict, parts=parts), reward=verdict.score)
        try:
            return self._make_calls(state, calls)
        except (RunError, OSError) as error:
            return broken_turn(state, "INFRA_ERROR", str(error)[:300])

    def _make_calls(self, state: ToolState, calls: list[WrittenCall]) -> Turn:
        """Return the turn with the results of the calls of one response."""
        counts, states, reward = Counter(state.counts) + Counter(calls=len(calls)), dict(state.states), 0.0
        results: list[tuple[str, str]] = []
        most = self.settings.max_calls
        if self.settings.episode_calls:
            faults = {name: n for name, n in state.counts.items() if name not in ("calls", *OUTCOMES)}
            earlier = state.counts.get("calls", 0) - sum(faults.values())
            most = min(most, max(0, self.settings.episode_calls - earlier))
        for call in calls[:most]:
            result = self._call(call, states, state.task.id)
            if result.label in OUTCOMES:
                verdict = self._reward_of(state.task, call, result)
                if verdict.score is None:
                    return broken_turn(state, verdict.label, f"call_reward: {verdict.reason}")
                reward += verdict.score
            results.append((call.name[:60] or "tool", result.text))
            counts[result.label] += result.label != "ok"
        if (more := len(calls) - most) > 0:
            counts["too_many"] += more
            text = f"too_many: of {len(calls)} calls the first {most} were made, the rest was not"
            results.append(("tool", text))
        return Turn(
            state=ToolState(state.task, state.turns + 1, dict(+counts), states),
            messages=result_messages(results, self.shown),
            reward=reward or None,
        )

    def _reward_of(self, task: Task, call: WrittenCall, result: ToolResult) -> Verdict:
        """Return the verdict whose score is the reward of a call that was made."""
        judge = self.settings.call_judge
        if judge is None:
            return Verdict(score=float(self.settings.call_reward), label="scored")
        call_fields = {"tool": call.name, "arguments": call.arguments, "outcome": result.label}
        return judge(replace(task, fields={**task.fields, **call_fields}), result.text)

    def _call(self, call: WrittenCall, states: dict[str, Any], seed: str) -> ToolResult:
        """Return the result of a call, and put the new state of its tool into `states`."""
        if call.fault:
            return ToolResult(f"{call.fault}: {call.reason}", call.fault)
        runner = next((r for r in self.runners if r.tool.name == call.name), None)
        if runner is None:
            names = ", ".join(r.tool.name for r in self.runners)
            return ToolResult(f"unknown: there is no tool {call.name[:60]!r}; there are {names}", "unknown")
        try:
            arguments = arguments_of(runner.tool, call)
        except ValueError as error:
            return ToolResult(f"arguments: {str(error)[:300]}", "arguments")
        before = states.get(runner.state_key)
        result, states[runner.state_key] = runner(arguments, before, self.settings, seed)
        return result


def _unpickle(judge: Verifier, runners: tuple[ToolRunner, ...], settings: Tools, shown: Shown) -> ToolUse:
    for runner in runners:
        runner.ready()
    return ToolUse(judge=judge, runners=runners, settings=settings, shown=shown)
