"""The fields of one record under the standard names of this package."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.base.name_hints import did_you_mean
from posttrain.data.records import Record
from posttrain.types import UserError

PROMPTS = ("messages", "prompt", "question", "problem", "instruction", "conversations")
SEPARATE_PROMPTS = (*PROMPTS[1:], "messages")
"""Prompts of answers in fields of their own; `messages` comes last, as it often includes such an answer."""
PAIR = ("chosen", "rejected")
SCORES_OF_PAIR = (
    ("score_chosen", "chosen_score", "chosen_rating"),
    ("score_rejected", "rejected_score", "rejected_rating"),
)
ANSWER_LISTS = ("responses", "completions", "answers", "generations")
SCORES = ("scores", "ratings")
RANKS = ("ranks",)
ANSWERS = ("completion", "response", "output", "answer")
LABELS = ("label", "score", "reward", "rating")
STEPS = ("steps", "labels")
SYSTEMS = ("system", "system_prompt")
SOLUTIONS = ("completion", "response", "output", "solution")
"""Complete answers, next to which `answer` may be the result alone."""
NAMES = tuple(
    dict.fromkeys(
        name
        for names in (
            (*PROMPTS, "answer", "completion", "input", "output", "id"),
            (*PAIR, *SCORES_OF_PAIR[0], *SCORES_OF_PAIR[1], "margin"),
            (*ANSWER_LISTS, *SCORES, *RANKS, *ANSWERS, *LABELS, *STEPS, *SYSTEMS, *SOLUTIONS, "tools"),
        )
        for name in names
    )
)
_OPENAI = {"prompt": "input", "chosen": "preferred_output", "rejected": "non_preferred_output"}
"""Columns of OpenAI's preference data, whose input is an object with messages and tools."""
_OF_PROMPTS = ("tools", "history", "context", "documents", "images", "image", "videos")
_KINDS: dict[type, str] = {
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "an object",
}


