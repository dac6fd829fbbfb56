"""Load tasks and conversations from records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from posttrain.base.name_hints import did_you_mean
from posttrain.data.calls import read_tools
from posttrain.data.fields import SOLUTIONS, Fields, kind
from posttrain.data.gather import Data, Form, Log, Records, gather, ignore_line
from posttrain.data.messages import answer_messages
from posttrain.data.records import Record
from posttrain.data.shapes import shape_record
from posttrain.types import Message, Task, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages for supervised training, the last of which is an assistant's.

    An assistant's message may have `tool_calls`, the results of which are messages of the role tool.
    """

    id: str
    messages: tuple[Message, ...]
    reward: Any = None
    """The reward of the last answer: the field `reward` of the record as it stands."""
    source: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of the tools, for the chat template."""


def load_tasks(data: Data, *, say: Log = ignore_line) -> list[Task]:
    """Return the tasks of the records. Raises UserError at the first record that is not a task.

    Ids are the records' own `id`, or else their file and line, and do not depend on seed and limit. `say`
    gets one line with the forms of the records, and one with what was skipped.
    """
    if isinstance(data.path, Records) and data.path.tasks:
        return _check_tasks(data, data.path.tasks)
    return gather(data, _task, say)


def task_of(record: Record) -> Task:
    """Return the task of one record. Raises UserError at its place if it is not a task."""
    [task] = _task(Fields(record, {}))[1]
    return task


def _check_tasks(data: Data, tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks that a program made. Raises UserError for one that no record could have become."""
    for option in fields(Data):
        if option.name != "path" and getattr(data, option.name) not in (option.default, {}):
            problem, fix = (
                "is never read: the tasks are given as they are",
                "leave it out, or give dictionaries",
            )
            raise UserError(f"task.data.{option.name}", problem, fix)
    ids: set[str] = set()
    for number, task in enumerate(tasks, start=1):
        texts = [m.get(key) for m in task.messages for key in ("role", "content")]
        for wrong, problem in (
            (not isinstance(task.id, str), f"its id is {task.id!r:.40}, not text"),
            (task.id in ids, f"another task is called {task.id!r:.40}"),
            (not isinstance(task.answer, str | None), f"its answer is {task.answer!r:.40}, not text"),
            (
                not texts or not all(isinstance(x, str) for x in texts),
                "a message has no text as role or content",
            ),
        ):
            if wrong:
                raise UserError(f"data:{number}", problem, "mend the Task, or give a dictionary")
        ids.add(task.id)
    return list(tasks)


def _task(fields: Fields) -> tuple[Form, list[Task]]:
    record = shape_record(fields)
    messages, answer, typed, rest = record.messages, record.answer, record.answer_value, record.rest
    if messages[-1]["role"] == "assistant":
        last, messages = messages[-1]["content"], messages[:-1]
        if not messages or messages[-1]["role"] not in ("user", "tool"):
            problem = "without the assistant's last message, the conversation ends with no message to answer"
            raise fields.fault(problem, "begin with a message of the user")
        if answer is None and typed is None:
            answer = last
            fields.notes.add("the assistant's last message is the answer, and not part of the prompt")
        else:
            rest = {"completion": last, **rest}
            fields.notes.add("the assistant's last message is the completion, and not part of the prompt")
    if typed is not None:
        text = "have no text to compare" if answer is None else "compare its text"
        fields.notes.add(
            f"answer is {kind(typed)}: a reward function gets it as it is, other verifiers {text}"
        )
    task = Task(
        id=record.id,
        messages=messages,
        answer=answer,
        answer_value=typed,
        fields=rest,
        source=fields.source,
        conversational=fields.conversational,
    )
    return Form("task", record.form), [task]


def load_conversations(data: Data, *, say: Log = ignore_line) -> list[Conversation]:
    """Return the conversations of the records. Raises UserError at the first without an answer at its end.

    A record with a prompt and an answer is a conversation of two messages; of a pair the chosen answer is
    used. `say` gets one line with the forms of the records, and one with what was skipped.
    """
    return gather(data, _conversation, say)


def _conversation(fields: Fields) -> tuple[Form, list[Conversation]]:
    fields.calls = True
    record = shape_record(fields)
    messages = record.messages
    if messages[-1]["role"] != "assistant":
        if record.completion is None or not str(record.completion).strip():
            names = ("answer", *SOLUTIONS)
            if empty := next((name for name in names if name in record.rest), ""):
                problem = f"there is no answer to learn: {empty} is {record.rest[empty]!r:.40}"
                raise fields.fault(problem, "leave the record out, or all such with bad = 'skip'")
            near = next(filter(None, (did_you_mean(name, record.rest) for name in names)), "")
            raise fields.fault(
                f"there is no answer to learn; it has {fields.names}",
                near or "set task.data.columns.completion to its column",
            )
        messages = (*messages, *answer_messages(record.completion))
    if messages[0]["role"] == "assistant" or all(m["role"] in ("system", "assistant") for m in messages):
        raise fields.fault("no message of a user precedes the assistant's")
    tools = read_tools(fields, messages)
    conversation = Conversation(
        id=record.id,
        messages=messages,
        reward=fields.raw("reward") if fields.has("reward") else None,
        source=fields.source,
        tools=tools,
    )
    return Form("conversation", f"{record.form}{', tools' if tools else ''}"), [conversation]
