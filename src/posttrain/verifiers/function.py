"""A reward that is a Python function of the user.

    def reward(prompt, response, answer, **fields) -> float            one response
    def reward(prompts, completions, **columns) -> list[float]         a group, as TRL calls it

A function gets by keyword the values that its parameters name:

| parameter | one response | a group |
|---|---|---|
| `prompt` / `prompts` | the last message of the prompt | a list with it; or of lists of messages |
| `response` / `completions` | the text of the response | a list of texts; or of lists of one message |
| `completion_ids` | | for each response the list of its sampled tokens |
| `trainer_state` | | a TrainerState: global_step, max_steps, epoch |
| `log_metric` | | `log_metric(name, number)` records a number for the group |
| `log_extra` | | `log_extra(name, values)` records a number or a text for each response |
| `answer` | the task's answer with its type in the data, or None | a list with it |
| `messages`, `task` | the conversation; the whole Task | lists with these |
| any other name, `**fields` | the task's other fields | lists with these |

A group is all responses to one task; each list has one entry per response. Prompts and completions are
lists of messages if the data are conversations. A group is judged in one call, so a function that raises
fails for the whole group. Verdicts on a group are not cached, because they depend on each other.

A function returns a number (bool, int, float, or a 0-dimensional array), a dictionary of named
numbers whose sum is the score, or a Verdict; for a group, a list with one of these per response,
or None for a response that it does not apply to (label not_applicable). It may be `async def`.
Logged numbers become parts of the verdicts (part/NAME); logged texts are added to their reasons.

Anything else is a failure and never a score of 0. This module gives the labels raised, not_a_number (NaN,
infinity, any other type) and wrong_length; the pool gives timeout and died.
"""

import math
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, TypeGuard

from posttrain.base.name_hints import did_you_mean
from posttrain.base.usercode import MEMORY, load_named, refuse_memory, signature, signature_of
from posttrain.base.verdict import LARGEST, number, sound
from posttrain.errors import counted
from posttrain.process.coroutines import run_coroutine
from posttrain.process.interpreter import call_in_fresh_process
from posttrain.types import Task, UserError, Verdict
from posttrain.verifiers.protocol import NOT_APPLICABLE, Group, Verifier

_SINGLE = ("prompt", "response", "answer", "messages", "task")
_TRL = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")
_LISTS = (*_TRL, "answer", "messages", "task")


