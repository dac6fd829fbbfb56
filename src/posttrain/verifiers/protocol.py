"""What a verifier is: something that judges one response to one task, and says how it can be tested."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

from posttrain.base.nearest import did_you_mean
from posttrain.types import Task, UserError, Verdict

NOT_APPLICABLE = "not_applicable"
"""Label of a verdict without a score on a response that the verifier has nothing to say about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """How far the run is, under the names that transformers' TrainerState has."""

    global_step: int = 0
    """Updates that are behind."""
    max_steps: int = 1
    """Updates of the whole run; 1 where nothing is trained, so that a share of it can be asked for."""
    epoch: float = 0.0
    """Tasks taken before this update, in multiples of all tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The responses to one task that are judged together."""

    task: Task
    responses: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...] | None = None
    """What the policy sampled for each, its end token included; None where only the text is known."""
    state: TrainerState = field(default_factory=TrainerState)

    def only(self, chosen: Sequence[int]) -> "Group":
        """The group of these of its responses.

        >>> Group(task=Task(id="q", messages=()), responses=("a", "b", "c")).only([0, 2]).responses
        ('a', 'c')
        """
        tokens = None if self.tokens is None else tuple(self.tokens[i] for i in chosen)
        return replace(self, responses=tuple(self.responses[i] for i in chosen), tokens=tokens)

    @property
    def pairs(self) -> list[tuple[Task, str]]:
        """Each response with the task."""
        return [(self.task, response) for response in self.responses]


class Verifier(Protocol):
    """Judges responses. Verifiers are frozen and picklable, and the same input gives the same verdict.

    A verifier that cannot judge raises, or returns a verdict without a score; neither ever
    becomes a reward of 0. Those that inherit from this class get the defaults below.
    """

    place: ClassVar[int] = 100
    """Where it stands among the verifiers of a recipe, by which a gate asks them: smaller numbers first."""

    @property
    def name(self) -> str:
        """Under which its score is recorded."""
        ...

    @property
    def trusted(self) -> bool:
        """Whether it may run in our own process: linear time, no user code, no way to hang or die."""
        return False

    @property
    def best(self) -> float | None:
        """The greatest score it gives; None if that is not known beforehand."""
        return None

    @property
    def batch(self) -> int:
        """How many responses one call of `judge_all` may take; more than 1 where a model judges."""
        return 1

    @property
    def grouped(self) -> bool:
        """Whether a verdict may depend on the other responses to the task, which `judge_group` is given."""
        return False

    def __call__(self, task: Task, response: str) -> Verdict:
        """The verdict on one response."""
        ...

    def judge_all(self, pairs: Sequence[tuple[Task, str]]) -> list[Verdict]:
        """The verdicts on at most `batch` responses, each the same as if it were judged alone."""
        return [self(task, response) for task, response in pairs]

    def judge_group(self, group: Group) -> list[Verdict]:
        """The verdicts on all responses to one task, in their order."""
        return self.judge_all(group.pairs)

    def vote(self, response: str) -> str | None:
        """Return what the response counts for in a majority vote; None if it counts for nothing."""
        return None

    def golds(self, task: Task) -> list[str]:
        """Responses to which it must give `best`."""
        return []

    def fakes(self, task: Task) -> list[str]:
        """Responses to which it must give less than `best`; the empty one is always among them."""
        return [""]

    def check(self, task: Task) -> None:
        """Nothing; raises UserError if this task cannot be judged, as when its answer has no meaning."""
        return

    def budget_s(self, task: Task) -> float | None:
        """Seconds after which a verdict on one response is given up; None: the pool's own deadline."""
        return None

    def check_all(self, tasks: Sequence[Task]) -> None:
        """UserError for what all tasks together lack."""
        return

    def require(self) -> None:
        """Nothing; raises UserError if this machine lacks what it needs, as a sandbox or a program."""
        return


UNJUDGED = "unjudged"
"""Label of what nobody judges, where the method learns from no reward."""


@dataclass(frozen=True)
class Unjudged(Verifier):
    """Nobody: a method that learns from a teacher alone needs no verifier. Each response has a score of 0."""

    name: str = UNJUDGED
    trusted: bool = True

    def __call__(self, task: Task, response: str) -> Verdict:
        """The verdict that says nothing."""
        return Verdict(score=0.0, label=UNJUDGED)


def gold_answer(task: Task) -> str:
    """The task's answer, which must be there and not blank; otherwise UserError at its line of the data."""
    if task.answer is None:
        hint = did_you_mean("answer", task.fields)
        raise UserError(task.source, f"task {task.id!r} has no answer", hint)
    if not task.answer.strip():
        raise UserError(task.source, f"the answer of task {task.id!r} is empty")
    return task.answer


def shown(text: str, most: int = 60) -> str:
    """A response as it fits into one line of a reason.

    >>> shown("7\\n"), shown("abcdefgh", most=4)
    ("'7\\\\n'", "'abcd'...")
    """
    return repr(text) if len(text) <= most else f"{text[:most]!r}..."
