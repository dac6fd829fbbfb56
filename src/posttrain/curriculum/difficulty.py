"""Tasks by a field of theirs: a number to sort by, and buckets of about as many tasks each."""

import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import Any

from posttrain.types import Task, UserError


def difficulty(task: Task, field: str) -> float:
    """The task's field as a finite number; UserError at the task's source if it is none.

    >>> difficulty(Task(id="a", messages=(), fields={"level": 3}), "level")
    3.0
    """
    value = _value(task, field)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not abs(value) <= sys.float_info.max:
        raise UserError(
            task.source or "curriculum.field",
            f"field {field!r} of task {task.id!r} is {value!r}",
            "give every task a finite number",
        )
    return float(value)


def bucketed(tasks: Sequence[Task], field: str, count: int) -> list[list[Task]]:
    """The tasks by the value of a field: one of each, or of about as many tasks.

    Values rise from bucket to bucket, and equal ones are never cut apart, so there may be fewer than
    `count`. Texts make buckets too, as long as there are no more than `count` of them.

    Raises UserError for a task without the field, for texts that are too many and for a single bucket.

    >>> tasks = [Task(id=str(n), messages=(), fields={"level": n}) for n in (5, 1, 1, 3, 9, 2)]
    >>> [[task.fields["level"] for task in bucket] for bucket in bucketed(tasks, "level", 3)]
    [[1, 1], [3, 2], [5, 9]]
    """
    texts = all(isinstance(_value(task, field), str) for task in tasks)
    values = [task.fields[field] if texts else difficulty(task, field) for task in tasks]
    starts = sorted(set(values))
    if texts and len(starts) > count:
        raise UserError(
            "curriculum.buckets",
            f"field {field!r} has {len(starts)} different texts, and there are {count} buckets",
            "raise it, or name a field of numbers",
        )
    if len(starts) == 1:
        raise UserError(
            "curriculum.field",
            f"field {field!r} is {starts[0]!r} in every task, so there is nothing to choose from",
            "name another field",
        )
    starts = _starts(values, count) if len(starts) > count else starts
    out: list[list[Task]] = [[] for _ in starts]
    for task, value in zip(tasks, values, strict=True):
        out[bisect_right(starts, value) - 1].append(task)
    return out


def _starts(values: Sequence[float], count: int) -> list[float]:
    """The least value of each bucket: it is closed when another value would take it farther from its due."""
    counts = sorted(Counter(values).items())
    starts, held, rest = [counts[0][0]], 0, len(values)
    for value, times in counts:
        due = rest / (count - len(starts) + 1)
        if held and len(starts) < count and held + times / 2 > due:
            starts.append(value)
            held, rest = 0, rest - held
        held += times
    return starts


def _value(task: Task, field: str) -> Any:
    if field not in task.fields:
        known = ", ".join(sorted(task.fields))
        raise UserError(
            task.source or "curriculum.field",
            f"task {task.id!r} has no field {field!r}",
            f"set curriculum.field to one of {known}" if known else "give every task a difficulty",
        )
    return task.fields[field]
