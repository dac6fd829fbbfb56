"""The verifier `coq`: a proof of the task's statement, checked by Coq."""

from collections.abc import Sequence
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
    append_finish,
    build_diagnosis,
    compose_file,
    find_obstacle,
    find_sentence,
    parse_response,
)
from posttrain_prove.coq.script import split_sentences
from posttrain_prove.coq.session import CoqSession, EndedError, Opening, take
from posttrain_prove.coq.task import problem_of
from posttrain_prove.coq.walk import ProofProgress, ProofWalk, measure_progress, rank_statement, walk_through

_LOAD_S = 60.0
_FIRST_RANKS: dict[CoqProblem, tuple[int, list[str]]] = {}
_MOST_FIRST_RANKS = 4096
_Submissions = dict[int, tuple[CoqProblem, Submission]]
"""Submissions by their place among the pairs."""


@dataclass(frozen=True, kw_only=True)
class Coq(Verifier):
    """Score 1 if the response proves the task's statement in Coq; else 0, or its progress with `partial`.

    Labels: proved, incomplete, error, wrong_statement, assumes, forbidden, timeout.

    >>> Coq(budget=5.0).best
    1.0
    """

    place: ClassVar[int] = 5
    name: str = "coq"
    """Name under which the score is logged."""
    level: Level = "strict"
    """The weakest isolation that is accepted."""
    budget: float = 20.0
    """Seconds for the tactics, and again for each of: measuring their progress, compiling, and checking."""
    memory_mb: int = 2048
    """Megabytes that Coq may use."""
    partial: bool = False
    """Give an unfinished proof a score for its progress, at most 0.5."""
    axioms: tuple[str, ...] = ()
    """Full names of the axioms that a proof may use, such as Coq.Logic.Classical_Prop.classic."""
    warm: int = 1
    """Processes that wait for each header; 0 starts one for each response."""
    batch: int = 1
    """Scripts of tactics that are judged together; for short ones this takes little longer than one.
    The progress of each tactic is then measured only with `partial`.
    """
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
        """Judge a response. The score is None if the task is not Coq or the box does not work."""
        try:
            diagnosis = self.diagnose(task, response)
        except UserError as error:
            return Verdict(score=None, label="bad_task", reason=str(error))
        except RunError as error:
            return Verdict(score=None, label="raised", reason=str(error))
        return diagnosis.verdict

    def judge_all(self, pairs: Sequence[tuple[Task, str]]) -> list[Verdict]:
        """Judge many responses.

        Scripts of tactics run in one session, one after the other, and those that seem complete are compiled
        together; what this does not settle is judged alone.
        """
        batches: dict[str, _Submissions] = {}
        """Submissions by header, as notations of one header do not hold under another."""
        for place, (task, response) in enumerate(pairs):
            with suppress(UserError):  # the judgement of the pair alone reports it
                problem = problem_of(task)
                submission = parse_response(problem, response)
                if isinstance(submission, Submission) and submission.is_tactics and not problem.definitions:
                    batches.setdefault(problem.header, {})[place] = (problem, submission)
        verdicts: dict[int, Verdict] = {}
        if len(pairs) > 1:
            for submissions in batches.values():
                for place, diagnosis in self._judge_together(submissions).items():
                    verdicts[place] = diagnosis.verdict
        return [verdicts[place] if place in verdicts else self(*pair) for place, pair in enumerate(pairs)]

    def diagnose(self, task: Task, response: str) -> Diagnosis:
        """Judge a response step by step. Raises UserError for a bad task and RunError if Coq does not run."""
        problem = problem_of(task)
        submission = parse_response(problem, response)
        if isinstance(submission, Diagnosis):
            return submission
        walk, progress = self._walk_alone(problem, submission)
        at: int | None = walk.at
        outcome = find_obstacle(submission, walk)
        if outcome is None:
            file = compose_file(problem, submission.text, submission.sentences, submission.is_script)
            outcome = check.judge(self._box(), problem, file, self.axioms)
            at = find_sentence(outcome.at, file, submission.text, submission.sentences)
            if outcome.label != "proved":  # goals that only seemed closed are not progress
                progress = ProofProgress()
        score = float(outcome.label == "proved")
        if self.partial and score == 0 and progress.last > 0:
            score = self._certify(problem, submission, walk, progress)
            progress = progress if score else ProofProgress()
        return build_diagnosis(submission, walk, outcome, at, progress, score)

    def _judge_together(self, submissions: _Submissions) -> dict[int, Diagnosis]:
        """Return diagnoses of the submissions that one session, or one run of the compiler, settles."""
        diagnoses: dict[int, Diagnosis] = {}
        candidates: dict[int, tuple[CoqProblem, str]] = {}
        """Scripts that seem complete, or that tactics of ours seem to complete."""
        for place, (walk, progress) in self._walk_in_turn(submissions).items():
            problem, submission = submissions[place]
            outcome, score = find_obstacle(submission, walk), progress.last
            if outcome is None:
                outcome, score = CoqOutcome("proved", check.CLOSES), 1.0
            if score:
                text = submission.text if score == 1 else append_finish(submission, walk, progress.finish)
                candidates[place] = (problem, batch.parse_tactics(text) or "")
            diagnoses[place] = build_diagnosis(submission, walk, outcome, walk.at, progress, score)
        proofs = batch.judge_batch(self._box(), list(candidates.values()))
        unsettled = {place for place, is_proved in zip(candidates, proofs, strict=True) if not is_proved}
        return {place: diagnosis for place, diagnosis in diagnoses.items() if place not in unsettled}

    def _walk_in_turn(self, submissions: _Submissions) -> dict[int, tuple[ProofWalk, ProofProgress]]:
        """Walk through submissions in one session, which goes back after each, or in a new one if it ends.

        A submission that ended its session or does not prove its statement is left out, to be judged alone.
        """
        walks: dict[int, tuple[ProofWalk, ProofProgress]] = {}
        session: CoqSession | None = None
        try:
            for place, (problem, submission) in submissions.items():
                session = session or self._make_opening(problem, len(submissions)).start()
                try:
                    walk, progress = self._walk(session, problem, submission, self.partial)
                    base = session.load().state
                    is_usable = walk.end in ("stopped", "failed") and (
                        session.say(f"BackTo {base}.").state == base
                    )
                except (EndedError, UserError, RunError):
                    is_usable = False
                if not is_usable:
                    session.close()
                    session = None
                elif walk.pinned:
                    walks[place] = (walk, progress)
        finally:
            if session:
                session.close()
        return walks

    def golds(self, task: Task) -> list[str]:
        """Return the script in the task's field `gold`, if there is one."""
        gold = task.fields.get("gold")
        return [gold] if isinstance(gold, str) else []

    def fakes(self, task: Task) -> list[str]:
        """Return wrong answers: nothing, giving up, no step, another statement of that name, and an axiom."""
        problem = problem_of(task)
        other = f"Definition {problem.name} := tt."
        axiom = f"Axiom {problem.name} : {problem.statement}."
        return ["", "admit.", "Proof. Admitted.", "idtac.", other, axiom]

    def check(self, task: Task) -> None:
        """Raise UserError unless name, statement, header, definitions and gold are well-formed."""
        problem_of(task)

    def budget_s(self, task: Task) -> float | None:
        """Return the time for all phases, on a machine with little other load."""
        return _LOAD_S * 2 + self.budget * 8

    def require(self) -> None:
        """Raise UserError if Coq is not installed or the isolation level is not available."""
        check.find_programs()
        require(self.level)

    def _box(self, wall_s: float | None = None) -> Box:
        limits = Limits(wall_s=wall_s or self.budget, memory_mb=self.memory_mb)
        return Box(level=self.level, limits=limits, readable=check.find_programs().readable)

    def _walk_alone(self, problem: CoqProblem, submission: Submission) -> tuple[ProofWalk, ProofProgress]:
        """Walk through a submission in its own session and measure its progress."""
        for is_retry in (False, True):  # a waiting process may have been killed to free memory
            opening = self._make_opening(problem)
            session = opening.start() if is_retry else take(opening, self.warm)
            try:
                walk, progress = self._walk(session, problem, submission, measure=True)
            except EndedError as end:
                if is_retry or end.why != "died":
                    raise RunError("coqtop", f"it fails at the verifier's own sentences: {end.why}") from None
                continue
            finally:
                session.close()
            if walk.end != "died":
                return walk, progress
        check.require_working_box(self._box())
        return walk, progress

    def _walk(
        self, session: CoqSession, problem: CoqProblem, submission: Submission, measure: bool
    ) -> tuple[ProofWalk, ProofProgress]:
        """Walk through a submission; the session is then in another state."""
        session.allow(_LOAD_S)
        session.load()
        first, rungs = self._rank_statement(session, problem) if measure else (0, [])
        session.allow(self.budget)
        walk = walk_through(session, problem, submission.allowed, submission.is_script)
        session.allow(self.budget)
        if not measure:
            return walk, ProofProgress()
        return walk, measure_progress(session, walk, submission.allowed, first, rungs)

    def _make_opening(self, problem: CoqProblem, submissions: int = 1) -> Opening:
        files = check.compile_definitions(self._box(), problem)
        return Opening(
            self._box(_LOAD_S + 4 * self.budget * submissions),
            tuple(check.command_line(check.find_programs().coqtop, "-emacs")),
            tuple(sorted(files.items())),
            problem.preamble,
        )

    def _rank_statement(self, session: CoqSession, problem: CoqProblem) -> tuple[int, list[str]]:
        if problem not in _FIRST_RANKS:
            rank = rank_statement(session, problem)
            if rank is None:
                # Raises UserError for a statement that is not Coq.
                check.compile_statement(self._box(), problem)
                raise RunError("coqtop", "it rejects a statement that coqc accepts")
            if len(_FIRST_RANKS) >= _MOST_FIRST_RANKS:
                _FIRST_RANKS.clear()
            _FIRST_RANKS[problem] = rank
        return _FIRST_RANKS[problem]

    def _certify(
        self, problem: CoqProblem, submission: Submission, walk: ProofWalk, progress: ProofProgress
    ) -> float:
        """Return the last Φ if Coq accepts the proof, finished by the tactics that Φ found; otherwise 0."""
        text = append_finish(submission, walk, progress.finish)
        parts = [*submission.sentences[: walk.at], split_sentences("Qed.")[0][0]]
        file = compose_file(problem, text, parts, submission.is_script)
        outcome = check.judge(self._box(), problem, file, self.axioms)
        return progress.last if outcome.label == "proved" else 0.0
