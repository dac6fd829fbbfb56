"""The verifier `coq`: a proof of the task's statement, checked by Coq."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from posttrain.types import RunError, Task, UserError, Verdict
from posttrain.verifiers.protocol import Verifier
from posttrain.verifiers.sandbox import LEVELS, Box, Level, Limits, require
from posttrain_prove.coq import batch, check
from posttrain_prove.coq.check import CoqOutcome, CoqProblem
from posttrain_prove.coq.diagnosis import (
    Diagnosis,
    Submission,
    finished,
    read,
    sentence_at,
    stopped,
    told,
    whole,
)
from posttrain_prove.coq.script import sentences
from posttrain_prove.coq.session import CoqSession, EndedError, Opening, take
from posttrain_prove.coq.task import problem_of
from posttrain_prove.coq.walk import ProofProgress, ProofWalk, first_rank, measured, walk_through

_LOAD_S = 60.0
_FIRST_RANKS: dict[CoqProblem, tuple[int, list[str]]] = {}
_MOST_FIRST_RANKS = 4096


@dataclass(frozen=True, kw_only=True)
class Coq(Verifier):
    """1 if the response proves the task's statement in Coq; otherwise 0, or its progress with `partial`.

    Labels: proved, incomplete, error, wrong_statement, assumes, forbidden, timeout.

    >>> Coq(budget=5.0).best
    1.0
    """

    place: ClassVar[int] = 5
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
    """Scripts of tactics that are judged together, which for short ones takes little longer than one.
    What each tactic adds is then measured with `partial` alone."""
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
        return found.verdict

    def judge_all(self, pairs: Sequence[tuple[Task, str]]) -> list[Verdict]:
        """The verdicts. Tactics are said in one session, one submission after the other, and those that end
        the proof are compiled together; alone is judged what is not settled by that."""
        together: dict[str, dict[int, tuple[CoqProblem, Submission]]] = {}
        """By header, as what one makes of notations does not hold for another."""
        for place, (task, response) in enumerate(pairs):
            with suppress(UserError):  # a bad task is called so where it is judged alone
                problem = problem_of(task)
                given = read(problem, response)
                if isinstance(given, Submission) and given.tactics and not problem.definitions:
                    together.setdefault(problem.header, {})[place] = (problem, given)
        found: dict[int, Verdict] = {}
        if len(pairs) > 1:
            for asked in together.values():
                found |= {place: each.verdict for place, each in self._together(asked).items()}
        return [found[place] if place in found else self(*pair) for place, pair in enumerate(pairs)]

    def diagnose(self, task: Task, response: str) -> Diagnosis:
        """The verdict with its steps. Raises UserError for a bad task and RunError if Coq does not run."""
        problem = problem_of(task)
        given = read(problem, response)
        if isinstance(given, Diagnosis):
            return given
        walk, progress = self._said(problem, given)
        at: int | None = walk.at
        outcome = stopped(given, walk)
        if outcome is None:
            file = whole(problem, given.text, given.found, given.script)
            outcome = check.accepted(self._box(), problem, file, self.axioms)
            at = sentence_at(outcome.at, file, given.text, given.found)
            if outcome.label != "proved":  # goals that only seemed to be closed were no progress
                progress = ProofProgress()
        score = float(outcome.label == "proved")
        if self.partial and score == 0 and progress.last > 0:
            score = self._certified(problem, given, walk, progress)
            progress = progress if score else ProofProgress()
        return told(given, walk, outcome, at, progress, score)

    def _together(self, asked: Mapping[int, tuple[CoqProblem, Submission]]) -> dict[int, Diagnosis]:
        """What is told of those that one session settles, or one run of the compiler."""
        found: dict[int, Diagnosis] = {}
        ended: dict[int, tuple[CoqProblem, str]] = {}
        """What seems to end its proof, or is said to be finished by tactics of ours."""
        for place, (walk, progress) in self._heard_in_turn(asked).items():
            problem, given = asked[place]
            outcome, score = stopped(given, walk), progress.last
            if outcome is None:
                outcome, score = CoqOutcome("proved", check.CLOSES), 1.0
            if score:
                text = given.text if score == 1 else finished(given, walk, progress.finish)
                ended[place] = (problem, batch.tactics(text) or "")
            found[place] = told(given, walk, outcome, walk.at, progress, score)
        wells = batch.proved(self._box(), list(ended.values()))
        unsettled = {place for place, well in zip(ended, wells, strict=True) if not well}
        return {place: each for place, each in found.items() if place not in unsettled}

    def _heard_in_turn(
        self, asked: Mapping[int, tuple[CoqProblem, Submission]]
    ) -> dict[int, tuple[ProofWalk, ProofProgress]]:
        """What comes of them in one session, which goes back after each; another where one ends it.

        What ended it, and what is no proof of its statement, is left out: that is judged alone.
        """
        found: dict[int, tuple[ProofWalk, ProofProgress]] = {}
        session: CoqSession | None = None
        try:
            for place, (problem, given) in asked.items():
                session = session or self._opening(problem, len(asked)).start()
                try:
                    walk, progress = self._heard(session, problem, given, self.partial)
                    base = session.load().state
                    usable = walk.ended in ("stopped", "failed") and (
                        session.say(f"BackTo {base}.").state == base
                    )
                except (EndedError, UserError, RunError):
                    usable = False
                if not usable:
                    session.close()
                    session = None
                elif walk.pinned:
                    found[place] = (walk, progress)
        finally:
            if session:
                session.close()
        return found

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
        """UserError if Coq is not installed or the isolation level is not available."""
        check.programs()
        require(self.level)

    def _box(self, wall_s: float | None = None) -> Box:
        limits = Limits(wall_s=wall_s or self.budget, memory_mb=self.memory_mb)
        return Box(level=self.level, limits=limits, readable=check.programs().readable)

    def _said(self, problem: CoqProblem, given: Submission) -> tuple[ProofWalk, ProofProgress]:
        """How far the sentences come in a session of their own, and the progress they make."""
        for fresh in (False, True):  # a process that waited may have been killed for want of memory
            opening = self._opening(problem)
            session = opening.start() if fresh else take(opening, self.warm)
            try:
                walk, progress = self._heard(session, problem, given, measure=True)
            except EndedError as end:
                if fresh or end.why != "died":
                    raise RunError("coqtop", f"it does not get through what is ours: {end.why}") from None
                continue
            finally:
                session.close()
            if walk.ended != "died":
                return walk, progress
        check.works(self._box())
        return walk, progress

    def _heard(
        self, session: CoqSession, problem: CoqProblem, given: Submission, measure: bool
    ) -> tuple[ProofWalk, ProofProgress]:
        """What comes of it in a session, which stands elsewhere then."""
        session.allow(_LOAD_S)
        session.load()
        first, rungs = self._first_rank(session, problem) if measure else (0, [])
        session.allow(self.budget)
        walk = walk_through(session, problem, given.said, given.script)
        session.allow(self.budget)
        return walk, measured(session, walk, given.said, first, rungs) if measure else ProofProgress()

    def _opening(self, problem: CoqProblem, submissions: int = 1) -> Opening:
        files = check.given(self._box(), problem)
        return Opening(
            self._box(_LOAD_S + 4 * self.budget * submissions),
            tuple(check.command(check.programs().coqtop, "-emacs")),
            tuple(sorted(files.items())),
            problem.preamble,
        )

    def _first_rank(self, session: CoqSession, problem: CoqProblem) -> tuple[int, list[str]]:
        if problem not in _FIRST_RANKS:
            found = first_rank(session, problem)
            if found is None:
                check.spec(self._box(), problem)  # says what is wrong with a statement that is not Coq
                raise RunError("coqtop", "it does not take a statement that coqc takes")
            if len(_FIRST_RANKS) >= _MOST_FIRST_RANKS:
                _FIRST_RANKS.clear()
            _FIRST_RANKS[problem] = found
        return _FIRST_RANKS[problem]

    def _certified(
        self, problem: CoqProblem, given: Submission, walk: ProofWalk, progress: ProofProgress
    ) -> float:
        """The last Φ if the proof, finished by what Φ says would finish it, is accepted; otherwise 0."""
        text = finished(given, walk, progress.finish)
        sentences_ = [*given.found[: walk.at], sentences("Qed.")[0][0]]
        file = whole(problem, text, sentences_, given.script)
        outcome = check.accepted(self._box(), problem, file, self.axioms)
        return progress.last if outcome.label == "proved" else 0.0
