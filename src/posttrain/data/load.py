"""Tasks and conversations from records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from posttrain.base.name_hints import did_you_mean
from posttrain.data.calls import tools_of
from posttrain.data.fields import WORKED, Fields
from posttrain.data.gather import Data, Form, Records, Say, gather, silent
from posttrain.data.records import Record
from posttrain.data.shapes import shaped
from posttrain.types import Message, Task, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages of which the last is the assistant's, for supervised training.

    An assistant's message may have `tool_calls`, and the results of those are messages of the role tool.
    """

    id: str
    messages: tuple[Message, ...]
    reward: Any = None
    """What the last answer was worth: the record's field `reward` as it stands."""
    source: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of what can be called, as chat templates are given them."""


def load_tasks(data: Data, *, say: Say = silent) -> list[Task]:
    """The tasks of the records; UserError at the first record that is none.

    Ids are the records' own `id`, or else their file and line, and the same under any seed and limit.
    `say` is told in one line which forms were recognised, and what was skipped in another.
    """
    if isinstance(data.path, Records) and data.path.tasks:
        return _given(data, data.path.tasks)
    return gather(data, _task, say)


def task_of(record: Record) -> Task:
    """The task of one record; UserError at its place if it is none."""
    [task] = _task(Fields(record, {}))[1]
    return task


def _given(data: Data, tasks: Sequence[Task]) -> list[Task]:
    """Tasks that a program made; UserError for one that no record would have become."""
    for each in fields(Data):
        if each.name != "path" and getattr(data, each.name) not in (each.default, {}):
            problem, fix = (
                "is never read: the tasks are given as they are",
                "leave it out, or give dictionaries",
            )
            raise UserError(f"task.data.{each.name}", problem, fix)
    known: set[str] = set()
    for number, task in enumerate(tasks, start=1):
        texts = [m.get(key) for m in task.messages for key in ("role", "content")]
        for wrong, problem in (
            (not isinstance(task.id, str), f"its id is {task.id!r:.40}, not text"),
            (task.id in known, f"another task is called {task.id!r:.40}"),
            (not isinstance(task.answer, str | None), f"its answer is {task.answer!r:.40}, not text"),
            (
                not texts or not all(isinstance(x, str) for x in texts),
                "a message has no text as role or content",
            ),
        ):
            if wrong:
                raise UserError(f"data:{number}", problem, "mend the Task, or give a dictionary")
        known.add(task.id)
    return list(tasks)


def _task(fields: Fields) -> tuple[Form, list[Task]]:
    record = shaped(fields)
    if record.messages[-1]["role"] == "assistant":
        raise fields.fault(
            "the conversation ends with the assistant, which leaves nothing to answer",
            "drop the last message, or use the record for supervised training",
        )
    task = Task(
        id=record.id,
        messages=record.messages,
        answer=record.answer,
        answer_value=record.answer_value,
        fields=record.rest,
        source=fields.source,
        conversational=fields.conversational,
    )
    return Form("task", record.form), [task]


def load_conversations(data: Data, *, say: Say = silent) -> list[Conversation]:
    """The conversations of the records, each ending with the assistant; UserError at the first that does not.

    A record with a prompt and an answer is a conversation of two messages, and of a pair the chosen
    answer is learnt. `say` is told in one line which forms were recognised, and what was skipped in another.
    """
    return gather(data, _conversation, say)


def _conversation(fields: Fields) -> tuple[Form, list[Conversation]]:
    fields.calls = True
    record = shaped(fields)
    messages = record.messages
    if messages[-1]["role"] != "assistant":
        if record.completion is None or not str(record.completion).strip():
            names = ("answer", *WORKED)
            if empty := next((name for name in names if name in record.rest), ""):
                what = f"there is no answer to learn: {empty} is {record.rest[empty]!r:.40}"
                raise fields.fault(what, "leave the record out, or all such with bad = 'skip'")
            near = next(filter(None, (did_you_mean(name, record.rest) for name in names)), "")
            raise fields.fault(
                f"there is no answer to learn; it has {fields.names}",
                near or "set task.data.columns.completion to its column",
            )
        said = record.completion
        messages = (*messages, *([{"role": "assistant", "content": said}] if isinstance(said, str) else said))
    if messages[0]["role"] == "assistant" or all(m["role"] in ("system", "assistant") for m in messages):
        raise fields.fault("the assistant answers nobody")
    tools = tools_of(fields, messages)
    found = Conversation(
        id=record.id,
        messages=messages,
        reward=fields.raw("reward") if fields.has("reward") else None,
        source=fields.source,
        tools=tools,
    )
    return Form("conversation", f"{record.form}{', tools' if tools else ''}"), [found]
