"""What a chat template supports: tools, calls and results, tested by rendering some before sampling."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.base.chat import Chat
from posttrain.envs.tools.call import Tool, WrittenCall
from posttrain.envs.tools.formats import (
    FORMATS,
    NATIVE,
    CallFormat,
    FormatName,
    call_in_another_form,
    malformed,
)
from posttrain.types import Message, UserError

_PROBE = Tool(
    "posttraintool",
    "posttrain shows this tool",
    {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
)
_ARGUMENTS = {"word": "posttrainword"}
_RESULTS = ('posttrain says "this" & <that>\n  in two lines', "posttrain says more")
QUESTION = {"role": "user", "content": "question"}


@dataclass(frozen=True)
class Shown:
    """How a prompt shows tools, calls and results."""

    format: FormatName = "plain"
    tools: bool = False
    """Whether the template gets the tools; otherwise the first system message describes them."""
    results: bool = False
    """Whether results are messages of the role tool; otherwise of the user."""

    @property
    def called(self) -> CallFormat:
        """The format in which calls are written."""
        return FORMATS[self.format]

    def read(self, response: str, tools: Sequence[Tool]) -> tuple[str, list[WrittenCall]]:
        """Return the words and the calls of a response; a call of a tool in another format is malformed."""
        words, calls = self.called.read(response)
        by_name = {tool.name: tool for tool in tools}
        if calls or not (other := call_in_another_form(response, by_name)):
            return words, calls
        form, name, words = other
        why = f"{name!r} is called in the form {form!r}; write {example(by_name[name], self.called)}"
        return words, [malformed(why)]

    def __str__(self) -> str:
        where = "the chat template shows the tools" if self.tools else "a system message describes the tools"
        role = "tool" if self.results else "user"
        return f"{where}, calls are in the form {self.format!r}, and results are messages of the role {role}"


def find_display(chat: Chat, form: FormatName) -> Shown:
    """Return what the template of a chat supports, with calls in the format `form`.

    "auto" is the format in which the template itself writes calls, or plain.
    """
    tools = shows_tools(chat)
    if form == "auto":
        form = _find_format(chat.for_tools) if tools else "plain"
    tools = tools and form != "plain"
    return Shown(form, tools, shows_results(chat.for_tools if tools else chat))


def with_tools(
    messages: Sequence[Message], tools: Sequence[Tool], shown: Shown
) -> tuple[tuple[Message, ...], tuple[Mapping[str, Any], ...]]:
    """Return (messages, schemas) of a first prompt with tools, for the template."""
    if not tools or shown.tools:
        return tuple(messages), tuple(tool.schema for tool in tools)
    return append_to_system(messages, describe_tools(tools, shown.called)), ()


def result_messages(results: Sequence[tuple[str, str]], shown: Shown) -> tuple[Message, ...]:
    """Return results of tools, (name, text) each, as messages for the template."""
    if shown.results:
        return tuple(result_message(name, text, n) for n, (name, text) in enumerate(results))
    # One message, since many templates require alternating turns.
    return ({"role": "user", "content": "\n".join(f"{name}: {text}" for name, text in results)},)


def result_message(name: str, content: str, number: int) -> dict[str, str]:
    """Return a result as a message; the number distinguishes the results of one turn."""
    return {"role": "tool", "name": name, "tool_call_id": f"call{number:05d}", "content": content}


def call_entry(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call as an entry of `tool_calls`."""
    return {"id": "call00000", "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def describe_tools(tools: Sequence[Tool], form: CallFormat) -> str:
    """Return a text that describes the tools, each with a call as an example."""
    lines = ["You can call tools, and are then shown what they return:"]
    for tool in tools:
        lines.append(f"{example(tool, form)} {tool.description}")
        descriptions = {name: schema.get("description") for name, schema in tool.properties.items()}
        lines += [f"  {name}: {text}" for name, text in descriptions.items() if text]
    return "\n".join([*lines, "Answer without a call when you know the answer."])


def example(tool: Tool, form: CallFormat) -> str:
    """Return a call of a tool as a policy writes it."""
    arguments = tool.example or {name: _example_value(schema) for name, schema in tool.properties.items()}
    return form.write(tool, arguments)


def append_to_system(messages: Sequence[Message], words: str) -> tuple[Message, ...]:
    """Return the messages with this text at the end of the system message, which is added if missing."""
    first, *rest = messages
    present = f"{first['content']}\n\n" if first["role"] == "system" else ""
    return ({"role": "system", "content": present + words}, *(rest if present else messages))


_EXAMPLES: dict[str, Any] = {
    "string": "text",
    "integer": 1,
    "number": 0.5,
    "boolean": True,
    "array": [],
    "object": {},
}


def _example_value(schema: Mapping[str, Any]) -> Any:
    """Return a value that fits most schemas of this type."""
    kind = schema.get("type", "string")
    return (schema.get("enum") or [_EXAMPLES.get(kind if isinstance(kind, str) else kind[0], "text")])[0]


def shows_tools(chat: Chat) -> bool:
    """Return whether the template shows a tool exactly once, word for word."""
    try:
        text = chat.text([QUESTION], prompt=True, tools=[_PROBE.schema])
    except UserError:
        return False
    return text.count(_PROBE.name) == text.count(_PROBE.description) == 1


def shows_results(chat: Chat, answer: Message | None = None) -> bool:
    """Return whether the template shows results behind an answer exactly once, word for word.

    answer: a message with two calls; by default one of words. The prompt that follows the results must
    render, too.
    """
    answer = answer or {"role": "assistant", "content": "posttrainplaceholder"}
    results = [result_message(_PROBE.name, text, n) for n, text in enumerate(_RESULTS)]
    try:
        text = chat.text([QUESTION, answer, *results], prompt=True)
    except UserError:
        return False
    return all(text.count(result) == 1 for result in _RESULTS)


def _find_format(chat: Chat) -> FormatName:
    """Return the format that reads a call which the template writes."""
    calls: Any = [call_entry(_PROBE.name, _ARGUMENTS)]
    try:
        response = render_answer(chat, {"role": "assistant", "content": "", "tool_calls": calls})
    except (UserError, ValueError):
        return "plain"
    for name in NATIVE:
        calls_read = FORMATS[name].read(response)[1][:1]
        if [(call.name, call.arguments) for call in calls_read] == [(_PROBE.name, _ARGUMENTS)]:
            return name
    return "plain"


def render_answer(chat: Chat, message: Message) -> str:
    """Return the text of an answer in a template. Raises UserError or ValueError if it cannot be found."""
    answer = {"role": "assistant", "content": _PROBE.name}
    head, close = chat.text([QUESTION, answer], prompt=False).rsplit(_PROBE.name, 1)
    return chat.text([QUESTION, message], prompt=False).removeprefix(head).removesuffix(close)
