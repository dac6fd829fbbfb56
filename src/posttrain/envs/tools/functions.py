"""Functions as tools: their descriptions, and calls, each in a fork of the process."""

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
from posttrain.process.fork import call_in_fork
from posttrain.process.interpreter import call_in_fresh_process
from posttrain.process.workers import Failed

_PLAIN = (str, int, float, bool, list, dict, tuple, type(None), Any)


@dataclass(frozen=True)
class ToolFunction:
    """A function "module:function" or "path/to/file.py:function", called with `options` and arguments."""

    tool: Tool
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    first: Mapping[str, Any] | None = None
    """Arguments of a call that loads what later calls share."""

    @property
    def state_key(self) -> str:
        return self.tool.name

    def ready(self) -> None:
        """Load the function, and what its calls share."""
        function = load_named(self.name)
        if self.first is not None:
            function(**self.options, **self.first)

    def __call__(
        self, arguments: Mapping[str, Any], state: Any, bounds: Bounds, seed: str
    ) -> tuple[ToolResult, Any]:
        """Return the value of the function as text, and no state."""
        function = partial(load_named(self.name), **self.options, **arguments)
        outcome = call_in_fork(
            partial(_call, function, seed),
            kind="tool",
            most_bytes=4 * bounds.max_chars + 1,  # of UTF-8: more than the result can show
            deadline_s=bounds.deadline_s,
            memory_mb=bounds.memory_mb,
        )
        if isinstance(outcome, Failed):
            return ToolResult(f"{outcome.label}: {outcome.reason}", outcome.label), None
        return bounds.cut(outcome.value), None


def _call(function: Callable[[], Any], seed: str) -> str:
    """Return the value of a function as text; the seed fixes draws of `random` and numpy."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(random.getrandbits(32))
    value = function()
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


@cache
def describe_function(name: str) -> Tool:
    """Return the tool that the hints and the docstring of a function describe, loaded in another process.

    Raises UserError for a function that no policy could call.
    """
    return Tool(**call_in_fresh_process(_describe, name, name=name))


def _describe(name: str) -> dict[str, Any]:
    """Return the same as plain data. The docstring is in Google style: a description, and Args."""
    from transformers.utils.chat_template_utils import get_json_schema

    function = load_named(name)
    if not inspect.isfunction(function) or inspect.iscoroutinefunction(function):
        kind = "an async function" if inspect.iscoroutinefunction(function) else "not a function"
        raise UserError(name, f"it is {kind}", "name a function that is written with 'def'")
    for argument in inspect.signature(function).parameters.values():
        if argument.kind not in (argument.POSITIONAL_OR_KEYWORD, argument.KEYWORD_ONLY):
            problem = f"its parameter {str(argument)!r} has no name that a call could give"
            raise UserError(name, problem, "give it parameters that are called by their names")
    for parameter, hint in typing.get_type_hints(function).items():
        if parameter != "return" and not _is_plain(hint):
            problem = (
                f"its parameter {parameter!r} is {getattr(hint, '__name__', hint)}, which JSON does not have"
            )
            raise UserError(name, problem, "take str, int, float, bool, list, dict or a Literal of them")
    try:
        schema = get_json_schema(function)["function"]
        json.dumps(schema, allow_nan=False)
    except Exception as error:
        fix = "give each parameter a hint, and a line under 'Args:' in the docstring"
        raise UserError(name, f"its schema cannot be derived: {cause(error)}", fix) from None
    return {key: schema[key] for key in ("name", "description", "parameters")}


def _is_plain(hint: Any) -> bool:
    """Return whether JSON has values of this type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return all(isinstance(value, str | int | float | bool | None) for value in arguments)
    if origin in (typing.Union, types.UnionType, list, dict, tuple):
        return all(_is_plain(hint) for hint in arguments if hint is not ...)
    return hint in _PLAIN
