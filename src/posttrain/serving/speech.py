"""Messages of the chat API as tokens, and answers as messages; with tools, as the template shows them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from posttrain.base.chat import Chat
from posttrain.envs.tools.call import Call, Tool, arguments_of
from posttrain.envs.tools.formats import FormatName
from posttrain.envs.tools.template import Shown, result_messages, shown_by, with_tools
from posttrain.serving.wire import ChatMessage, ToolCall, canonical
from posttrain.types import Message


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
        shown, schemas = with_tools(self._shown(messages, messages, tools), tools, self.shown)
        return self.chat.render(shown, schemas)

    def added(
        self, tokens: Sequence[int], messages: Sequence[ChatMessage], first: int, tools: Sequence[Tool]
    ) -> list[int]:
        """The tokens that follow an answer of the model: the messages from the `first` on."""
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
            shown.append({"role": each.role, "content": "\n".join([*filter(None, [each.content]), *calls])})
        return [*shown, *(result_messages(results, self.shown) if results else ())]

    def _spell_call(self, named: Mapping[str, Tool], call: ToolCall) -> str:
        try:
            given = json.loads(call.arguments)
        except ValueError:
            given = {}
        return self.shown.called.write(
            named.get(call.name, Tool(call.name, "", {})), given if isinstance(given, dict) else {}
        )


def _arguments(tool: Tool | None, call: Call) -> str:
    """The arguments of a call, with their types where they are what the tool takes."""
    try:
        return canonical(call.arguments if tool is None else arguments_of(tool, call))
    except ValueError:
        return canonical(call.arguments)
