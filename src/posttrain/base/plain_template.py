"""The chat template called "none": conversations as plain text, for models without turns."""

NAME = "none"
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ '' if loop.first else '\\n' }}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
)
"""Jinja: messages joined by newlines. An answer directly follows the message that it answers; eos ends it."""
