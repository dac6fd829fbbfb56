"""A reward that is a Python function of the user's.

    def reward(prompt, response, answer, **fields) -> float            one response
    def reward(prompts, completions, **columns) -> list[float]         lists, as TRL calls it

A function gets what its parameters name, by keyword:

| parameter | one response | lists |
|---|---|---|
| `prompt` / `prompts` | the last message shown to the policy | a list of it |
| `response` / `completions` | what the policy said (required) | a list of it |
| `answer` | the task's answer or None | a list of it |
| `messages`, `task` | the conversation; the whole Task | lists of it |
| any other name, `**fields` | the task's other fields | lists of them |

Lists have one entry: responses are judged one by one, so that one that breaks takes no other
with it. A function returns a number (bool, int, float, or a 0-dimensional array), a dictionary
of named numbers whose sum is the score, or a Verdict; with lists, a list of one of these.

Whatever else happens is a failure and never a score of 0: labels raised, not_a_number (NaN,
infinity, None, any other type) and wrong_length here; timeout and died from the pool.
"""

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from posttrain.nearest import did_you_mean
from posttrain.types import Task, UserError, Verdict
from posttrain.usercode import asked, load_named, signature
from posttrain.verifiers.protocol import Verifier

_SINGLE = ("prompt", "response", "answer", "messages", "task")
_LISTS = ("prompts", "completions", "answer", "messages", "task")


@dataclass(frozen=True, kw_only=True)
class Function(Verifier):
    """What a function named "module:function" or "path/to/file.py:function" returns.

    Making one loads the function and raises UserError if that cannot be done or if its
    parameters are none of those above. It is sent to other processes by name.

    Labels: that of a returned Verdict, otherwise `scored`; failures as above.
    """

    function: str
    name: str = "function"
    trusted: ClassVar[bool] = False
    best: ClassVar[None] = None

    def __post_init__(self) -> None:
        _parameters(self.function)

    def __reduce__(self) -> tuple[Callable[[str, str], "Function"], tuple[str, str]]:
        # Being unpickled loads the function, so that loading is not counted as judging.
        return _function, (self.function, self.name)

    def __call__(self, task: Task, response: str) -> Verdict:
        """The function's value as a verdict; whatever the function raises."""
        wanted = _parameters(self.function)
        given = self._given(task, response)
        if not wanted.everything:
            given = {key: value for key, value in given.items() if key in wanted.names}
        returned = load_named(self.function)(**given)
        if not wanted.lists:
            return as_verdict(returned)
        if not _is_sequence(returned):
            return _not_a_number(returned, "a list")
        if len(returned) != 1:
            reason = f"{len(returned)} scores were returned for 1 response"
            return Verdict(score=None, label="wrong_length", reason=reason)
        return as_verdict(returned[0])

    def _given(self, task: Task, response: str) -> dict[str, Any]:
        wanted = _parameters(self.function)
        prompt = task.messages[-1]["content"] if task.messages else ""
        values = (prompt, response, task.answer, list(task.messages), task)
        given = {**task.fields, **dict(zip(_LISTS if wanted.lists else _SINGLE, values, strict=True))}
        return {key: [value] for key, value in given.items()} if wanted.lists else given

    def golds(self, task: Task) -> list[str]:
        """None: nobody knows what the function likes."""
        return []

    def fakes(self, task: Task) -> list[str]:
        """The empty response, which must not make the function fail."""
        return [""]

    def check(self, task: Task) -> None:
        """UserError if the function needs a field that this task does not have."""
        wanted = _parameters(self.function)
        known = set(task.fields) | set(_LISTS if wanted.lists else _SINGLE)
        for name in sorted(wanted.required - known):
            raise UserError(
                f"{self.function} wants {name!r}, which task {task.id!r} does not have",
                where=task.source,
                mend=did_you_mean(name, known) or f"it has {', '.join(sorted(known))}",
            )


def _function(function: str, name: str) -> Function:
    return Function(function=function, name=name)


def as_verdict(returned: object) -> Verdict:
    """The verdict that a returned value stands for; a failed one if it stands for none.

    >>> as_verdict(0.5).score, as_verdict({"length": 0.5, "style": 1}).score
    (0.5, 1.5)
    >>> as_verdict(float("nan")).label, as_verdict("0.5").label, as_verdict(None).score
    ('not_a_number', 'not_a_number', None)
    """
    if isinstance(returned, Verdict):
        return returned
    if isinstance(returned, Mapping):
        parts = {str(key): _number(value) for key, value in returned.items()}
        bad = [(key, returned[key]) for key in returned if _number(returned[key]) is None]
        if bad or not parts:
            return _not_a_number(bad[0] if bad else returned, "named numbers")
        known = {key: value for key, value in parts.items() if value is not None}
        total = math.fsum(known.values()) if all(abs(v) < 1e300 for v in known.values()) else math.inf
        if not math.isfinite(total):
            return _not_a_number(returned, "a finite sum")
        return Verdict(score=total, label="scored", parts=known)
    value = _number(returned)
    if value is None:
        return _not_a_number(returned, "a finite number")
    return Verdict(score=value, label="scored")


def _number(value: object) -> float | None:
    """The finite number that a value is, or None."""
    if not isinstance(value, numbers.Real) and getattr(value, "shape", None) == ():
        value = value.item() if hasattr(value, "item") else value  # a 0-dimensional array or tensor
    if not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:  # an int beyond the largest float
        return None
    return number if math.isfinite(number) else None


def _not_a_number(returned: object, wanted: str) -> Verdict:
    kind = type(returned).__name__
    text = f" {str(returned)[:80]}" if isinstance(returned, (float, str, tuple, list)) else ""
    reason = f"the function returned {kind}{text}, not {wanted}"
    return Verdict(score=None, label="not_a_number", reason=reason)


def _is_sequence(value: object) -> bool:
    """A list, a tuple, or a 1-dimensional array; not a string or a dictionary."""
    shape = getattr(value, "shape", None)
    return isinstance(value, (list, tuple)) or (shape is not None and len(shape) == 1)


@dataclass(frozen=True)
class _Wanted:
    names: frozenset[str]
    required: frozenset[str]
    everything: bool
    """It has **fields."""
    lists: bool


@lru_cache(maxsize=256)
def _parameters(function: str) -> _Wanted:
    """What a function's parameters ask for; UserError if it cannot be called with a response."""
    found = asked(signature, function, name=function)
    parameters = found["parameters"]
    if not found["callable"]:
        raise UserError(f"it is not a function but {found['type']}", where=function)
    if found["is_async"]:
        raise UserError("it is an async function", where=function, mend="write it with 'def'")
    if parameters is None:
        raise UserError("its parameters cannot be read", where=function, mend="wrap it in a 'def'")
    keyword = [p for p in parameters if p[1] in ("POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY")]
    names = frozenset(name for name, *_ in keyword)
    required = frozenset(name for name, _, default, _ in keyword if not default)
    everything = any(kind == "VAR_KEYWORD" for _, kind, *_ in parameters)
    positional = [name for name, kind, default, _ in parameters if kind == "POSITIONAL_ONLY" and not default]
    lists = "completions" in names
    if positional or not (lists or "response" in names or (everything and not names & set(_LISTS[:2]))):
        takes = ", ".join(text for *_, text in parameters) or "nothing"
        raise UserError(
            f"it takes ({takes}), which has no place for a response",
            where=function,
            mend="write 'def reward(prompt, response, answer, **fields)' "
            "or 'def reward(prompts, completions, **columns)'",
        )
    return _Wanted(names, required, everything, lists)
