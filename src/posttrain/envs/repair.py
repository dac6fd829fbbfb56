"""Repair: the policy answers, sees why the verifier rejects the answer, and tries again."""

from dataclasses import dataclass

from posttrain.envs.protocol import Start, Turn
from posttrain.types import Task, UserError, Verdict
from posttrain.verifiers.protocol import Verifier


@dataclass(frozen=True, kw_only=True)
class Repair:
    """How often an answer may be corrected, and the message about a wrong one.

    >>> Repair().about(Verdict(score=0.0, label="error", reason="sentence 2: no such hypothesis"), None)
    'error: sentence 2: no such hypothesis\\nGive the whole answer again.'
    """

    turns: int = 3
    """Maximum attempts at a task."""
    says: str = "{label}: {reason}\nGive the whole answer again."
    """The message; {label} and {reason} are those of the verdict."""
    characters: int = 600
    """Maximum characters of a reason: its beginning and its end are shown."""

    def __post_init__(self) -> None:
        if min(self.turns, self.characters) < 1:
            raise ValueError("turns and characters must be 1 or more")
        if not self.says.strip():
            raise ValueError("says must not be empty")

    def about(self, verdict: Verdict, answer: str | None) -> str:
        """Return the message about a wrong answer; a reason that contains the right answer is withheld."""
        reason = verdict.reason
        if answer and answer.strip() and answer.strip() in reason:
            reason = "not so"
        if len(reason) > self.characters:
            half = self.characters // 2
            reason = f"{reason[:half]} … {reason[len(reason) - half :]}"
        return self.says.replace("{label}", verdict.label).replace("{reason}", reason)


@dataclass(frozen=True, slots=True)
class Attempt:
    """The state of an episode of repair."""

    task: Task
    attempts: int = 0
    """Number of earlier attempts, all wrong."""
    feedback: str = ""
    """The message about the last one."""


@dataclass(frozen=True, kw_only=True)
class Repairing:
    """The policy answers a task until the answer is right, at most `turns` times.

    The score of the last answer is the reward of the episode, at its last token. An answer that cannot be
    judged ends the episode without a score.

    right: the least score of a right answer.
    """

    judge: Verifier
    settings: Repair = Repair()
    right: float = 1.0

    @property
    def trusted(self) -> bool:
        """Whether it may run in the process of the run: the judge's `trusted`."""
        return self.judge.trusted

    @property
    def max_turns(self) -> int:
        """Maximum attempts at a task."""
        return self.settings.turns

    def budget_s(self, task: Task) -> float | None:
        """Return the seconds that a reply may take, or None for the usual limit."""
        return self.judge.budget_s(task)

    def start(self, task: Task) -> Start:
        """Return the task's question. Raises UserError if it has none."""
        if not task.messages:
            raise UserError(task.source, f"task {task.id!r} asks nothing")
        return Start(state=Attempt(task), messages=task.messages)

    def reply(self, state: Attempt, response: str) -> Turn:
        """Return the message about this answer, or the end."""
        verdict, attempts = self.judge(state.task, response), state.attempts + 1
        solved = verdict.score is not None and verdict.score >= self.right
        if verdict.score is None or solved or attempts >= self.settings.turns:
            reason = f"{verdict.reason}; attempt {attempts} of {self.settings.turns}"
            verdict = Verdict(score=verdict.score, label=verdict.label, reason=reason, parts=verdict.parts)
            return Turn(state=state, done=True, verdict=verdict, reward=verdict.score)
        feedback = self.settings.about(verdict, state.task.answer)
        next_state = Attempt(state.task, attempts, feedback)
        return Turn(state=next_state, messages=({"role": "user", "content": feedback},))
