"""`posttrain data contamination`: find problems of a suite that share a run of words with training data."""

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from posttrain.commands.options import Json
from posttrain.data.documents import documents
from posttrain.data.records import read_records
from posttrain.evaluation.suites.suite import SuiteProblem, read
from posttrain.evaluation.suites.table import suite_of
from posttrain.recipe import config
from posttrain.report.terminal import out
from posttrain.types import UserError

Texts = Iterable[tuple[str, str]]
"""Pairs of a place, such as file:line, and a text."""


def contamination(
    source: Annotated[
        str, typer.Argument(metavar="RECIPE.toml|FILE", help="The training data: of a recipe, or a file.")
    ],
    suite: Annotated[str, typer.Option("--suite", help="The suite whose problems are searched for.")],
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The suite's problems, in place of the Hub's.")
    ] = None,
    n: Annotated[int, typer.Option("--words", min=2, help="Words in a row that make a hit.")] = 13,
    as_json: Json = False,
) -> None:
    """List the problems of a suite that share a run of words with training data.

    Words are compared without case, punctuation and blanks. Any file of records is a suite of its own:
    --suite own --data held_out.jsonl. Exit 0 whether there are hits or not.

    Example: `posttrain data contamination train.jsonl --suite gsm8k`
    """
    # Search for the questions alone, without the solved examples before them.
    problems = read(replace(suite_of(suite), shots=None), str(data) if data else None, None, None)
    result = find_overlap(problems, training_texts(source), n)
    if as_json:
        counts = {"problems": result.problems, "short": result.short, "texts": result.texts}
        typer.echo(json.dumps(counts | {"hits": [hit._asdict() for hit in result.hits]}))
        return
    for hit in result.hits:
        out.print(f"{hit.problem}\t{hit.place}\t{hit.words}", soft_wrap=True)
    share = f"problems with {n} words in a row of training data: {len(result.hits)} of {result.problems}"
    short = f"; too short to say: {result.short}" if result.short else ""
    out.print(f"{share}{short}; texts: {result.texts}", soft_wrap=True)


class Hit(NamedTuple):
    """A problem, and a place of the training data that has a run of its words."""

    problem: str
    place: str
    words: str


class Overlap(NamedTuple):
    """The problems found in the texts, each with the first place, and the numbers of problems and texts."""

    hits: list[Hit]
    problems: int
    short: int
    """Problems with fewer words than a run, which cannot be judged."""
    texts: int


def words(text: str) -> list[str]:
    """Return the words of a text, case-folded, without punctuation, in Unicode form NFKC.

    >>> words("How many? 3,000 -- I think.")
    ['how', 'many', '3', '000', 'i', 'think']
    """
    return re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold())


def runs(text: str, n: int) -> Iterator[str]:
    """Return every run of n words of a text.

    >>> list(runs("a b c", 2))
    ['a b', 'b c']
    """
    sequence = words(text)
    return (" ".join(sequence[i : i + n]) for i in range(len(sequence) - n + 1))


def find_overlap(problems: Sequence[SuiteProblem], texts: Texts, n: int) -> Overlap:
    """Find the problems with a run of n words that occurs in the texts, in time linear in both."""
    problems_of: dict[str, list[str]] = {}
    short = 0
    for problem in problems:
        problem_runs = set(runs(problem.question, n))
        short += not problem_runs
        for run in problem_runs:
            problems_of.setdefault(run, []).append(problem.task.id)
    hits: dict[str, Hit] = {}
    count, before = 0, ""
    for place, text in texts:
        count, before = count + (place != before), place  # the strings of a record count as one text
        for run in runs(text, n):
            for problem_id in problems_of.get(run, ()):
                hits.setdefault(problem_id, Hit(problem_id, place, run))
    order = {problem.task.id: number for number, problem in enumerate(problems)}
    return Overlap(sorted(hits.values(), key=lambda hit: order[hit.problem]), len(problems), short, count)


def training_texts(source: str) -> Iterator[tuple[str, str]]:
    """Yield the place and text of every string of the records of a recipe or a file, and of its documents.

    Raises UserError for a file that cannot be read, and for a recipe whose tasks are generated.
    """
    if not source.endswith(".toml"):
        yield from _strings(read_records(source))
        return
    tasks = config.read(Path(source)).recipe.task
    if all(task.data is None and task.text is None for task in tasks):
        raise UserError(source, "its tasks are generated, not read", "name a recipe with task.data")
    for task in tasks:
        if task.data is not None:
            yield from _strings(task.data.read())
        if task.text is not None:
            for number, text in enumerate(documents(task.text), start=1):
                yield f"{', '.join(task.text.paths)}: document {number}", text


def _strings(records: Iterable[Any]) -> Iterator[tuple[str, str]]:
    for record in records:
        # Each string alone, so that no run of words spans two fields.
        yield from ((record.source, text) for text in _within(record.fields))


def _within(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _within(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _within(inner)
