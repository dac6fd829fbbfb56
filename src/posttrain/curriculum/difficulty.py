"""Difficulty of tasks by one of their fields: a number to sort by, or buckets of about the same size."""

import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import Any

from posttrain.types import Task, UserError


def difficulty(task: Task, field: str) -> float:
    """Return the task's field as a finite number; raise UserError at the task's source if it is not one.

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


def split_buckets(tasks: Sequence[Task], field: str, count: int) -> list[list[Task]]:
    """Split tasks by a field: one bucket per value, or `count` buckets of about the same size.

    Values rise from bucket to bucket. Equal values share a bucket, so there may be fewer than `count`. Texts
    make buckets too if there are at most `count` different ones.

    Raises UserError for a task without the field, for too many texts and for a single bucket.

    >>> tasks = [Task(id=str(n), messages=(), fields={"level": n}) for n in (5, 1, 1, 3, 9, 2)]
    >>> [[task.fields["level"] for task in bucket] for bucket in split_buckets(tasks, "level", 3)]
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
    """Return the least value of each bucket; one more value would take its size farther from its share."""
    counts = sorted(Counter(values).items())
    starts, size, rest = [counts[0][0]], 0, len(values)
    for value, times in counts:
        share = rest / (count - len(starts) + 1)
        if size and len(starts) < count and size + times / 2 > share:
            starts.append(value)
            size, rest = 0, rest - size
        size += times
    return starts


def _value(task: Task, field: str) -> Any:
    if field not in task.fields:
        fields = ", ".join(sorted(task.fields))
        raise UserError(
            task.source or "curriculum.field",
            f"task {task.id!r} has no field {field!r}",
            f"set curriculum.field to one of {fields}" if fields else "give every task a difficulty",
        )
    return task.fields[field]
