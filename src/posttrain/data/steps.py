"""Load solutions whose steps were judged one by one, for process reward models.

| form | fields | steps | labels |
|---|---|---|---|
| PRM800K | question with its problem, label with its steps | the completion that was chosen at each step, \
else the one that a human wrote, else the first | rating -1 is 0; 0 and 1 are 1; a human's own step is 1 |
| Math-Shepherd | input, label | the text before each ки, from "Step 1:" on | + is 1, - is 0 |
| lists | a prompt, steps or completions, labels | as they stand | numbers from 0 to 1, true, false |

A label of null means that the step was not judged. Of PRM800K a solution ends with its first wrong step, and
with a step at which nothing was chosen, since the steps behind it do not continue it. The prompt is the field
prompt, question, problem or instruction.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.data.fields import Fields, kind
from posttrain.data.gather import Data, Form, Log, gather, ignore_line
from posttrain.data.messages import add_system, check_prompt, prompt_of_answers
from posttrain.types import Message

_MARK = re.compile(r"ки(?: *\?)?")
_JUDGED = re.compile(r"\s*(?:ки\s*)?([+-])")
_FIRST = re.compile(r"(?<!\w)Step 1\s*:")
_JOINED = ("\n\n", "\n", "")
_RATINGS = {-1: 0.0, 0: 1.0, 1: 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class SteppedSolution:
    """A solution cut into steps, and a label for each step.

    >>> prompt = ({"role": "user", "content": "2 + 3 + 4?"},)
    >>> steps = ("2 + 3 = 5", "5 + 4 = 8")
    >>> solution = SteppedSolution(id="7", messages=prompt, steps=steps, labels=(1.0, 0.0))
    >>> solution.labels.index(0.0)
    1
    """

    id: str
    messages: tuple[Message, ...]
    """The prompt; ends with a message of the user or of a tool."""
    steps: tuple[str, ...]
    """Texts that are not blank."""
    labels: tuple[float | None, ...]
    """One for each step, from 0 (wrong) to 1 (right); None without a judgement. At least one is a number."""
    source: str = ""


def load_steps(data: Data, *, say: Log = ignore_line) -> list[SteppedSolution]:
    """Return the judged solutions of the records. Raises UserError at the first faulty record.

    Such a record has no steps or no labels, different numbers of the two, labels out of range, or a
    `response` that its steps do not join to. `say` gets one line with the forms of the records, and one with
    what was skipped.
    """
    return gather(data, _solution, say)


def _solution(fields: Fields) -> tuple[Form, list[SteppedSolution]]:
    if _is_prm800k(fields):
        form, messages, steps, labels = _prm800k(fields)
    elif fields.has("input") and fields.has("label"):
        form, messages, steps, labels = _math_shepherd(fields)
    else:
        form, messages, steps, labels = _lists(fields)
    if all(label is None for label in labels):
        raise fields.fault("no step has a label")
    if fields.first_set("response"):
        response = fields.text("response").strip()
        if response not in [mark.join(steps).strip() for mark in _JOINED]:
            raise fields.fault("the steps do not join to the response", _step_not_joined(steps, response))
    solution = SteppedSolution(
        id=fields.id(),
        messages=add_system(fields, check_prompt(fields, messages)),
        steps=tuple(steps),
        labels=tuple(labels),
        source=fields.source,
    )
    return Form("solution", form), [solution]


Parts = tuple[str, tuple[Message, ...], list[str], list[float | None]]
"""Form, prompt, steps, labels."""


def _lists(fields: Fields) -> Parts:
    name = fields.first_existing("steps", "completions")
    if name is None:
        raise fields.missing("there are no steps", "steps", "completions", "input", "label")
    if not fields.has("labels"):
        raise fields.missing(f"there are no labels for {fields.column(name)}", "labels")
    messages = prompt_of_answers(fields)
    steps = [fields.checked_text(s, f"step {n}") for n, s in enumerate(fields.items(name), start=1)]
    labels = [_label(fields, v, f"label {n}") for n, v in enumerate(fields.items("labels"), start=1)]
    if len(steps) != len(labels):
        raise fields.fault(f"the numbers of steps and labels differ: {len(steps)} and {len(labels)}")
    return fields.form, messages, steps, labels


def _label(fields: Fields, value: Any, place: str) -> float | None:
    if value is None or isinstance(value, bool):
        return None if value is None else float(value)
    number = fields.checked_number(value, place)
    if not 0 <= number <= 1:
        raise fields.fault(f"{place} is not from 0 to 1: {number:g}")
    return number


def _math_shepherd(fields: Fields) -> Parts:
    """Read the question before "Step 1:", and the steps; `label` has + or - for each mark of a step."""
    text, judged = fields.text("input"), fields.text("label")
    *parts, rest = _MARK.split(text)
    if not parts:
        raise fields.fault("input has no mark ки after its steps")
    if rest.strip():
        raise fields.fault("input continues after the last ки")
    begins = list(_FIRST.finditer(parts[0]))
    if not begins:
        raise fields.fault("input has no 'Step 1:' after the question")
    at, labels = 0, []
    for number, part in enumerate(parts, start=1):
        # A step may contain + or -, so `label` is matched against the steps, too.
        there = re.compile(r"\s*" + re.escape(part.strip())).match(judged, at)
        mark = _JUDGED.match(judged, there.end()) if there else None
        if mark is None:
            raise fields.fault(f"label does not repeat step {number} of input with + or - in place of ки")
        labels.append(1.0 if mark[1] == "+" else 0.0)
        at = mark.end()
    if judged[at:].strip():
        raise fields.fault("label continues after the last step of input")
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
        text, rating, continues = _choose_step(fields, step, f"step {number}")
        steps.append(text)
        labels.append(rating)
        if rating == 0.0 or not continues:
            break
    return "question, label (PRM800K)", ({"role": "user", "content": problem},), steps, labels


def _choose_step(fields: Fields, step: Any, place: str) -> tuple[str, float | None, bool]:
    """Return the text of a step, its label, and whether the solution continues from it."""
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
    completion = offered[choice or 0]
    if not isinstance(completion, dict):
        raise fields.fault(f"a completion of {place} is {kind(completion)}, not an object")
    text, rating = fields.checked_text(completion.get("text"), f"text of {place}"), completion.get("rating")
    if rating is not None and (type(rating) is bool or rating not in (-1, 0, 1)):
        raise fields.fault(f"rating of {place} is none of -1, 0 and 1: {rating!r}")
    return text, None if rating is None else _RATINGS[int(rating)], choice is not None


def _step_not_joined(steps: Sequence[str], response: str) -> str:
    """Describe the first step that is not where the previous one ends in the response."""
    at = 0
    for number, step in enumerate(steps, start=1):
        begin = response.find(step.strip(), at)
        if begin < 0:
            return f"step {number} is not in it"
        at = begin + len(step.strip())
    return "between two steps belongs a line break, an empty line or nothing"
