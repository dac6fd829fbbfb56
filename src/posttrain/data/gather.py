"""Select, shuffle and resample records, turn them into items, and report what was recognised."""

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from posttrain.base.name_hints import did_you_mean
from posttrain.base.usercode import MEMORY, refuse_memory
from posttrain.data.fields import NAMES, PROMPTS, Fields
from posttrain.data.prompt_template import placeholders
from posttrain.data.records import Record, iterate_records, record_of_row, without_decoding
from posttrain.types import Task, UserError

Log = Callable[[str], None]
"""Receives one line for the user."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Which records to read, and how they become prompts.

    >>> Data(path="openai/gsm8k", subset="main", split="test", limit=200).path
    'openai/gsm8k'
    """

    path: "str | Records"
    """A file (JSONL, JSON, Parquet, CSV, also gzipped; Arrow), a directory that `datasets` saved, or a data
    set of the Hub as owner/name."""
    split: str | None = None
    """The split of a data set; by default train."""
    subset: str | None = None
    """The subset of a data set of the Hub, which calls it a configuration."""
    limit: int | None = None
    """Use only the first records, after shuffling."""
    seed: int | None = None
    """Shuffles the records; without it they stay in order."""
    bootstrap: int | None = None
    """Resamples the selected records with replacement, from this seed: another one for each model of an
    ensemble."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Columns of the data by standard name, where they differ: {"question": "problem"}."""
    system: str | None = None
    """A system message that is put before every conversation."""
    template: str | None = None
    """The prompt, with fields of the record in braces: "What is {a} + {b}?"."""
    bad: Literal["error", "skip"] = "error"
    """Whether a record that cannot be used stops the run (error), or is left out and counted (skip)."""

    def __post_init__(self) -> None:
        if not str(self.path).strip():
            raise ValueError("path must not be empty")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be 1 or more, not {self.limit}")
        if self.system is not None and not self.system.strip():
            raise ValueError("system must not be blank; leave it out")
        if self.bad not in ("error", "skip"):
            raise ValueError(f"bad must be error or skip, not {self.bad!r}")
        for name in self.columns:
            if name not in NAMES:
                hint = did_you_mean(name, NAMES) or f"known are {', '.join(NAMES)}"
                raise ValueError(f"columns has no place for {name!r}; {hint}")
        if self.template is not None:
            placeholders(self.template)
            if any(name in PROMPTS for name in self.columns):
                raise ValueError("template makes the prompt, so columns must not name another")

    def read(self) -> Iterator[Record]:
        """Yield the records, each with its place. Raises UserError if they cannot be read."""
        if isinstance(self.path, Records):
            return self.path.read()
        refuse_memory(self.path, "give the data again, or save them and name the file")
        return iterate_records(self.path, split=self.split, subset=self.subset)


class Records:
    """Records, or tasks, that a program passes as objects.

    Those with one digest are equal, also to their name in a file.

    >>> str(Records.of([{"prompt": "1 + 1?", "answer": "2"}]))
    'memory:1 records, becc3bb2'
    """

    __object__ = True

    def __init__(
        self,
        name: str,
        records: Sequence[Mapping[str, Any]],
        tasks: Sequence[Task] = (),
        typed: frozenset[str] = frozenset(),
    ) -> None:
        """tasks: those that the records were made from, if any.

        typed: columns of a table in which null may stand for a missing key (posttrain.data.records.Record).
        """
        self.name, self.records, self.tasks, self.typed = name, records, tasks, typed

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return str(self) == str(other) if isinstance(other, str | Records) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.name)

    @staticmethod
    def of(items: Iterable[Any], typed: frozenset[str] = frozenset()) -> "Records":
        """Return mappings or tasks as Records. Raises UserError for anything else, and for no entries."""
        entries = list(without_decoding(items))
        wrong = next((entry for entry in entries if not isinstance(entry, Mapping | Task)), None)
        if not entries or wrong is not None:
            problem = f"an entry is of {type(wrong).__name__}" if entries else "there are no records"
            raise UserError("data", problem, "give dictionaries such as {'prompt': ..., 'answer': ...}")
        tasks = [entry for entry in entries if isinstance(entry, Task)]
        records = [_to_plain(_record_of_task(e) if isinstance(e, Task) else e) for e in entries]
        text = json.dumps(records, sort_keys=True, default=_digest_text)
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
        tasks = tasks if len(tasks) == len(entries) else []  # a mixture is read as records
        return Records(f"{MEMORY}{len(records)} records, {digest}", records, tuple(tasks), typed)

    def read(self) -> Iterator[Record]:
        """Yield the records with their numbers."""
        for number, record in enumerate(self.records, start=1):
            yield record_of_row(record, f"data:{number}", self.typed)


def _to_plain(value: Any) -> Any:
    """Return arrays, sets and keys of mappings as types that JSON has; other values unchanged."""
    if isinstance(value, Mapping):
        return {str(key): _to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_to_plain, value)) if type(value) in (list, tuple) else value
    if isinstance(value, set | frozenset):
        return sorted(map(_to_plain, value), key=repr)
    return _to_plain(value.tolist()) if hasattr(value, "tolist") else value


