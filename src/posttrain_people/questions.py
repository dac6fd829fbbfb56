"""Make questions for raters from a run's samples or from records, and choose their order.

| source | answers to one question | their source in the summary |
|---|---|---|
| a run directory | the samples of one task, from all its files | eval or update, and the number of updates |
| chosen, rejected | both | chosen, rejected |
| responses, completions, answers, generations | the list | an entry's model, source or policy, or its place |
| steps; or a prompt and one answer | the steps, or the answer cut at the separator | the same |
"""

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, zip_longest
from pathlib import Path
from typing import Any, Literal

from posttrain.data.calls import read_tools
from posttrain.data.fields import ANSWER_LISTS, ANSWERS, Fields
from posttrain.data.gather import Data, Form, Log, gather
from posttrain.data.messages import (
    Answer,
    add_system,
    answer_messages,
    as_answer,
    check_answer,
    check_prompt,
    comparison_key,
    parse_messages,
    prompt_of_answers,
)
from posttrain.data.pairs import is_pair, read_pair
from posttrain.evaluation.recorded import RecordedTasks
from posttrain.recipe import config
from posttrain.report.record import read_json_lines, samples_in
from posttrain.types import Message, Task, UserError
from posttrain.verifiers.model.scores import steps as split_steps

Mode = Literal["pairs", "rank", "steps"]
MODES: tuple[Mode, ...] = ("pairs", "rank", "steps")
MOST_RANKED = 9
"""Maximum number of answers in one ranking: each has a digit."""
_TEXTS = ("response", "completion", "answer", "text", "content")
_WRITERS = ("model", "source", "policy")


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelQuestion:
    """A prompt with the answers or the steps that a rater judges at once; before `ask`, all answers."""

    id: str
    """Of the record or task."""
    messages: tuple[Message, ...]
    """The prompt; ends with a message of the user or of a tool."""
    answers: tuple[Answer, ...] = ()
    sources: tuple[str, ...] = ()
    """The writer of each answer: a model, or an update of a run."""
    steps: tuple[str, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    source: str = ""
    """File and line of the record."""

    @property
    def key(self) -> str:
        """Digest of prompt, answers and steps: equal in every session, whatever the order of records."""
        content = json.dumps([self.messages, self.answers, self.steps], ensure_ascii=False)
        return hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def read_questions(source: Path, mode: Mode, separator: str, say: Log) -> list[LabelQuestion]:
    """Return the prompts of a run or a file with all their distinct answers, or with the steps of each.

    Raises UserError for records without answers, and if there is nothing to judge in this mode.
    """
    if source.is_dir():
        items = _read_run(source, say)
    else:
        items = gather(Data(path=str(source)), _read_record, say)
    items = [_distinct(item) for item in items]
    if mode == "steps":
        usable = [solution for item in items for solution in _solutions(item, separator)]
    else:
        usable = [item for item in items if len(item.answers) > 1]
    if len(usable) < len(items):
        noun = "fewer than two steps" if mode == "steps" else "fewer than two different answers"
        say(f"{source}: {len(items) - len(usable)} of {len(items)} prompts have {noun} and are left out")
    if not usable:
        fix = "give each prompt several answers" if mode != "steps" else "set --separator to what ends a step"
        raise UserError(str(source), f"there is nothing to judge with --mode {mode}", fix)
    return usable


def ask(questions: Sequence[LabelQuestion], mode: Mode, seed: int) -> list[LabelQuestion]:
    """Return what raters are asked, in random order: pairs of each prompt's answers, rankings, or solutions.

    Of pairs, every prompt gets its first before one gets its second, so a rater may stop at any time.
    """
    draw = random.Random(f"order {seed}")
    shuffled = draw.sample(questions, len(questions))
    if mode == "steps":
        return shuffled
    if mode == "rank":
        return [
            _select(q, sorted(draw.sample(range(n), min(n, MOST_RANKED))))
            for q in shuffled
            for n in [len(q.answers)]
        ]
    pairs = [list(combinations(range(len(question.answers)), 2)) for question in shuffled]
    for places in pairs:
        draw.shuffle(places)
    rounds = zip_longest(
        *([_select(q, p) for p in places] for q, places in zip(shuffled, pairs, strict=True))
    )
    return [question for one in rounds for question in one if question is not None]


def share_of(
    questions: Sequence[LabelQuestion], rater: str, raters: Sequence[str], ratings: int, seed: int
) -> list[LabelQuestion]:
    """Return the questions of this rater, if each goes to `ratings` of the raters; their order stays.

    The raters of a question are drawn from its key, so all pairs of raters overlap about equally.
    """
    names = sorted(raters)
    return [q for q in questions if rater in random.Random(f"{seed} {q.key}").sample(names, ratings)]


def _select(question: LabelQuestion, places: Sequence[int]) -> LabelQuestion:
    answers = tuple(question.answers[i] for i in places)
    return replace(question, answers=answers, sources=tuple(question.sources[i] for i in places))


def _distinct(question: LabelQuestion) -> LabelQuestion:
    """Leave out answers that are blank or equal an earlier one."""
    keys = [comparison_key(answer) for answer in question.answers]
    blank = [isinstance(answer, str) and not answer.strip() for answer in question.answers]
    return _select(question, [i for i, key in enumerate(keys) if not blank[i] and keys.index(key) == i])


def _solutions(question: LabelQuestion, separator: str) -> list[LabelQuestion]:
    """Return the steps of a record, or those of each answer, as a question each."""
    if question.steps:
        return [question]
    return [
        replace(question, answers=(), steps=parts, sources=(source,))
        for answer, source in zip(question.answers, question.sources, strict=True)
        if isinstance(answer, str)
        and len(parts := tuple(step.text.strip() for step in split_steps(answer, separator))) > 1
    ]


def _read_record(fields: Fields) -> tuple[Form, list[LabelQuestion]]:
    fields.calls = True
    steps: tuple[str, ...] = ()
    answers: list[Answer] = []
    if is_pair(fields):
        pair = read_pair(fields)
        messages, answers, sources = pair.messages, [*pair.answers], ["chosen", "rejected"]
    else:
        messages, sources = add_system(fields, check_prompt(fields, prompt_of_answers(fields))), [""]
        lists = [n for n in ANSWER_LISTS if fields.has(n) and isinstance(fields.raw(n), list)]
        if fields.has("steps"):
            steps = tuple(fields.checked_text(s, f"step {n}") for n, s in enumerate(fields.items("steps"), 1))
        elif lists:
            items, column = fields.items(lists[0]), fields.column(lists[0])
            answers = [_answer(fields, item, f"entry {n} of {column}") for n, item in enumerate(items, 1)]
            sources = [_writer(item, f"answer {n}") for n, item in enumerate(items, 1)]
        elif name := fields.first_set(*ANSWERS):
            answers = [fields.text(name)]
        else:
            problem = f"there is neither chosen and rejected nor one of {', '.join(ANSWER_LISTS)}, or steps"
            raise fields.missing(problem, "chosen", "rejected", "steps", *ANSWER_LISTS)
    turns = (*messages, *(turn for answer in answers for turn in answer_messages(answer)))
    question = LabelQuestion(
        id=fields.id(),
        messages=messages,
        answers=tuple(answers),
        sources=tuple(sources),
        steps=steps,
        tools=read_tools(fields, turns),
        source=fields.source,
    )
    return Form("prompt", fields.form), [question]


def _answer(fields: Fields, item: Any, place: str) -> Answer:
    if isinstance(item, list):
        turns = parse_messages(fields, item, place)
        check_answer(fields, place, turns)
        return as_answer(turns)
    if isinstance(item, Mapping):
        key = next((key for key in _TEXTS if key in item), None)
        if key is None:
            raise fields.fault(f"{place} has none of {', '.join(_TEXTS)}")
        return fields.checked_text(item[key], f"{key} of {place}")
    return fields.checked_text(item, place)


def _writer(item: Any, default: str) -> str:
    names = [item[key] for key in _WRITERS if item.get(key)] if isinstance(item, Mapping) else []
    return str(names[0]) if names else default


def _read_run(run_dir: Path, say: Log) -> list[LabelQuestion]:
    """Return the tasks of a run with the answers in samples/, whose prompts the recipe of the run makes."""
    files, notes = samples_in(run_dir / "samples")
    if not files:
        problem = notes[0] if notes else "holds no samples/*.jsonl"
        raise UserError(str(run_dir), problem, "name a run that sampled answers, or a JSONL file")
    tasks = RecordedTasks(config.read(run_dir / "config.toml").recipe)
    notes += tasks.problems
    answers: dict[int, tuple[Task, list[tuple[str, str]]]] = {}
    skipped = 0
    for file in files:
        rows, remarks = read_json_lines(file.path)
        notes += remarks
        name = f"{'eval' if file.kind == 'eval' else 'update'} {file.update}"
        for row in rows:
            task = tasks.find(file, row)
            if task is None or row.get("turns") != 1:
                skipped += 1
                continue
            _, answers_to_task = answers.setdefault(id(task), (task, []))
            answers_to_task.append((name, tasks.last_answer(row)))
    for note in notes:
        say(f"{run_dir}: {note}")
    if skipped:
        say(f"{run_dir}: {skipped} samples of several turns or of unknown tasks are left out")
    return [
        LabelQuestion(
            id=task.id,
            messages=tuple(task.messages),
            answers=tuple(text for _, text in rows),
            sources=tuple(name for name, _ in rows),
            source=str(run_dir),
        )
        for task, rows in answers.values()
    ]
