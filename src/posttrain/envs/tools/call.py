"""A tool, a call as a policy wrote it, and the result of the call.

A call that cannot be made has a fault: malformed, unknown, arguments, too_large or too_many. A call that was
made has an outcome: ok, cut, raised, timeout or died. The policy is shown all of these except ok, and they
are counted.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from posttrain.data.records import parse_finite, reject_constant

MOST_OF_A_CALL = 1 << 16
"""Maximum characters of a call."""
OUTCOMES = ("ok", "cut", "raised", "timeout", "died")
TOOLS, AGENT, GREEDY = "tools/", "agent/", "greedy/"
COUNTED = (TOOLS, AGENT, GREEDY)
"""Prefixes of the parts of a verdict that are no scores: what the tools of an episode or an agent did, and
how the greedy answer to its task ended."""


@dataclass(frozen=True)
class Tool:
    """The description of a tool for a policy.

    >>> Tool("now", "Says what time it is.", {"type": "object", "properties": {}}).schema["type"]
    'function'
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments, an object."""
    example: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of a call that is shown as an example."""

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in the form that chat templates take."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    @property
    def properties(self) -> Mapping[str, Any]:
        """The schema of each parameter."""
        schemas: Mapping[str, Any] = self.parameters.get("properties") or {}
        return schemas


def text_tool(name: str, argument: str, example: str, description: str) -> Tool:
    """Return a tool that takes one text."""
    schema = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return Tool(name, description, schema, {argument: example})


@dataclass(frozen=True)
class WrittenCall:
    """A call as the policy wrote it, or the reason why it is malformed.

    arguments: values by name; texts by name if the format has no types; or the text of the only argument.
    """

    name: str
    arguments: Mapping[str, Any] | str = field(default_factory=dict)
    typed: bool = True
    fault: str = ""
    reason: str = ""


@dataclass(frozen=True)
class ToolResult:
    """The result of a call: a text for the policy, and a label, which is an outcome or a fault."""

    text: str
    label: str = "ok"


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Limits of one call of a tool."""

    deadline_s: float = 5.0
    """Seconds that a call may take."""
    memory_mb: int = 512
    """Memory that a call may use in addition to that of its process."""
    max_chars: int = 2000
    """Characters of a result; a longer one is cut."""

    def __post_init__(self) -> None:
        if not (0 < self.deadline_s < math.inf and self.memory_mb > 0 and self.max_chars > 0):
            raise ValueError("deadline_s, memory_mb and max_chars must be positive")

    def cut(self, text: str) -> ToolResult:
        """Return a text as a result, cut to the maximum length.

        >>> Bounds(max_chars=3).cut("12345")
        ToolResult(text='123 … (cut after 3 characters)', label='cut')
        """
        text = text.strip() or "(nothing)"
        if len(text) <= self.max_chars:
            return ToolResult(text)
        return ToolResult(f"{text[: self.max_chars]} … (cut after {self.max_chars} characters)", "cut")


def from_json(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError as `json_at`, or if more follows.

    >>> from_json('{"a": [1, 2.5]}')
    {'a': [1, 2.5]}
    """
    begin = len(text) - len(text.lstrip(_BLANKS))
    value, end = json_at(text[begin:])
    if text[begin + end :].strip(_BLANKS):
        raise ValueError(f"more follows the JSON value: {text[begin + end :].strip()[:20]!r}")
    return value


_BLANKS = " \t\r\n"
_DECODER = json.JSONDecoder(parse_constant=reject_constant, parse_float=parse_finite)


def json_at(text: str) -> tuple[Any, int]:
    """Return the JSON value at the beginning of a text, and where it ends.

    Raises ValueError without one, for NaN or half a character, and for too deep nesting.

    >>> json_at('[1, "]"] and words')
    ([1, ']'], 8)
    """
    try:
        value, end = _DECODER.raw_decode(text)
        if text.find("\\u", 0, end) >= 0:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value, end


def arguments_of(tool: Tool, call: WrittenCall) -> dict[str, Any]:
    """Return the arguments of a call as the tool takes them.

    Raises ValueError, with a text of one line, for missing or unknown ones, and for values that do not fit
    the schema.

    >>> add = Tool("add", "", {"properties": {"a": {"type": "integer"}}, "required": ["a"]})
    >>> arguments_of(add, WrittenCall("add", {"a": "3"}, typed=False))
    {'a': 3}
    """
    arguments = call.arguments
    if isinstance(arguments, str):
        if len(tool.properties) == 1:
            arguments = {next(iter(tool.properties)): arguments}
        else:
            arguments, call = from_json(arguments or "{}"), WrittenCall(call.name)
    if not isinstance(arguments, Mapping):
        raise ValueError(f"the arguments are {kind(arguments)}, not an object")
    if strange := [name for name in arguments if name not in tool.properties]:
        raise ValueError(f"there is no argument {strange[0][:60]!r}; there are {', '.join(tool.properties)}")
    if missing := [name for name in tool.parameters.get("required") or () if name not in arguments]:
        raise ValueError(f"{missing[0]!r} is missing")
    values = {
        name: value if call.typed else _parse_untyped(value, tool.properties[name])
        for name, value in arguments.items()
    }
    for name, value in values.items():
        if why := misfit(value, tool.properties[name]):
            raise ValueError(f"{name!r} {why}")
    return values


def _parse_untyped(text: str, schema: Any) -> Any:
    """Return the value of a text without a type, by the schema."""
    if "string" in _kinds(schema):
        return text
    try:
        return from_json(text)
    except ValueError:
        return text


_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def misfit(value: Any, schema: Any) -> str:
    """Return why a value does not fit a JSON schema, by its types, choices and fields; "" if it fits.

    >>> misfit([1, "2"], {"type": "array", "items": {"type": "integer"}})
    'has an entry that must be integer, not string'
    """
    if not isinstance(schema, Mapping):
        return ""
    kinds = _kinds(schema)
    is_integer = isinstance(value, float) and value.is_integer() and "integer" in kinds
    types = [kind for kind in kinds if kind in _TYPES]
    if types and not is_integer and kind(value) not in types and not _is_wider(value, types):
        return f"must be {' or '.join(types)}, not {kind(value)}"
    if "enum" in schema and value not in schema["enum"]:
        return f"must be one of {', '.join(map(str, schema['enum']))}"
    either = schema.get("anyOf") or schema.get("oneOf")
    if either and all(misfit(value, form) for form in either):
        return f"fits none of {len(either)} forms"
    if isinstance(value, list):
        why = next((why for item in value if (why := misfit(item, schema.get("items")))), "")
        return why and f"has an entry that {why}"
    if isinstance(value, dict):
        if missing := [name for name in schema.get("required", ()) if name not in value]:
            return f"has no {missing[0]!r}"
        fields, others = schema.get("properties", {}), schema.get("additionalProperties")
        faults = ((name, misfit(item, fields.get(name, others))) for name, item in value.items())
        return next((f"has a {name[:60]!r} that {why}" for name, why in faults if why), "")
    return ""


def _kinds(schema: Any) -> list[str]:
    schema = schema if isinstance(schema, Mapping) else {}  # true stands for any value
    kinds = schema.get("type", [])
    return [*([kinds] if isinstance(kinds, str) else kinds), *["null"] * bool(schema.get("nullable"))]


def kind(value: Any) -> str:
    """Return the JSON type of a value."""
    return next(kind for kind, types in _TYPES.items() if type(value) in types)


def _is_wider(value: Any, kinds: list[str]) -> bool:
    return type(value) is int and "number" in kinds
