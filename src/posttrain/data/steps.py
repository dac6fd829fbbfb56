"""Solutions whose steps were judged one by one, for process reward models.

| form | fields | steps | labels |
|---|---|---|---|
| PRM800K | question with its problem, label with its steps | the completion that was chosen at each step, \
else what the human wrote, else the first | rating -1 is 0; 0 and 1 are 1; a human's own step is 1 |
| Math-Shepherd | input, label | what stands before each ки, from "Step 1:" on | + is 1, - is 0 |
| lists | a prompt, steps or completions, labels | as they stand | numbers from 0 to 1, true, false |

A label of null is a step that was not judged. Of PRM800K a solution ends with its first wrong step, and
with a step at which nothing was chosen: what follows was not written after it. The prompt is the field
prompt, question, problem or instruction.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.data.fields import Fields, kind
from posttrain.data.gather import Data, Form, Say, gather, silent
from posttrain.data.messages import answerable, asked_beside, with_system
from posttrain.types import Message

_MARK = re.compile(r"ки(?: *\?)?")
_JUDGED = re.compile(r"\s*(?:ки\s*)?([+-])")
_FIRST = re.compile(r"(?<!\w)Step 1\s*:")
_JOINED = ("\n\n", "\n", "")
_RATINGS = {-1: 0.0, 0: 1.0, 1: 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class SteppedSolution:
    """A solution cut into steps, and what each of them is worth.

    >>> solution = Stepped(id="7", messages=({"role": "user", "content": "2 + 3 + 4?"},),
    ...                    steps=("2 + 3 = 5", "5 + 4 = 8"), labels=(1.0, 0.0))
    >>> solution.labels.index(0.0)
    1
    """

    id: str
    messages: tuple[Message, ...]
    """The prompt; ends with the user or a tool."""
    steps: tuple[str, ...]
    """None is blank."""
    labels: tuple[float | None, ...]
    """One for each step, from 0 (wrong) to 1 (right); None where nobody judged. One at least is a number."""
    source: str = ""


def load_steps(data: Data, *, say: Say = silent) -> list[SteppedSolution]:
    """The judged solutions of the records; UserError at the first record that is none.

    That is one without steps or labels, with another number of labels than steps, with labels out of
    range, or with a `response` that its steps do not join to. `say` is told in one line which forms were
    recognised, and what was skipped in another.
    """
    return gather(data, _stepped, say)


def _stepped(fields: Fields) -> tuple[Form, list[SteppedSolution]]:
    if _is_prm800k(fields):
        form, messages, steps, labels = _prm800k(fields)
    elif fields.has("input") and fields.has("label"):
        form, messages, steps, labels = _math_shepherd(fields)
    else:
        form, messages, steps, labels = _lists(fields)
    if all(label is None for label in labels):
        raise fields.fault("no step has a label")
    if fields.given("response"):
        whole = fields.text("response").strip()
        if whole not in [mark.join(steps).strip() for mark in _JOINED]:
            raise fields.fault("the steps do not join to the response", _parting(steps, whole))
    found = SteppedSolution(
        id=fields.id(),
        messages=with_system(fields, answerable(fields, messages)),
        steps=tuple(steps),
        labels=tuple(labels),
        source=fields.source,
    )
    return Form("solution", form), [found]


Parts = tuple[str, tuple[Message, ...], list[str], list[float | None]]
"""Form, prompt, steps, labels."""


def _lists(fields: Fields) -> Parts:
    name = fields.first("steps", "completions")
    if name is None:
        raise fields.missing("there are no steps", "steps", "completions", "input", "label")
    if not fields.has("labels"):
        raise fields.missing(f"there are no labels for {fields.column(name)}", "labels")
    messages = asked_beside(fields)
    steps = [fields.checked_text(s, f"step {n}") for n, s in enumerate(fields.items(name), start=1)]
    labels = [_label(fields, v, f"label {n}") for n, v in enumerate(fields.items("labels"), start=1)]
    if len(steps) != len(labels):
        raise fields.fault(f"the numbers of steps and labels differ: {len(steps)} and {len(labels)}")
    return fields.form, messages, steps, labels


def _label(fields: Fields, value: Any, what: str) -> float | None:
    if value is None or isinstance(value, bool):
        return None if value is None else float(value)
    number = fields.checked_number(value, what)
    if not 0 <= number <= 1:
        raise fields.fault(f"{what} is not from 0 to 1: {number:g}")
    return number


def _math_shepherd(fields: Fields) -> Parts:
    """The question before "Step 1:", then steps that end in the mark; labels stand in its place."""
    text, judged = fields.text("input"), fields.text("label")
    *parts, rest = _MARK.split(text)
    if not parts:
        raise fields.fault("input has no mark ки after its steps")
    if rest.strip():
        raise fields.fault("input goes on after the last ки")
    begins = list(_FIRST.finditer(parts[0]))
    if not begins:
        raise fields.fault("input has no 'Step 1:' after the question")
    at, labels = 0, []
    for number, part in enumerate(parts, start=1):
        # A plus or minus within a step is none of the labels, so the steps themselves are read along.
        there = re.compile(r"\s*" + re.escape(part.strip())).match(judged, at)
        mark = _JUDGED.match(judged, there.end()) if there else None
        if mark is None:
            raise fields.fault(f"label does not repeat step {number} of input with + or - in place of ки")
        labels.append(1.0 if mark[1] == "+" else 0.0)
        at = mark.end()
    if judged[at:].strip():
        raise fields.fault("label goes on after the last step of input")
    begin = begins[-1].start()
    question = parts[0][:begin].strip()
    if not question:
        raise fields.fault("there is no question before 'Step 1:'")
    steps = [part.strip() for part in (parts[0][begin:], *parts[1:])]
    if "" in steps:
        raise fields.fault(f"step {steps.index('') + 1} is empty")
    return "input, label (Math-Shepherd)", ({"role": "user", "content": question},), steps, [*labels]


def _is_prm800k(fields: Fields) -> bool:
    question = fields.record.fields.get("question")
    return isinstance(question, dict) or isinstance(fields.record.fields.get("label"), dict)


def _prm800k(fields: Fields) -> Parts:
    for name, other in (("question", "label"), ("label", "question")):
        if not fields.has(name):
            raise fields.missing(f"there is {other} and no {name}", name)
    question, label = fields.raw("question"), fields.raw("label")
    if not isinstance(question, dict) or not isinstance(label, dict):
        raise fields.fault(f"question is {kind(question)}, and label {kind(label)}", "both must be objects")
    problem = fields.checked_text(question.get("problem"), "problem of question")
    written = label.get("steps")
    if not isinstance(written, list) or not written:
        raise fields.fault(f"steps of label is {'empty' if written == [] else kind(written)}")
    steps: list[str] = []
    labels: list[float | None] = []
    for number, step in enumerate(written, start=1):
        text, rating, goes_on = _chosen(fields, step, f"step {number}")
        steps.append(text)
        labels.append(rating)
        if rating == 0.0 or not goes_on:
            break
    return "question, label (PRM800K)", ({"role": "user", "content": problem},), steps, labels


def _chosen(fields: Fields, step: Any, place: str) -> tuple[str, float | None, bool]:
    """The text of a step with its label, and whether the solution goes on from it."""
    if not isinstance(step, dict):
        raise fields.fault(f"{place} is {kind(step)}, not an object")
    choice, human, offered = (step.get(k) for k in ("chosen_completion", "human_completion", "completions"))
    if choice is None and human is not None:
        text = human.get("text") if isinstance(human, dict) else human
        return fields.checked_text(text, f"human_completion of {place}"), 1.0, True
    if not isinstance(offered, list) or not offered:
        raise fields.fault(f"completions of {place} is {'empty' if offered == [] else kind(offered)}")
    if choice is not None and (type(choice) is not int or not 0 <= choice < len(offered)):
        raise fields.fault(f"chosen_completion of {place} is none of its completions: {choice!r}")
    taken = offered[choice or 0]
    if not isinstance(taken, dict):
        raise fields.fault(f"a completion of {place} is {kind(taken)}, not an object")
    text, rating = fields.checked_text(taken.get("text"), f"text of {place}"), taken.get("rating")
    if rating is not None and (type(rating) is bool or rating not in (-1, 0, 1)):
        raise fields.fault(f"rating of {place} is none of -1, 0 and 1: {rating!r}")
    return text, None if rating is None else _RATINGS[int(rating)], choice is not None


def _parting(steps: Sequence[str], whole: str) -> str:
    """Which step is not found in the response where the one before ends."""
    at = 0
    for number, step in enumerate(steps, start=1):
        found = whole.find(step.strip(), at)
        if found < 0:
            return f"step {number} is not in it"
        at = found + len(step.strip())
    return "between two steps belongs a line break, an empty line or nothing"
