"""What a submission to Coq says, and what is told of it when Coq has heard it."""

import re
from dataclasses import dataclass

from posttrain.types import Verdict
from posttrain.verifiers.protocol import shown
from posttrain_prove.coq.check import CoqOutcome, CoqProblem
from posttrain_prove.coq.screen import Refusal, refusal
from posttrain_prove.coq.script import Sentence, declares, sentences, submission
from posttrain_prove.coq.walk import ProofProgress, ProofWalk


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

    @property
    def verdict(self) -> Verdict:
        """The same as any verifier says it."""
        return Verdict(score=self.score, label=self.label, reason=self.reason, progress=self.progress)


@dataclass(frozen=True, slots=True)
class Submission:
    text: str
    offset: int
    """Of the text in the response."""
    found: list[Sentence]
    wrong: str
    """What is wrong with the text's end; empty if nothing is."""
    refused: Refusal | None
    script: bool
    """Whether it is a proof alone, to which the theorem is added."""

    @property
    def said(self) -> list[Sentence]:
        """The sentences up to one that gives up."""
        return self.found if self.refused is None else self.found[: self.refused.index]

    @property
    def tactics(self) -> bool:
        """Whether it says nothing but tactics, which leave no trace in a session that goes back."""
        said = [s for s in self.said if s.code not in ("Proof.", "Qed.")]
        return bool(said) and all(s.is_proof_step for s in said)


def read(problem: CoqProblem, response: str) -> Submission | Diagnosis:
    """What a response submits; what is told of it, if it need not be said to Coq."""
    text, offset = submission(response)
    found, wrong = sentences(text)
    if not found and not wrong:
        return Diagnosis("incomplete", "the response is empty", 0)
    refused = refusal(found)
    if refused is not None and refused.label != "incomplete":
        return Diagnosis(refused.label, f"sentence {refused.index + 1}: {refused.why}", refused.index)
    script = not any(declares(sentence, problem.name) for sentence in found)
    return Submission(text, offset, found, wrong, refused, script)


def told(
    given: Submission,
    walk: ProofWalk,
    outcome: CoqOutcome,
    at: int | None,
    progress: ProofProgress,
    score: float,
) -> Diagnosis:
    """The diagnosis. `at` is the sentence where it fails, by its number; progress that is not worth its
    score is left out by whoever asks."""
    found, reason = given.found, outcome.reason
    if outcome.label == "proved":
        at = None
    elif at is not None and at < len(found):
        reason = f"sentence {at + 1}, {shown(found[at].text)}: {reason}"
    if outcome.label in ("incomplete", "error") and walk.goals:
        reason += f"; {walk.goals} {'goal is' if walk.goals == 1 else 'goals are'} left"
    ends = tuple((given.offset + found[index].end, phi) for index, phi in progress.potentials)
    return Diagnosis(outcome.label, reason, at, tuple(step.goals for step in walk.steps), ends, score)


def finished(given: Submission, walk: ProofWalk, finish: tuple[str, ...]) -> str:
    """What was accepted, and what would finish it."""
    return f"{given.text[: given.found[walk.at - 1].end]}\n" + "\n".join([*finish, "Qed."])


def stopped(given: Submission, walk: ProofWalk) -> CoqOutcome | None:
    """Why a submission is not worth compiling; None if it is."""
    if walk.ended == "timeout":
        return CoqOutcome("timeout", "Coq's time is used up")
    if walk.ended in ("output", "died"):
        return CoqOutcome("error", {"output": "it prints too much", "died": "Coq ended"}[walk.ended])
    if walk.ended == "failed":
        return CoqOutcome("error", walk.said)
    if given.refused is not None and walk.at >= given.refused.index:
        return CoqOutcome("incomplete", given.refused.why)
    if given.wrong:
        return CoqOutcome("error", given.wrong)
    if walk.proving and walk.goals:
        return CoqOutcome("incomplete", "the proof does not end here")
    if walk.proving and not given.script and walk.at == len(given.found):
        return CoqOutcome("incomplete", "the proof does not end with Qed")
    return None


def whole(problem: CoqProblem, text: str, found: list[Sentence], script: bool) -> str:
    """The file that is compiled."""
    if not script:
        return f"{problem.preamble}{text}\n"
    ended = any(re.match(r"(?:Qed|Defined|Save|Proof\s+[^u\s.])\b", sentence.code) for sentence in found)
    end = "" if ended else "\nQed."
    return f"{problem.preamble}Theorem {problem.name} : {problem.statement}.\n{text}{end}\n"


def sentence_at(at: int | None, whole: str, text: str, found: list[Sentence]) -> int | None:
    """The sentence in which a byte of the compiled file is; None if it is in what we have added."""
    if at is None:
        return None
    place = len(whole.encode("utf-8", "replace")[:at].decode("utf-8", "replace")) - whole.rindex(text)
    return next((i for i, sentence in enumerate(found) if sentence.start <= place < sentence.end), None)
