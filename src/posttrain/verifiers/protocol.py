"""The protocol of verifiers: judge the responses to a task, and provide responses to test the judge."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

from posttrain.base.name_hints import did_you_mean
from posttrain.types import Task, UserError, Verdict

NOT_APPLICABLE = "not_applicable"
"""Label of a verdict without a score: the verifier does not apply to this response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """Progress of the run, under the names of transformers' TrainerState."""

    global_step: int = 0
    """Number of completed updates."""
    max_steps: int = 1
    """Updates of the whole run; 1 outside training, so that global_step / max_steps is defined."""
    epoch: float = 0.0
    """Tasks drawn before this update, divided by the number of tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The responses to one task that are judged together."""

    task: Task
    responses: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...] | None = None
    """Sampled token ids of each response, end token included; None if only the text is known."""
    state: TrainerState = field(default_factory=TrainerState)
    key: str = ""
    """Key of the group's random draws, epoch:task, for verifiers that draw; "" outside a run."""

    def select(self, indices: Sequence[int]) -> "Group":
        """Return the group of the responses at these indices.

        >>> Group(task=Task(id="q", messages=()), responses=("a", "b", "c")).select([0, 2]).responses
        ('a', 'c')
        """
        tokens = None if self.tokens is None else tuple(self.tokens[i] for i in indices)
        return replace(self, responses=tuple(self.responses[i] for i in indices), tokens=tokens)

    @property
    def pairs(self) -> list[tuple[Task, str]]:
        """(task, response) for each response: the argument of `Verifier.judge_all`."""
        return [(self.task, response) for response in self.responses]


class Verifier(Protocol):
    """Judge responses. A verifier is frozen and picklable, and gives the same input the same verdict.

    A verifier that cannot judge raises, or returns a verdict without a score; neither ever
    becomes a reward of 0. Subclasses inherit the defaults below.
    """

    place: ClassVar[int] = 100
    """Order among the verifiers of a recipe, in which a gate runs them: lower numbers first."""

    @property
    def name(self) -> str:
        """Name under which the score is recorded."""
        ...

    @property
    def trusted(self) -> bool:
        """Whether it may run in the main process: linear time, no user code, cannot hang or crash."""
        return False

    @property
    def best(self) -> float | None:
        """Highest score that it gives; None if that is not known beforehand."""
        return None

    @property
    def batch(self) -> int:
        """Most responses that one call of `judge_all` takes; above 1 for verifiers that run a model."""
        return 1

    @property
    def grouped(self) -> bool:
        """Whether a verdict may depend on the other responses to the task; then `judge_group` is called."""
        return False

    @property
    def largest_group(self) -> int | None:
        """Most responses that one call of `judge_group` takes; None: any number."""
        return None

    def __call__(self, task: Task, response: str) -> Verdict:
        """Judge one response."""
        ...

    def judge_all(self, pairs: Sequence[tuple[Task, str]]) -> list[Verdict]:
        """Judge at most `batch` responses, each as if it were judged alone."""
        return [self(task, response) for task, response in pairs]

    def judge_group(self, group: Group) -> list[Verdict]:
        """Judge all responses to one task; verdicts are in the order of `group.responses`."""
        return self.judge_all(group.pairs)

    def vote(self, response: str) -> str | None:
        """Return the answer that the response votes for in a majority vote; None if it has no vote."""
        return None

    def golds(self, task: Task) -> list[str]:
        """Return responses that must get `best`."""
        return []

    def fakes(self, task: Task) -> list[str]:
        """Return responses that must get less than `best`. They always include the empty response."""
        return [""]

    def check(self, task: Task) -> None:
        """Raise UserError if this task cannot be judged, for example because its answer cannot be parsed."""
        return

    def budget_s(self, task: Task) -> float | None:
        """Return the seconds that one verdict may take; None for the deadline of the pool."""
        return None

    def check_all(self, tasks: Sequence[Task]) -> None:
        """Raise UserError for a fault of the tasks as a whole, such as a column that every task lacks."""
        return

    def require(self) -> None:
        """Raise UserError if this machine lacks something that is needed, such as a sandbox or a program."""
        return


UNJUDGED = "unjudged"
"""Label of responses that no verifier judges, because the method learns from no reward."""


@dataclass(frozen=True)
class Unjudged(Verifier):
    """Give every response a score of 0, for methods that learn from a teacher and need no verifier."""

    name: str = UNJUDGED
    trusted: bool = True

    def __call__(self, task: Task, response: str) -> Verdict:
        return Verdict(score=0.0, label=UNJUDGED)


def gold_answer(task: Task) -> str:
    """Return the task's answer. Raises UserError at its line of the data if it is not a text, or blank."""
    if task.answer is None and task.answer_value is not None:
        problem = f"the answer of task {task.id!r} is not text or a number: {task.answer_value!r:.40}"
        raise UserError(task.source, problem, "write it as text, or judge with a function of your own")
    if task.answer is None:
        hint = did_you_mean("answer", task.fields)
        raise UserError(task.source, f"task {task.id!r} has no answer", hint)
    if not task.answer.strip():
        raise UserError(task.source, f"the answer of task {task.id!r} is empty")
    return task.answer


def quote(text: str, most: int = 60) -> str:
    """Quote a text for a one-line reason, cut after `most` characters.

    >>> quote("7\\n"), quote("abcdefgh", most=4)
    ("'7\\\\n'", "'abcd'...")
    """
    return repr(text) if len(text) <= most else f"{text[:most]!r}..."
