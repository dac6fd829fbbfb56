"""Whether a chat template shows what it was given: messages, tools and calls."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from posttrain.types import Message, UserError

_ESCAPED = "\\ufdd0"
"""What guards the spelling of marks (base/spelling.py), once it is escaped and guards no more."""


def check_shown(messages: Sequence[Message], tools: Sequence[Any], text: str, *, fix: str) -> None:
    """UserError if a text leaves out or alters a message, or leaves out a tool."""
    for message in messages:
        # What assistants said earlier may be left out: many templates drop their reasoning.
        if message["role"] != "assistant" and message["content"].strip() not in text:
            problem = f"the chat template leaves out or alters what the {message['role']} says"
            raise UserError("", problem, fix)
    if any(tool["function"]["name"] not in text for tool in tools):
        raise UserError("", "the chat template does not show tools", "describe them in a message")


def check_calls(message: Message, said: str) -> None:
    """UserError if what a turn comes to lacks the name of a call, or a value of its arguments.

    >>> call = {"function": {"name": "add", "arguments": {"a": 2}}}
    >>> check_calls({"content": "", "tool_calls": [call]}, '<tool_call>{"name": "add", "a": 2}</tool_call>')
    """
    functions = [call["function"] for call in message.get("tool_calls", ())]
    names = [function["name"] for function in functions]
    for name in names:
        if said.count(name) < names.count(name):
            raise UserError("", f"the chat template leaves out a call of {name!r}")
    for value in leaves([function["arguments"] for function in functions]):
        if not is_shown(value, said) or _ESCAPED in said:
            raise UserError("", f"the chat template leaves out or alters the argument {value!r:.60}")


def holds(text: str, words: str) -> bool:
    """Whether a text holds these words, however they are spaced.

    >>> holds("<think>\\nmaybe\\n</think>4", "<think>maybe</think> 4"), holds("4", "<think>maybe</think> 4")
    (True, False)
    """
    return "".join(words.split()) in "".join(text.split())


def leaves(value: Any) -> Iterator[Any]:
    """The texts, numbers, truth values and nulls of plain data.

    >>> list(leaves({"a": [1, {"b": "c"}], "d": {}}))
    [1, 'c']
    """
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from leaves(each)
    else:
        yield value


def is_shown(value: Any, text: str) -> bool:
    """Whether a text holds a value as it stands, or as JSON writes it."""
    if not isinstance(value, str):
        return json.dumps(value) in text
    forms = (value, json.dumps(value, ensure_ascii=False)[1:-1], json.dumps(value)[1:-1])
    return any(form in text for form in forms)
