"""The verifier `rubric`: a weighted checklist for each task, which a language model judges item by item.

    {"prompt": ..., "rubric": [
        {"criterion": "Names the capital", "weight": 3},
        {"criterion": "Invents a source", "weight": 2, "pitfall": true},
        "Is polite"]}

Source: Rubrics as Rewards, arXiv:2507.17746 (explicit and implicit aggregation); HealthBench,
arXiv:2505.08775 (criteria that cost points).
"""

import hashlib
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from posttrain.base.name_hints import did_you_mean
from posttrain.types import Message, Task, UserError, Verdict
from posttrain.verifiers.judge.judge import Judging, Reading, ask
from posttrain.verifiers.judge.rubric import Rubric, guarded, lines_of, question_of
from posttrain.verifiers.judge.rubric import Verdict as How
from posttrain.verifiers.judge.writer import Writer
from posttrain.verifiers.protocol import Group, Verifier, quote

_SYSTEM = """
You check answers to questions against criteria. You are exact and literal, and you are not impressed by
length, by confidence or by ornament. An answer that says which criteria it meets does not meet them by
saying so.
"""
_CASE = """
Here is a question that somebody asked.

{question}

Here is the answer to check.

{response}

"""
_ITEM = Rubric(
    kind="pointwise",
    system=_SYSTEM,
    prompt=_CASE + "The criterion:\n\n{principles}\n\nGive 1 if the answer meets it, and 0 if it does not.",
)
_ITEMS = _CASE + "The criteria:\n\n{principles}\n\nDecide for each criterion whether the answer meets it."
_WHOLE = Rubric(
    kind="pointwise",
    system=_SYSTEM,
    prompt=_CASE
    + "The criteria, each with its weight; meeting one with a negative weight makes the answer worse:\n\n"
    "{principles}\n\nGrade the answer as a whole by how well it does on them.",
    low=1,
    high=10,
)
_MET = re.compile(r"met\s*:\s*(none|\d{1,3}(?:\s*,\s*\d{1,3})*)\s*\.?", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True, slots=True)
class RubricItem:
    """A criterion, with a negative weight if meeting it is a fault."""

    criterion: str
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Checking(Judging):
    """Options of a rubric by task."""

    name: str = "rubric"
    """Name under which the score is recorded."""
    field: str = "rubric"
    """Field of a task that holds its items: texts, or tables with `criterion`, `weight` (1 if not given) and
    `pitfall` (true: an answer that meets it loses its weight)."""
    aggregate: Literal["explicit", "implicit"] = "explicit"
    """explicit: the weights of the items that are met, over the sum of the positive weights, within 0 to 1.
    implicit: the judge sees all items with their weights and grades the answer as a whole, 1 to 10."""
    together: bool = False
    """Judge all items in one request in place of one request an item: cheaper, and less exact."""
    items: int = 0
    """Number of items drawn at random and judged, the same for all answers of a group; 0: all items."""
    unjudged: float = 0.2
    """Greatest share of items without a readable verdict: they are left out of both sums, and above it the
    answer has no score."""
    verdict: How = "text"
    """text: the judge writes its reasons, and the verdict is read from its last line. logprobs: an item
    counts by p(1) / (p(0) + p(1)), the probabilities of the judge's next character."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.items < 0:
            raise ValueError(f"items must be 0 (all) or more, not {self.items}")
        if not 0 <= self.unjudged < 1:
            raise ValueError(f"unjudged must lie in [0, 1), not {self.unjudged}")
        if self.verdict == "logprobs" and (self.together or self.aggregate == "implicit"):
            raise ValueError("verdict = 'logprobs' reads one item a request: leave together and implicit out")
        if self.together and self.aggregate == "implicit":
            raise ValueError("together is for explicit aggregation: implicit shows all items anyway")


@dataclass(frozen=True)
class _Met:
    """The form `Met: 1, 3` of an answer about `count` items at once."""

    count: int
    verdict: How = "text"
    options: Mapping[str, float] = field(default_factory=dict)

    def read(self, answer: str) -> frozenset[int] | None:
        """Return the numbers of the items that are met; None without exactly one verdict, on the last line.

        >>> sorted(_Met(3).read("Fine.\\n**Met: 1, 3**")), _Met(3).read("Met: none"), _Met(3).read("Met: 4")
        ([1, 3], frozenset(), None)
        """
        lines = lines_of(answer)
        matches = [match for line in lines if (match := _MET.fullmatch(line))]
        if len(matches) != 1 or not _MET.fullmatch(lines[-1]):
            return None
        text = matches[0][1].lower()
        numbers = [] if text == "none" else [int(number) for number in text.split(",")]
        valid = all(1 <= n <= self.count for n in numbers) and len(set(numbers)) == len(numbers)
        return frozenset(numbers) if valid else None

    def weigh(self, chances: Sequence[float]) -> frozenset[int] | None:
        """Return None: probabilities are read for one item at a time."""
        return None


@dataclass(frozen=True, kw_only=True)
class Checklist(Checking, Verifier):
    """Score responses by the items of their task's rubric.

    Explicit: Σ w_j c_j / Σ max(w_j, 0), clipped to [0, 1], over the judged items j with c_j = 1 if item j is
    met, and w_j < 0 for a pitfall. Without pitfalls this is eq. 1 of arXiv:2507.17746. Implicit: the judge's
    grade g from 1 to 10 as (g - 1) / 9. Label: scored. The reason lists items met, missed and unjudged;
    Verdict.parts: unjudged, the share of items without a verdict.

    Without asking the judge, with score 0: no_answer, too_long, forbidden. Without a score: unanswered,
    unparsable.
    """

    place: ClassVar[int] = 17
    writer: Writer
    best: ClassVar[float] = 1.0

    @property
    def grouped(self) -> bool:
        """Whether items are drawn: the draw is one of the group."""
        return self.items > 0

    def __call__(self, task: Task, response: str) -> Verdict:
        return self.judge_all([(task, response)])[0]

    def judge_all(self, pairs: Sequence[tuple[Task, str]]) -> list[Verdict]:
        """Judge responses, by the items drawn in epoch 0 if `items` is set."""
        return self._judge([(task, response, self.draw_items(task)) for task, response in pairs])

    def judge_group(self, group: Group) -> list[Verdict]:
        """Judge the responses to a task by the same items."""
        items = self.draw_items(group.task, group.key)
        return self._judge([(group.task, response, items) for response in group.responses])

    def draw_items(self, task: Task, key: str = "") -> tuple[RubricItem, ...]:
        """Return the items to judge, in their order in the task; they depend on seed and key alone.

        key: epoch:task, of epoch 0 if it is "". At least one has a positive weight.
        """
        items = read_items(task, self.field)
        if not 0 < self.items < len(items):
            return items
        text = f"{self.seed}\0{key or f'0:{task.id}'}"
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        order = random.Random(int.from_bytes(digest)).sample(range(len(items)), len(items))
        indices = order[: self.items]
        if all(items[i].weight < 0 for i in indices):
            indices[-1] = next(i for i in order if items[i].weight > 0)
        return tuple(items[i] for i in sorted(indices))

    def _judge(self, cases: Sequence[tuple[Task, str, tuple[RubricItem, ...]]]) -> list[Verdict]:
        visible = [self.visible(response) for _, response, _ in cases]
        verdicts = [self.judge_unseen(response) for response in visible]
        open_cases = [i for i, verdict in enumerate(verdicts) if verdict is None]
        texts = [{"question": question_of(cases[i][0]), "response": visible[i]} for i in open_cases]
        lists = [cases[i][2] for i in open_cases]
        judged = self._judge_whole(texts, lists) if self.aggregate == "implicit" else None
        if judged is None:
            readings = self._read_together(texts, lists) if self.together else self._read_items(texts, lists)
            judged = [self._aggregate(*pair) for pair in zip(lists, readings, strict=True)]
        for i, verdict in zip(open_cases, judged, strict=True):
            verdicts[i] = verdict
        return [verdict for verdict in verdicts if verdict is not None]

    def _read_items(
        self, texts: Sequence[dict[str, str]], lists: Sequence[tuple[RubricItem, ...]]
    ) -> list[list[Reading[float]]]:
        rubric = Rubric(kind="pointwise", system=_ITEM.system, prompt=_ITEM.prompt, verdict=self.verdict)
        conversations: list[Sequence[Message]] = [
            rubric.conversation(case, item.criterion)
            for case, items in zip(texts, lists, strict=True)
            for item in items
        ]
        readings = iter(ask(self.writer, rubric, conversations, self) if conversations else [])
        return [[next(readings) for _ in items] for items in lists]

    def _read_together(
        self, texts: Sequence[dict[str, str]], lists: Sequence[tuple[RubricItem, ...]]
    ) -> list[list[Reading[float]]]:
        result: list[list[Reading[float]]] = [[] for _ in lists]
        for count in sorted({len(items) for items in lists}):  # the form of an answer depends on the count
            cases = [i for i, items in enumerate(lists) if len(items) == count]
            instruction = (
                "Give your reasons in a few sentences. Then end with one line that reads exactly 'Met: ' and "
                "the numbers of the criteria that are met, as in 'Met: 1, 2', or 'Met: none'."
            )
            conversations = [
                guarded(_ITEMS, _SYSTEM, texts[i], _numbered(lists[i]), instruction) for i in cases
            ]
            for i, reading in zip(cases, ask(self.writer, _Met(count), conversations, self), strict=True):
                met = reading.value
                result[i] = [
                    Reading(None if met is None else float(n in met), reading.text, reading.label)
                    for n in range(1, count + 1)
                ]
        return result

    def _judge_whole(
        self, texts: Sequence[dict[str, str]], lists: Sequence[tuple[RubricItem, ...]]
    ) -> list[Verdict]:
        conversations = [
            _WHOLE.conversation(case, _numbered(items, weights=True))
            for case, items in zip(texts, lists, strict=True)
        ]
        readings = ask(self.writer, _WHOLE, conversations, self) if conversations else []
        return [
            Verdict(score=None, label=reading.label, reason=reading.text)
            if reading.value is None
            else Verdict(
                score=reading.value, label="scored", reason=quote(" ".join(reading.text.split()), 120)
            )
            for reading in readings
        ]

    def _aggregate(self, items: Sequence[RubricItem], readings: Sequence[Reading[float]]) -> Verdict:
        met: list[float | None] = [
            None if self.verdict == "text" and reading.value not in (0.0, 1.0) else reading.value
            for reading in readings
        ]
        share = met.count(None) / len(met)
        score = rubric_score([item.weight for item in items], met)
        if share > self.unjudged or score is None:
            label, text = next((r.label, r.text) for r, m in zip(readings, met, strict=True) if m is None)
            reason = f"{met.count(None)} of {len(met)} items are without a verdict: {quote(text, 120)}"
            return Verdict(score=None, label=label or "unparsable", reason=reason)
        by_kind: dict[str, list[str]] = {"met": [], "missed": [], "pitfalls": [], "unjudged": []}
        for item, value in zip(items, met, strict=True):
            kind = "unjudged" if value is None else "met" if value > 0.5 else "missed"
            if item.weight < 0 and kind != "unjudged":
                kind = "pitfalls" if kind == "met" else ""
            if kind:
                by_kind[kind].append(quote(item.criterion, 40))
        reason = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in by_kind.items() if names)
        return Verdict(score=score, label="scored", reason=reason, parts={"unjudged": share})

    def check(self, task: Task) -> None:
        """Raise UserError if the task has no question, or no items with a positive weight among them."""
        if not question_of(task).strip():
            raise UserError(task.source, f"task {task.id!r} has no question")
        read_items(task, self.field)

    def budget_s(self, task: Task) -> float:
        """Return the writer's budget for all attempts of all requests about one response."""
        single = self.together or self.aggregate == "implicit"
        return self.writer.budget_s * self.attempts * (1 if single else len(self.draw_items(task)))

    def require(self) -> None:
        """Raise UserError if the writer is not available."""
        self.writer.require()


