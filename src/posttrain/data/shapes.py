"""The shapes of records that are asked or learnt from, and how each becomes a conversation with an answer.

Looked for in this order; the first that is there counts:

| fields | conversation | answer |
|---|---|---|
| chosen and rejected | the prompt of the two (posttrain.data.pairs) | answer; what is learnt is chosen |
| messages | as they stand: {"role", "content"} | answer |
| prompt | one user message, or messages if it is a list | answer, else completion |
| question | one user message, or a template's | answer; only what follows #### if that is in it (GSM8K) |
| problem | one user message | answer |
| instruction (and input) | one user message, the two with a blank line between | answer, else output |
| conversations | turns of {"from", "value"} with human, gpt, system, tool | answer |

What is learnt is the first of completion, response, output and solution that holds text or messages, or else
the answer. A system message is one of the conversation, or of the config, or of the field system or
system_prompt.
"""

from dataclasses import dataclass
from typing import Any

from posttrain.base.name_hints import did_you_mean
from posttrain.data.fields import PAIR, PROMPTS, WORKED, Fields
from posttrain.data.messages import Answer, answer_of, asked, spoken, with_system
from posttrain.data.pairs import is_pair, paired
from posttrain.data.records import in_list
from posttrain.types import Message, UserError

_GOLD = "####"
_COMPARED = {"prompt": "completion", "instruction": "output"}
"""Answers in full that verifiers compare with, by the field of the prompt, where there is no `answer`."""


@dataclass(frozen=True, slots=True)
class Shaped:
    """A record as a conversation, with what was to be answered in full, and what a verifier compares."""

    messages: tuple[Message, ...]
    completion: Answer | None
    """The worked answer, which SFT learns; or the turns that end with it."""
    answer: str | None
    answer_value: bool | int | float | None
    """The answer as it stands, if that is a number or a boolean."""
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
        return Shaped(pair.messages, pair.answers[0], answer, _number(fields, "answer"), name, rest, form)
    messages = asked(fields, *PROMPTS)
    if messages is None:
        raise _no_shape(fields)
    shape = (fields.given(*PROMPTS) or fields.first(*PROMPTS)) if fields.template is None else "prompt"
    answer, worked = fields.answer("answer"), _worked(fields)
    number = _number(fields, "answer")
    completion: Answer | None = None
    if worked is not None:
        value = fields.spelt(worked)
        if isinstance(value, (list, dict)):
            completion = _spoken(fields, worked)
        else:
            completion = value if isinstance(value, str) else fields.answer(worked)
    # A verifier compares with what is called an answer; of what else is there it knows under its own name.
    own = worked is not None and worked == _COMPARED.get(shape or "")
    if answer is None and own and isinstance(completion, str):
        answer, number = completion, _number(fields, worked or "")
    completion = answer if completion is None else completion
    templated = fields.template is not None and "question" in fields.record.fields
    if (shape == "question" or templated) and answer is not None and _GOLD in answer:
        answer = answer.rpartition(_GOLD)[2].strip()
    name, messages = fields.id(), with_system(fields, messages)
    rest = fields.rest
    if worked is not None and not own:
        rest[fields.column(worked)] = fields.raw(worked)
    if answer != completion and isinstance(completion, str):
        rest["completion"] = completion
    return Shaped(messages, completion, answer, number, name, rest, fields.form)


def _number(fields: Fields, name: str) -> bool | int | float | None:
    """Return a field that is a number or a boolean, else None."""
    value = fields.record.fields.get(fields.column(name))
    return value if isinstance(value, (bool, int, float)) else None


def _worked(fields: Fields) -> str | None:
    """The field that holds the answer in full, as text that is not blank, or as messages; None if none."""
    if "answer" in fields.columns and not any(name in fields.columns for name in WORKED):
        return None
    return fields.given(*(name for name in WORKED if _is_worked(fields, name)))


def _is_worked(fields: Fields, name: str) -> bool:
    column, record = fields.column(name), fields.record
    value = record.cells.get(column, record.fields.get(column))
    if isinstance(value, (list, dict)):
        turns = [value] if isinstance(value, dict) else value
        return bool(turns) and all(isinstance(turn, dict) and "role" in turn for turn in turns)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number or (isinstance(value, str) and bool(value.strip()))


def _spoken(fields: Fields, name: str) -> Answer:
    """The answer of a field that holds messages: the assistant's one, or several that end with it."""
    turns = spoken(fields, name)
    if turns[-1]["role"] != "assistant":
        raise fields.fault(f"{fields.column(name)} ends with the {turns[-1]['role']}, not the assistant")
    return answer_of(turns)


def _no_shape(fields: Fields) -> UserError:
    columns = fields.record.fields
    hints = [(column, did_you_mean(column, PROMPTS)) for column in columns]
    near = next((f"{column!r}: {hint}" for column, hint in hints if hint), "")
    text = ", or learn the text as it stands: method.name 'pretrain' and [task.text]"
    plain = text if "text" in columns else ""
    return fields.fault(
        f"there is none of {', '.join(PROMPTS)}; it has {', '.join(map(repr, columns)) or 'no fields'}",
        near or in_list(columns) or f"set task.data.columns.prompt to its column{plain}",
    )
