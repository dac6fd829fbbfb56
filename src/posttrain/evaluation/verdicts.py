"""Judge the responses of a file, for `posttrain verify`: without a model or training."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.base.name_hints import did_you_mean
from posttrain.data.fields import answer_text, kind
from posttrain.data.records import Record, read_records
from posttrain.types import Message, Task, UserError, Verdict
from posttrain.verifiers.pool import Pool
from posttrain.verifiers.protocol import Group, Verifier

_IDS = ("id", "task_id")
SCORED = "scored"
"""Label of verdicts that have no class, only a score."""


@dataclass(frozen=True)
class Response:
    """A response of a file, and its task."""

    task: Task
    text: str
    fault: str = ""
    """Why the response is not a text that can be judged; empty if it is."""
    gold: Any = None
    """Its field `gold`, or `label`: whether a person finds it right."""
    source: str = ""
    """Origin of the response as "file:line"."""
    group: str = ""
    """Responses to a task are one group if this is equal."""


@dataclass(frozen=True)
class RecordedAnswer:
    """An answer that a run has recorded, with its verdict then."""

    response: Response
    file: str
    """The name of the file of samples, without its ending: 000012, eval_000012."""
    sample: int
    label: str
    score: float | None

    def has_changed(self, verdict: Verdict) -> bool:
        """Return whether another verdict has another score, or another class if both have a class."""
        same = self.score == verdict.score
        if self.score is not None and verdict.score is not None:
            same = math.isclose(self.score, verdict.score, abs_tol=1e-9)
        return not (same and (self.label == verdict.label or SCORED in (self.label, verdict.label)))


@dataclass(frozen=True)
class Judges:
    """The verifiers that judge a run's answers, each for the tasks of some sources."""

    by_source: Mapping[str, Verifier | None] = field(default_factory=dict)
    """By the name of a source; None if an environment gives its rewards."""
    default: Verifier | None = None
    """The verifier of all other sources."""

    def of(self, source: str) -> Verifier | None:
        """Return the verifier of the tasks of a source; None if nothing judges them."""
        return self.by_source.get(source, self.default)


def read_tasks(path: Path) -> dict[str, Task]:
    """Return the tasks of a file by their `id`, with all other fields unchanged.

    A `prompt` is text or messages. Raises UserError with file and line for a record without an id, and for
    two with the same.
    """
    tasks: dict[str, Task] = {}
    for record in read_records(str(path)):
        name = _id(record)
        if name in tasks:
            raise UserError(record.source, f"a second task is called {name!r}")
        value = record.fields.get("answer")
        answer = record.cells.get("answer", value)
        fields = {k: v for k, v in record.fields.items() if k not in ("id", "answer")}
        prompt = record.cells.get("prompt", fields.get("prompt"))
        tasks[name] = Task(
            id=name,
            messages=parse_prompt(prompt),
            answer=answer_text(answer),
            answer_value=None if isinstance(value, str) else value,
            fields=fields,
            source=record.source,
            conversational=isinstance(prompt, list),
        )
    return tasks


def read_responses(path: Path, tasks: dict[str, Task]) -> list[Response]:
    """Return the responses of a file, in order; UserError with file and line for a response without a task.

    A response that is not text, or has bytes that are not UTF-8, has a fault; the others are still judged.
    """
    responses = []
    for record in read_records(str(path), whole=False):
        name = _id(record)
        if name not in tasks:
            fix = did_you_mean(name, list(tasks)[:1000])
            raise UserError(record.source, f"there is no task {name!r}", fix)
        if "response" not in record.fields:
            fix = did_you_mean("response", record.fields)
            raise UserError(record.source, "there is no response", fix)
        text = record.cells.get("response", record.fields["response"])
        fault = _unreadable(text)
        gold = record.fields.get("gold", record.fields.get("label"))
        responses.append(Response(tasks[name], "" if fault else text, fault, gold=gold, source=record.source))
    return responses


def _unreadable(text: object) -> str:
    """Return why a response cannot be read, or an empty text."""
    if not isinstance(text, str):
        return f"it is {kind(text)}, not text"
    if text.isascii():
        return ""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ord(text[error.start])
        byte = 0xDC80 <= half <= 0xDCFF
        return f"byte 0x{half - 0xDC00:02x} is not UTF-8" if byte else f"\\u{half:04x} is half a character"
    return ""


def parse_prompt(prompt: object) -> tuple[Message, ...]:
    """Return the messages of a prompt; empty if it is neither text nor messages."""
    if isinstance(prompt, str):
        return ({"role": "user", "content": prompt},)
    turns = prompt if isinstance(prompt, list) else []
    valid = all(isinstance(t, dict) and isinstance(t.get("content"), str) for t in turns)
    return tuple(turns) if valid else ()


def verdicts(
    verifier: Verifier,
    responses: Sequence[Response],
    *,
    workers: int,
    deadline_s: float,
    on_progress: Callable[[int], None],
) -> Iterator[Verdict]:
    """Yield the verdicts in the order of the responses, each as soon as those before it are available.

    `on_progress` receives the number judged. Responses to a task that the verifier cannot judge, such as one
    with a meaningless answer, get a verdict without a score, of class `data_error`; a response that cannot be
    read has the score 0, of class `unreadable`. A verifier that compares gets the responses to a task with
    the same `group` as a group.
    """
    verifier.require()
    # Tasks of two sources, or of training and evaluation, may share an id.
    tasks = {id(response.task): response.task for response in responses}
    faulty = {key: fault for key, task in tasks.items() if (fault := _fault(verifier, task))}
    with Pool(workers=workers, deadline_s=deadline_s) as pool:
        arrived: dict[int, Verdict] = {}
        places: dict[tuple[int, str], list[int]] = {}
        for place, response in enumerate(responses):
            if not response.fault and id(response.task) not in faulty:
                # Without comparison the order of submission is the order in which verdicts are yielded.
                group = response.group if verifier.grouped else str(place)
                places.setdefault((id(response.task), group), []).append(place)
        tickets: dict[int, int] = {}
        for same in places.values():
            texts = tuple(responses[place].text for place in same)
            tickets |= zip(
                same,
                pool.submit_group(verifier, Group(task=responses[same[0]].task, responses=texts)),
                strict=True,
            )
        for place, response in enumerate(responses):
            if id(response.task) in faulty:
                yield Verdict(score=None, label="data_error", reason=faulty[id(response.task)])
                continue
            if response.fault:
                yield Verdict(score=0.0, label="unreadable", reason=response.fault)
                continue
            ticket = tickets[place]
            while ticket not in arrived:
                arrived.update(pool.poll(1.0))
                on_progress(len(arrived))
            yield arrived[ticket]


def _fault(verifier: Verifier, task: Task) -> str:
    """Return why a task cannot be judged, or an empty text."""
    try:
        verifier.check(task)
    except UserError as error:
        return str(error)
    return ""


def _id(record: Record) -> str:
    for name in _IDS:
        value = record.cells.get(name, record.fields.get(name))
        if isinstance(value, (str, int)) and not isinstance(value, bool) and value != "":
            return str(value)
    raise UserError(record.source, "there is no id", did_you_mean("id", record.fields))
