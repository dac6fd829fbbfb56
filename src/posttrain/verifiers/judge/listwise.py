"""A judge of whole groups: all responses to a task are shown together and ranked in one request."""

import hashlib
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from posttrain.types import Message, Task, UserError, Verdict
from posttrain.verifiers.judge.constitution import Constitution
from posttrain.verifiers.judge.judge import Judging, ask, reference
from posttrain.verifiers.judge.rubric import Rubric, guarded, lines_of, question_of
from posttrain.verifiers.judge.rubric import Verdict as How
from posttrain.verifiers.judge.writer import Writer
from posttrain.verifiers.protocol import Group, Verifier, quote

_RANKING = re.compile(r"ranking\s*:\s*(\d{1,3}(?:\s*[>=]\s*\d{1,3})*)\s*\.?", re.IGNORECASE | re.ASCII)
_INSTRUCTION = (
    "Give your reasons in a few sentences. Then end with one line that begins with 'Ranking: ' and has the "
    "number of each answer once, from the best to the worst, as in 'Ranking: 2 > 3 > 1'. Write = for > "
    "between answers that are equally good."
)


@dataclass(frozen=True)
class _Ranking:
    """The form `Ranking: 2 > 1 = 3` of an answer about `count` responses."""

    count: int
    verdict: How = "text"
    options: Mapping[str, float] = field(default_factory=dict)

    def read(self, answer: str) -> tuple[int, ...] | None:
        """Return the place of each response, 0 for the best; None unless the last line ranks each once.

        >>> _Ranking(3).read("Fine.\\n**Ranking: 2 > 1 = 3**"), _Ranking(3).read("Ranking: 2 > 1")
        ((1, 0, 1), None)
        """
        lines = lines_of(answer)
        matches = [match for line in lines if (match := _RANKING.fullmatch(line))]
        if len(matches) != 1 or not _RANKING.fullmatch(lines[-1]):
            return None
        places: dict[int, int] = {}
        for place, equal in enumerate(matches[0][1].split(">")):
            numbers = [int(number) for number in equal.split("=")]
            if places.keys() & set(numbers) or len(set(numbers)) < len(numbers):
                return None
            places |= dict.fromkeys(numbers, place)
        expected = range(1, self.count + 1)
        return tuple(places[n] for n in expected) if places.keys() == set(expected) else None

    def weigh(self, chances: Sequence[float]) -> tuple[int, ...] | None:
        """Return None: a ranking is read from text."""
        return None


@dataclass(frozen=True, kw_only=True)
class Listwise(Judging, Verifier):
    """Rank the responses of a group by one request to a language model.

    The score of a response in a group of n is (b + t/2) / (n - 1): b responses are worse, and t others
    equally good; it is the mean of its comparisons with the others. Label: ranked. Equal responses are shown
    once and tie. They are shown in an order drawn by the seed, the task and the epoch, which does not depend
    on their order in the group. A single response scores 1/2 (alone) without a request.

    What the judge is not shown (no_answer, too_long, forbidden) scores 0 and is worse than all others. If the
    judge gives no ranking of all responses, the whole group is without a score: unanswered, unparsable.
    """

    place: ClassVar[int] = 14
    writer: Writer
    rubric: Rubric
    constitution: Constitution | None = None
    best: ClassVar[float] = 1.0
    grouped: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rubric.wants("principles") != (self.constitution is not None):
            has = "has no place for" if self.constitution else "has a place for"
            raise ValueError(f"the rubric {has} {{principles}}, which come from a constitution")

    @property
    def largest_group(self) -> int:
        """Most responses of a group."""
        return self.most_responses

    def __call__(self, task: Task, response: str) -> Verdict:
        return self.judge_group(Group(task=task, responses=(response,)))[0]

    def judge_all(self, pairs: Sequence[tuple[Task, str]]) -> list[Verdict]:
        """Judge each response as a group of its own."""
        return [self(task, response) for task, response in pairs]

    def judge_group(self, group: Group) -> list[Verdict]:
        """Rank the responses. Raises UserError for a group of more than `most_responses`."""
        if (n := len(group.responses)) > self.most_responses:
            problem = (
                f"{n} responses to a task are more than the {self.most_responses} that are shown at once"
            )
            fix = "raise it if the judge's context has room"
            raise UserError("verifier.judge.most_responses", problem, fix)
        visible = [self.visible(response) for response in group.responses]
        verdicts = {i: v for i, response in enumerate(visible) if (v := self.judge_unseen(response))}
        texts = self._shuffled({text for i, text in enumerate(visible) if i not in verdicts}, group)
        places, because = (0,) * len(texts), "nothing to compare with"
        if len(texts) > 1:
            [reading] = ask(self.writer, _Ranking(len(texts)), [self._conversation(group.task, texts)], self)
            if reading.value is None:
                return [Verdict(score=None, label=reading.label, reason=reading.text)] * n
            places, because = reading.value, quote(" ".join(reading.text.split()), 120)
        place_of = dict(zip(texts, places, strict=True))
        ranks = [len(texts) if i in verdicts else place_of[text] for i, text in enumerate(visible)]
        for i, rank in enumerate(ranks):
            if i not in verdicts:
                label = "ranked" if n > 1 else "alone"
                verdicts[i] = Verdict(score=rank_score(rank, ranks), label=label, reason=because)
        return [verdicts[i] for i in range(n)]

    def _shuffled(self, texts: set[str], group: Group) -> list[str]:
        key = f"{self.seed}\0{group.key or f'0:{group.task.id}'}"
        digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return random.Random(int.from_bytes(digest)).sample(sorted(texts), len(texts))

    def _conversation(self, task: Task, responses: Sequence[str]) -> list[Message]:
        texts = {"question": question_of(task)}
        if self.rubric.wants("reference"):
            texts["reference"] = self.visible(reference(task))
        texts |= {f"response_{n}": text for n, text in enumerate(responses, start=1)}
        several = "\n\n".join(f"Answer {n}:\n\n{{response_{n}}}" for n in range(1, len(responses) + 1))
        prompt = self.rubric.prompt.replace("{responses}", several)
        principles = self.constitution.listed() if self.constitution else ""
        return guarded(prompt, self.rubric.system, texts, principles, _INSTRUCTION)

    def check(self, task: Task) -> None:
        """Raise UserError if the task has no question, or lacks a reference that the rubric needs."""
        if not question_of(task).strip():
            raise UserError(task.source, f"task {task.id!r} has no question")
        if self.rubric.wants("reference"):
            reference(task)

    def budget_s(self, task: Task) -> float:
        """Return the writer's budget for all attempts."""
        return self.writer.budget_s * self.attempts

    def require(self) -> None:
        """Raise UserError if the writer is not available."""
        self.writer.require()


def rank_score(rank: int, ranks: Sequence[int]) -> float:
    """(worse + equal / 2) / (n - 1) over the others of n ranks, of which `rank` is one; 1/2 for n = 1.

    >>> [rank_score(rank, [0, 1, 1]) for rank in (0, 1)]
    [1.0, 0.25]
    """
    worse, equal = sum(other > rank for other in ranks), ranks.count(rank) - 1
    return (worse + equal / 2) / (len(ranks) - 1) if len(ranks) > 1 else 0.5
