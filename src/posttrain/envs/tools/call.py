"""A tool, a call of it as a policy wrote it, and what came of that.

A call that cannot be made has a fault: malformed, unknown, arguments, too_large or too_many. One that was
made has an outcome: ok, cut, raised, timeout or died. All but ok are said to the policy, and counted.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from posttrain.data.records import parse_finite, reject_constant

MOST_OF_A_CALL = 1 << 16
"""Characters of one call that are read."""
OUTCOMES = ("ok", "cut", "raised", "timeout", "died")
TOOLS, AGENT = "tools/", "agent/"
COUNTED = (TOOLS, AGENT)
"""Begin the names under which a verdict's parts count what an agent, or the tools of an episode, did."""


@dataclass(frozen=True)
class Tool:
    """What a policy is told of a tool.

    >>> Tool("now", "Says what time it is.", {"type": "object", "properties": {}}).schema["type"]
    'function'
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments, an object."""
    example: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of a call that can be shown."""

    @property
    def schema(self) -> dict[str, Any]:
        """As chat templates are given it."""
        told = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": told}

    @property
    def properties(self) -> Mapping[str, Any]:
        """The schema of each parameter."""
        found: Mapping[str, Any] = self.parameters.get("properties") or {}
        return found


def taking(name: str, argument: str, example: str, description: str) -> Tool:
    """A tool that takes one text."""
    schema = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return Tool(name, description, schema, {argument: example})


@dataclass(frozen=True)
class WrittenCall:
    """A call as it was written, or why it is none.

    arguments: values by their names; texts by their names where the format has no types; or the text that is
    the only argument.
    """

    name: str
    arguments: Mapping[str, Any] | str = field(default_factory=dict)
    typed: bool = True
    fault: str = ""
    reason: str = ""


@dataclass(frozen=True)
class ToolResult:
    """What a call came to: a text for the policy, and its class, an outcome or a fault."""

    text: str
    label: str = "ok"


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What one call may use."""

    deadline_s: float = 5.0
    """Seconds for a call."""
    memory_mb: int = 512
    """Memory that a call may take beyond what its process has."""
    max_chars: int = 2000
    """Characters of a result; what is longer is cut."""

    def __post_init__(self) -> None:
        if not (0 < self.deadline_s < math.inf and self.memory_mb > 0 and self.max_chars > 0):
            raise ValueError("deadline_s, memory_mb and max_chars must be positive")

    def cut(self, text: str) -> ToolResult:
        """The text as a result, no longer than it may be.

        >>> Bounds(max_chars=3).cut("12345")
        Result(text='123 … (cut after 3 characters)', label='cut')
        """
        text = text.strip() or "(nothing)"
        if len(text) <= self.max_chars:
            return ToolResult(text)
        return ToolResult(f"{text[: self.max_chars]} … (cut after {self.max_chars} characters)", "cut")


def from_json(text: str) -> Any:
    """Return the value of a JSON text; ValueError as `json_at`, or if more follows.

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

    Raises ValueError if there is none, or it holds NaN or half a character, or nests too deeply.

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
    """The arguments that a tool is called with; ValueError, in one line, if they are not what it takes.

    >>> add = Tool("add", "", {"properties": {"a": {"type": "integer"}}, "required": ["a"]})
    >>> arguments_of(add, Call("add", {"a": "3"}, typed=False))
    {'a': 3}
    """
    given = call.arguments
    if isinstance(given, str):
        if len(tool.properties) == 1:
            given = {next(iter(tool.properties)): given}
        else:
            given, call = from_json(given or "{}"), WrittenCall(call.name)
    if not isinstance(given, Mapping):
        raise ValueError(f"the arguments are {kind(given)}, not an object")
    if strange := [name for name in given if name not in tool.properties]:
        raise ValueError(f"there is no argument {strange[0][:60]!r}; there are {', '.join(tool.properties)}")
    if missing := [name for name in tool.parameters.get("required") or () if name not in given]:
        raise ValueError(f"{missing[0]!r} is missing")
    made = {
        name: value if call.typed else _meant(value, tool.properties[name]) for name, value in given.items()
    }
    for name, value in made.items():
        if why := misfit(value, tool.properties[name]):
            raise ValueError(f"{name!r} {why}")
    return made


def _meant(text: str, schema: Any) -> Any:
    """The value that a text without a type stands for."""
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
    """Why a value is not what a JSON schema says, by its types, choices and fields; "" where it is.

    >>> misfit([1, "2"], {"type": "array", "items": {"type": "integer"}})
    'has an entry that must be integer, not string'
    """
    if not isinstance(schema, Mapping):
        return ""
    kinds = _kinds(schema)
    whole = isinstance(value, float) and value.is_integer() and "integer" in kinds
    known = [kind for kind in kinds if kind in _TYPES]
    if known and not whole and kind(value) not in known and not _wider(value, known):
        return f"must be {' or '.join(known)}, not {kind(value)}"
    if "enum" in schema and value not in schema["enum"]:
        return f"must be one of {', '.join(map(str, schema['enum']))}"
    either = schema.get("anyOf") or schema.get("oneOf")
    if either and all(misfit(value, each) for each in either):
        return f"fits none of {len(either)} forms"
    if isinstance(value, list):
        why = next((why for each in value if (why := misfit(each, schema.get("items")))), "")
        return why and f"has an entry that {why}"
    if isinstance(value, dict):
        if missing := [name for name in schema.get("required", ()) if name not in value]:
            return f"has no {missing[0]!r}"
        fields, others = schema.get("properties", {}), schema.get("additionalProperties")
        told = ((name, misfit(each, fields.get(name, others))) for name, each in value.items())
        return next((f"has a {name[:60]!r} that {why}" for name, why in told if why), "")
    return ""


def _kinds(schema: Any) -> list[str]:
    schema = schema if isinstance(schema, Mapping) else {}  # true stands for any value
    kinds = schema.get("type", [])
    return [*([kinds] if isinstance(kinds, str) else kinds), *["null"] * bool(schema.get("nullable"))]


def kind(value: Any) -> str:
    """The JSON type of a value."""
    return next(kind for kind, types in _TYPES.items() if type(value) in types)


def _wider(value: Any, kinds: list[str]) -> bool:
    return type(value) is int and "number" in kinds
