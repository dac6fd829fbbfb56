"""The shapes of records that are asked or learnt from, and how each becomes a conversation with an answer.

Looked for in this order; the first that is there counts:

| fields | conversation | answer |
|---|---|---|
| chosen and rejected | the prompt of the two (posttrain.data.pairs) | answer; what is learnt is chosen |
| messages | as they stand: {"role", "content"} | answer |
| prompt | one user message, or messages if it is a list | answer, else completion |
| question | one user message | answer; only what follows #### if that is in it (GSM8K) |
| problem | one user message | answer |
| instruction (and input) | one user message, the two with a blank line between | answer, else output |
| conversations | turns of {"from", "value"} with human, gpt, system, tool | answer |

What is learnt is the first of completion, response, output and solution that is there, or else the answer. A
system message is one of the conversation, of the field system or system_prompt, or of the config.
"""

from dataclasses import dataclass
from typing import Any

from posttrain.data.fields import PAIR, PROMPTS, WORKED, Fields
from posttrain.data.pairs import is_pair, paired
from posttrain.data.turns import asked, said, with_system
from posttrain.nearest import did_you_mean
from posttrain.types import Message, UserError

_GOLD = "####"
_COMPARED = {"prompt": "completion", "instruction": "output"}
"""Answers in full that verifiers compare with, by the field of the prompt, where there is no `answer`."""


@dataclass(frozen=True, slots=True)
class Shaped:
    """A record as a conversation, with what was to be answered in full, and what a verifier compares."""

    messages: tuple[Message, ...]
    completion: str | None
    """The worked answer, which SFT learns."""
    answer: str | None
    id: str
    rest: dict[str, Any]
    """Fields that became none of these."""
    form: str
    """The fields that became these."""


def shaped(fields: Fields) -> Shaped:
    """The record in its shape; UserError at its line if it has none, or if a field is not as it should be."""
    if fields.template is None and is_pair(fields) and all(fields.has(name) for name in PAIR):
        pair = paired(fields)
        answer, name = fields.answer("answer"), fields.id()
        form = f"{fields.form} ({pair.form})"
        rest = fields.rest | {"completion": pair.answers[0]}
        return Shaped(pair.messages, pair.answers[0], answer, name, rest, form)
    messages = asked(fields, *PROMPTS)
    if messages is None:
        raise _no_shape(fields)
    shape = fields.first(*PROMPTS) if fields.template is None else "prompt"
    answer, worked = fields.answer("answer"), fields.given(*WORKED)
    completion: str | None = None
    if worked is not None and isinstance(fields.record.fields[fields.column(worked)], (list, dict)):
        messages, completion = _spoken(fields, messages, worked)
    elif worked is not None:
        completion = fields.answer(worked)
    # A verifier compares with what is called an answer; of what else is there it knows under its own name.
    own = worked is not None and worked == _COMPARED.get(shape or "")
    if answer is None and own:
        answer = completion
    completion = answer if completion is None else completion
    if shape == "question" and answer is not None and _GOLD in answer:
        answer = answer.rpartition(_GOLD)[2].strip()
    name, messages = fields.id(), with_system(fields, messages)
    rest = fields.rest
    if worked is not None and not own:
        rest[fields.column(worked)] = fields.raw(worked)
    if answer != completion and completion is not None:
        rest["completion"] = completion
    return Shaped(messages, completion, answer, name, rest, fields.form)


def _spoken(
    fields: Fields, messages: tuple[Message, ...], name: str
) -> tuple[tuple[Message, ...], str | None]:
    """The conversation and the answer of a field that holds messages: the assistant's one, or several."""
    value, column = fields.raw(name), fields.column(name)
    turns = said(fields, [value] if isinstance(value, dict) else value, column, "role")
    if turns[-1]["role"] != "assistant":
        raise fields.fault(f"{column} ends with the {turns[-1]['role']}, not the assistant")
    if len(turns) == 1:
        return messages, turns[0]["content"]
    return (*messages, *turns), None


def _no_shape(fields: Fields) -> UserError:
    columns = fields.record.fields
    hints = [(column, did_you_mean(column, PROMPTS)) for column in columns]
    near = next((f"{column!r}: {hint}" for column, hint in hints if hint), "")
    return fields.fault(
        f"there is none of {', '.join(PROMPTS)}; it has {', '.join(map(repr, columns)) or 'no fields'}",
        near or "say in [data.columns] which column is the prompt",
    )
