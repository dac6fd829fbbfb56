"""A reward that is a Python function of the user's.

    def reward(prompt, response, answer, **fields) -> float            one response
    def reward(prompts, completions, **columns) -> list[float]         a group, as TRL calls it

A function gets what its parameters name, by keyword:

| parameter | one response | a group |
|---|---|---|
| `prompt` / `prompts` | the last message shown to the policy | a list of it; of lists of messages |
| `response` / `completions` | what the policy said | a list of it; of lists of one message |
| `completion_ids` | | a list of the sampled tokens of each |
| `trainer_state` | | a TrainerState: global_step, max_steps, epoch |
| `log_metric` | | `log_metric(name, number)` records a number beside the scores |
| `log_extra` | | `log_extra(name, values)` records one for each response, a number or a text |
| `answer` | the task's answer as the data held it, or None | a list of it |
| `messages`, `task` | the conversation; the whole Task | lists of it |
| any other name, `**fields` | the task's other fields | lists of them |

A group is all responses to one task, each list has an entry for each of them, and prompts and
completions are lists of messages where the data are. A group is judged in one call, so a function
that raises fails on all of it; its verdicts are never remembered, as they depend on each other.

A function returns a number (bool, int, float, or a 0-dimensional array), a dictionary of named
numbers whose sum is the score, or a Verdict; with a group, a list of one of these for each
response, or of None where it has nothing to say (label not_applicable). It may be `async def`.
Numbers that are logged become parts of the verdicts (part/NAME), texts stand in their reasons.

Whatever else happens is a failure and never a score of 0: labels raised, not_a_number (NaN,
infinity, any other type) and wrong_length here; timeout and died from the pool.
"""

import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

from posttrain.base.nearest import did_you_mean
from posttrain.base.usercode import MEMORY, load_named, refuse_memory, signature, signature_of
from posttrain.errors import counted
from posttrain.process.coroutines import awaited
from posttrain.process.interpreter import asked
from posttrain.types import Task, UserError, Verdict
from posttrain.verifiers.protocol import NOT_APPLICABLE, Group, Verifier
from posttrain.verifiers.returned import Noted, as_verdict, is_sequence, not_a_number, with_notes

_SINGLE = ("prompt", "response", "answer", "messages", "task")
_TRL = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")
_LISTS = (*_TRL, "answer", "messages", "task")


@dataclass(frozen=True, kw_only=True)
class Function(Verifier):
    """What a function named "module:function" or "path/to/file.py:function" returns, or one of a program.

    Making one loads the function and raises UserError if that cannot be done or if its
    parameters are none of those above. A named one is sent to other processes by name. A program's own, or an
    object that can be called as a verifier is, is called in its process, where nothing ends one that hangs.

    Labels: that of a returned Verdict, otherwise `scored`; failures as above.
    """

    place: ClassVar[int] = 16
    several: ClassVar[bool] = True
    function: str | Callable[..., Any]
    name: str = ""
    """Under which its score is recorded; empty: the function's own."""

    def __post_init__(self) -> None:
        if callable(self.function) or not self.function.startswith(MEMORY):
            _ = self._wanted
        if not self.name:
            object.__setattr__(self, "name", _name(self.function))

    def __reduce__(self) -> tuple[Callable[..., "Function"], tuple[Any, str]]:
        # Being unpickled loads the function, so that loading is not counted as judging.
        return _function, (self.function, self.name)

    @property
    def trusted(self) -> bool:
        """Whether it is called in this process: only an object of the program is."""
        return callable(self.function)

    @property
    def own(self) -> str:
        """What the function is called, for errors."""
        return _name(self.function) if callable(self.function) else self.function.removeprefix(MEMORY)

    @property
    def grouped(self) -> bool:
        return self._wanted.lists

    @property
    def _wanted(self) -> "_Wanted":
        if callable(self.function):
            return _understood(self.own, signature_of(self.function))
        again = "give it again, as reward= of posttrain.evaluate, train or Session"
        refuse_memory(self.function, f"{again}, or put it into a file and name that")
        return _parameters(self.function)

    def check_all(self, tasks: Sequence[Task]) -> None:
        """UserError if the function needs answers, and no task has one: the column has another name."""
        if tasks and "answer" in self._wanted.required and all(task.answer is None for task in tasks):
            there = ", ".join(map(repr, tasks[0].fields))
            problem = f"{self.own} wants 'answer', and no task has one: there is {there or 'nothing else'}"
            fix = "set task.data.columns.answer to its column, or give the parameter a default"
            raise UserError(tasks[0].source, problem, fix)

    def require(self) -> None:
        """UserError if the function is not here."""
        _ = self._wanted

    def __call__(self, task: Task, response: str) -> Verdict:
        """The function's value as a verdict; whatever the function raises."""
        if self.grouped:
            return self.judge_group(Group(task=task, responses=(response,)))[0]
        given = {**_columns(task), "prompt": _prompt(task), "response": response}
        return as_verdict(self._call(given))

    def judge_group(self, group: Group) -> list[Verdict]:
        """The function's values as verdicts; whatever the function raises."""
        if not self.grouped:
            return super().judge_group(group)
        task, size = group.task, len(group.responses)
        columns = [_columns(task) for _ in range(size)]
        noted = Noted([{} for _ in range(size)])
        given: dict[str, Any] = {"log_metric": noted.metric, "log_extra": noted.extra}
        given |= {key: [each[key] for each in columns] for key in _columns(task)}
        given["prompts"], given["completions"] = [_prompt(task)] * size, list(group.responses)
        if task.conversational:
            given["prompts"] = [[dict(message) for message in task.messages] for _ in range(size)]
            given["completions"] = [[{"role": "assistant", "content": r}] for r in group.responses]
        if group.tokens is not None or not any(group.responses):
            given["completion_ids"] = [list(ids) for ids in group.tokens or [()] * size]
        elif "completion_ids" in self._wanted.required:
            raise ValueError("completion_ids are known in training and evaluation only")
        returned = self._call({**given, "trainer_state": group.state})
        if not is_sequence(returned):
            return [not_a_number(returned, "a list")] * size
        if len(returned) != size:
            reason = f"{len(returned)} scores were returned for {counted(size, 'response')}"
            return [Verdict(score=None, label="wrong_length", reason=reason)] * size
        verdicts = [_SILENT if value is None else as_verdict(value) for value in returned]
        return [with_notes(verdict, notes) for verdict, notes in zip(verdicts, noted.each, strict=True)]

    def _call(self, given: Mapping[str, Any]) -> object:
        wanted = self._wanted
        named = {key: value for key, value in given.items() if wanted.everything or key in wanted.names}
        return self._returned(named)

    def _returned(self, named: Mapping[str, Any]) -> object:
        if not callable(self.function):
            return awaited(load_named(self.function)(**named))
        try:
            return awaited(self.function(**named))
        except Exception:
            # As the cause alone tells a program's author less than the line.
            if id(self.function) not in _FAILED:
                _FAILED.add(id(self.function))
                traceback.print_exc()
            raise

    def check(self, task: Task) -> None:
        """UserError if the function needs a field that this task does not have."""
        wanted = self._wanted
        known = set(task.fields) | set(_LISTS if wanted.lists else _SINGLE)
        for name in sorted(wanted.required - known):
            raise UserError(
                task.source,
                f"{self.own} wants {name!r}, which task {task.id!r} does not have",
                did_you_mean(name, known) or f"it has {', '.join(sorted(known))}",
            )


