"""Messages of the chat API as tokens, and answers as messages; tools in the form of the chat template."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from posttrain.base.chat import Chat
from posttrain.envs.tools.call import Tool, WrittenCall, arguments_of, from_json
from posttrain.envs.tools.formats import FormatName
from posttrain.envs.tools.template_support import Shown, find_display, result_messages, with_tools
from posttrain.serving.wire import ChatMessage, ToolCall, canonical_json
from posttrain.types import Message, UserError


@dataclass(frozen=True)
class Speech:
    """The token form of conversations with one model."""

    chat: Chat
    form: Shown

    @staticmethod
    def of(chat: Chat, form: FormatName = "auto") -> "Speech":
        """Return the form with tool calls as `form`; auto: as the chat template writes them, or plain."""
        return Speech(chat, find_display(chat, form))

    def with_template_args(self, args: Mapping[str, Any]) -> "Speech":
        """Return the form in which the chat template has these variables too, or other values for them.

        Raises UserError for a name that the template does not mention: it would have no effect.
        """
        self.chat.check_args(args, "chat_template_kwargs")
        return replace(self, chat=replace(self.chat, template_args={**self.chat.template_args, **args}))

    def prompt(self, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[int]:
        """Return the tokens of a conversation up to the next answer. Raise UserError as Chat.render."""
        self._check(messages, 0)
        rendered, schemas = with_tools(self._template_messages(messages, messages, tools), tools, self.form)
        return self.chat.render(rendered, schemas)

    def added(
        self, tokens: Sequence[int], messages: Sequence[ChatMessage], first: int, tools: Sequence[Tool]
    ) -> list[int]:
        """Return the tokens that follow an answer of the model: the messages from the `first` on."""
        self._check(messages, first)
        rendered = self._template_messages(messages[first:], messages, tools)
        return self.chat.extend(tokens, rendered, tools if self.form.tools else ())

    def read(self, text: str, tools: Sequence[Tool]) -> ChatMessage:
        """Return an answer as a message; if a call cannot be parsed, the calls stay in the text."""
        words, calls = self.form.called.read(text) if tools else (text, [])
        if not calls or any(call.fault for call in calls):
            return ChatMessage("assistant", text.strip())
        by_name = {tool.name: tool for tool in tools}
        tool_calls = tuple(ToolCall(call.name, _arguments(by_name.get(call.name), call)) for call in calls)
        return ChatMessage("assistant", words.strip(), tool_calls)

    def _check(self, messages: Sequence[ChatMessage], first: int) -> None:
        """Raise UserError for a field of a message, from the `first` on, that the template does not know."""
        template = self.chat.template or str(self.chat.tokenizer.chat_template)
        for n, message in enumerate(messages[first:], first):
            for name in message.others:
                if message.role == "tool" or not re.search(rf"\b{re.escape(name)}\b", template):
                    problem = (
                        f"the chat template does not show {name[:60]!r} of a message of the {message.role}"
                    )
                    raise UserError(f"messages[{n}].{name[:60]}", problem, "leave it out")

    def _template_messages(
        self, messages: Sequence[ChatMessage], conversation: Sequence[ChatMessage], tools: Sequence[Tool]
    ) -> list[Message]:
        """Return messages for the template; conversation: all messages, in which calls have names."""
        by_name = {tool.name: tool for tool in tools}
        names = {call.id: call.name for message in conversation for call in message.calls}
        rendered: list[Message] = []
        results: list[tuple[str, str]] = []
        for message in messages:
            if message.role == "tool":
                results.append((message.name or names.get(message.answers, "tool"), message.content))
                continue
            rendered += result_messages(results, self.form) if results else ()
            results = []
            calls = [self._spell_call(by_name, call) for call in message.calls]
            content = "\n".join([*filter(None, [message.content]), *calls])
            author = {"name": message.name} if message.name else {}
            rendered.append({**message.others, **author, "role": message.role, "content": content})
        return [*rendered, *(result_messages(results, self.form) if results else ())]

    def _spell_call(self, by_name: Mapping[str, Tool], call: ToolCall) -> str:
        """Return a call as the model writes it; arguments that are not an object stay text."""
        try:
            arguments = from_json(call.arguments)
        except ValueError:
            arguments = None
        tool = by_name.get(call.name, Tool(call.name, "", {}))
        return self.form.called.write(tool, arguments if isinstance(arguments, dict) else call.arguments)


def _arguments(tool: Tool | None, call: WrittenCall) -> str:
    """Return the arguments of a call, converted to the types that the tool declares where they fit."""
    try:
        return canonical_json(call.arguments if tool is None else arguments_of(tool, call))
    except ValueError:
        return canonical_json(call.arguments)
