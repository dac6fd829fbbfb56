"""The verifier `instructions`: check instructions by a program."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from posttrain.base.name_hints import did_you_mean
from posttrain.types import Task, UserError, Verdict
from posttrain.verifiers.protocol import Verifier
from posttrain.verifiers.regions import remove_thought
from posttrain_envs.instructions.checks import AT_LEAST, CHECKS, LESS_THAN
from posttrain_envs.instructions.language import LANGUAGES

_RELATIONS = (AT_LEAST, LESS_THAN)
_ONE_OF = dict.fromkeys(("relation", "let_relation", "capital_relation"), _RELATIONS) | {
    "language": LANGUAGES
}


@dataclass(frozen=True, kw_only=True)
class Instructions(Verifier):
    """1 if the response follows all of the task's instructions, otherwise 0, or with `partial` the share.

    An empty response follows none. Thoughts are not checked.

    A task's fields are IFEval's: `instruction_id_list`, and `kwargs` with the arguments of each. The parts
    count the instructions (`instructions`), those that are followed (`strict`, `loose`), and tell whether all
    are (`all_strict`, `all_loose`); the score uses `strict`, or with `loose` the loose count. Loosely, an
    instruction is followed if the response follows it as it is, or without its first line, its last line or
    both, or without its asterisks.

    Labels: right, wrong, and with `partial` partial for a share between 0 and 1.

    >>> fields = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    >>> task = Task(id="q", messages=(), fields=fields)
    >>> verdict = Instructions()(task, "Sure, here it is:\\nno comma")
    >>> verdict.label, verdict.parts["loose"]
    ('wrong', 1.0)
    """

    place: ClassVar[int] = 12
    name: str = "instructions"
    partial: bool = False
    """Give a share of 1 if some of the instructions are followed."""
    loose: bool = False
    """Overlook an introduction, a last line and asterisks."""
    trusted: ClassVar[bool] = True
    best: ClassVar[float] = 1.0

    def __call__(self, task: Task, response: str) -> Verdict:
        """Check each instruction; the reason names those that are not followed."""
        checks = list(_checks(task))
        response = remove_thought(response)
        versions = _versions(response)
        strict = [bool(response.strip()) and check(response) for _, check in checks]
        loose = [any(check(text) for text in versions) for _, check in checks]
        counted = loose if self.loose else strict
        broken = [name for (name, _), followed in zip(checks, counted, strict=True) if not followed]
        share = sum(counted) / len(checks) if self.partial else float(not broken)
        parts = {"instructions": len(checks), "strict": sum(strict), "loose": sum(loose)}
        parts |= {"all_strict": all(strict), "all_loose": all(loose)}
        return Verdict(
            score=share,
            label="right" if not broken else "partial" if share else "wrong",
            reason=f"not followed: {', '.join(broken)}" if broken else "all are followed",
            parts={name: float(value) for name, value in parts.items()},
        )

    def check(self, task: Task) -> None:
        """Raise UserError for an unknown kind of instruction, or kwargs that do not fit it."""
        list(_checks(task))


def _checks(task: Task) -> Iterator[tuple[str, Any]]:
    """Yield the name of each instruction, and its check with its arguments bound."""
    names, kwargs = task.fields.get("instruction_id_list"), task.fields.get("kwargs")
    if not isinstance(names, list) or not names or not isinstance(kwargs, list) or len(kwargs) != len(names):
        problem = f"task {task.id!r} needs instruction_id_list and kwargs, one of each for an instruction"
        raise UserError(task.source, problem)
    for name, numbers in zip(names, kwargs, strict=True):
        if name not in CHECKS:
            problem = f"task {task.id!r}: there is no instruction {name!r}"
            raise UserError(task.source, problem, did_you_mean(str(name), CHECKS))
        parameters = list(inspect.signature(CHECKS[name]).parameters.values())[1:]
        numbers = {} if numbers is None else numbers
        if not isinstance(numbers, Mapping):
            raise UserError(task.source, f"task {task.id!r}: the kwargs of {name} are no object")
        try:
            arguments = {
                parameter.name: _argument(parameter.name, numbers.get(parameter.name), parameter.annotation)
                for parameter in parameters
            }
        except ValueError as error:
            raise UserError(task.source, f"task {task.id!r}: {name} {error}") from None
        yield name, partial(CHECKS[name], **arguments)


def _argument(key: str, value: Any, kind: Any) -> Any:
    """Return the value of a key of kwargs. Raises ValueError if it does not fit the parameter."""
    if value is None:
        raise ValueError(f"has no {key!r}")
    if kind is int:
        # A table with gaps holds floats.
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        fits, expected = is_whole and value >= (key == "nth_paragraph"), "a whole number"
        value = int(value) if is_whole else value
    elif key in _ONE_OF:
        fits, expected = value in _ONE_OF[key], f"one of {', '.join(_ONE_OF[key])}"
    elif kind is str:
        fits, expected = isinstance(value, str) and bool(value.strip()), "a text"
    else:
        texts = isinstance(value, list) and all(isinstance(word, str) and word.strip() for word in value)
        fits, expected = texts and bool(value), "a list of texts"
    if not fits:
        raise ValueError(f"needs {expected} as {key!r}, not {value!r}")
    return value


def _versions(response: str) -> list[str]:
    """Return the response, also without introduction, closing words or emphasis; skip blank versions."""
    lines = response.split("\n")
    cut = [response, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return [text for text in (*cut, *(version.replace("*", "") for version in cut)) if text.strip()]