class Fields:
    """Access to the fields of a record by standard names, which remembers the names that were used.

    `columns` maps standard names to columns of the data.

    >>> fields = Fields(Record({"problem": "1 + 1?", "id": 7}, "d.jsonl:1"), {"question": "problem"})
    >>> fields.text("question"), fields.form
    ('1 + 1?', 'problem (as question)')
    """

    def __init__(
        self,
        record: Record,
        columns: Mapping[str, str],
        template: str | None = None,
        system: str | None = None,
    ) -> None:
        openai = all(column in record.fields for column in _OPENAI.values())
        self.record, self.columns = record, (_OPENAI | dict(columns) if openai else columns)
        self.template, self.system = template, system
        self.source = record.source
        self.used: set[str] = set()
        self.looked_for: set[str] = set()
        self.notes: set[str] = set()
        """Notes for the user on values that are read in another way than they stand in the data."""
        self.calls = False
        """Whether messages may call tools, and may be results of calls."""
        for name, column in self.columns.items():
            if column not in record.fields:
                hint = did_you_mean(column, record.fields) or f"it has {self.names}"
                raise self.fault(f"there is no field {column!r} (for {name})", hint)

    @property
    def names(self) -> str:
        """The columns of the record, in one line for a message."""
        return ", ".join(" ".join(column.split()) for column in self.record.fields) or "no fields"

    @property
    def form(self) -> str:
        """The columns that were read, for a person; each with its standard name if that differs."""
        used = sorted((NAMES.index(name), name) for name in self.used if name != "id")
        columns = [(name, self.column(name)) for _, name in used]
        descriptions = [column if column == name else f"{column} (as {name})" for name, column in columns]
        return ", ".join((["a template"] if self.template is not None else []) + descriptions)

    @property
    def conversational(self) -> bool:
        """Whether the prompt is a list of messages."""
        names = self.used.intersection((*PROMPTS, *PAIR))
        return any(isinstance(self.record.fields[self.column(name)], list | dict) for name in names)

    @property
    def rest(self) -> dict[str, Any]:
        """Columns that were not read."""
        used = set(map(self.column, self.used))
        return {key: value for key, value in self.record.fields.items() if key not in used}

    @property
    def unread_context(self) -> list[str]:
        """Columns that were not read but that other trainers put into the prompt; none with a template."""
        if self.template is not None:
            return []
        used, fields = set(map(self.column, self.used)), self.record.fields
        return [name for name in _OF_PROMPTS if fields.get(name) and name not in used]

    def fault(self, problem: str, fix: str = "") -> UserError:
        """Return an error at the place of the record."""
        return UserError(self.source, problem, fix)

    def missing(self, problem: str, *names: str) -> UserError:
        """Return the error that the record has none of these names, with a hint at a misspelt one."""
        free = [column for column in self.record.fields if column not in NAMES]
        near = next((f"{column!r}: {hint}" for column in free if (hint := did_you_mean(column, names))), "")
        return self.fault(f"{problem}; it has {self.names}", near)

    def column(self, name: str) -> str:
        """Return the column of a standard name."""
        return self.columns.get(name, name)

    def has(self, name: str) -> bool:
        """Return whether the record has the field, even if it is null."""
        self.looked_for.add(name)
        return self.column(name) in self.record.fields

    def first_existing(self, *names: str) -> str | None:
        """Return the first of these names that the record has; those in `columns` come first."""
        return next(filter(self.has, self._columns_first(names)), None)

    def first_set(self, *names: str) -> str | None:
        """Return the first of these names that the record has with a value other than null."""
        there = filter(self.has, self._columns_first(names))
        return next((n for n in there if self.record.fields[self.column(n)] is not None), None)

    def _columns_first(self, names: Sequence[str]) -> list[str]:
        self.looked_for.update(names)
        return sorted(names, key=lambda name: name not in self.columns)

    def find(self, *names: str) -> str | None:
        """Return the first of these names with a value other than null, or else the first that exists."""
        return self.first_set(*names) or self.first_existing(*names)

    def raw(self, name: str) -> Any:
        """Return the value of a field as it stands."""
        self.looked_for.add(name)
        self.used.add(name)
        return self.record.fields[self.column(name)]

    def objects(self, name: str) -> Any:
        """Return a field of messages, tools or answers without the nulls that the type of its column added.

        Arrow gives every object of a column the keys of all objects in it. JSON in a text has its own nulls.
        """
        value = self.raw(name)
        return _without_nulls(value) if self.column(name) in self.record.typed else value

    def as_written(self, name: str) -> Any:
        """Return the value of a field; for a number or boolean of a CSV file the text of its cell."""
        value = self.raw(name)
        return self.record.cells.get(self.column(name), value)

    def text(self, name: str) -> str:
        """Return a field that must be text and not blank."""
        return self.checked_text(self.as_written(name), self.column(name))

    def checked_text(self, value: Any, name: str) -> str:
        """Return the value, which must be text and not blank."""
        if not isinstance(value, str):
            raise self.fault(f"{name} is {kind(value)}, not text")
        if not value.strip():
            raise self.fault(f"{name} is empty")
        return value

    def number(self, name: str) -> float:
        """Return a field that must be a finite number."""
        return self.checked_number(self.raw(name), self.column(name))

    def checked_number(self, value: Any, name: str) -> float:
        """Return the value as a float. Raises UserError unless it is a finite number."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.fault(f"{name} is {kind(value)}, not a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.fault(f"{name} is not finite")
        return number

    def items(self, name: str) -> list[Any]:
        """Return a field that must be a list and not empty."""
        value, column = self.objects(name), self.column(name)
        if not isinstance(value, list):
            raise self.fault(f"{column} is {kind(value)}, not a list")
        if not value:
            raise self.fault(f"{column} is empty")
        return value

    def answer(self, name: str) -> str | None:
        """Return a field of text, number or boolean as `answer_text` does; None if it is anything else."""
        return answer_text(self.as_written(name)) if self.has(name) else None

    def id(self) -> str:
        """Return the record's own id, or else its place."""
        if self.first_set("id") is None:
            return self.source
        value = self.as_written("id")
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # pandas turns integers to floats in a column with a missing one
        if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
            raise self.fault(f"id is {kind(value)}, not text or a whole number")
        return str(value)


def _without_nulls(value: Any) -> Any:
    """Return plain data without the keys of objects that are null; entries of lists stay.

    >>> _without_nulls({"a": None, "b": [None, {"c": None, "d": 1}]})
    {'b': [None, {'d': 1}]}
    """
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def answer_text(value: Any) -> str | None:
    """Return an answer as the text that is compared: a number or boolean as JSON has it; else None.

    42.0 becomes 42: pandas turns a column of integers with a missing one into floats.

    >>> answer_text("a"), answer_text(42.0), answer_text(True), answer_text([1])
    ('a', '42', 'true', None)
    """
    if isinstance(value, bool):
        return str(value).lower()
    if type(value) is float and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return str(value) if isinstance(value, (str, int, float)) else None


def kind(value: Any) -> str:
    """Return the kind of a value in words.

    >>> kind([1]), kind(True), kind(None)
    ('a list', 'a boolean', 'null')
    """
    if value is None or value == "":
        return "null" if value is None else "empty"
    return _KINDS.get(type(value), type(value).__name__)
