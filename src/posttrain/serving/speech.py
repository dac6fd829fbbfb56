"""Messages of the chat API as tokens, and answers as messages; with tools, as the template shows them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from posttrain.base.chat import Chat
from posttrain.envs.tools.call import Tool, WrittenCall, arguments_of, from_json
from posttrain.envs.tools.formats import FormatName
from posttrain.envs.tools.template_support import Shown, result_messages, shown_by, with_tools
from posttrain.serving.wire import ChatMessage, ToolCall, canonical
from posttrain.types import Message, UserError


@dataclass(frozen=True)
class Speech:
    """How conversations with one model are written."""

    chat: Chat
    shown: Shown

    @staticmethod
    def of(chat: Chat, form: FormatName = "auto") -> "Speech":
        """With calls in this form; auto: as the template writes them, or plain."""
        return Speech(chat, shown_by(chat, form))

    def prompt(self, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[int]:
        """The tokens of a conversation, up to where the model begins to speak; UserError as Chat.render."""
        self._check(messages, 0)
        shown, schemas = with_tools(self._shown(messages, messages, tools), tools, self.shown)
        return self.chat.render(shown, schemas)

    def added(
        self, tokens: Sequence[int], messages: Sequence[ChatMessage], first: int, tools: Sequence[Tool]
    ) -> list[int]:
        """The tokens that follow an answer of the model: the messages from the `first` on."""
        self._check(messages, first)
        shown = self._shown(messages[first:], messages, tools)
        return self.chat.extend(tokens, shown, tools if self.shown.tools else ())

    def read(self, text: str, tools: Sequence[Tool]) -> ChatMessage:
        """An answer as a message; a call that cannot be read stays among its words."""
        words, calls = self.shown.called.read(text) if tools else (text, [])
        if not calls or any(call.fault for call in calls):
            return ChatMessage("assistant", text.strip())
        named = {tool.name: tool for tool in tools}
        made = tuple(ToolCall(call.name, _arguments(named.get(call.name), call)) for call in calls)
        return ChatMessage("assistant", words.strip(), made)

    def _check(self, messages: Sequence[ChatMessage], first: int) -> None:
        """UserError for a field of a message, from the `first` on, that the template does not know."""
        template = self.chat.template or str(self.chat.tokenizer.chat_template)
        for n, message in enumerate(messages[first:], first):
            for name in message.others:
                if message.role == "tool" or not re.search(rf"\b{re.escape(name)}\b", template):
                    problem = (
                        f"the chat template does not show {name[:60]!r} of a message of the {message.role}"
                    )
                    raise UserError(f"messages[{n}].{name[:60]}", problem, "leave it out")

    def _shown(
        self, messages: Sequence[ChatMessage], whole: Sequence[ChatMessage], tools: Sequence[Tool]
    ) -> list[Message]:
        """Messages as the template is given them; whole: the conversation, in which calls have names."""
        named = {tool.name: tool for tool in tools}
        names = {call.id: call.name for each in whole for call in each.calls}
        shown: list[Message] = []
        results: list[tuple[str, str]] = []
        for each in messages:
            if each.role == "tool":
                results.append((each.name or names.get(each.answers, "tool"), each.content))
                continue
            shown += result_messages(results, self.shown) if results else ()
            results = []
            calls = [self._spell_call(named, call) for call in each.calls]
            content = "\n".join([*filter(None, [each.content]), *calls])
            named_so = {"name": each.name} if each.name else {}
            shown.append({**each.others, **named_so, "role": each.role, "content": content})
        return [*shown, *(result_messages(results, self.shown) if results else ())]

    def _spell_call(self, named: Mapping[str, Tool], call: ToolCall) -> str:
        """A call as the model writes it; arguments that are not an object stay the text that they are."""
        try:
            given = from_json(call.arguments)
        except ValueError:
            given = None
        tool = named.get(call.name, Tool(call.name, "", {}))
        return self.shown.called.write(tool, given if isinstance(given, dict) else call.arguments)


def _arguments(tool: Tool | None, call: WrittenCall) -> str:
    """The arguments of a call, with their types where they are what the tool takes."""
    try:
        return canonical(call.arguments if tool is None else arguments_of(tool, call))
    except ValueError:
        return canonical(call.arguments)
