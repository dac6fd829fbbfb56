"""Functions as tools: what a policy is told of one, and calls of it, each in a copy of the process."""

import inspect
import json
import random
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from posttrain.base.usercode import cause, load_named
from posttrain.envs.tools.call import Bounds, Tool, ToolResult
from posttrain.errors import UserError
from posttrain.process.fork import forked
from posttrain.process.interpreter import asked
from posttrain.process.workers import Failed

_PLAIN = (str, int, float, bool, list, dict, tuple, type(None), Any)


@dataclass(frozen=True)
class ToolFunction:
    """A function named "module:function" or "path/to/file.py:function", called with `given` besides."""

    tool: Tool
    name: str
    given: Mapping[str, Any] = field(default_factory=dict)
    first: Mapping[str, Any] | None = None
    """Arguments of a call that makes what later ones share."""

    @property
    def keeper(self) -> str:
        return self.tool.name

    def ready(self) -> None:
        """Loads the function, and what its calls share."""
        found = load_named(self.name)
        if self.first is not None:
            found(**self.given, **self.first)

    def __call__(
        self, arguments: Mapping[str, Any], kept: Any, bounds: Bounds, seed: str
    ) -> tuple[ToolResult, Any]:
        """What the function returns, as text; nothing is kept."""
        function = partial(load_named(self.name), **self.given, **arguments)
        outcome = forked(
            partial(_called, function, seed),
            kind="tool",
            most_bytes=4 * bounds.max_chars + 1,  # of UTF-8, more than can be shown
            deadline_s=bounds.deadline_s,
            memory_mb=bounds.memory_mb,
        )
        if isinstance(outcome, Failed):
            return ToolResult(f"{outcome.label}: {outcome.reason}", outcome.label), None
        return bounds.cut(outcome.value), None


def _called(function: Callable[[], Any], seed: str) -> str:
    """Return what a function returns, as text; draws of `random` and numpy are fixed by the seed."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(random.getrandbits(32))
    value = function()
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


@cache
def described(name: str) -> Tool:
    """What the hints and the docstring of a function say of it; UserError for one that no policy could call.

    The function is loaded in a process of its own.
    """
    return Tool(**asked(_described, name, name=name))


def _described(name: str) -> dict[str, Any]:
    """The same as plain data. A docstring is Google's: a description, and each argument under Args."""
    from transformers.utils.chat_template_utils import get_json_schema

    found = load_named(name)
    if not inspect.isfunction(found) or inspect.iscoroutinefunction(found):
        problem = "it is an async function" if inspect.iscoroutinefunction(found) else "it is no function"
        raise UserError(name, problem, "name a function that is written with 'def'")
    for each in inspect.signature(found).parameters.values():
        if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            problem = f"its parameter {str(each)!r} has no name that a call could give"
            raise UserError(name, problem, "give it parameters that are called by their names")
    for parameter, hint in typing.get_type_hints(found).items():
        if parameter != "return" and not _is_plain(hint):
            problem = (
                f"its parameter {parameter!r} is {getattr(hint, '__name__', hint)}, which JSON does not have"
            )
            raise UserError(name, problem, "take str, int, float, bool, list, dict or a Literal of them")
    try:
        told = get_json_schema(found)["function"]
        json.dumps(told, allow_nan=False)
    except Exception as error:
        fix = "give each parameter a hint, and a line under 'Args:' in the docstring"
        raise UserError(name, f"no policy can be told what it does: {cause(error)}", fix) from None
    return {key: told[key] for key in ("name", "description", "parameters")}


def _is_plain(hint: Any) -> bool:
    """Whether JSON has values of this type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return all(isinstance(each, str | int | float | bool | None) for each in arguments)
    if origin in (typing.Union, types.UnionType, list, dict, tuple):
        return all(_is_plain(each) for each in arguments if each is not ...)
    return hint in _PLAIN
