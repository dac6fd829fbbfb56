"""The verifier `coq`: a proof of the task's statement, checked by Coq."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from posttrain.types import RunError, Task, UserError, Verdict
from posttrain.verifiers.proof.coq import batch, check
from posttrain.verifiers.proof.coq.check import Outcome, Problem
from posttrain.verifiers.proof.coq.screen import Refusal, refusal
from posttrain.verifiers.proof.coq.script import Sentence, declares, sentences, submission
from posttrain.verifiers.proof.coq.session import EndedError, Opening, Session, taken
from posttrain.verifiers.proof.coq.task import problem_of
from posttrain.verifiers.proof.coq.walk import Progress, Walk, first_rank, measured, walked
from posttrain.verifiers.protocol import Verifier, shown
from posttrain.verifiers.sandbox import LEVELS, Box, Level, Limits, require

_LOAD_S = 60.0
_FIRST_RANKS: dict[Problem, tuple[int, list[str]]] = {}
_MOST_FIRST_RANKS = 4096


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What Coq said of a submission, step by step."""

    label: str
    reason: str
    at: int | None = None
    """The first sentence, counted from 0, that fails; None if none does."""
    goals: tuple[int, ...] = ()
    """Goals left after the statement and after each accepted sentence of the theorem's proof."""
    progress: tuple[tuple[int, float], ...] = ()
    score: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Coq(Verifier):
    """1 if the response proves the task's statement in Coq; otherwise 0, or its progress with `partial`.

    Labels: proved, incomplete, error, wrong_statement, assumes, forbidden, timeout.

    >>> Coq(budget=5.0).best
    1.0
    """

    name: str = "coq"
    """Under which its score is recorded."""
    level: Level = "strict"
    """The least isolation that is accepted."""
    budget: float = 20.0
    """Seconds for the tactics, and again for each of: their progress, compiling, and checking."""
    memory_mb: int = 2048
    """Megabytes that Coq may use."""
    partial: bool = False
    """Whether a proof that does not end is worth its progress, at most 0.5."""
    axioms: tuple[str, ...] = ()
    """Full names of the axioms that a proof may use, such as Coq.Logic.Classical_Prop.classic."""
    warm: int = 1
    """Processes kept waiting for each header; 0 starts one for each response."""
    batch: int = 1
    """Scripts of tactics that are checked together, which for short proofs takes little longer than one.
    What each tactic adds is not measured then."""
    trusted: ClassVar[bool] = False
    best: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"level must be one of {', '.join(LEVELS)}, not {self.level}")
        if not 0 < self.budget < float("inf"):
            raise ValueError(f"budget must be positive, not {self.budget}")
        if self.memory_mb < 256:
            raise ValueError(f"memory_mb must be at least 256, not {self.memory_mb}")
        if self.warm < 0:
            raise ValueError(f"warm must be 0 or more, not {self.warm}")
        if self.batch < 1:
            raise ValueError(f"batch must be at least 1, not {self.batch}")
        if self.batch > 1 and self.partial:
            raise ValueError("partial measures each proof alone, so batch must be 1")
        if any("." not in axiom for axiom in self.axioms):
            raise ValueError("axioms must be full names, such as Coq.Logic.Classical_Prop.classic")

    def __call__(self, task: Task, response: str) -> Verdict:
        """The verdict; one without a score if the task is not Coq or the box does not work."""
        try:
            found = self.diagnose(task, response)
        except UserError as error:
            return Verdict(score=None, label="bad_task", reason=str(error))
        except RunError as error:
            return Verdict(score=None, label="raised", reason=str(error))
        return Verdict(score=found.score, label=found.label, reason=found.reason, progress=found.progress)

    def judge_all(self, pairs: Sequence[tuple[Task, str]]) -> list[Verdict]:
        """The verdicts; scripts of tactics are checked together, and alone where that does not prove them."""
        together: dict[str, dict[int, tuple[Problem, str]]] = {}
        """By header, as what one makes of notations does not hold for another."""
        for place, (task, response) in enumerate(pairs):
            script = batch.tactics(submission(response)[0])
            with suppress(UserError):  # a bad task is called so where it is judged alone
                problem = problem_of(task)
                if script is not None and not problem.definitions:
                    together.setdefault(problem.header, {})[place] = (problem, script)
        proved: set[int] = set()
        for proofs in together.values():
            found = batch.proved(self._box(), list(proofs.values()))
            proved |= {place for place, well in zip(proofs, found, strict=True) if well}
        good = Verdict(score=1.0, label="proved", reason="closed under the global context")
        return [good if place in proved else self(*pair) for place, pair in enumerate(pairs)]

    def diagnose(self, task: Task, response: str) -> Diagnosis:
        """The verdict with its steps. Raises UserError for a bad task and RunError if Coq does not run."""
        problem = problem_of(task)
        text, offset = submission(response)
        found, wrong = sentences(text)
        if not found and not wrong:
            return Diagnosis("incomplete", "the response is empty", 0)
        refused = refusal(found)
        if refused is not None and refused.label != "incomplete":
            return Diagnosis(refused.label, f"sentence {refused.index + 1}: {refused.why}", refused.index)
        script = not any(declares(sentence, problem.name) for sentence in found)
        said = found if refused is None else found[: refused.index]
        walk, progress = self._said(problem, said, script)
        at: int | None = walk.at
        outcome = _stopped(walk, found, refused, wrong, script)
        if outcome is None:
            whole = _whole(problem, text, found, script)
            outcome = check.accepted(self._box(), problem, whole, self.axioms)
            at = _sentence_at(outcome.at, whole, text, found)
            if outcome.label != "proved":  # goals that only seemed to be closed were no progress
                progress = Progress()
        steps = progress.potentials
        score = float(outcome.label == "proved")
        if self.partial and score == 0 and steps and steps[-1][1] > 0:
            score = self._certified(problem, text, found[: walk.at], script, progress)
            steps = steps if score else ()
        reason = outcome.reason
        if outcome.label == "proved":
            at = None
        elif at is not None and at < len(found):
            reason = f"sentence {at + 1}, {shown(found[at].text)}: {reason}"
        if outcome.label in ("incomplete", "error") and walk.goals:
            reason += f"; {walk.goals} {'goal is' if walk.goals == 1 else 'goals are'} left"
        ends = tuple((offset + found[index].end, phi) for index, phi in steps)
        return Diagnosis(outcome.label, reason, at, tuple(step.goals for step in walk.steps), ends, score)

    def golds(self, task: Task) -> list[str]:
        """The script that the task holds as `gold`, if it holds one."""
        gold = task.fields.get("gold")
        return [gold] if isinstance(gold, str) else []

    def fakes(self, task: Task) -> list[str]:
        """Nothing, giving up, doing nothing, another statement of that name, and an axiom."""
        problem = problem_of(task)
        other = f"Definition {problem.name} := tt."
        assumed = f"Axiom {problem.name} : {problem.statement}."
        return ["", "admit.", "Proof. Admitted.", "idtac.", other, assumed]

    def check(self, task: Task) -> None:
        """UserError unless name, statement, header, definitions and gold have the form they must have."""
        problem_of(task)

    def budget_s(self, task: Task) -> float | None:
        """All phases, on a machine that does little else."""
        return _LOAD_S * 2 + self.budget * 8

    def require(self) -> None:
        """UserError if Coq is not installed or the isolation level is not to be had."""
        check.programs()
        require(self.level)

    def _box(self, wall_s: float | None = None) -> Box:
        limits = Limits(wall_s=wall_s or self.budget, memory_mb=self.memory_mb)
        return Box(level=self.level, limits=limits, readable=check.programs().readable)

    def _said(self, problem: Problem, found: list[Sentence], script: bool) -> tuple[Walk, Progress]:
        """How far the sentences come in a session of their own, and the progress they make."""
        for fresh in (False, True):  # a process that waited may have been killed for want of memory
            try:
                walk, progress = self._said_once(problem, found, script, fresh)
            except EndedError as end:
                if fresh or end.why != "died":
                    raise RunError(f"coqtop does not get through what is ours: {end.why}") from None
                continue
            if walk.ended != "died":
                return walk, progress
        check.works(self._box())
        return walk, progress

    def _said_once(
        self, problem: Problem, found: list[Sentence], script: bool, fresh: bool
    ) -> tuple[Walk, Progress]:
        opening = self._opening(problem)
        session = opening.start() if fresh else taken(opening, self.warm)
        try:
            session.allow(_LOAD_S)
            session.load()
            first, rungs = self._first_rank(session, problem)
            session.allow(self.budget)
            walk = walked(session, problem, found, script)
            session.allow(self.budget)
            return walk, measured(session, walk, found, first, rungs)
        finally:
            session.close()

    def _opening(self, problem: Problem) -> Opening:
        files = check.given(self._box(), problem)
        return Opening(
            self._box(_LOAD_S + 4 * self.budget),
            tuple(check.command(check.programs().coqtop, "-emacs")),
            tuple(sorted(files.items())),
            problem.preamble,
        )

    def _first_rank(self, session: Session, problem: Problem) -> tuple[int, list[str]]:
        if problem not in _FIRST_RANKS:
            check.spec(self._box(), problem)  # says what is wrong with a statement that is not Coq
            if len(_FIRST_RANKS) >= _MOST_FIRST_RANKS:
                _FIRST_RANKS.clear()
            session.allow(_LOAD_S)
            _FIRST_RANKS[problem] = first_rank(session, problem)
        return _FIRST_RANKS[problem]

    def _certified(
        self, problem: Problem, text: str, found: list[Sentence], script: bool, progress: Progress
    ) -> float:
        """The last Φ if the proof, finished by what Φ says would finish it, is accepted; otherwise 0."""
        ended = f"{text[: found[-1].end]}\n" + "\n".join([*progress.finish, "Qed."])
        whole = _whole(problem, ended, [*found, sentences("Qed.")[0][0]], script)
        outcome = check.accepted(self._box(), problem, whole, self.axioms)
        return progress.potentials[-1][1] if outcome.label == "proved" else 0.0


