"""Checks that a chat template shows the messages, tools and calls that it was rendered with."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from posttrain.types import Message, UserError

_ESCAPED = "\\ufdd0"
"""The guard of a mark's spelling (base/spelling.py) as JSON escapes it; escaped, it does not guard."""


def check_shown(messages: Sequence[Message], tools: Sequence[Any], text: str, *, fix: str) -> None:
    """Raise UserError if a rendered text leaves out or alters a message, or leaves out a tool."""
    for message in messages:
        # Earlier answers may be left out: many templates drop their reasoning.
        if message["role"] != "assistant" and message["content"].strip() not in text:
            problem = f"the chat template leaves out or alters what the {message['role']} says"
            raise UserError("", problem, fix)
    if any(tool["function"]["name"] not in text for tool in tools):
        raise UserError("", "the chat template does not show tools", "describe them in a message")


def check_calls(message: Message, text: str) -> None:
    """Raise UserError if the text of a turn lacks the name of a call, or a value of its arguments.

    >>> call = {"function": {"name": "add", "arguments": {"a": 2}}}
    >>> check_calls({"content": "", "tool_calls": [call]}, '<tool_call>{"name": "add", "a": 2}</tool_call>')
    """
    functions = [call["function"] for call in message.get("tool_calls", ())]
    names = [function["name"] for function in functions]
    for name in names:
        if text.count(name) < names.count(name):
            raise UserError("", f"the chat template leaves out a call of {name!r}")
    for value in iterate_leaves([function["arguments"] for function in functions]):
        if not is_shown(value, text) or _ESCAPED in text:
            raise UserError("", f"the chat template leaves out or alters the argument {value!r:.60}")


def contains_words(text: str, words: str) -> bool:
    """Return whether a text contains these words, ignoring white space.

    >>> contains_words("<think>\\nmaybe\\n</think>4", "<think>maybe</think> 4")
    True
    """
    return "".join(words.split()) in "".join(text.split())


def iterate_leaves(value: Any) -> Iterator[Any]:
    """Yield the texts, numbers, booleans and nulls of plain data.

    >>> list(iterate_leaves({"a": [1, {"b": "c"}], "d": {}}))
    [1, 'c']
    """
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from iterate_leaves(item)
    else:
        yield value


def is_shown(value: Any, text: str) -> bool:
    """Return whether a text contains a value as it stands, or as JSON writes it."""
    if not isinstance(value, str):
        return json.dumps(value) in text
    forms = (value, json.dumps(value, ensure_ascii=False)[1:-1], json.dumps(value)[1:-1])
    return any(form in text for form in forms)
