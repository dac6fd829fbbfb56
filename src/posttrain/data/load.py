"""Tasks and conversations from records."""

import random
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from posttrain.data.records import Record, read_records
from posttrain.data.shapes import NAMES, SHAPES, Shaped, shaped
from posttrain.nearest import did_you_mean
from posttrain.types import Message, Task, UserError


@dataclass(frozen=True, kw_only=True)
class Data:
    """Which records to read, and how they become prompts.

    >>> Data(path="openai/gsm8k", subset="main", split="test", limit=200).path
    'openai/gsm8k'
    """

    path: str
    """A file (JSONL, a JSON array, Parquet; also gzipped), or a data set of the Hub as owner/name."""
    split: str | None = None
    """Of a data set of the Hub; train if not given."""
    subset: str | None = None
    """Of a data set of the Hub, which calls it a configuration."""
    limit: int | None = None
    """Use only the first records, after shuffling."""
    seed: int | None = None
    """Shuffles the records; not given leaves them in order."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Columns of the data that are called otherwise: {"question": "problem"}."""
    system: str | None = None
    """A system message put before every conversation."""
    template: str | None = None
    """The prompt, with fields of the record in braces: "What is {a} + {b}?"."""

    def __post_init__(self) -> None:
        if not self.path.strip():
            raise ValueError("path must not be empty")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be 1 or more, not {self.limit}")
        if self.system is not None and not self.system.strip():
            raise ValueError("system must not be blank; leave it out")
        for name in self.columns:
            if name not in NAMES:
                hint = did_you_mean(name, NAMES) or f"known are {', '.join(NAMES)}"
                raise ValueError(f"columns has no place for {name!r}; {hint}")
        if self.template is not None:
            _placeholders(self.template)
            if any(name in SHAPES for name in self.columns):
                raise ValueError("template makes the prompt, so columns must not name another")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages of which the last is the assistant's, for supervised training."""

    id: str
    messages: tuple[Message, ...]
    reward: Any = None
    """What the last answer was worth: the record's field `reward` as it stands."""
    source: str = ""


def load_tasks(data: Data) -> list[Task]:
    """The tasks of the records; UserError at the first record that is none.

    Ids are the records' own `id`, or else their file and line, and the same under any seed and limit.
    """
    tasks = []
    for record, form in _shaped(data):
        if form.messages[-1]["role"] == "assistant":
            raise UserError(
                "the conversation ends with the assistant, which leaves nothing to answer",
                where=record.source,
                mend="drop the last message, or use the record for supervised training",
            )
        tasks.append(
            Task(
                id=form.id or record.source,
                messages=form.messages,
                answer=form.answer,
                fields=form.rest,
                source=record.source,
            )
        )
    return tasks


def load_conversations(data: Data) -> list[Conversation]:
    """The conversations of the records, each ending with the assistant; UserError at the first that does not.

    A record with a prompt and an answer is a conversation of two messages.
    """
    conversations = []
    for record, form in _shaped(data):
        messages = form.messages
        if messages[-1]["role"] != "assistant":
            if form.completion is None or not form.completion.strip():
                near = [did_you_mean(name, form.rest) for name in ("answer", "completion", "output")]
                raise UserError(
                    "there is no answer to learn", where=record.source, mend=next(filter(None, near), "")
                )
            messages = (*messages, {"role": "assistant", "content": form.completion})
        if messages[0]["role"] == "assistant" or all(m["role"] in ("system", "assistant") for m in messages):
            raise UserError("the assistant answers nobody", where=record.source)
        conversations.append(
            Conversation(
                id=form.id or record.source,
                messages=messages,
                reward=form.rest.get("reward"),
                source=record.source,
            )
        )
    return conversations


def _shaped(data: Data) -> list[tuple[Record, Shaped]]:
    """The chosen records in their order; ids are compared among all of them, chosen or not."""
    records = read_records(data.path, split=data.split, subset=data.subset)
    found = [(record, _with_system(_one(record, data), record, data.system)) for record in records]
    seen: dict[str, str] = {}
    for record, form in found:
        key = form.id or record.source
        if key in seen:
            raise UserError(f"id {key!r} is that of {seen[key]} too", where=record.source)
        seen[key] = record.source
    if data.seed is not None:
        random.Random(data.seed).shuffle(found)
    return found[: data.limit]


def _one(record: Record, data: Data) -> Shaped:
    prompt = _filled(data.template, record) if data.template is not None else None
    return shaped(record, data.columns, prompt)


def _with_system(form: Shaped, record: Record, system: str | None) -> Shaped:
    if system is None:
        return form
    if form.messages[0]["role"] == "system":
        raise UserError(
            "the conversation has a system message, and the config gives another",
            where=record.source,
            mend="leave system out of the config",
        )
    messages = ({"role": "system", "content": system}, *form.messages)
    return Shaped(messages, form.completion, form.answer, form.id, form.rest)


def _filled(template: str, record: Record) -> str:
    """The template with the record's fields in its braces."""
    for name in _placeholders(template):
        if name not in record.fields:
            hint = did_you_mean(name, record.fields) or f"it has {', '.join(record.fields) or 'none'}"
            raise UserError(f"there is no field {name!r} for the template", where=record.source, mend=hint)
        if record.fields[name] is None:
            raise UserError(f"{name!r}, which the template wants, is null", where=record.source)
    try:
        prompt = template.format_map(record.fields)
    except (ValueError, TypeError) as error:
        raise UserError(f"the template cannot be filled in: {error}", where=record.source) from None
    if not prompt.strip():
        raise UserError("the prompt is empty", where=record.source)
    return prompt


def _placeholders(template: str) -> list[str]:
    """The names in a template's braces; ValueError if it has none, or others than plain names."""
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(f"the template {template!r} cannot be filled in: {error}") from None
    if not names:
        raise ValueError(f"the template {template!r} has no {{field}}, so every prompt would be the same")
    for name in names:
        if not name or name.isdigit() or any(c in name for c in ".["):
            raise ValueError(f"the template names {{{name}}}, where the name of a field belongs")
    return names