@dataclass(frozen=True, kw_only=True)
class Function(Verifier):
    """Judge by a function: "module:function", "path/to/file.py:function", or a Python callable.

    The constructor reads the function's signature, and raises UserError if the function cannot be loaded or
    cannot take a response. A function given by name is sent to the workers by name. A callable runs in the
    process of the program that passed it, without a deadline.

    Labels: that of a returned Verdict, otherwise `scored`; failures as above.
    """

    place: ClassVar[int] = 16
    several: ClassVar[bool] = True
    function: str | Callable[..., Any]
    name: str = ""
    """Name under which the score is recorded; empty: the name of the function."""

    def __post_init__(self) -> None:
        if callable(self.function) or not self.function.startswith(MEMORY):
            _ = self._parameters
        if not self.name:
            object.__setattr__(self, "name", _name(self.function))

    def __reduce__(self) -> tuple[Callable[..., "Function"], tuple[Any, str]]:
        # Unpickling runs the constructor, which loads the function before the deadline of a verdict begins.
        return _function, (self.function, self.name)

    @property
    def trusted(self) -> bool:
        """Whether it runs in this process: only a callable does."""
        return callable(self.function)

    @property
    def _display_name(self) -> str:
        """Name of the function in errors."""
        return _name(self.function) if callable(self.function) else self.function.removeprefix(MEMORY)

    @property
    def grouped(self) -> bool:
        return self._parameters.lists

    @property
    def _parameters(self) -> "_Parameters":
        if callable(self.function):
            return _read_parameters(self._display_name, signature_of(self.function))
        argument = "give it again, as reward= of posttrain.evaluate, train or Session"
        refuse_memory(self.function, f"{argument}, or put it into a file and name that")
        return _load_parameters(self.function)

    def check_all(self, tasks: Sequence[Task]) -> None:
        """Raise UserError if the function needs answers and no task has one: the column has another name."""
        if (
            tasks
            and "answer" in self._parameters.required
            and all(task.typed_answer is None for task in tasks)
        ):
            fields = ", ".join(map(repr, tasks[0].fields)) or "nothing else"
            problem = f"{self._display_name} wants 'answer', and no task has one: there is {fields}"
            fix = "set task.data.columns.answer to its column, or give the parameter a default"
            raise UserError(tasks[0].source, problem, fix)

    def require(self) -> None:
        """Raise UserError if the function cannot be loaded on this machine."""
        _ = self._parameters

    def __call__(self, task: Task, response: str) -> Verdict:
        """Call the function for one response. Its exceptions propagate."""
        if self.grouped:
            return self.judge_group(Group(task=task, responses=(response,)))[0]
        values = {**_columns(task), "prompt": _prompt(task), "response": response}
        return to_verdict(self._call(values))

    def judge_group(self, group: Group) -> list[Verdict]:
        """Call the function for a group. Its exceptions propagate."""
        if not self.grouped:
            return super().judge_group(group)
        task, size = group.task, len(group.responses)
        columns = [_columns(task) for _ in range(size)]
        notes = _Notes([{} for _ in range(size)])
        values: dict[str, Any] = {"log_metric": notes.metric, "log_extra": notes.extra}
        values |= {key: [fields[key] for fields in columns] for key in _columns(task)}
        values["prompts"], values["completions"] = [_prompt(task)] * size, list(group.responses)
        if task.conversational:
            values["prompts"] = [[dict(message) for message in task.messages] for _ in range(size)]
            values["completions"] = [[{"role": "assistant", "content": r}] for r in group.responses]
        if group.tokens is not None or not any(group.responses):
            values["completion_ids"] = [list(ids) for ids in group.tokens or [()] * size]
        elif "completion_ids" in self._parameters.required:
            raise ValueError("completion_ids are known in training and evaluation only")
        returned = self._call({**values, "trainer_state": group.state})
        if not _is_sequence(returned):
            return [_not_a_number(returned, "a list")] * size
        if len(returned) != size:
            reason = f"{len(returned)} scores were returned for {counted(size, 'response')}"
            return [Verdict(score=None, label="wrong_length", reason=reason)] * size
        verdicts = [_SKIPPED if value is None else to_verdict(value) for value in returned]
        return [_add_notes(*pair) for pair in zip(verdicts, notes.by_response, strict=True)]

    def _call(self, values: Mapping[str, Any]) -> object:
        parameters = self._parameters
        keywords = {
            key: value for key, value in values.items() if parameters.any_name or key in parameters.names
        }
        return self._run(keywords)

    def _run(self, keywords: Mapping[str, Any]) -> object:
        if not callable(self.function):
            return run_coroutine(load_named(self.function)(**keywords))
        try:
            return run_coroutine(self.function(**keywords))
        except Exception:
            # The verdict keeps the message alone; the author of the function needs the line too, once.
            if id(self.function) not in _FAILED:
                _FAILED.add(id(self.function))
                traceback.print_exc()
            raise

    def check(self, task: Task) -> None:
        """Raise UserError if the function needs a field that this task does not have."""
        parameters = self._parameters
        names = set(task.fields) | set(_LISTS if parameters.lists else _SINGLE)
        for name in sorted(parameters.required - names):
            raise UserError(
                task.source,
                f"{self._display_name} wants {name!r}, which task {task.id!r} does not have",
                did_you_mean(name, names) or f"it has {', '.join(sorted(names))}",
            )


_FAILED: set[int] = set()
"""Ids of the functions whose first traceback was printed."""
_SKIPPED = Verdict(score=None, label=NOT_APPLICABLE, reason="the function returned None")


def _function(function: str | Callable[..., Any], name: str) -> Function:
    return Function(function=function, name=name)


def _name(function: str | Callable[..., Any]) -> str:
    """Return the name of a function or callable object; "reward" if it has none that is an identifier."""
    if isinstance(function, str):
        return re.split("[:.]", function)[-1]
    inner = getattr(function, "func", function)  # of a partial
    name = getattr(inner, "__name__", "") or str(getattr(inner, "name", "")) or type(inner).__name__
    return name if name.isidentifier() else "reward"


def _prompt(task: Task) -> str:
    return task.messages[-1]["content"] if task.messages else ""


def _columns(task: Task) -> dict[str, Any]:
    """Return the task's values by name. Columns of the data override `messages` and `task`.

    The values are copies, since a function that changes its arguments must not change the task.
    """
    messages, fields = _copy(list(task.messages)), _copy(dict(task.fields))
    task = replace(task, messages=tuple(messages), fields=fields)
    return {"messages": messages, "task": task, **fields, "answer": _copy(task.typed_answer)}


def _copy(value: Any) -> Any:
    """Copy the lists and dictionaries of a value, nested ones too; anything else is shared."""
    if type(value) is dict:
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if type(value) is list else value


@dataclass(frozen=True)
class _Parameters:
    """Names that a function can and must be given."""

    names: frozenset[str]
    required: frozenset[str]
    any_name: bool
    """Whether it takes any name, by **fields."""
    lists: bool
    """Whether it takes the lists of a group."""


