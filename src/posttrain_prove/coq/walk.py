"""A submission said to Coq sentence by sentence: how far it comes, and how near it is to the end."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from posttrain_prove.coq.check import CoqProblem, error_in
from posttrain_prove.coq.progress import WORST, ladder, loaded_by, pinned, potential, ranked
from posttrain_prove.coq.script import Sentence, declares
from posttrain_prove.coq.session import CoqSession, EndedError

_ENDS = re.compile(r"(?:Qed|Defined|Save\b.*|Admitted|Abort\b.*)\.")
_SPEC = "spec"


@dataclass(frozen=True, slots=True)
class ProofStep:
    """A sentence of the theorem's proof that Coq accepted."""

    index: int
    state: int
    goals: int
    """Goals that are left after it, shelved ones included."""


@dataclass(slots=True)
class ProofWalk:
    """How far a submission came."""

    steps: list[ProofStep] = field(default_factory=list)
    """Of the theorem's own proof; before the first stands its statement, with the index -1 in a script."""
    ended: Literal["stopped", "failed", "timeout", "output", "died"] = "stopped"
    """stopped: every sentence was accepted, up to the Qed of the theorem, which is not said."""
    at: int = 0
    """The first sentence that was not accepted, or not said."""
    said: str = ""
    """Coq's error, in one line."""
    pinned: bool = False
    """Whether the theorem's proof was one of the statement."""
    proving: bool = False
    """Whether the theorem's proof is open."""

    @property
    def goals(self) -> int:
        """Goals that are left where it ends."""
        return self.steps[-1].goals if self.steps else 0


def walk_through(
    session: CoqSession, problem: CoqProblem, found: Sequence[Sentence], script: bool
) -> ProofWalk:
    """What came of the sentences, said one after the other until one fails or the theorem's proof ends."""
    walk = ProofWalk()
    try:
        session.say(f"Definition {_SPEC}{session.secret} : Type := {problem.statement}.")
        session.say("Set Silent.")
        if script:
            answer = session.say(f"Theorem {problem.name} : {problem.statement}.")
            _begin_proof(walk, session, -1, answer.state)
        for walk.at, sentence in enumerate(found):
            if walk.proving and _ENDS.fullmatch(sentence.code):
                return walk
            answer = session.say(sentence.text)
            if not answer.accepted:
                walk.ended, walk.said = "failed", error_in(answer.output) or "Coq does not accept it"
                return walk
            if not script and not walk.steps and answer.proving and declares(sentence, problem.name):
                _begin_proof(walk, session, walk.at, answer.state)
            elif walk.steps and not answer.proving:
                walk.proving = False
            elif walk.proving:
                walk.steps.append(ProofStep(walk.at, answer.state, _goals(session)))
        walk.at = len(found)
    except EndedError as end:
        walk.ended = end.why
        walk.proving = False
    return walk


def _begin_proof(walk: ProofWalk, session: CoqSession, index: int, state: int) -> None:
    walk.proving = True
    walk.pinned = pinned(session, f"{_SPEC}{session.secret}")
    walk.steps.append(ProofStep(index, state, _goals(session)))


def _goals(session: CoqSession) -> int:
    return len(re.findall(r"^Existential\s+\d+\s+=", session.say("Show Existentials.").output, re.MULTILINE))


@dataclass(frozen=True, slots=True)
class ProofProgress:
    """Φ after sentences of the proof, and the sentences by which the last state is finished."""

    potentials: tuple[tuple[int, float], ...] = ()
    """(index of the sentence, Φ)."""
    finish: tuple[str, ...] = ()

    @property
    def last(self) -> float:
        """Φ of the last state; 0 where none was measured."""
        return self.potentials[-1][1] if self.potentials else 0.0


def first_rank(session: CoqSession, problem: CoqProblem) -> tuple[int, list[str]] | None:
    """The rank of the bare statement, before the submission has said anything, and the ladder's rungs.

    None if the statement is not accepted.
    """
    before = session.say("Set Silent.").state
    rungs = ladder(loaded_by(session))
    opened = session.say(f"Theorem bare{session.secret} : {problem.statement}.")
    if not opened.accepted:
        return None
    rank, _ = ranked(session, opened.state, rungs, ())
    session.say(f"BackTo {before}.")
    return rank, rungs


def measured(
    session: CoqSession, walk: ProofWalk, found: Sequence[Sentence], first: int, rungs: Sequence[str]
) -> ProofProgress:
    """Φ after each step; nothing where the proof is not one of the statement, or its time is used up.

    From the last state to the first, as going back forgets what lies ahead.
    """
    if not (walk.proving and walk.pinned):
        return ProofProgress()
    potentials: list[tuple[int, float]] = []
    finish: list[str] = []
    try:
        for step in reversed(walk.steps[1:]):
            structure = [s.code for s in found[walk.steps[0].index + 1 : step.index + 1] if s.is_structure]
            if found[step.index].is_structure and potentials:
                continue
            rank, said = ranked(session, step.state, rungs[: max(0, first - 1)], structure)
            if not potentials:
                finish = said
            potentials.append((step.index, potential(min(rank, WORST), first)))
    except EndedError:
        return ProofProgress()
    return ProofProgress(tuple(reversed(potentials)), tuple(finish))
