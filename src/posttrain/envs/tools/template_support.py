"""What a chat template does with tools: proved by rendering some, before anything is sampled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.base.chat import Chat
from posttrain.envs.tools.call import Tool, WrittenCall
from posttrain.envs.tools.formats import FORMATS, CallFormat, FormatName, call_in_another_form, malformed
from posttrain.types import Message, UserError

_SENTINEL = Tool(
    "posttraintool",
    "posttrain shows this tool",
    {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
)
_GIVEN = {"word": "posttrainword"}
_RESULTS = ('posttrain says "this" & <that>\n  in two lines', "posttrain says more")
QUESTION = {"role": "user", "content": "question"}


@dataclass(frozen=True)
class Shown:
    """How tools, calls and results are shown."""

    format: FormatName = "plain"
    tools: bool = False
    """Whether the template is given the tools; otherwise the first system message describes them."""
    results: bool = False
    """Whether results are messages of the role tool; otherwise of the user."""

    @property
    def called(self) -> CallFormat:
        """The format in which calls are written."""
        return FORMATS[self.format]

    def read(self, response: str, tools: Sequence[Tool]) -> tuple[str, list[WrittenCall]]:
        """Return the words and the calls of a response; a call of a tool in another form is malformed."""
        words, calls = self.called.read(response)
        named = {tool.name: tool for tool in tools}
        if calls or not (other := call_in_another_form(response, named)):
            return words, calls
        form, name, words = other
        why = f"{name!r} is called in the form {form!r}; write {example(named[name], self.called)}"
        return words, [malformed(why)]

    def __str__(self) -> str:
        where = "the chat template shows the tools" if self.tools else "a system message describes the tools"
        role = "tool" if self.results else "user"
        return f"{where}, calls are in the form {self.format!r}, and results are messages of the role {role}"


def shown_by(chat: Chat, wanted: FormatName) -> Shown:
    """What the template of a chat can do; "auto" takes the form in which it writes calls itself, or plain."""
    tools = shows_tools(chat)
    if wanted == "auto":
        wanted = _form(chat.for_tools) if tools else "plain"
    tools = tools and wanted != "plain"
    return Shown(wanted, tools, shows_results(chat.for_tools if tools else chat))


def with_tools(
    messages: Sequence[Message], tools: Sequence[Tool], shown: Shown
) -> tuple[tuple[Message, ...], tuple[Mapping[str, Any], ...]]:
    """(messages, schemas) of a first prompt with tools, as a template is given them."""
    if not tools or shown.tools:
        return tuple(messages), tuple(each.schema for each in tools)
    return with_words(messages, described(tools, shown.called)), ()


def result_messages(said: Sequence[tuple[str, str]], shown: Shown) -> tuple[Message, ...]:
    """Results of tools, (name, text) each, as a template is given them."""
    if shown.results:
        return tuple(result_message(name, text, n) for n, (name, text) in enumerate(said))
    # One, as many templates want turns to alternate.
    return ({"role": "user", "content": "\n".join(f"{name}: {text}" for name, text in said)},)


def result_message(name: str, content: str, number: int) -> dict[str, str]:
    """A result as templates are given it; the number tells those of one turn apart."""
    return {"role": "tool", "name": name, "tool_call_id": f"call{number:05d}", "content": content}


def described(tools: Sequence[Tool], form: CallFormat) -> str:
    """The tools in words, each with a call as it is written."""
    lines = ["You can call tools, and are then shown what they return:"]
    for tool in tools:
        lines.append(f"{example(tool, form)} {tool.description}")
        told = {name: schema.get("description") for name, schema in tool.properties.items()}
        lines += [f"  {name}: {text}" for name, text in told.items() if text]
    return "\n".join([*lines, "Answer without a call when you know the answer."])


def example(tool: Tool, form: CallFormat) -> str:
    """A call of a tool as it is written."""
    given = tool.example or {name: _example(schema) for name, schema in tool.properties.items()}
    return form.write(tool, given)


def with_words(messages: Sequence[Message], words: str) -> tuple[Message, ...]:
    """The conversation with these words at the end of its system message, which is made if there is none."""
    first, *rest = messages
    said = f"{first['content']}\n\n" if first["role"] == "system" else ""
    return ({"role": "system", "content": said + words}, *(rest if said else messages))


_EXAMPLES: dict[str, Any] = {
    "string": "text",
    "integer": 1,
    "number": 0.5,
    "boolean": True,
    "array": [],
    "object": {},
}


def _example(schema: Mapping[str, Any]) -> Any:
    """A value that a schema allows, for most schemas."""
    kind = schema.get("type", "string")
    return (schema.get("enum") or [_EXAMPLES.get(kind if isinstance(kind, str) else kind[0], "text")])[0]


def shows_tools(chat: Chat) -> bool:
    """Whether a tool is there once and word for word."""
    try:
        text = chat.text([QUESTION], prompt=True, tools=[_SENTINEL.schema])
    except UserError:
        return False
    return text.count(_SENTINEL.name) == text.count(_SENTINEL.description) == 1


def shows_results(chat: Chat, said: Message | None = None) -> bool:
    """Whether results behind an answer are there once and word for word, and another answer may follow.

    said: the answer, with two calls; not given: words.
    """
    said = said or {"role": "assistant", "content": "posttrainplaceholder"}
    results = [result_message(_SENTINEL.name, text, n) for n, text in enumerate(_RESULTS)]
    try:
        text = chat.text([QUESTION, said, *results], prompt=True)
    except UserError:
        return False
    return all(text.count(result) == 1 for result in _RESULTS)


def _form(chat: Chat) -> FormatName:
    """The form of which the template writes a call that is read back."""
    call = {"name": _SENTINEL.name, "arguments": _GIVEN}
    calls: Any = [{"id": "call00000", "type": "function", "function": call}]
    try:
        response = render(chat, {"role": "assistant", "content": "", "tool_calls": calls})
    except (UserError, ValueError):
        return "plain"
    names: tuple[FormatName, ...] = ("qwen_xml", "hermes", "llama3", "mistral", "deepseek")
    for name in names:
        read = FORMATS[name].read(response)[1][:1]
        if [(call.name, call.arguments) for call in read] == [(_SENTINEL.name, _GIVEN)]:
            return name
    return "plain"


def render(chat: Chat, message: Message) -> str:
    """What a template makes of an answer with calls; UserError or ValueError if that cannot be told."""
    said = {"role": "assistant", "content": _SENTINEL.name}
    head, close = chat.text([QUESTION, said], prompt=False).rsplit(_SENTINEL.name, 1)
    return chat.text([QUESTION, message], prompt=False).removeprefix(head).removesuffix(close)
