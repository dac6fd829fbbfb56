"""Fields of the hint that a teacher reads after a task (`reference.hint`)."""

from collections.abc import Sequence, Set
from typing import Any

from posttrain.types import Task, UserError

OF_THE_ANSWER = ("reason", "sibling")
"""Fields that are not the task's."""


def fields_of(task: Task) -> dict[str, Any]:
    """Return the fields of a task that a hint may name."""
    return {**task.fields, "answer": task.answer}


def check_hint(names: Set[str], tasks: Sequence[Task]) -> None:
    """Raise UserError if a hint names a field that no task has."""
    fields = [fields_of(task).items() for task in tasks]
    names_of_tasks = {name for items in fields for name, value in items if value not in (None, "")}
    if missing := sorted(names - names_of_tasks - set(OF_THE_ANSWER)):
        fix = f"one of {', '.join(sorted({*names_of_tasks, *OF_THE_ANSWER}))}"
        raise UserError("reference.hint", f"no task has a field {missing[0]!r}", fix)