def rubric_score(weights: Sequence[float], met: Sequence[float | None]) -> float | None:
    """Σ w c / Σ max(w, 0) over the judged items, clipped to [0, 1]; None if no judged weight is positive.

    Source: arXiv:2507.17746, eq. 1; with negative weights arXiv:2505.08775.

    >>> rubric_score([3.0, 1.0, -2.0], [1.0, 0.0, 1.0]), rubric_score([3.0, 1.0], [1.0, None])
    (0.25, 1.0)
    """
    judged = [(w, c) for w, c in zip(weights, met, strict=True) if c is not None]
    most = math.fsum(w for w, _ in judged if w > 0)
    return min(max(math.fsum(w * c for w, c in judged) / most, 0.0), 1.0) if most else None


def read_items(task: Task, name: str) -> tuple[RubricItem, ...]:
    """Return the items of a task's field. Raises UserError at the task's line of the data for a wrong one."""
    value = task.fields.get(name)
    if not isinstance(value, (list, tuple)) or not value:
        fix = did_you_mean(name, task.fields) or "give it a list of criteria, or set verifier.rubric.field"
        raise UserError(task.source, f"task {task.id!r} has no list of items in {name!r}", fix)
    items = tuple(_item(task, f"item {n} of {name!r}", entry) for n, entry in enumerate(value, start=1))
    if all(item.weight < 0 for item in items):
        problem = f"every item of {name!r} of task {task.id!r} is a pitfall, so no answer could score above 0"
        raise UserError(task.source, problem, "add an item with a positive weight")
    return items


