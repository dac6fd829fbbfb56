"""Training conversations that call tools, in the form that a chat template takes.

A template that writes calls itself gets them, in the variant that it takes: arguments as an object or as
JSON, no words as "" or as null. For other templates calls are written into the text of the assistant, the
system message describes the tools, and results are shown as in episodes with tools, so that training and
sampling use the same format.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from posttrain.base.chat import Chat
from posttrain.base.template_checks import is_shown, iterate_leaves
from posttrain.envs.tools.call import Tool, arguments_of, kind
from posttrain.envs.tools.formats import FORMATS, NATIVE, FormatName
from posttrain.envs.tools.template_support import (
    Shown,
    append_to_system,
    call_entry,
    describe_tools,
    find_display,
    render_answer,
    shows_results,
    shows_tools,
)
from posttrain.types import Message, UserError

_PROBE = Tool(
    "posttraintool",
    "",
    {"type": "object", "properties": {"word": {"type": "string"}, "flag": {"type": "boolean"}}},
)
_ARGUMENTS = {"word": 'posttrain "word"', "flag": True}


@dataclass(frozen=True)
class Variant:
    """The form of calls that a template takes."""

    objects: bool = True
    """Whether arguments are an object; otherwise they are JSON."""
    null: bool = False
    """Whether a call without words has the content null; otherwise an empty text."""

    def message(self, words: str, calls: Sequence[Mapping[str, Any]]) -> Message:
        """Return an assistant's message with calls."""
        variants = [{**call, "function": self._function(call["function"])} for call in calls]
        return {"role": "assistant", "content": words or (None if self.null else ""), "tool_calls": variants}

    def _function(self, function: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.objects:
            return function
        return {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}


@dataclass(frozen=True)
class ConversationFormat:
    """How conversations with calls are shown under a template."""

    shown: Shown
    variant: Variant | None = None
    """The variant of calls that the template writes; None if calls are part of the text."""

    def __str__(self) -> str:
        if self.variant is None:
            return str(self.shown)
        where = "the tools and the calls" if self.shown.tools else "the calls, and a system message the tools"
        role = "tool" if self.shown.results else "user"
        return f"the chat template shows {where}, and results are messages of the role {role}"

    def told(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[tuple[Message, ...], tuple[Mapping[str, Any], ...]]:
        """Return messages and tools for the template. Raises UserError if a call cannot be written."""
        by_name = {tool.name: tool for tool in map(_tool_of_schema, tools)}
        out: list[Message] = []
        for message in messages:
            if "tool_calls" in message:
                extra = {key: message[key] for key in ("weight", "reasoning_content") if key in message}
                out.append({**self._message_of_calls(message, by_name), **extra})
            elif "tool_call_id" not in message or self.shown.results:
                out.append(message)
            else:
                text = f"{message['name']}: {message['content']}"
                if out and out[-1].get("results"):  # many templates require alternating turns
                    text = f"{out.pop()['content']}\n{text}"
                out.append({"role": "user", "content": text, "results": True})
        plain = tuple({k: v for k, v in message.items() if k != "results"} for message in out)
        if self.shown.tools or not tools:
            return plain, tuple(tools)
        return append_to_system(plain, describe_tools(list(by_name.values()), self.shown.called)), ()

    def _message_of_calls(self, message: Message, by_name: Mapping[str, Tool]) -> Message:
        words, calls = message["content"].strip(), message["tool_calls"]
        if self.variant is not None:
            return self.variant.message(words, calls)
        pairs = []
        for name, arguments in ((call["function"]["name"], call["function"]["arguments"]) for call in calls):
            # A tool without a description takes the arguments that the call has.
            bare = Tool(name, "", {"properties": {key: {} for key in arguments}})
            pairs.append((by_name.get(name, bare), arguments))
        text = "\n".join([*[words] * bool(words), *(self.shown.called.write(*pair) for pair in pairs)])
        if not _is_read_back(self.shown.format, text, words, pairs):
            problem = f"a call of {pairs[0][0].name!r} cannot be written in the form {self.shown.format!r}"
            raise UserError("", problem, "set batch.tool_format to another form, as 'hermes'")
        return {"role": "assistant", "content": text}


def telling(chat: Chat, form: FormatName) -> ConversationFormat:
    """Return how conversations are shown: "auto" passes calls to a template that shows them.

    Other formats are those of `shown_by`.
    """
    tools = shows_tools(chat)
    shows = chat.for_tools if tools else chat
    variant, own_form = _find_variant(shows) if form == "auto" else (None, None)
    if variant is None:
        return ConversationFormat(find_display(chat, form))
    results = shows_results(shows, variant.message("", [call_entry(_PROBE.name, _ARGUMENTS)] * 2))
    return ConversationFormat(Shown(own_form or "plain", tools, results), variant)


def _find_variant(chat: Chat) -> tuple[Variant | None, FormatName | None]:
    """Return the variant of calls that the template shows, and the format that it writes, if it is known."""
    texts: dict[Variant, str] = {}
    for null, objects in product((False, True), (True, False)):
        variant = Variant(objects, null)
        try:
            texts[variant] = render_answer(chat, variant.message("", [call_entry(_PROBE.name, _ARGUMENTS)]))
        except (UserError, ValueError):
            continue
    for variant, text in texts.items():
        for name in NATIVE:
            if _is_read_back(name, text, "", [(_PROBE, _ARGUMENTS)]):
                return variant, name
    json_first = sorted(texts.items(), key=lambda entry: json.dumps(_ARGUMENTS) not in entry[1])
    for variant, text in json_first:
        if _PROBE.name in text and all(is_shown(value, text) for value in iterate_leaves(_ARGUMENTS)):
            return variant, None
    return None, None


def _is_read_back(
    form: FormatName, text: str, words: str, pairs: Sequence[tuple[Tool, Mapping[str, Any]]]
) -> bool:
    """Return whether a format reads these words and these calls from the text."""
    rest, calls = FORMATS[form].read(text)
    if not rest.startswith(words) or [call.name for call in calls] != [tool.name for tool, _ in pairs]:
        return False
    for call, (tool, arguments) in zip(calls, pairs, strict=True):
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


def _tool_of_schema(schema: Mapping[str, Any]) -> Tool:
    function = schema["function"]
    return Tool(function["name"], function["description"], function["parameters"])
