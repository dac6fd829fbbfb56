"""Repair: a whole answer, what the verifier says is wrong with it, and another attempt."""

from dataclasses import dataclass

from posttrain.envs.protocol import Start, Turn
from posttrain.types import Task, UserError, Verdict
from posttrain.verifiers.protocol import Verifier


@dataclass(frozen=True, kw_only=True)
class Repair:
    """How often an answer may be mended, and what is said of one that is wrong.

    >>> Repair().about(Verdict(score=0.0, label="error", reason="sentence 2: no such hypothesis"), None)
    'error: sentence 2: no such hypothesis\\nGive the whole answer again.'
    """

    turns: int = 3
    """Attempts at a task."""
    says: str = "{label}: {reason}\nGive the whole answer again."
    """{label} and {reason} are the verdict's."""
    characters: int = 600
    """Most that is said of a reason, its beginning and its end."""

    def __post_init__(self) -> None:
        if min(self.turns, self.characters) < 1:
            raise ValueError("turns and characters must be 1 or more")
        if not self.says.strip():
            raise ValueError("says must not be empty")

    def about(self, verdict: Verdict, answer: str | None) -> str:
        """What is said of a wrong answer; a reason that holds the right one is kept back."""
        reason = verdict.reason
        if answer and answer.strip() and answer.strip() in reason:
            reason = "not so"
        if len(reason) > self.characters:
            half = self.characters // 2
            reason = f"{reason[:half]} … {reason[len(reason) - half :]}"
        return self.says.replace("{label}", verdict.label).replace("{reason}", reason)


@dataclass(frozen=True, slots=True)
class Attempt:
    """Where an episode of repair stands."""

    task: Task
    made: int = 0
    """Attempts so far, all of them wrong."""
    told: str = ""
    """What was said of the last one."""


@dataclass(frozen=True, kw_only=True)
class Repairing:
    """The policy answers a task until that is right, at most `turns` times.

    What the last answer is worth is what the episode is worth, and comes with its last token. An answer that
    could not be judged ends the episode without a score.

    right: the score from which on an answer is right.
    """

    judge: Verifier
    settings: Repair = Repair()
    right: float = 1.0

    @property
    def trusted(self) -> bool:
        """Whether it may run in our own process, as its judge may."""
        return self.judge.trusted

    @property
    def max_turns(self) -> int:
        """Attempts at a task."""
        return self.settings.turns

    def budget_s(self, task: Task) -> float | None:
        """How long a reply may take, where its verifier needs longer than others."""
        return self.judge.budget_s(task)

    def start(self, task: Task) -> Start:
        """The task's question; UserError if it has none."""
        if not task.messages:
            raise UserError(task.source, f"task {task.id!r} asks nothing")
        return Start(state=Attempt(task), messages=task.messages)

    def reply(self, state: Attempt, response: str) -> Turn:
        """What is wrong with this answer, or the end."""
        verdict, made = self.judge(state.task, response), state.made + 1
        solved = verdict.score is not None and verdict.score >= self.right
        if verdict.score is None or solved or made >= self.settings.turns:
            told = f"{verdict.reason}; attempt {made} of {self.settings.turns}"
            verdict = Verdict(score=verdict.score, label=verdict.label, reason=told, parts=verdict.parts)
            return Turn(state=state, done=True, verdict=verdict, reward=verdict.score)
        said = self.settings.about(verdict, state.task.answer)
        return Turn(state=Attempt(state.task, made, said), messages=({"role": "user", "content": said},))