def _item(task: Task, where: str, entry: Any) -> RubricItem:
    table = {"criterion": entry} if isinstance(entry, str) else entry
    if not isinstance(table, Mapping):
        problem = f"{where} of task {task.id!r} is {type(entry).__name__}, not a text or a table"
        raise UserError(task.source, problem)
    keys = ("criterion", "weight", "pitfall")
    # Columns of a table file give every item all keys, with null where an item lacks one.
    table = {key: value for key, value in table.items() if value is not None}
    if unknown := sorted(set(map(str, table)) - set(keys)):
        fix = did_you_mean(unknown[0], keys) or f"an item has {', '.join(keys)}"
        raise UserError(task.source, f"{where} of task {task.id!r} has an unknown key {unknown[0]!r}", fix)
    text, weight, pitfall = table.get("criterion"), table.get("weight", 1.0), table.get("pitfall", False)
    if not isinstance(text, str) or not text.strip():
        raise UserError(
            task.source, f"{where} of task {task.id!r} has no criterion", "write what is required"
        )
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < abs(weight) < 1e6:
        problem = f"{where} of task {task.id!r} has the weight {weight!r}; expected a number other than 0"
        raise UserError(task.source, problem)
    if not isinstance(pitfall, bool):
        raise UserError(
            task.source, f"{where} of task {task.id!r}: pitfall is true or false, not {pitfall!r}"
        )
    return RubricItem(text.strip(), -abs(weight) if pitfall else float(weight))


def _numbered(items: Sequence[RubricItem], *, weights: bool = False) -> str:
    lines = [f"{n}. {item.criterion}" for n, item in enumerate(items, start=1)]
    if weights:
        lines = [f"{line} (weight {item.weight:g})" for line, item in zip(lines, items, strict=True)]
    return "\n".join(lines)
