"""Calls of tools in records, as OpenAI's chat API writes them, and the tools that were available.

The format is {"id", "type": "function", "function": {"name", "arguments"}} in `tool_calls` of an assistant's
message, or the function alone, with arguments as an object or as JSON. Results are messages of the role tool,
with `tool_call_id`, or else in the order of the calls. Calls are numbered again, since no policy could know
an id.
"""

import json
from collections.abc import Mapping
from typing import Any

from posttrain.base.name_hints import did_you_mean
from posttrain.data.fields import Fields, kind
from posttrain.types import Message

NOTHING = "(nothing)"
"""Replaces a result without text."""


class Calls:
    """The calls of a conversation while it is read, which match each result to its call."""

    def __init__(self, fields: Fields) -> None:
        self._fields, self._count = fields, 0
        self._waiting: list[tuple[Any, str, str]] = []
        """Of each call without a result: its id in the record, its new id, and the tool's name."""

    def read_extra(self, turn: Mapping[str, Any], role: str, place: str) -> dict[str, Any]:
        """Return the keys of a turn besides its text: its calls, or the call that it is the result of."""
        if role == "assistant" and turn.get("tool_calls"):
            return {"tool_calls": self._read_calls(turn["tool_calls"], place)}
        if role != "tool" or not (self._waiting or turn.get("tool_call_id")):
            return {}
        old_id = turn.get("tool_call_id")
        call = next((c for c in self._waiting if not old_id or c[0] == old_id), None)
        if call is None:
            raise self._fields.fault(f"{place} is the result of {old_id!r}, but no earlier call has that id")
        self._waiting.remove(call)
        return {"name": call[2], "tool_call_id": call[1]}

    def _read_calls(self, calls: Any, place: str) -> list[dict[str, Any]]:
        if not isinstance(calls, list):
            raise self._fields.fault(f"tool_calls of {place} is {kind(calls)}, not a list")
        numbered, self._waiting = [], []
        for call in calls:
            if (function_call := _function(call)) is None:
                raise self._fields.fault(f"a call of {place} names no function")
            new_id = f"call{self._count:05d}"
            self._count += 1
            function = {"name": function_call["name"], "arguments": self._arguments(function_call, place)}
            numbered.append({"id": new_id, "type": "function", "function": function})
            self._waiting.append((call.get("id"), new_id, function_call["name"]))
        return numbered

    def _arguments(self, call: Mapping[str, Any], place: str) -> dict[str, Any]:
        value = _parse_json(call.get("arguments") or {})
        if not isinstance(value, dict):
            raise self._fields.fault(f"the arguments of a call of {place} are not a JSON object")
        return value


def read_tools(fields: Fields, messages: tuple[Message, ...]) -> tuple[dict[str, Any], ...]:
    """Return the tools of a record for a chat template. Raises UserError for a call of another tool."""
    if fields.template is not None:
        return ()
    entry = fields.objects("tools") if fields.first_set("tools") else None
    if entry is None and fields.first_set("prompt") and isinstance(prompt := fields.objects("prompt"), dict):
        entry = prompt.get("tools")
    if not entry:
        return ()
    value = _parse_json(entry)
    if not isinstance(value, list):
        raise fields.fault(f"{fields.column('tools')} is not a list of tools")
    tools = {}
    for tool in value:
        if (function := _function(tool)) is None:
            raise fields.fault(f"a tool of {fields.column('tools')} has no name")
        schema = function.get("parameters")
        schema = schema if isinstance(schema, dict) else {"type": "object", "properties": {}}
        description = str(function.get("description") or function["name"])
        function = {**function, "description": description, "parameters": schema}
        tools[function["name"]] = {"type": "function", "function": function}
    called = [call["function"]["name"] for message in messages for call in message.get("tool_calls", ())]
    if tools and (strange := [name for name in called if name not in tools]):
        hint = did_you_mean(strange[0], tools)
        raise fields.fault(f"{strange[0]!r} is called, but is not among the tools", hint)
    return tuple(tools.values())


def _function(entry: Any) -> dict[str, Any] | None:
    """Return the function of a call or a tool, which may stand alone; None without a name."""
    function = entry.get("function") or entry if isinstance(entry, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return function if isinstance(name, str) and name.strip() else None


def _parse_json(value: Any) -> Any:
    """Return the value of a JSON text, or None if it is malformed; any other value unchanged."""
    try:
        return json.loads(value, parse_constant=lambda _: 1 / 0) if isinstance(value, str) else value
    except (ValueError, RecursionError, ZeroDivisionError):
        return None
