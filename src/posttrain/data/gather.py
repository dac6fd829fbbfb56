"""Which records are read, and what is said of them."""

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
from posttrain.data.records import Record, iterate_records, of_columns, undecoded
from posttrain.types import Task, UserError

Say = Callable[[str], None]
"""Takes one line for the user."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Which records to read, and how they become prompts.

    >>> Data(path="openai/gsm8k", subset="main", split="test", limit=200).path
    'openai/gsm8k'
    """

    path: "str | Records"
    """A file (JSONL, JSON, Parquet, CSV, also gzipped; Arrow), or a data set, of the Hub as owner/name or
    saved."""
    split: str | None = None
    """Of a data set of the Hub; train if not given."""
    subset: str | None = None
    """Of a data set of the Hub, which calls it a configuration."""
    limit: int | None = None
    """Use only the first records, after shuffling."""
    seed: int | None = None
    """Shuffles the records; not given leaves them in order."""
    bootstrap: int | None = None
    """Draws the chosen records again with replacement, from this seed: another one for each model of an
    ensemble."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Columns of the data that are called otherwise: {"question": "problem"}."""
    system: str | None = None
    """A system message put before every conversation."""
    template: str | None = None
    """The prompt, with fields of the record in braces: "What is {a} + {b}?"."""
    bad: Literal["error", "skip"] = "error"
    """A record that cannot be used stops the run, or is left out and counted."""

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
        """Yield the records, each with its place; UserError for whatever cannot be read."""
        if isinstance(self.path, Records):
            return self.path.read()
        refuse_memory(self.path, "give the data again, or save them and name the file")
        return iterate_records(self.path, split=self.split, subset=self.subset)


class Records:
    """Records that a program holds, or tasks; those of one digest are equal, also to their name in a file.

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
        """tasks: those that the records were made of, if there were some.

        typed: columns of a table in which a null may stand for a missing key (posttrain.data.records.Record).
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
        """Return these mappings, or these tasks; UserError for anything else, and for nothing."""
        given = list(undecoded(items))
        wrong = next((each for each in given if not isinstance(each, Mapping | Task)), None)
        if not given or wrong is not None:
            problem = f"an entry is of {type(wrong).__name__}" if given else "there are no records"
            raise UserError("data", problem, "give dictionaries such as {'prompt': ..., 'answer': ...}")
        tasks = [each for each in given if isinstance(each, Task)]
        records = [_plain(_recorded(each) if isinstance(each, Task) else each) for each in given]
        text = json.dumps(records, sort_keys=True, default=_told)
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
        tasks = tasks if len(tasks) == len(given) else []  # a mix is read as records
        return Records(f"{MEMORY}{len(records)} records, {digest}", records, tuple(tasks), typed)

    def read(self) -> Iterator[Record]:
        """Yield the records, numbered."""
        for number, each in enumerate(self.records, start=1):
            yield of_columns(each, f"data:{number}", self.typed)


def _plain(value: Any) -> Any:
    """What a file could hold, of arrays, sets and mappings with other keys than texts; the rest as it is."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value
    if isinstance(value, set | frozenset):
        return sorted(map(_plain, value), key=repr)
    return _plain(value.tolist()) if hasattr(value, "tolist") else value


def _told(value: Any) -> str:
    """What stands for other objects in a digest: the same in every process."""
    says = any(vars(kind).keys() & {"__str__", "__repr__"} for kind in type(value).__mro__[:-1])
    return str(value) if says else type(value).__name__


def _recorded(task: Task) -> dict[str, Any]:
    prompt: Any = [dict(message) for message in task.messages]
    if not task.conversational and len(prompt) == 1 and prompt[0].get("role") == "user":
        prompt = prompt[0].get("content")
    answer = {} if task.answer is None else {"answer": task.typed_answer}
    return {**task.fields, "id": task.id, "prompt": prompt, **answer}


class Form(NamedTuple):
    """What a record was recognised as."""

    noun: str
    """In the singular; the plural has an s."""
    fields: str
    """The fields it was made of."""


class Item(Protocol):
    """Something with an id, made of a record."""

    @property
    def id(self) -> str:
        """Unique in its set."""
        ...

    @property
    def source(self) -> str:
        """The record's "file:line"."""
        ...


