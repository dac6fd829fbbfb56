"""`posttrain data contamination`: which problems of a suite share a run of words with training data."""

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from posttrain.data.documents import documents
from posttrain.data.records import read_records
from posttrain.evaluation.suites.suite import SuiteProblem, read
from posttrain.evaluation.suites.table import suite_of
from posttrain.recipe import config
from posttrain.report.terminal import out
from posttrain.types import UserError

Texts = Iterable[tuple[str, str]]
"""(where it stands, text)"""


def contamination(
    source: Annotated[
        str, typer.Argument(metavar="RECIPE.toml|FILE", help="What was trained on, or will be.")
    ],
    suite: Annotated[str, typer.Option("--suite", help="Whose problems are looked for.")],
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The suite's problems, in place of the Hub's.")
    ] = None,
    n: Annotated[int, typer.Option("--words", min=2, help="Words in a row that make a hit.")] = 13,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")] = False,
) -> None:
    """List the problems of a suite that share a run of words with training data.

    Words are compared without case, signs and blanks. Any file of records is a suite of its own:
    --suite own --data held_out.jsonl. Exit 0 whether there are hits or not.

    Example: `posttrain data contamination train.jsonl --suite gsm8k`
    """
    # What is asked is looked for, and not the solved examples before it.
    problems = read(replace(suite_of(suite), shots=None), str(data) if data else None, None, None)
    found = overlap(problems, training_texts(source), n)
    if as_json:
        counts = {"problems": found.problems, "short": found.short, "texts": found.texts}
        typer.echo(json.dumps(counts | {"hits": [hit._asdict() for hit in found.hits]}))
        return
    for hit in found.hits:
        out.print(f"{hit.problem}\t{hit.place}\t{hit.words}", soft_wrap=True)
    share = f"problems with {n} words in a row of training data: {len(found.hits)} of {found.problems}"
    short = f"; too short to say: {found.short}" if found.short else ""
    out.print(f"{share}{short}; texts: {found.texts}", soft_wrap=True)


class Hit(NamedTuple):
    """A problem, and a place of the training data that has a run of its words."""

    problem: str
    place: str
    words: str


class Overlap(NamedTuple):
    """What was looked through, and what was found: for each problem the first place."""

    hits: list[Hit]
    problems: int
    short: int
    """Problems with fewer words than a run, of which nothing can be said."""
    texts: int


def words(text: str) -> list[str]:
    """The words of a text, without case, signs and blanks, and however its characters are composed.

    >>> words("How many? 3,000 -- I think.")
    ['how', 'many', '3', '000', 'i', 'think']
    """
    return re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold())


def runs(text: str, n: int) -> Iterator[str]:
    """Every run of n words of a text.

    >>> list(runs("a b c", 2))
    ['a b', 'b c']
    """
    found = words(text)
    return (" ".join(found[i : i + n]) for i in range(len(found) - n + 1))


def overlap(problems: Sequence[SuiteProblem], texts: Texts, n: int) -> Overlap:
    """The problems of which some run of n words occurs in the texts, in time linear in both."""
    asked: dict[str, list[str]] = {}
    short = 0
    for problem in problems:
        mine = set(runs(problem.question, n))
        short += not mine
        for run in mine:
            asked.setdefault(run, []).append(problem.task.id)
    found: dict[str, Hit] = {}
    count, before = 0, ""
    for place, text in texts:
        count, before = count + (place != before), place  # the strings of a record are one text
        for run in runs(text, n):
            for name in asked.get(run, ()):
                found.setdefault(name, Hit(name, place, run))
    order = {problem.task.id: number for number, problem in enumerate(problems)}
    return Overlap(sorted(found.values(), key=lambda hit: order[hit.problem]), len(problems), short, count)


def training_texts(source: str) -> Iterator[tuple[str, str]]:
    """Every text that a recipe trains on, or that stands in the records of a file; each string of a record.

    UserError for what cannot be read, and for a recipe whose tasks are made up.
    """
    if not source.endswith(".toml"):
        yield from _strings(read_records(source))
        return
    task = config.read(Path(source)).recipe.task
    if task.data is None and task.text is None:
        raise UserError(source, "its tasks are made up, not read", "name a recipe with task.data")
    if task.data is not None:
        yield from _strings(task.data.read())
    if task.text is not None:
        for number, text in enumerate(documents(task.text), start=1):
            yield f"{', '.join(task.text.paths)}: document {number}", text


def _strings(records: Iterable[Any]) -> Iterator[tuple[str, str]]:
    for record in records:
        # Each by itself: no run of words goes from one field into the next.
        yield from ((record.source, text) for text in _within(record.fields))


def _within(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _within(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _within(each)
