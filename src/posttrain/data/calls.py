"""Calls of tools in records, as OpenAI's chat API writes them, and the tools that there were to call.

What is read is {"id", "type": "function", "function": {"name", "arguments"}} in `tool_calls` of an
assistant's message, the function alone too, its arguments as an object or as JSON; results are messages of
the role tool, with `tool_call_id`, or else in the order of the calls. Calls are numbered again, as no policy
could know an id.
"""

import json
from collections.abc import Mapping
from typing import Any

from posttrain.base.name_hints import did_you_mean
from posttrain.data.fields import Fields, kind
from posttrain.types import Message

NOTHING = "(nothing)"
"""What stands for a result without text."""


class Calls:
    """The calls of a conversation while it is read, so that each result finds its own."""

    def __init__(self, fields: Fields) -> None:
        self._fields, self._count = fields, 0
        self._waiting: list[tuple[Any, str, str]] = []
        """Of each call without a result yet its id in the record, ours, and the tool's name."""

    def of(self, turn: Mapping[str, Any], role: str, place: str) -> dict[str, Any]:
        """What a turn has besides what it says: its calls, or of which call it is the result."""
        if role == "assistant" and turn.get("tool_calls"):
            return {"tool_calls": self._made(turn["tool_calls"], place)}
        if role != "tool" or not (self._waiting or turn.get("tool_call_id")):
            return {}
        given = turn.get("tool_call_id")
        found = next((each for each in self._waiting if not given or each[0] == given), None)
        if found is None:
            raise self._fields.fault(f"{place} is the result of {given!r}, which is no call before it")
        self._waiting.remove(found)
        return {"name": found[2], "tool_call_id": found[1]}

    def _made(self, calls: Any, place: str) -> list[dict[str, Any]]:
        if not isinstance(calls, list):
            raise self._fields.fault(f"tool_calls of {place} is {kind(calls)}, not a list")
        made, self._waiting = [], []
        for call in calls:
            if (what := _function(call)) is None:
                raise self._fields.fault(f"a call of {place} names no function")
            own = f"call{self._count:05d}"
            self._count += 1
            function = {"name": what["name"], "arguments": self._arguments(what, place)}
            made.append({"id": own, "type": "function", "function": function})
            self._waiting.append((call.get("id"), own, what["name"]))
        return made

    def _arguments(self, call: Mapping[str, Any], place: str) -> dict[str, Any]:
        value = _read(call.get("arguments") or {})
        if not isinstance(value, dict):
            raise self._fields.fault(f"the arguments of a call of {place} are no JSON object")
        return value


def tools_of(fields: Fields, messages: tuple[Message, ...]) -> tuple[dict[str, Any], ...]:
    """The tools of a record, as chat templates are given them; UserError for a call of another."""
    if fields.template is not None:
        return ()
    given = fields.objects("tools") if fields.given("tools") else None
    if given is None and fields.given("prompt") and isinstance(prompt := fields.objects("prompt"), dict):
        given = prompt.get("tools")
    if not given:
        return ()
    value = _read(given)
    if not isinstance(value, list):
        raise fields.fault(f"{fields.column('tools')} is no list of tools")
    made = {}
    for tool in value:
        if (what := _function(tool)) is None:
            raise fields.fault(f"a tool of {fields.column('tools')} has no name")
        schema = what.get("parameters")
        schema = schema if isinstance(schema, dict) else {"type": "object", "properties": {}}
        told = {**what, "description": str(what.get("description") or what["name"]), "parameters": schema}
        made[what["name"]] = {"type": "function", "function": told}
    called = [call["function"]["name"] for message in messages for call in message.get("tool_calls", ())]
    if made and (strange := [name for name in called if name not in made]):
        raise fields.fault(f"{strange[0]!r} is called, and is no tool of it", did_you_mean(strange[0], made))
    return tuple(made.values())


def _function(given: Any) -> dict[str, Any] | None:
    """The function of a call or a tool, which may stand alone; None of one without a name."""
    what = given.get("function") or given if isinstance(given, dict) else None
    name = what.get("name") if isinstance(what, dict) else None
    return what if isinstance(name, str) and name.strip() else None


def _read(value: Any) -> Any:
    """The value of a JSON text, None if it is none; anything else as it stands."""
    try:
        return json.loads(value, parse_constant=lambda _: 1 / 0) if isinstance(value, str) else value
    except (ValueError, RecursionError, ZeroDivisionError):
        return None
