"""Turn records for prompts or supervised training into a conversation with an answer.

The first of these fields that a record has decides:

| fields | conversation | answer |
|---|---|---|
| chosen and rejected | the prompt of the two (posttrain.data.pairs) | answer; chosen is trained |
| messages | as they stand: {"role", "content"} | answer |
| prompt | one user message, or messages if it is a list | answer, else completion |
| question | one user message, or a template's | answer; only what follows #### if that is in it (GSM8K) |
| problem | one user message | answer |
| instruction (and input) | one user message, the two with a blank line between | answer, else output |
| conversations | turns of {"from", "value"} with human, gpt, system, tool | answer |

The trained answer is the first of completion, response, output and solution that has text or messages, or
else the answer. A system message is in the conversation, in the config, or in the field system or
system_prompt.
"""

from dataclasses import dataclass
from typing import Any

from posttrain.base.name_hints import did_you_mean
from posttrain.data.fields import PAIR, PROMPTS, SOLUTIONS, Fields
from posttrain.data.messages import Answer, add_system, as_answer, find_prompt, read_messages
from posttrain.data.pairs import is_pair, read_pair
from posttrain.data.records import nested_list_hint
from posttrain.types import Message, UserError

_GOLD = "####"
_COMPARED = {"prompt": "completion", "instruction": "output"}
"""By prompt field: the complete answer that verifiers compare with, for records without `answer`."""


@dataclass(frozen=True, slots=True)
class ShapedRecord:
    """A record as a conversation, with the answer to train on and the answer that a verifier compares."""

    messages: tuple[Message, ...]
    completion: Answer | None
    """The complete answer, for supervised training; or the turns that end with it."""
    answer: str | None
    answer_value: Any
    """The answer as it stands, if it is not text; a list or an object has no text to compare."""
    id: str
    rest: dict[str, Any]
    """Fields that are in none of the above."""
    form: str
    """The fields that were read."""


def shape_record(fields: Fields) -> ShapedRecord:
    """Return the shaped record. Raises UserError at its line if no shape fits, or if a field is malformed."""
    if fields.template is None and is_pair(fields) and all(fields.has(name) for name in PAIR):
        pair = read_pair(fields)
        answer, name = fields.answer("answer"), fields.id()
        form = f"{fields.form} ({pair.form})"
        rest, value = fields.rest | {"completion": pair.answers[0]}, _typed(fields, "answer")
        return ShapedRecord(pair.messages, pair.answers[0], answer, value, name, rest, form)
    messages = find_prompt(fields, *PROMPTS)
    if messages is None:
        raise _shape_error(fields)
    shape = fields.find(*PROMPTS) if fields.template is None else "prompt"
    answer, worked = fields.answer("answer"), _find_worked(fields)
    typed = _typed(fields, "answer")
    completion: Answer | None = None
    if worked is not None:
        value = fields.as_written(worked)
        if isinstance(value, (list, dict)):
            completion = _read_worked_messages(fields, worked)
        else:
            completion = value if isinstance(value, str) else fields.answer(worked)
    # A verifier compares the field called answer; it sees other fields under their own names.
    is_compared = worked is not None and worked == _COMPARED.get(shape or "")
    if answer is None and typed is None and is_compared and isinstance(completion, str):
        answer, typed = completion, _typed(fields, worked or "")
    completion = answer if completion is None else completion
    templated = fields.template is not None and "question" in fields.record.fields
    if (shape == "question" or templated) and answer is not None and _GOLD in answer:
        answer = answer.rpartition(_GOLD)[2].strip()
    name, messages = fields.id(), add_system(fields, messages)
    rest = fields.rest
    if worked is not None and not is_compared:
        rest[fields.column(worked)] = fields.raw(worked)
    if answer != completion and isinstance(completion, str):
        rest["completion"] = completion
    return ShapedRecord(messages, completion, answer, typed, name, rest, fields.form)


def _typed(fields: Fields, name: str) -> Any:
    """Return a field as it stands if it is not text, else None."""
    value = fields.objects(name) if fields.has(name) else None
    return None if isinstance(value, str) else value


def _find_worked(fields: Fields) -> str | None:
    """Return the field of the complete answer, as text that is not blank, or as messages; else None."""
    if "answer" in fields.columns and not any(name in fields.columns for name in SOLUTIONS):
        return None
    return fields.first_set(*(name for name in SOLUTIONS if _is_worked(fields, name)))


def _is_worked(fields: Fields, name: str) -> bool:
    column, record = fields.column(name), fields.record
    value = record.cells.get(column, record.fields.get(column))
    if isinstance(value, (list, dict)):
        turns = [value] if isinstance(value, dict) else value
        return bool(turns) and all(isinstance(turn, dict) and "role" in turn for turn in turns)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number or (isinstance(value, str) and bool(value.strip()))


def _read_worked_messages(fields: Fields, name: str) -> Answer:
    """Return the answer of a field of messages: one of the assistant, or several that end with it."""
    turns = read_messages(fields, name)
    if turns[-1]["role"] != "assistant":
        raise fields.fault(f"{fields.column(name)} ends with the {turns[-1]['role']}, not the assistant")
    return as_answer(turns)


def _shape_error(fields: Fields) -> UserError:
    columns = fields.record.fields
    hints = [(column, did_you_mean(column, PROMPTS)) for column in columns]
    near = next((f"{column!r}: {hint}" for column, hint in hints if hint), "")
    text = ", or learn the text as it stands: method.name 'pretrain' and [task.text]"
    plain = text if "text" in columns else ""
    return fields.fault(
        f"there is none of {', '.join(PROMPTS)}; it has {', '.join(map(repr, columns)) or 'no fields'}",
        near or nested_list_hint(columns) or f"set task.data.columns.prompt to its column{plain}",
    )
