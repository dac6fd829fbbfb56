"""Conversations that call tools, as a chat template is given them in supervised training.

A template that writes calls itself is given them, in the variant that it takes: arguments as an object or as
JSON, no words as "" or as null. Otherwise calls are written into what the assistant says, tools are described
in the system message, and results are said as in episodes with tools, so that what is learnt is what is asked
for later.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from posttrain.base.chat import Chat
from posttrain.base.template_checks import is_shown, iterate_leaves
from posttrain.envs.tools.call import Tool, arguments_of, kind
from posttrain.envs.tools.formats import FORMATS, FormatName
from posttrain.envs.tools.template_support import (
    Shown,
    described,
    render,
    shown_by,
    shows_results,
    shows_tools,
    with_words,
)
from posttrain.types import Message, UserError

_PROBE = Tool(
    "posttraintool",
    "",
    {"type": "object", "properties": {"word": {"type": "string"}, "flag": {"type": "boolean"}}},
)
_GIVEN = {"word": 'posttrain "word"', "flag": True}


@dataclass(frozen=True)
class Variant:
    """How a template wants to be given calls."""

    objects: bool = True
    """Arguments as an object, otherwise as JSON."""
    null: bool = False
    """No words beside a call as null, otherwise as an empty text."""

    def message(self, words: str, calls: Sequence[Mapping[str, Any]]) -> Message:
        """An assistant's message with calls."""
        given = [{**call, "function": self._function(call["function"])} for call in calls]
        return {"role": "assistant", "content": words or (None if self.null else ""), "tool_calls": given}

    def _function(self, function: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.objects:
            return function
        return {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}


@dataclass(frozen=True)
class Telling:
    """How conversations with calls are told under a template."""

    shown: Shown
    variant: Variant | None = None
    """Of calls that the template writes; None where they are part of what is said."""

    def __str__(self) -> str:
        if self.variant is None:
            return str(self.shown)
        where = "the tools and the calls" if self.shown.tools else "the calls, and a system message the tools"
        role = "tool" if self.shown.results else "user"
        return f"the chat template shows {where}, and results are messages of the role {role}"

    def told(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[tuple[Message, ...], tuple[Mapping[str, Any], ...]]:
        """The messages and the tools for the template; UserError for a call that cannot be written."""
        known = {each.name: each for each in map(_tool, tools)}
        out: list[Message] = []
        for message in messages:
            if "tool_calls" in message:
                beside = {key: message[key] for key in ("weight", "reasoning_content") if key in message}
                out.append({**self._called(message, known), **beside})
            elif "tool_call_id" not in message or self.shown.results:
                out.append(message)
            else:
                said = f"{message['name']}: {message['content']}"
                if out and out[-1].get("results"):  # one, as many templates want turns to alternate
                    said = f"{out.pop()['content']}\n{said}"
                out.append({"role": "user", "content": said, "results": True})
        given = tuple({k: v for k, v in message.items() if k != "results"} for message in out)
        if self.shown.tools or not tools:
            return given, tuple(tools)
        return with_words(given, described(list(known.values()), self.shown.called)), ()

    def _called(self, message: Message, known: Mapping[str, Tool]) -> Message:
        words, calls = message["content"].strip(), message["tool_calls"]
        if self.variant is not None:
            return self.variant.message(words, calls)
        made = []
        for name, arguments in ((call["function"]["name"], call["function"]["arguments"]) for call in calls):
            # Of a tool that nobody describes, what the call has is what it takes.
            bare = Tool(name, "", {"properties": {key: {} for key in arguments}})
            made.append((known.get(name, bare), arguments))
        said = "\n".join([*[words] * bool(words), *(self.shown.called.write(*each) for each in made)])
        if not _reads(self.shown.format, said, words, made):
            problem = f"a call of {made[0][0].name!r} cannot be written in the form {self.shown.format!r}"
            raise UserError("", problem, "set batch.tool_format to another form, as 'hermes'")
        return {"role": "assistant", "content": said}


def telling(chat: Chat, wanted: FormatName) -> Telling:
    """How conversations are told: "auto" gives calls to a template that shows them; see `shown_by`."""
    tools = shows_tools(chat)
    shows = chat.for_tools if tools else chat
    variant, form = _variant(shows) if wanted == "auto" else (None, None)
    if variant is None:
        return Telling(shown_by(chat, wanted))
    results = shows_results(shows, variant.message("", [_call(_PROBE.name, _GIVEN)] * 2))
    return Telling(Shown(form or "plain", tools, results), variant)


def _variant(chat: Chat) -> tuple[Variant | None, FormatName | None]:
    """In which way the template shows calls, and the form in which it writes them if we know that."""
    said: dict[Variant, str] = {}
    for null, objects in product((False, True), (True, False)):
        variant = Variant(objects, null)
        try:
            said[variant] = render(chat, variant.message("", [_call(_PROBE.name, _GIVEN)]))
        except (UserError, ValueError):
            continue
    names: tuple[FormatName, ...] = ("qwen_xml", "hermes", "llama3", "mistral", "deepseek")
    for variant, text in said.items():
        for name in names:
            if _reads(name, text, "", [(_PROBE, _GIVEN)]):
                return variant, name
    json_first = sorted(said.items(), key=lambda each: json.dumps(_GIVEN) not in each[1])
    for variant, text in json_first:
        if _PROBE.name in text and all(is_shown(value, text) for value in iterate_leaves(_GIVEN)):
            return variant, None
    return None, None


def _reads(form: FormatName, said: str, words: str, made: Sequence[tuple[Tool, Mapping[str, Any]]]) -> bool:
    """Whether these words and these calls are read out of what was said."""
    found, calls = FORMATS[form].read(said)
    if not found.startswith(words) or [call.name for call in calls] != [tool.name for tool, _ in made]:
        return False
    for call, (tool, arguments) in zip(calls, made, strict=True):
        if call.fault:
            return False
        fields: dict[str, Any] = {key: {} for key in tool.properties}
        fields |= {name: {"type": kind(value)} for name, value in arguments.items()}
        try:
            if arguments_of(Tool(tool.name, "", {"properties": fields}), call) != arguments:
                return False
        except ValueError:
            return False
    return True


def _tool(schema: Mapping[str, Any]) -> Tool:
    told = schema["function"]
    return Tool(told["name"], told["description"], told["parameters"])


def _call(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": "call00000", "type": "function", "function": {"name": name, "arguments": dict(arguments)}}
