"""A suite: its problems, how they are asked, its judge and its metrics."""

import hashlib
import inspect
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from posttrain.base.chat import Chat
from posttrain.base.usercode import file_of, imported_files
from posttrain.data.records import Record, iterate_records, read_hub, read_records
from posttrain.types import Sampling, Task, UserError
from posttrain.verifiers.protocol import Verifier


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """A data set of the Hub at a revision.

    The Hub may move `main`, so the fingerprint of results has a digest of all prompts.
    """

    path: str
    split: str
    subset: str | None = None
    revision: str = "main"

    def read(self) -> list[Record]:
        """Return the records; UserError if the Hub has none, or cannot be reached."""
        return read_hub(self.path, split=self.split, subset=self.subset, revision=self.revision)


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteProblem:
    """A question, with the fields that its judge needs."""

    task: Task
    question: str
    """Text without examples and instructions, for the search of contamination."""
    choices: tuple[str, ...] = ()
    """Continuations of the prompt, one right; empty if answers are drawn."""
    gold: int = 0
    """Index of the right choice."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Parts that a metric divides by, known without a verdict, so that failed answers count too."""


Form = Callable[[Record, str, Sequence[Record]], SuiteProblem]
"""Makes a problem from a record, its id and its examples; raises UserError with the record's place."""


class Shots(NamedTuple):
    """Solved examples before the question."""

    source: HubSource
    size: int
    seed: int | None = None
    """Seed of one sequence of draws over all problems; None takes the first examples."""
    by: str = ""
    """Field with the same value as the problem's, such as the subject."""


class Metric(NamedTuple):
    """Σ `of` / Σ `per` over the answers, each a part of the verdict or the score; without `per` a mean."""

    name: str
    of: str = "score"
    per: str = ""


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A suite of problems, as a line of the table."""

    name: str
    about: str
    form: Form
    source: HubSource | None = None
    """None: the user names a file."""
    chat: bool = True
    """Whether prompts use the model's chat template; otherwise the model continues the plain text."""
    shots: Shots | None = None
    sampling: Sampling = Sampling(temperature=0.0, max_new_tokens=512)  # noqa: RUF009  frozen
    samples: int = 1
    """Default number of answers to a problem."""
    verifier: Verifier | None = None
    """None: the likeliest choice is the answer."""
    metrics: tuple[Metric, ...] = (Metric("accuracy"),)


def digest(value: Any) -> str:
    """Return a short digest of JSON data.

    >>> digest({"a": 1}) == digest({"a": 1}), digest("a") == digest("b")
    (True, False)
    """
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def fingerprint(
    suite: Suite, problems: Sequence[SuiteProblem], chat: Chat, sampling: Sampling, samples: int
) -> dict[str, Any]:
    """Return what must be equal in comparable results: prompts, shots, template, decoding and judge."""
    prompts = [
        [
            p.task.id,
            [dict(m) for m in p.task.messages],
            p.choices,
            p.gold,
            p.task.answer,
            json.dumps(dict(p.task.fields), sort_keys=True, default=str),
        ]
        for p in problems
    ]
    shots = suite.shots and {"shots": suite.shots.size, "seed": suite.shots.seed}
    decoding = asdict(sampling) | {"stop": list(sampling.stop), "samples": samples}
    return {
        "suite": suite.name,
        "problems": len(problems),
        "prompts": digest(prompts),
        "shots": shots,
        "template": digest(chat.template or chat.tokenizer.chat_template),
        "decoding": None if suite.verifier is None else decoding,
        "judge": "likelihood" if suite.verifier is None else _version(suite.verifier),
    }


def _version(verifier: Verifier) -> str:
    """Return a verifier with its settings, and a digest of its source files.

    These are the files in and below its folder, or all files of its package if that is not the kernel.
    """
    root = Path(inspect.getfile(type(verifier))).parent
    if (package := type(verifier).__module__.partition(".")[0]) != "posttrain":
        root = next((folder for folder in (root, *root.parents) if folder.name == package), root)
    files = sorted(root.rglob("*.py"))
    if user_file := file_of(getattr(verifier, "function", "")):
        files += imported_files(user_file)
    return f"{verifier!r} {digest([file.read_text(encoding='utf-8') for file in files])}"


def read(suite: Suite, file: str | None, shots: str | None, limit: int | None) -> list[SuiteProblem]:
    """Return the first `limit` problems of a suite, from a file if one is named; None: all.

    A file is read up to the limit. Raises UserError for data that is missing or cannot be used.
    """
    if file is None and suite.source is None:
        raise UserError(suite.name, "this suite has no data of its own", "name a file with --data")
    records = iterate_records(file) if file is not None else suite.source.read()  # type: ignore[union-attr]
    examples: list[Record] = []
    if suite.shots:
        examples = read_records(shots) if shots is not None else suite.shots.source.read()
    draws = random.Random(suite.shots.seed if suite.shots else 0)
    out = [
        suite.form(record, _id(suite, record, number), _examples(suite.shots, examples, record, draws))
        for number, record in enumerate(islice(records, limit))
    ]
    ids = [problem.task.id for problem in out]
    if len(set(ids)) < len(ids):
        twice = next(name for name in ids if ids.count(name) > 1)
        raise UserError(suite.name, f"two problems are called {twice!r}")
    return out


def _examples(
    shots: Shots | None, pool: Sequence[Record], record: Record, draws: random.Random
) -> Sequence[Record]:
    """Return the solved examples of a record, chosen as lm-evaluation-harness does."""
    if shots is None:
        return ()
    if shots.by:
        pool = [shot for shot in pool if shot.fields.get(shots.by) == record.fields.get(shots.by)]
    if len(pool) < shots.size:
        raise UserError(record.source, f"{shots.size} examples are needed, and there are {len(pool)}")
    return pool[: shots.size] if shots.seed is None else draws.sample(pool, shots.size)


def _id(suite: Suite, record: Record, number: int) -> str:
    """Return the record's id field, or else its index, which is independent of the file's name."""
    # In user records the other fields may mean anything, such as a question_id that several share.
    names = ("id",) if suite.name == "own" else ("id", "task_id", "question_id", "unique_id", "key")
    return str(next((record.fields[name] for name in names if record.fields.get(name) is not None), number))
