"""What a chat template does with tools: proved by rendering some, before anything is sampled."""

from dataclasses import dataclass
from typing import Any

from posttrain.base.chat import Chat
from posttrain.envs.tools.call import Tool
from posttrain.envs.tools.formats import FORMATS, Format, FormatName
from posttrain.types import UserError

_SENTINEL = Tool(
    "posttraintool",
    "posttrain shows this tool",
    {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
)
_GIVEN = {"word": "posttrainword"}
_RESULTS = ('posttrain says "this" & <that>\n  in two lines', "posttrain says more")
_QUESTION = {"role": "user", "content": "question"}


@dataclass(frozen=True)
class Shown:
    """How tools, calls and results are shown."""

    format: FormatName = "plain"
    tools: bool = False
    """Whether the template is given the tools; otherwise the first system message describes them."""
    results: bool = False
    """Whether results are messages of the role tool; otherwise of the user."""

    @property
    def called(self) -> Format:
        """The format in which calls are written."""
        return FORMATS[self.format]

    def __str__(self) -> str:
        where = "the chat template shows the tools" if self.tools else "a system message describes the tools"
        role = "tool" if self.results else "user"
        return f"{where}, calls are in the form {self.format!r}, and results are messages of the role {role}"


def shown_by(chat: Chat, wanted: FormatName) -> Shown:
    """What the template of a chat can do; "auto" takes the form in which it writes calls itself, or plain."""
    tools, results = _shows_tools(chat), _shows_results(chat)
    if wanted == "auto":
        wanted = _form(chat) if tools else "plain"
    return Shown(wanted, tools and wanted != "plain", results)


def result_message(name: str, content: str, number: int) -> dict[str, str]:
    """A result as templates are given it; the number tells those of one turn apart."""
    return {"role": "tool", "name": name, "tool_call_id": f"call{number:05d}", "content": content}


def _shows_tools(chat: Chat) -> bool:
    """Whether a tool is there once and word for word."""
    try:
        text = chat.text([_QUESTION], prompt=True, tools=[_SENTINEL.schema])
    except UserError:
        return False
    return text.count(_SENTINEL.name) == text.count(_SENTINEL.description) == 1


def _shows_results(chat: Chat) -> bool:
    """Whether results behind an answer are there once and word for word, and another answer may follow."""
    said: dict[str, Any] = {"role": "assistant", "content": "posttrainplaceholder"}
    results = [result_message(_SENTINEL.name, text, n) for n, text in enumerate(_RESULTS)]
    try:
        text = chat.text([_QUESTION, said, *results], prompt=True)
    except UserError:
        return False
    return all(text.count(result) == 1 for result in _RESULTS)


def _form(chat: Chat) -> FormatName:
    """The form of which the template writes a call that is read back."""
    call = {"name": _SENTINEL.name, "arguments": _GIVEN}
    calls: Any = [{"id": "call00000", "type": "function", "function": call}]
    said: dict[str, Any] = {"role": "assistant", "content": _SENTINEL.name}
    try:
        head, close = chat.text([_QUESTION, said], prompt=False).rsplit(_SENTINEL.name, 1)
        text = chat.text([_QUESTION, {**said, "content": "", "tool_calls": calls}], prompt=False)
    except (UserError, ValueError):
        return "plain"
    response = text.removeprefix(head).removesuffix(close)
    names: tuple[FormatName, ...] = ("qwen_xml", "hermes", "llama3", "mistral", "deepseek")
    for name in names:
        read = FORMATS[name].read(response)[1][:1]
        if [(call.name, call.arguments) for call in read] == [(_SENTINEL.name, _GIVEN)]:
            return name
    return "plain"
