"""The shapes of records that are asked or learnt from, and how each becomes a conversation with an answer.

Looked for in this order; the first that is there counts:

| fields | conversation | answer |
|---|---|---|
| chosen and rejected | the prompt of the two (posttrain.data.pairs) | answer; what is learnt is chosen |
| messages | as they stand: {"role", "content"} | answer |
| prompt | one user message, or messages if it is a list | answer, completion |
| question | one user message | answer; only what follows #### if that is in it (GSM8K) |
| problem | one user message | answer |
| instruction (and input) | one user message, the two with a blank line between | output |
| conversations | turns of {"from", "value"} with human, gpt, system, tool | answer |
"""

from dataclasses import dataclass
from typing import Any

from posttrain.data.fields import PAIR, PROMPTS, Fields
from posttrain.data.pairs import paired
from posttrain.data.turns import asked, with_system
from posttrain.nearest import did_you_mean
from posttrain.types import Message, UserError

_GOLD = "####"


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
    if fields.template is None and all(fields.has(name) for name in PAIR):
        pair = paired(fields)
        answer, name = fields.answer("answer"), fields.id()
        form = f"{fields.form} ({pair.form})"
        rest = fields.rest | {"completion": pair.answers[0]}
        return Shaped(pair.messages, pair.answers[0], answer, name, rest, form)
    messages = asked(fields, *PROMPTS)
    if messages is None:
        raise _no_shape(fields)
    shape = fields.first(*PROMPTS) if fields.template is None else "prompt"
    full = fields.answer("output" if shape == "instruction" else "answer")
    completion = fields.answer("completion") if shape == "prompt" else None
    answer = full if full is not None else completion
    completion = completion if completion is not None else full
    if shape == "question" and answer is not None and _GOLD in answer:
        answer = answer.rpartition(_GOLD)[2].strip()
    name = fields.id()
    rest = fields.rest
    if answer != completion and completion is not None:
        rest["completion"] = completion
    return Shaped(with_system(fields, messages), completion, answer, name, rest, fields.form)


def _no_shape(fields: Fields) -> UserError:
    columns = fields.record.fields
    hints = [(column, did_you_mean(column, PROMPTS)) for column in columns]
    near = next((f"{column!r}: {hint}" for column, hint in hints if hint), "")
    return fields.fault(
        f"there is none of {', '.join(PROMPTS)}; it has {', '.join(map(repr, columns)) or 'no fields'}",
        near or "say in [data.columns] which column is the prompt",
    )
