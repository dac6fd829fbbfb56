"""Conversations as plain text, for models that know no turns: the chat template called "none"."""

NAME = "none"
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ '' if loop.first else '\\n' }}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
)
"""Jinja: messages joined by newlines; an answer stands right behind what it answers, and eos ends it."""