def _stopped(
    walk: Walk, found: list[Sentence], refused: Refusal | None, wrong: str, script: bool
) -> Outcome | None:
    """Why a submission is not worth compiling; None if it is."""
    if walk.ended == "timeout":
        return Outcome("timeout", "Coq's time is used up")
    if walk.ended in ("output", "died"):
        return Outcome("error", {"output": "it prints too much", "died": "Coq ended"}[walk.ended])
    if walk.ended == "failed":
        return Outcome("error", walk.said)
    if refused is not None and walk.at >= refused.index:
        return Outcome("incomplete", refused.why)
    if wrong:
        return Outcome("error", wrong)
    if walk.proving and walk.goals:
        return Outcome("incomplete", "the proof does not end here")
    if walk.proving and not script and walk.at == len(found):
        return Outcome("incomplete", "the proof does not end with Qed")
    return None


def _whole(problem: Problem, text: str, found: list[Sentence], script: bool) -> str:
    """The file that is compiled."""
    if not script:
        return f"{problem.preamble}{text}\n"
    ended = any(re.match(r"(?:Qed|Defined|Save|Proof\s+[^u\s.])\b", sentence.code) for sentence in found)
    end = "" if ended else "\nQed."
    return f"{problem.preamble}Theorem {problem.name} : {problem.statement}.\n{text}{end}\n"


def _sentence_at(at: int | None, whole: str, text: str, found: list[Sentence]) -> int | None:
    """The sentence in which a byte of the compiled file is; None if it is in what we have added."""
    if at is None:
        return None
    place = len(whole.encode("utf-8", "replace")[:at].decode("utf-8", "replace")) - whole.rindex(text)
    return next((i for i, sentence in enumerate(found) if sentence.start <= place < sentence.end), None)
