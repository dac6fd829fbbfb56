"""Read a submission to Coq, and describe the result."""

import re
from dataclasses import dataclass

from posttrain.types import Verdict
from posttrain.verifiers.protocol import quote
from posttrain_prove.coq.check import CoqOutcome, CoqProblem
from posttrain_prove.coq.screen import Refusal, find_refusal
from posttrain_prove.coq.script import Sentence, declares, find_submission, split_sentences
from posttrain_prove.coq.walk import ProofProgress, ProofWalk


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of a submission, step by step."""

    label: str
    reason: str
    at: int | None = None
    """The index of the first sentence that fails, from 0; None if none does."""
    goals: tuple[int, ...] = ()
    """Numbers of open goals after the statement and after each accepted sentence of the theorem's proof."""
    progress: tuple[tuple[int, float], ...] = ()
    score: float = 0.0

    @property
    def verdict(self) -> Verdict:
        return Verdict(score=self.score, label=self.label, reason=self.reason, progress=self.progress)


@dataclass(frozen=True, slots=True)
class Submission:
    text: str
    offset: int
    """Where the text begins in the response."""
    sentences: list[Sentence]
    error: str
    """Why the end of the text is not Coq; "" if it is."""
    refusal: Refusal | None
    """The first sentence that gives up."""
    is_script: bool
    """Whether it is a proof alone, to which the theorem is added."""

    @property
    def allowed(self) -> list[Sentence]:
        """The sentences up to the first that gives up."""
        return self.sentences if self.refusal is None else self.sentences[: self.refusal.index]

    @property
    def is_tactics(self) -> bool:
        """Whether it consists of tactics alone, which leave no trace in a session that goes back."""
        steps = [s for s in self.allowed if s.code not in ("Proof.", "Qed.")]
        return bool(steps) and all(s.is_proof_step for s in steps)


def parse_response(problem: CoqProblem, response: str) -> Submission | Diagnosis:
    """Parse a response; return a Diagnosis if it can be judged without running Coq."""
    text, offset = find_submission(response)
    parts, error = split_sentences(text)
    if not parts and not error:
        return Diagnosis("incomplete", "the response is empty", 0)
    refused = find_refusal(parts)
    if refused is not None and refused.label != "incomplete":
        return Diagnosis(refused.label, f"sentence {refused.index + 1}: {refused.why}", refused.index)
    is_script = not any(declares(sentence, problem.name) for sentence in parts)
    return Submission(text, offset, parts, error, refused, is_script)


def build_diagnosis(
    submission: Submission,
    walk: ProofWalk,
    outcome: CoqOutcome,
    at: int | None,
    progress: ProofProgress,
    score: float,
) -> Diagnosis:
    """Build the diagnosis. `at` is the index of the sentence that fails.

    A caller that gives no score for progress passes empty progress.
    """
    parts, reason = submission.sentences, outcome.reason
    if outcome.label == "proved":
        at = None
    elif at is not None and at < len(parts):
        reason = f"sentence {at + 1}, {quote(parts[at].text)}: {reason}"
    if outcome.label in ("incomplete", "error") and walk.goals:
        reason += f"; {walk.goals} {'goal is' if walk.goals == 1 else 'goals are'} left"
    ends = tuple((submission.offset + parts[index].end, phi) for index, phi in progress.potentials)
    return Diagnosis(outcome.label, reason, at, tuple(step.goals for step in walk.steps), ends, score)


def append_finish(submission: Submission, walk: ProofWalk, finish: tuple[str, ...]) -> str:
    """Return the accepted part of a submission followed by the tactics that finish it."""
    return f"{submission.text[: submission.sentences[walk.at - 1].end]}\n" + "\n".join([*finish, "Qed."])


def find_obstacle(submission: Submission, walk: ProofWalk) -> CoqOutcome | None:
    """Return why a submission need not be compiled; None if it must be."""
    if walk.end == "timeout":
        return CoqOutcome("timeout", "Coq's time is used up")
    if walk.end in ("output", "died"):
        return CoqOutcome("error", {"output": "it prints too much", "died": "Coq ended"}[walk.end])
    if walk.end == "failed":
        return CoqOutcome("error", walk.error)
    if submission.refusal is not None and walk.at >= submission.refusal.index:
        return CoqOutcome("incomplete", submission.refusal.why)
    if submission.error:
        return CoqOutcome("error", submission.error)
    if walk.proving and walk.goals:
        return CoqOutcome("incomplete", "the proof does not end here")
    if walk.proving and not submission.is_script and walk.at == len(submission.sentences):
        return CoqOutcome("incomplete", "the proof does not end with Qed")
    return None


def compose_file(problem: CoqProblem, text: str, parts: list[Sentence], is_script: bool) -> str:
    """Return the text of the file to compile."""
    if not is_script:
        return f"{problem.preamble}{text}\n"
    has_end = any(re.match(r"(?:Qed|Defined|Save|Proof\s+[^u\s.])\b", sentence.code) for sentence in parts)
    end = "" if has_end else "\nQed."
    return f"{problem.preamble}Theorem {problem.name} : {problem.statement}.\n{text}{end}\n"


def find_sentence(at: int | None, file: str, text: str, parts: list[Sentence]) -> int | None:
    """Return the index of the sentence at a byte of the compiled file; None if the byte is in added text."""
    if at is None:
        return None
    place = len(file.encode("utf-8", "replace")[:at].decode("utf-8", "replace")) - file.rindex(text)
    return next((i for i, sentence in enumerate(parts) if sentence.start <= place < sentence.end), None)