T = TypeVar("T", bound=Item)


def silent(line: str) -> None: ...


def gather(data: Data, shape: Callable[[Fields], tuple[Form, Sequence[T]]], say: Say) -> list[T]:
    """What the chosen records become, in their order; `shape` makes the items of one of them.

    The forms found are said in one line, and what was skipped in another. UserError at the first record
    that is at fault, and if all are. Without a seed the records behind the limit are not read; with one,
    ids are compared among all records, chosen or not.
    """
    count, file = 0, ""
    found: list[Sequence[T]] = []
    forms: Counter[Form] = Counter()
    faults: list[UserError] = []
    seen: dict[str, str] = {}
    looked_for: set[str] = set()
    beside: Counter[str] = Counter()
    for record in data.read():
        count += 1
        file = file or record.source.rpartition(":")[0]
        try:
            fields = Fields(record, data.columns, data.template, data.system)
            form, items = _one(fields, shape, seen)
        except UserError as fault:
            if data.bad == "error":
                raise
            faults.append(fault)
            continue
        found.append(items)
        forms[form] += 1
        looked_for |= fields.looked_for
        beside.update(fields.beside)
        if data.seed is None and len(found) == data.limit:
            break
    if not found:
        first = faults[0]
        raise UserError(
            first.key, f"none of its {count} records can be used; the first: {first.problem}", first.fix
        )
    _check_columns(data, looked_for, forms.most_common(1)[0][0])
    if data.seed is not None:
        random.Random(data.seed).shuffle(found)
    chosen = found[: data.limit]
    if data.bootstrap is not None:
        chosen = random.Random(data.bootstrap).choices(chosen, k=len(chosen))
    some = f"; used of them: {len(chosen)}" if len(chosen) < len(found) else ""
    some = "; read up to the limit" if data.seed is None and len(found) == data.limit else some
    say(f"{file}: {'; '.join(_counted(form, n) for form, n in forms.most_common())}{some}")
    if beside:
        names = ", ".join(f"{name} ({count})" for name, count in beside.most_common())
        say(f"{file}: no part of any prompt, though other trainers show it: {names}")
    if faults:
        say(f"{file}: {len(faults)} of {count} records skipped: {summary(faults)}")
    return [item for items in chosen for item in items]


def _one(
    fields: Fields, shape: Callable[[Fields], tuple[Form, Sequence[T]]], seen: dict[str, str]
) -> tuple[Form, Sequence[T]]:
    form, items = shape(fields)
    for item in items:
        if item.id in seen:
            raise UserError(fields.source, f"id {item.id!r} is that of {seen[item.id]} too")
    seen.update((item.id, fields.source) for item in items)
    return form, items


def _check_columns(data: Data, looked_for: Container[str], form: Form) -> None:
    """UserError for a column that is named for something which these records are not made of."""
    for name, column in data.columns.items():
        if name not in looked_for:
            problem = (
                f"columns takes {column!r} for {name}, which is not read of a {form.noun} of {form.fields}"
            )
            raise UserError(str(data.path), problem, "leave it out")


def _counted(form: Form, number: int) -> str:
    return f"{number} {form.noun}{'' if number == 1 else 's'} in the form {form.fields}"


def summary(faults: Sequence[UserError], *, reasons: bool = False) -> str:
    """Return each kind of fault with its number and its first place, the most frequent first.

    Numbers and quotations are particulars of one record, and without `reasons` so is what follows a colon.
    """
    kinds: dict[str, list[str]] = {}
    for fault in faults:
        general = re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "…", fault.problem)
        kinds.setdefault(general if reasons else re.split(r"[:;] ", general)[0], []).append(fault.key)
    ordered = sorted(kinds.items(), key=lambda entry: -len(entry[1]))
    return ", ".join(f"{len(places)} × {what} (first {places[0]})" for what, places in ordered)
