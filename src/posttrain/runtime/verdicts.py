"""Judging responses that lie in files, for `posttrain verify`: no model, no training."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.data.records import Record, read_records
from posttrain.nearest import did_you_mean
from posttrain.types import Task, UserError, Verdict
from posttrain.verifiers.pool import Pool
from posttrain.verifiers.protocol import Verifier

_IDS = ("id", "task_id")


@dataclass(frozen=True)
class Response:
    """One response of a file, and the task it is to."""

    task: Task
    text: str


def read_tasks(path: Path) -> dict[str, Task]:
    """The tasks of a file by their `id`, every other field as it stands.

    UserError with file and line for a record without an id, and for two with the same.
    """
    tasks: dict[str, Task] = {}
    for record in read_records(str(path)):
        name = _id(record)
        if name in tasks:
            raise UserError(f"a second task is called {name!r}", where=record.source)
        answer = record.fields.get("answer")
        fields = {k: v for k, v in record.fields.items() if k not in ("id", "answer")}
        tasks[name] = Task(
            id=name, messages=(), answer=_text(answer, record), fields=fields, source=record.source
        )
    return tasks


def read_responses(path: Path, tasks: dict[str, Task]) -> list[Response]:
    """The responses of a file, in order; UserError with file and line for one that is to no task."""
    responses = []
    for record in read_records(str(path)):
        name = _id(record)
        if name not in tasks:
            mend = did_you_mean(name, list(tasks)[:1000])
            raise UserError(f"there is no task {name!r}", where=record.source, mend=mend)
        text = record.fields.get("response")
        if not isinstance(text, str):
            mend = did_you_mean("response", record.fields) if text is None else "it must be text"
            raise UserError("there is no response", where=record.source, mend=mend)
        responses.append(Response(tasks[name], text))
    return responses


def verdicts(
    verifier: Verifier,
    responses: Sequence[Response],
    *,
    workers: int,
    deadline_s: float,
    seen: Callable[[int], None],
) -> Iterator[Verdict]:
    """The verdicts in the order of the responses, each as soon as those before it are there.

    `seen` is told how many have been judged. Responses to a task that cannot be judged, as when its
    answer has no meaning, get a verdict without a score, of class `data_error`.
    """
    verifier.require()
    faulty = {
        task.id: fault
        for task in {r.task.id: r.task for r in responses}.values()
        if (fault := _fault(verifier, task))
    }
    with Pool(workers=workers, deadline_s=deadline_s) as pool:
        arrived: dict[int, Verdict] = {}
        tickets = [None if r.task.id in faulty else pool.submit(verifier, r.task, r.text) for r in responses]
        for response, ticket in zip(responses, tickets, strict=True):
            if ticket is None:
                yield Verdict(score=None, label="data_error", reason=faulty[response.task.id])
                continue
            while ticket not in arrived:
                arrived.update(pool.poll(1.0))
                seen(len(arrived))
            yield arrived[ticket]


def _fault(verifier: Verifier, task: Task) -> str:
    """Why a task cannot be judged, or empty."""
    try:
        verifier.check(task)
    except UserError as error:
        return str(error)
    return ""


def _id(record: Record) -> str:
    for name in _IDS:
        value = record.fields.get(name)
        if isinstance(value, (str, int)) and not isinstance(value, bool) and value != "":
            return str(value)
    raise UserError("there is no id", where=record.source, mend=did_you_mean("id", record.fields))


def _text(answer: Any, record: Record) -> str | None:
    if answer is None or isinstance(answer, str):
        return answer
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        return str(answer)
    raise UserError(
        "the answer is not text or a number", where=record.source, mend="write it as the text it is"
    )
