"""What a suite is: problems, how they are asked, who judges, and what is counted."""

import hashlib
import inspect
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from posttrain.base.chat import Chat
from posttrain.base.usercode import file_of, with_neighbours
from posttrain.data.records import Record, read_hub, read_records
from posttrain.types import Sampling, Task, UserError
from posttrain.verifiers.protocol import Verifier


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """A data set of the Hub, at a revision of it.

    The Hub may move `main`; what was read is in the fingerprint, as a digest of all prompts.
    """

    path: str
    split: str
    subset: str | None = None
    revision: str = "main"

    def read(self) -> list[Record]:
        """Its records; UserError if the Hub has none, or cannot be reached."""
        return read_hub(self.path, split=self.split, subset=self.subset, revision=self.revision)


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteProblem:
    """One question: what is shown, and what judges need."""

    task: Task
    question: str
    """Its own words, without examples and instructions: what contamination looks for."""
    choices: tuple[str, ...] = ()
    """Continuations of the prompt, one of them right; empty where an answer is drawn."""
    gold: int = 0
    """Which choice is right."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Parts that a metric divides by, known before any verdict: an answer without one counts with these."""


Form = Callable[[Record, str, Sequence[Record]], SuiteProblem]
"""From a record, its id and its examples to a problem; UserError with the record's place."""


class Shots(NamedTuple):
    """Solved examples before the question."""

    source: HubSource
    size: int
    seed: int | None = None
    """Draws them again for each problem, in their order; None takes the first."""
    by: str = ""
    """A field that they share with the problem, as the subject."""


class Metric(NamedTuple):
    """Σ `of` / Σ `per` over the answers: parts of their verdicts, or the score; without `per`, a mean."""

    name: str
    of: str = "score"
    per: str = ""


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A line of the table."""

    name: str
    about: str
    form: Form
    source: HubSource | None = None
    """None: a file must be named."""
    chat: bool = True
    """Whether it is asked through the model's chat template; otherwise the text is gone on with."""
    shots: Shots | None = None
    sampling: Sampling = Sampling(temperature=0.0, max_new_tokens=512)  # noqa: RUF009  frozen
    samples: int = 1
    """Answers to a problem, unless told otherwise."""
    verifier: Verifier | None = None
    """None: the likeliest choice is the answer."""
    metrics: tuple[Metric, ...] = (Metric("accuracy"),)


def digest(value: Any) -> str:
    """A short digest of plain data.

    >>> digest({"a": 1}) == digest({"a": 1}), digest("a") == digest("b")
    (True, False)
    """
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def fingerprint(
    suite: Suite, problems: Sequence[SuiteProblem], chat: Chat, sampling: Sampling, samples: int
) -> dict[str, Any]:
    """What two results must have alike to be comparable: prompts, shots, template, decoding and judge."""
    asked = [
        [
            p.task.id,
            [dict(m) for m in p.task.messages],
            p.choices,
            p.gold,
            p.task.answer,
            _plain(p.task.fields),
        ]
        for p in problems
    ]
    shots = suite.shots and {"shots": suite.shots.size, "seed": suite.shots.seed}
    drawn = asdict(sampling) | {"stop": list(sampling.stop), "samples": samples}
    return {
        "suite": suite.name,
        "problems": len(problems),
        "prompts": digest(asked),
        "shots": shots,
        "template": digest(chat.template or chat.tokenizer.chat_template),
        "decoding": None if suite.verifier is None else drawn,
        "judge": "likelihood" if suite.verifier is None else _version(suite.verifier),
    }


def _plain(fields: Mapping[str, Any]) -> str:
    return json.dumps(dict(fields), sort_keys=True, default=str)


def _version(verifier: Verifier) -> str:
    """Return a verifier with its settings, and a digest of the source files that judge.

    They are those of its folder and below, and of another package than the kernel all.
    """
    root = Path(inspect.getfile(type(verifier))).parent
    if (package := type(verifier).__module__.partition(".")[0]) != "posttrain":
        root = next((place for place in (root, *root.parents) if place.name == package), root)
    files = sorted(root.rglob("*.py"))
    if own := file_of(getattr(verifier, "function", "")):
        files += with_neighbours(own)
    return f"{verifier!r} {digest([file.read_text(encoding='utf-8') for file in files])}"


def read(suite: Suite, file: str | None, shots: str | None, limit: int | None) -> list[SuiteProblem]:
    """The first problems of a suite, of the file if one is named; UserError for whatever is at fault."""
    if file is None and suite.source is None:
        raise UserError(suite.name, "this suite has no data of its own", "name a file with --data")
    records = read_records(file) if file is not None else suite.source.read()  # type: ignore[union-attr]
    examples: list[Record] = []
    if suite.shots:
        examples = read_records(shots) if shots is not None else suite.shots.source.read()
    draws = random.Random(suite.shots.seed if suite.shots else 0)
    out = [
        suite.form(record, _id(suite, record, number), _examples(suite.shots, examples, record, draws))
        for number, record in enumerate(records[:limit])
    ]
    ids = [problem.task.id for problem in out]
    if len(set(ids)) < len(ids):
        twice = next(each for each in ids if ids.count(each) > 1)
        raise UserError(suite.name, f"two problems are called {twice!r}")
    return out


def _examples(
    shots: Shots | None, pool: Sequence[Record], record: Record, draws: random.Random
) -> Sequence[Record]:
    """The solved examples of a record, as lm-evaluation-harness takes them."""
    if shots is None:
        return ()
    if shots.by:
        pool = [each for each in pool if each.fields.get(shots.by) == record.fields.get(shots.by)]
    if len(pool) < shots.size:
        problem = f"{shots.size} examples are wanted, and there are {len(pool)}"
        raise UserError(record.source, problem)
    found: Sequence[Record] = pool[: shots.size] if shots.seed is None else draws.sample(pool, shots.size)
    return found


def _id(suite: Suite, record: Record, number: int) -> str:
    """The record's own id, or its number in the suite, which a file's name does not change."""
    # Of one's own records other fields may be anything: a question_id that several share.
    names = ("id",) if suite.name == "own" else ("id", "task_id", "question_id", "unique_id", "key")
    return str(next((record.fields[name] for name in names if record.fields.get(name) is not None), number))