@lru_cache(maxsize=256)
def _load_parameters(function: str) -> _Parameters:
    """Load a function's parameters. Raises UserError if it cannot be called with a response."""
    return _read_parameters(function, call_in_fresh_process(signature, function, name=function))


def _read_parameters(function: str, description: Mapping[str, Any]) -> _Parameters:
    parameters = description["parameters"]
    if not description["callable"]:
        raise UserError(function, f"it is not a function but {description['type']}")
    if parameters is None:
        raise UserError(function, "its parameters cannot be read", "wrap it in a 'def'")
    if description["type"] == "class":
        fix = f"make one, 'judge = {function.rpartition(':')[2]}(...)', and name that (docs/verifiers.md)"
        raise UserError(function, "it is a class, and one of its objects judges", fix)
    keyword = [p for p in parameters if p[1] in ("POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY")]
    names = frozenset(name for name, *_ in keyword)
    required = frozenset(name for name, _, default, _ in keyword if not default)
    any_name = any(kind == "VAR_KEYWORD" for _, kind, *_ in parameters)
    positional = [name for name, kind, default, _ in parameters if kind == "POSITIONAL_ONLY" and not default]
    lists = bool(names & set(_TRL))
    response_names = {"completions", "completion_ids"} if lists else {"response"}
    if positional or not (any_name or names & response_names):
        takes = ", ".join(text for *_, text in parameters) or "nothing"
        raise UserError(
            function,
            f"it takes ({takes}), which has no place for a response",
            "write 'def reward(prompt, response, answer, **fields)' "
            "or 'def reward(prompts, completions, **columns)'",
        )
    return _Parameters(names, required, any_name, lists)


# ---------------------------------------------------------------------- what a function returns and logs


def to_verdict(returned: object) -> Verdict:
    """Convert a returned value to a verdict; a failed one if it is not a score.

    >>> to_verdict(0.5).score, to_verdict({"length": 0.5, "style": 1}).score
    (0.5, 1.5)
    >>> to_verdict(float("nan")).label, to_verdict("0.5").label, to_verdict(None).score
    ('not_a_number', 'not_a_number', None)
    """
    if isinstance(returned, Verdict):
        return sound(returned)
    if isinstance(returned, Mapping):
        parts = {str(key): number(value) for key, value in returned.items()}
        bad = [(key, returned[key]) for key in returned if number(returned[key]) is None]
        if bad or not parts:
            return _not_a_number(bad[0] if bad else returned, "named numbers")
        numbers = {key: value for key, value in parts.items() if value is not None}
        total = number(math.fsum(numbers.values()))
        if total is None:
            return _not_a_number(returned, f"a sum of at most {LARGEST:g}")
        return Verdict(score=total, label="scored", parts=numbers)
    value = number(returned)
    if value is None:
        return _not_a_number(returned, f"a finite number (at most {LARGEST:g})")
    return Verdict(score=value, label="scored")


def _not_a_number(returned: object, expected: str) -> Verdict:
    """Return a failed verdict that says what was returned and what was expected."""
    kind = type(returned).__name__
    text = f" {str(returned)[:80]}" if isinstance(returned, (float, str, tuple, list)) else ""
    reason = f"the function returned {kind}{text}, not {expected}"
    return Verdict(score=None, label="not_a_number", reason=reason)


def _is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    """Return whether a value is a list, a tuple or a 1-dimensional array; a string is not."""
    shape = getattr(value, "shape", None)
    return isinstance(value, (list, tuple)) or (shape is not None and len(shape) == 1)


@dataclass(frozen=True)
class _Notes:
    """Notes that a function logs on the responses of a group, through TRL's log_metric and log_extra."""

    by_response: list[dict[str, Any]]

    def metric(self, name: str, value: Any) -> None:
        """Log a number for the whole group."""
        self.extra(name, [value] * len(self.by_response))

    def extra(self, name: str, values: Sequence[Any]) -> None:
        """Log a number or a text for each response."""
        for notes, value in zip(self.by_response, values, strict=True):
            notes[name] = value


def _add_notes(verdict: Verdict, notes: Mapping[str, Any]) -> Verdict:
    """Add logged numbers to the parts of a verdict, and logged texts to its reason."""
    if verdict.failed or not notes:
        return verdict
    numbers = {name: number(value) for name, value in notes.items()}
    parts = {name: value for name, value in numbers.items() if value is not None}
    texts = [f"{name}: {' '.join(str(notes[name]).split())}" for name in notes if name not in parts]
    reason = "; ".join(filter(None, [verdict.reason, *texts]))
    return sound(replace(verdict, parts=parts | dict(verdict.parts), reason=reason))
