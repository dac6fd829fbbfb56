"""The shapes of records that are understood, and how each becomes a conversation with an answer.

Looked for in this order; the first that is there counts:

| fields | conversation | answer |
|---|---|---|
| messages | as they stand: {"role", "content"} | answer |
| prompt | one user message, or messages if it is a list | answer, completion |
| question | one user message | answer; only what follows #### if that is in it (GSM8K) |
| instruction (and input) | one user message, the two with a blank line between | output |
| conversations | turns of {"from", "value"} with human, gpt, system | answer |
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.data.records import Record
from posttrain.nearest import did_you_mean
from posttrain.types import Message, UserError

SHAPES = ("messages", "prompt", "question", "instruction", "conversations")
NAMES = (*SHAPES, "answer", "completion", "input", "output", "id")
ROLES = ("system", "user", "assistant", "tool")
_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}
_GOLD = "####"
_KINDS: dict[type, str] = {
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "an object",
}


@dataclass(frozen=True, slots=True)
class Shaped:
    """A record as a conversation, with what was to be answered in full, and what a verifier compares."""

    messages: tuple[Message, ...]
    completion: str | None
    """The worked answer, which SFT learns."""
    answer: str | None
    id: str | None
    rest: dict[str, Any]
    """Fields that became none of these."""


def shaped(record: Record, columns: Mapping[str, str], prompt: str | None = None) -> Shaped:
    """The record in its shape; UserError at its line if it has none, or if a field is not what it should be.

    `columns` maps names of the table above to columns of the data; `prompt`, if given, is the one user
    message instead of what the record shows.
    """
    get = _Getter(record, columns)
    shape = "prompt" if prompt is not None else next((name for name in SHAPES if get.has(name)), None)
    if shape is None:
        raise _no_shape(record)
    if prompt is not None:
        messages: tuple[Message, ...] = ({"role": "user", "content": prompt},)
    else:
        messages = _messages(get, shape)
    full = get.answer("output" if shape == "instruction" else "answer")
    completion = get.answer("completion") if shape == "prompt" else None
    answer = full if full is not None else completion
    completion = completion if completion is not None else full
    if shape == "question" and answer is not None and _GOLD in answer:
        answer = answer.rpartition(_GOLD)[2].strip()
    name = get.id()
    rest = {key: value for key, value in record.fields.items() if key not in get.used}
    if answer != completion and completion is not None:
        rest["completion"] = completion
    return Shaped(messages, completion, answer, name, rest)


class _Getter:
    """Fields of a record by their standard names, remembering which columns were used."""

    def __init__(self, record: Record, columns: Mapping[str, str]) -> None:
        self.record, self.columns = record, columns
        self.used: set[str] = set()
        for name, column in columns.items():
            if column not in record.fields:
                hint = did_you_mean(column, record.fields) or f"it has {', '.join(record.fields) or 'none'}"
                raise UserError(f"there is no field {column!r} (for {name})", where=record.source, mend=hint)

    def has(self, name: str) -> bool:
        return self.columns.get(name, name) in self.record.fields

    def raw(self, name: str) -> Any:
        column = self.columns.get(name, name)
        self.used.add(column)
        return self.record.fields[column]

    def text(self, name: str) -> str:
        """A field that must be text and not blank."""
        value = self.raw(name)
        column = self.columns.get(name, name)
        if not isinstance(value, str):
            raise UserError(f"{column} is {_kind(value)}, not text", where=self.record.source)
        if not value.strip():
            raise UserError(f"{column} is empty", where=self.record.source)
        return value

    def answer(self, name: str) -> str | None:
        """A field that may be missing, null, text, or a number, which becomes text."""
        if not self.has(name):
            return None
        value = self.raw(name)
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return str(value)
        column = self.columns.get(name, name)
        raise UserError(f"{column} is {_kind(value)}, not text or a number", where=self.record.source)

    def id(self) -> str | None:
        if not self.has("id"):
            return None
        value = self.raw("id")
        if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
            raise UserError(f"id is {_kind(value)}, not text or a whole number", where=self.record.source)
        return str(value)


def _messages(get: _Getter, shape: str) -> tuple[Message, ...]:
    if shape == "conversations":
        return _said(get.raw(shape), get.record.source, shape, "from", "value")
    if shape == "messages" or isinstance(get.record.fields[get.columns.get(shape, shape)], list):
        return _said(get.raw(shape), get.record.source, shape, "role", "content")
    text = get.text(shape)
    if shape == "instruction" and get.has("input"):
        extra = get.raw("input")
        if extra is not None and not isinstance(extra, str):
            raise UserError(f"input is {_kind(extra)}, not text", where=get.record.source)
        text = f"{text}\n\n{extra}" if extra and extra.strip() else text
    return ({"role": "user", "content": text},)


def _said(turns: Any, source: str, field: str, who: str, what: str) -> tuple[Message, ...]:
    """The messages of a list of turns, each of which says who spoke and what."""
    if not isinstance(turns, list):
        raise UserError(f"{field} is {_kind(turns)}, not a list of messages", where=source)
    if not turns:
        raise UserError(f"{field} is empty", where=source)
    messages = []
    for number, turn in enumerate(turns, start=1):
        place = f"message {number} of {field}"
        if not isinstance(turn, dict):
            raise UserError(f"{place} is {_kind(turn)}, not an object", where=source)
        for key in (who, what):
            if key not in turn:
                raise UserError(f"{place} has no {key!r}", where=source, mend=did_you_mean(key, turn))
            if not isinstance(turn[key], str):
                raise UserError(f"{key} of {place} is {_kind(turn[key])}, not text", where=source)
        messages.append({"role": _role(turn[who], place, source, who), "content": turn[what]})
        if not turn[what].strip():
            raise UserError(f"{place} is empty", where=source)
        extra = [key for key, value in turn.items() if key not in (who, what) and value is not None]
        if extra:
            raise UserError(f"{place} has {extra[0]!r}, which is not understood", where=source)
        if messages[-1]["role"] == "system" and number > 1:
            raise UserError(f"{place} is a system message, which must come first", where=source)
    return tuple(messages)


def _role(said: str, place: str, source: str, who: str) -> str:
    known = _SPEAKERS if who == "from" else {role: role for role in ROLES}
    if said not in known:
        hint = did_you_mean(said, known) or f"it must be one of {', '.join(known)}"
        raise UserError(f"{who} of {place} is {said!r}", where=source, mend=hint)
    return known[said]


def _no_shape(record: Record) -> UserError:
    fields = ", ".join(map(repr, record.fields)) or "no fields"
    hints = [(column, did_you_mean(column, SHAPES)) for column in record.fields]
    near = next((f"{column!r}: {hint}" for column, hint in hints if hint), "")
    return UserError(
        f"there is none of {', '.join(SHAPES)}; it has {fields}",
        where=record.source,
        mend=near or "say in [data.columns] which column is the prompt",
    )


def _kind(value: Any) -> str:
    if value is None or value == "":
        return "null" if value is None else "empty"
    return _KINDS.get(type(value), type(value).__name__)
