"""Conversations as plain text, for models that know no turns: the chat template called "none"."""

from typing import Any

NAME = "none"
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ '' if loop.first else '\\n' }}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
)
"""Jinja: messages joined by newlines; an answer stands right behind what it answers, and eos ends it."""


def begun(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text that goes on: begun as the tokenizer begins one, without an end that it puts."""
    tokens = list(tokenizer(text)["input_ids"])
    ended = len(tokens) > 1 and tokens[-1] == tokenizer.eos_token_id
    return tokens[:-1] if ended else tokens
