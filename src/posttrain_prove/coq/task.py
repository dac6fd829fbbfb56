"""Check the fields of a task for Coq, and read its problem."""

import re

from posttrain.types import Task, UserError
from posttrain.verifiers.protocol import quote
from posttrain_prove.coq.check import CoqProblem
from posttrain_prove.coq.script import Sentence, split_sentences

_HEADER = re.compile(
    r"(?:(?:From\s+\S+\s+)?Require\b|Import\b|Export\b|(?:#\[local\]\s*|Local\s+)?Open\s+Scope\b"
    r"|(?:Set|Unset)\s+(?!Guard|Positivity|Universe\s+Checking)\w)"
)


def is_header(sentence: Sentence) -> bool:
    """Return whether a sentence may stand in a task's header: Require, Import, Open Scope or Set."""
    return _HEADER.match(sentence.code) is not None


def problem_of(task: Task) -> CoqProblem:
    """Return the problem in the task's fields. Raises UserError if a field is missing or malformed."""
    fields = {}
    for key in ("name", "statement", "header", "definitions", "gold"):
        value = task.fields.get(key, "")
        if not isinstance(value, str) or (key in ("name", "statement") and not value.strip()):
            raise UserError(task.source, f"task {task.id!r} needs text as its {key!r}")
        fields[key] = value.strip()
    if not re.fullmatch(r"[^\W\d][\w']*", fields["name"]):
        raise UserError(task.source, f"the name {fields['name']!r} of task {task.id!r} is not a name in Coq")
    # In brackets, as a brace or a minus at the start of a sentence would be a bullet.
    parts, error = split_sentences(f"Check ({fields['statement']}) .")
    if error or len(parts) != 1:
        raise UserError(
            task.source,
            f"the statement of task {task.id!r} is not one proposition: {quote(fields['statement'])}",
            "give the proposition alone, such as 'forall n : nat, n + 0 = n', without a full stop",
        )
    lines, error = split_sentences(fields["header"])
    unexpected = [line for line in lines if not is_header(line)]
    if error or unexpected:
        raise UserError(
            task.source,
            f"the header of task {task.id!r} is not a list of Require, Import, Open Scope or Set: "
            f"{error or quote(unexpected[0].text)}",
            "put declarations into 'definitions'",
        )
    if error := split_sentences(fields["definitions"])[1]:
        raise UserError(task.source, f"the definitions of task {task.id!r} are not Coq: {error}")
    return CoqProblem(fields["name"], fields["statement"], fields["header"], fields["definitions"])
