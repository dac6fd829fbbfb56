"""The fields of one record under the names that this package knows them by."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.base.name_hints import did_you_mean
from posttrain.data.records import Record
from posttrain.types import UserError

PROMPTS = ("messages", "prompt", "question", "problem", "instruction", "conversations")
BESIDE = (*PROMPTS[1:], "messages")
"""Prompts of answers that have a field of their own; `messages` often holds such an answer too."""
PAIR = ("chosen", "rejected")
SCORES_OF_PAIR = (
    ("score_chosen", "chosen_score", "chosen_rating"),
    ("score_rejected", "rejected_score", "rejected_rating"),
)
RANKED = ("responses", "completions", "answers", "generations")
SCORES = ("scores", "ratings")
RANKS = ("ranks",)
LABELLED = ("completion", "response", "output", "answer")
WORTH = ("label", "score", "reward", "rating")
STEPS = ("steps", "labels")
SYSTEM = ("system", "system_prompt")
WORKED = ("completion", "response", "output", "solution")
"""Answers in full, beside which `answer` may hold the result alone."""
NAMES = tuple(
    dict.fromkeys(
        name
        for names in (
            (*PROMPTS, "answer", "completion", "input", "output", "id"),
            (*PAIR, *SCORES_OF_PAIR[0], *SCORES_OF_PAIR[1], "margin"),
            (*RANKED, *SCORES, *RANKS, *LABELLED, *WORTH, *STEPS, *SYSTEM, *WORKED, "tools"),
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
    """Fields of a record by their standard names, remembering which of them were used.

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
        self.calls = False
        """Whether messages may call tools, and be results of calls."""
        for name, column in self.columns.items():
            if column not in record.fields:
                hint = did_you_mean(column, record.fields) or f"it has {self.names}"
                raise self.fault(f"there is no field {column!r} (for {name})", hint)

    @property
    def names(self) -> str:
        """The columns that the record has, for a message of one line."""
        return ", ".join(" ".join(column.split()) for column in self.record.fields) or "no fields"

    @property
    def form(self) -> str:
        """What was read, for a person: the columns, each with its standard name if that is another."""
        used = sorted((NAMES.index(name), name) for name in self.used if name != "id")
        columns = [(name, self.column(name)) for _, name in used]
        named = [column if column == name else f"{column} (as {name})" for name, column in columns]
        return ", ".join((["a template"] if self.template is not None else []) + named)

    @property
    def conversational(self) -> bool:
        """Whether what was asked is a list of messages."""
        asked = self.used.intersection((*PROMPTS, *PAIR))
        return any(isinstance(self.record.fields[self.column(name)], list | dict) for name in asked)

    @property
    def rest(self) -> dict[str, Any]:
        """Columns that were not read."""
        read = set(map(self.column, self.used))
        return {key: value for key, value in self.record.fields.items() if key not in read}

    @property
    def beside(self) -> list[str]:
        """Columns that were not read and that elsewhere belong to the prompt, unless a template makes it."""
        if self.template is not None:
            return []
        read, found = set(map(self.column, self.used)), self.record.fields
        return [name for name in _OF_PROMPTS if found.get(name) and name not in read]

    def fault(self, problem: str, fix: str = "") -> UserError:
        """An error at the record's line."""
        return UserError(self.source, problem, fix)

    def missing(self, what: str, *names: str) -> UserError:
        """The error that none of these names is there, with the misspelt one if there is one."""
        free = [column for column in self.record.fields if column not in NAMES]
        near = next((f"{column!r}: {hint}" for column in free if (hint := did_you_mean(column, names))), "")
        return self.fault(f"{what}; it has {self.names}", near)

    def column(self, name: str) -> str:
        """What the data calls it."""
        return self.columns.get(name, name)

    def has(self, name: str) -> bool:
        """Whether the record has it, be it null."""
        self.looked_for.add(name)
        return self.column(name) in self.record.fields

    def first(self, *names: str) -> str | None:
        """The first of these that the record has; what `columns` names comes before all others."""
        return next(filter(self.has, self._chosen_first(names)), None)

    def given(self, *names: str) -> str | None:
        """The first of these that the record has and that is not null."""
        there = filter(self.has, self._chosen_first(names))
        return next((n for n in there if self.record.fields[self.column(n)] is not None), None)

    def _chosen_first(self, names: Sequence[str]) -> list[str]:
        self.looked_for.update(names)
        return sorted(names, key=lambda name: name not in self.columns)

    def raw(self, name: str) -> Any:
        """A field as it stands."""
        self.looked_for.add(name)
        self.used.add(name)
        return self.record.fields[self.column(name)]

    def objects(self, name: str) -> Any:
        """Return a field of messages, tools or answers without the nulls that the type of its column added.

        Arrow gives all objects of a column the keys of all of them. JSON in a text has its own nulls.
        """
        value = self.raw(name)
        return _without_nulls(value) if self.column(name) in self.record.typed else value

    def spelt(self, name: str) -> Any:
        """A field as it stands; a number or boolean of a CSV file as the text of its cell."""
        value = self.raw(name)
        return self.record.cells.get(self.column(name), value)

    def text(self, name: str) -> str:
        """A field that must be text and not blank."""
        return self.checked_text(self.spelt(name), self.column(name))

    def checked_text(self, value: Any, what: str) -> str:
        """The value, which must be text and not blank."""
        if not isinstance(value, str):
            raise self.fault(f"{what} is {kind(value)}, not text")
        if not value.strip():
            raise self.fault(f"{what} is empty")
        return value

    def number(self, name: str) -> float:
        """A field that must be a finite number."""
        return self.checked_number(self.raw(name), self.column(name))

    def checked_number(self, value: Any, what: str) -> float:
        """The value, which must be a finite number."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.fault(f"{what} is {kind(value)}, not a number")
        try:
            found = float(value)
        except OverflowError:
            found = math.inf
        if not math.isfinite(found):
            raise self.fault(f"{what} is not finite")
        return found

    def items(self, name: str) -> list[Any]:
        """A field that must be a list with something in it."""
        value, column = self.objects(name), self.column(name)
        if not isinstance(value, list):
            raise self.fault(f"{column} is {kind(value)}, not a list")
        if not value:
            raise self.fault(f"{column} is empty")
        return value

    def answer(self, name: str) -> str | None:
        """A field that may be missing, null, text, number or boolean: answer_text, or of CSV its cell."""
        if not self.has(name):
            return None
        value = self.spelt(name)
        text = answer_text(value)
        if text is None and value is not None:
            fix = "a column of another name is handed to rewards as it is"
            raise self.fault(f"{self.column(name)} is {kind(value)}, not text or a number", fix)
        return text

    def id(self) -> str:
        """The record's own id, or else its place."""
        if self.given("id") is None:
            return self.source
        value = self.spelt("id")
        if isinstance(value, float) and value.is_integer():  # as pandas holds ids of which one is missing
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
            raise self.fault(f"id is {kind(value)}, not text or a whole number")
        return str(value)


def _without_nulls(value: Any) -> Any:
    """Return objects without their keys that are null; entries of lists stay.

    >>> _without_nulls({"a": None, "b": [None, {"c": None, "d": 1}]})
    {'b': [None, {'d': 1}]}
    """
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def answer_text(value: Any) -> str | None:
    """An answer as the text that is compared: a number or boolean as JSON has it; None for anything else.

    42.0 becomes 42: so pandas holds whole numbers of a column in which one is missing.

    >>> answer_text("a"), answer_text(42.0), answer_text(True), answer_text([1])
    ('a', '42', 'true', None)
    """
    if isinstance(value, bool):
        return str(value).lower()
    if type(value) is float and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return str(value) if isinstance(value, (str, int, float)) else None


def kind(value: Any) -> str:
    """What a value is, as a person says it.

    >>> kind([1]), kind(True), kind(None)
    ('a list', 'a boolean', 'null')
    """
    if value is None or value == "":
        return "null" if value is None else "empty"
    return _KINDS.get(type(value), type(value).__name__)
