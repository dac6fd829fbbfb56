"""Send a submission to Coq sentence by sentence, and measure how near each step is to the end."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from posttrain_prove.coq.check import CoqProblem, find_error
from posttrain_prove.coq.progress import WORST, find_loaded_tactics, is_pinned, ladder, potential, rank_state
from posttrain_prove.coq.script import Sentence, declares
from posttrain_prove.coq.session import CoqSession, EndedError

_ENDS = re.compile(r"(?:Qed|Defined|Save\b.*|Admitted|Abort\b.*)\.")
_SPEC = "spec"


@dataclass(frozen=True, slots=True)
class ProofStep:
    """An accepted sentence of the theorem's proof."""

    index: int
    state: int
    goals: int
    """Open goals after it, shelved ones included."""


@dataclass(slots=True)
class ProofWalk:
    """The progress of a submission through Coq."""

    steps: list[ProofStep] = field(default_factory=list)
    """Steps of the theorem's own proof; the first is its statement, with index -1 in a script."""
    end: Literal["stopped", "failed", "timeout", "output", "died"] = "stopped"
    """stopped: every sentence was accepted, up to the Qed of the theorem, which is not sent."""
    at: int = 0
    """The index of the first sentence that was not accepted, or not sent."""
    error: str = ""
    """Coq's error, in one line."""
    pinned: bool = False
    """Whether the theorem's proof is one of the task's statement."""
    proving: bool = False
    """Whether the theorem's proof is open."""

    @property
    def goals(self) -> int:
        """Open goals after the last step."""
        return self.steps[-1].goals if self.steps else 0


def walk_through(
    session: CoqSession, problem: CoqProblem, script: Sequence[Sentence], is_script: bool
) -> ProofWalk:
    """Send the sentences one by one until one fails or the theorem's proof ends."""
    walk = ProofWalk()
    try:
        session.say(f"Definition {_SPEC}{session.secret} : Type := {problem.statement}.")
        session.say("Set Silent.")
        if is_script:
            answer = session.say(f"Theorem {problem.name} : {problem.statement}.")
            _begin_proof(walk, session, -1, answer.state)
        for walk.at, sentence in enumerate(script):
            if walk.proving and _ENDS.fullmatch(sentence.code):
                return walk
            answer = session.say(sentence.text)
            if not answer.accepted:
                walk.end, walk.error = "failed", find_error(answer.output) or "Coq does not accept it"
                return walk
            if not is_script and not walk.steps and answer.proving and declares(sentence, problem.name):
                _begin_proof(walk, session, walk.at, answer.state)
            elif walk.steps and not answer.proving:
                walk.proving = False
            elif walk.proving:
                walk.steps.append(ProofStep(walk.at, answer.state, _goals(session)))
        walk.at = len(script)
    except EndedError as error:
        walk.end = error.why
        walk.proving = False
    return walk


def _begin_proof(walk: ProofWalk, session: CoqSession, index: int, state: int) -> None:
    walk.proving = True
    walk.pinned = is_pinned(session, f"{_SPEC}{session.secret}")
    walk.steps.append(ProofStep(index, state, _goals(session)))


def _goals(session: CoqSession) -> int:
    return len(re.findall(r"^Existential\s+\d+\s+=", session.say("Show Existentials.").output, re.MULTILINE))


@dataclass(frozen=True, slots=True)
class ProofProgress:
    """Φ after sentences of the proof, and the sentences that finish the last state."""

    potentials: tuple[tuple[int, float], ...] = ()
    """(index of the sentence, Φ)."""
    finish: tuple[str, ...] = ()

    @property
    def last(self) -> float:
        """Φ of the last state; 0 if it was not measured."""
        return self.potentials[-1][1] if self.potentials else 0.0


def rank_statement(session: CoqSession, problem: CoqProblem) -> tuple[int, list[str]] | None:
    """Return the rank of the bare statement, before the submission is sent, and the ladder's tactics.

    Return None if Coq does not accept the statement.
    """
    before = session.say("Set Silent.").state
    rungs = ladder(find_loaded_tactics(session))
    reply = session.say(f"Theorem bare{session.secret} : {problem.statement}.")
    if not reply.accepted:
        return None
    rank, _ = rank_state(session, reply.state, rungs, ())
    session.say(f"BackTo {before}.")
    return rank, rungs


def measure_progress(
    session: CoqSession, walk: ProofWalk, script: Sequence[Sentence], first: int, rungs: Sequence[str]
) -> ProofProgress:
    """Return Φ after each step; nothing if the proof is not one of the statement, or time runs out.

    Measures from the last state to the first, as going back forgets the states ahead.
    """
    if not (walk.proving and walk.pinned):
        return ProofProgress()
    potentials: list[tuple[int, float]] = []
    finish: list[str] = []
    try:
        for step in reversed(walk.steps[1:]):
            structure = [s.code for s in script[walk.steps[0].index + 1 : step.index + 1] if s.is_structure]
            if script[step.index].is_structure and potentials:
                continue
            rank, tactics = rank_state(session, step.state, rungs[: max(0, first - 1)], structure)
            if not potentials:
                finish = tactics
            potentials.append((step.index, potential(min(rank, WORST), first)))
    except EndedError:
        return ProofProgress()
    return ProofProgress(tuple(reversed(potentials)), tuple(finish))
