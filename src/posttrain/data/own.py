"""Tasks that a function of the user makes: the table [task.own]."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from posttrain.base.usercode import cause, load_edited
from posttrain.data.gather import Data, Records
from posttrain.data.load import load_tasks
from posttrain.data.protocol import Games
from posttrain.types import Task, UserError


@dataclass(frozen=True, kw_only=True)
class OwnTasks:
    """Tasks made by a function of your own; the run keeps a copy of its file."""

    function: str
    """module:function or path/to/file.py:function, called with the options. It returns or yields tasks:
    dictionaries as in `[task.data]`, or posttrain.types.Task."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The keyword arguments of the function."""
    held_out: int = 0
    """Number of its last tasks that are only evaluated on."""

    def __post_init__(self) -> None:
        if self.held_out < 0:
            raise ValueError(f"held_out must be 0 or more, not {self.held_out}")

    def make(self, limit: int, seed: int, games: Games) -> tuple[list[Task], list[Task]]:
        """Return the tasks to train on, and at most `limit` of the held-out ones."""
        tasks = self.tasks()
        count = len(tasks) - self.held_out
        return tasks[:count], tasks[count:][:limit]

    def tasks(self) -> list[Task]:
        """Return all tasks in the order of the function.

        Raises UserError if it fails, if something that it returns is not a task, or if two tasks have one id.
        """
        where = "task.own.function"
        function = load_edited(self.function, where)
        try:
            items = list(function(**self.options))
        except Exception as error:
            raise UserError(where, f"{self.function} fails: {cause(error)}") from None
        try:
            tasks = load_tasks(Data(path=Records.of(items))) if items else []
        except UserError as error:
            raise UserError(where, f"{self.function} returns something that is not a task: {error}") from None
        if len(tasks) <= self.held_out:
            raise UserError(where, f"{self.function} makes {len(tasks)} tasks, none to train on")
        return tasks