def _digest_text(value: Any) -> str:
    """Return the text of another object in the digest, which is the same in every process."""
    says = any(vars(kind).keys() & {"__str__", "__repr__"} for kind in type(value).__mro__[:-1])
    return str(value) if says else type(value).__name__


def _record_of_task(task: Task) -> dict[str, Any]:
    prompt: Any = [dict(message) for message in task.messages]
    if not task.conversational and len(prompt) == 1 and prompt[0].get("role") == "user":
        prompt = prompt[0].get("content")
    answer = {} if task.typed_answer is None else {"answer": task.typed_answer}
    return {**task.fields, "id": task.id, "prompt": prompt, **answer}


class Form(NamedTuple):
    """The form in which a record was recognised."""

    noun: str
    """In the singular; the plural ends with s."""
    fields: str
    """The fields that were read."""


class Item(Protocol):
    """An object with an id that is made from a record."""

    @property
    def id(self) -> str:
        """Unique in its set."""
        ...

    @property
    def source(self) -> str:
        """The "file:line" of its record."""
        ...


T = TypeVar("T", bound=Item)


def ignore_line(line: str) -> None: ...


def gather(data: Data, shape: Callable[[Fields], tuple[Form, Sequence[T]]], say: Log) -> list[T]:
    """Return the items of the selected records in their order; `shape` makes the items of one record.

    Reports the forms of the records in one line, and what was skipped in another. Raises UserError at the
    first faulty record; with bad = "skip" only if all are faulty. Without a seed, records behind the limit
    are not read; with a seed, ids must be unique among all records, selected or not.
    """
    count, file = 0, ""
    groups: list[Sequence[T]] = []
    forms: Counter[Form] = Counter()
    faults: list[UserError] = []
    sources: dict[str, str] = {}
    standard_names: set[str] = set()
    unread: Counter[str] = Counter()
    notes: Counter[str] = Counter()
    for record in data.read():
        count += 1
        file = file or record.source.rpartition(":")[0]
        try:
            fields = Fields(record, data.columns, data.template, data.system)
            form, items = _shape_one(fields, shape, sources)
        except UserError as fault:
            if data.bad == "error":
                raise
            faults.append(fault)
            continue
        groups.append(items)
        forms[form] += 1
        standard_names |= fields.looked_for
        unread.update(fields.unread_context)
        notes.update(fields.notes)
        if data.seed is None and len(groups) == data.limit:
            break
    if not groups:
        first = faults[0]
        problem = f"none of its {count} records can be used; the first: {first.problem}"
        raise UserError(first.key, problem, first.fix)
    _check_columns(data, standard_names, forms.most_common(1)[0][0])
    if data.seed is not None:
        random.Random(data.seed).shuffle(groups)
    selected = groups[: data.limit]
    if data.bootstrap is not None:
        selected = random.Random(data.bootstrap).choices(selected, k=len(selected))
    some = f"; used: {len(selected)}" if len(selected) < len(groups) else ""
    some = "; read up to the limit" if data.seed is None and len(groups) == data.limit else some
    say(f"{file}: {'; '.join(_count_text(form, n) for form, n in forms.most_common())}{some}")
    for note, number in notes.most_common():
        say(f"{file}: {note} ({number} of {count} records)")
    if unread:
        names = ", ".join(f"{name} ({count})" for name, count in unread.most_common())
        say(f"{file}: not part of the prompts, though other trainers show it: {names}")
    if faults:
        say(f"{file}: {len(faults)} of {count} records skipped: {summary(faults)}")
    return [item for items in selected for item in items]


def _shape_one(
    fields: Fields, shape: Callable[[Fields], tuple[Form, Sequence[T]]], sources: dict[str, str]
) -> tuple[Form, Sequence[T]]:
    form, items = shape(fields)
    for item in items:
        if item.id in sources:
            raise UserError(fields.source, f"id {item.id!r} is that of {sources[item.id]} too")
    sources.update((item.id, fields.source) for item in items)
    return form, items


def _check_columns(data: Data, names: Container[str], form: Form) -> None:
    """Raise UserError if `columns` names a column for something that these records are not made from."""
    for name, column in data.columns.items():
        if name not in names:
            problem = (
                f"columns takes {column!r} for {name}, which is not read of a {form.noun} of {form.fields}"
            )
            raise UserError(str(data.path), problem, "leave it out")


def _count_text(form: Form, number: int) -> str:
    return f"{number} {form.noun}{'' if number == 1 else 's'} in the form {form.fields}"


def summary(faults: Sequence[UserError], *, reasons: bool = False) -> str:
    """Return each kind of fault with its count and its first place, the most frequent first.

    Numbers and quotations are details of one record and are left out; so is, without `reasons`, what follows
    a colon.
    """
    kinds: dict[str, list[str]] = {}
    for fault in faults:
        general = re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "…", fault.problem)
        kinds.setdefault(general if reasons else re.split(r"[:;] ", general)[0], []).append(fault.key)
    ordered = sorted(kinds.items(), key=lambda entry: -len(entry[1]))
    return ", ".join(f"{len(places)} × {problem} (first {places[0]})" for problem, places in ordered)