_FAILED: set[int] = set()
"""Functions whose first traceback was printed."""
_SILENT = Verdict(score=None, label=NOT_APPLICABLE, reason="the function returned None")


def _function(function: str | Callable[..., Any], name: str) -> Function:
    return Function(function=function, name=name)


def _name(function: str | Callable[..., Any]) -> str:
    """The name of a function, or of an object that can be called, where it has one."""
    if isinstance(function, str):
        return re.split("[:.]", function)[-1]
    inner = getattr(function, "func", function)  # of a partial
    own = getattr(inner, "__name__", "") or str(getattr(inner, "name", "")) or type(inner).__name__
    return own if own.isidentifier() else "reward"


def _prompt(task: Task) -> str:
    return task.messages[-1]["content"] if task.messages else ""


def _columns(task: Task) -> dict[str, Any]:
    """What is known of a task by name; the data's own columns before what is called the same here.

    It is a copy, for a function that changes its arguments, as by `tests.pop()`, must not change the task.
    """
    messages, fields = _copied(list(task.messages)), _copied(dict(task.fields))
    task = replace(task, messages=tuple(messages), fields=fields)
    return {"messages": messages, "task": task, **fields, "answer": task.typed_answer}


def _copied(value: Any) -> Any:
    """The value, its lists and dictionaries copied and all else itself."""
    if type(value) is dict:
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if type(value) is list else value


@dataclass(frozen=True)
class _Wanted:
    names: frozenset[str]
    required: frozenset[str]
    everything: bool
    """It has **fields."""
    lists: bool
    """It takes the lists of a group."""


@lru_cache(maxsize=256)
def _parameters(function: str) -> _Wanted:
    """What a function's parameters ask for; UserError if it cannot be called with a response."""
    return _understood(function, asked(signature, function, name=function))


def _understood(function: str, found: Mapping[str, Any]) -> _Wanted:
    parameters = found["parameters"]
    if not found["callable"]:
        raise UserError(function, f"it is not a function but {found['type']}")
    if parameters is None:
        raise UserError(function, "its parameters cannot be read", "wrap it in a 'def'")
    if found["type"] == "class":
        fix = f"make one, 'judge = {function.rpartition(':')[2]}(...)', and name that (docs/verifiers.md)"
        raise UserError(function, "it is a class, and one of its objects judges", fix)
    keyword = [p for p in parameters if p[1] in ("POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY")]
    names = frozenset(name for name, *_ in keyword)
    required = frozenset(name for name, _, default, _ in keyword if not default)
    everything = any(kind == "VAR_KEYWORD" for _, kind, *_ in parameters)
    positional = [name for name, kind, default, _ in parameters if kind == "POSITIONAL_ONLY" and not default]
    lists = bool(names & set(_TRL))
    said = {"completions", "completion_ids"} if lists else {"response"}
    if positional or not (everything or names & said):
        takes = ", ".join(text for *_, text in parameters) or "nothing"
        raise UserError(
            function,
            f"it takes ({takes}), which has no place for a response",
            "write 'def reward(prompt, response, answer, **fields)' "
            "or 'def reward(prompts, completions, **columns)'",
        )
    return _Wanted(names, required, everything, lists)
