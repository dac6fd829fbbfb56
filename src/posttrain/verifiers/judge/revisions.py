"""Critique and revision: a model criticises its own answer by a principle, and rewrites it.

Source: Constitutional AI, Bai et al. 2022, arXiv:2212.08073, section 3 (first phase: revised answers are data
for supervised training). Each conversation holds one prompt, so no answer can refer to another.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.types import Message
from posttrain.verifiers.judge.constitution import Constitution, Principle
from posttrain.verifiers.judge.records import append, chunks, new_file, texts_of
from posttrain.verifiers.judge.rubric import defused
from posttrain.verifiers.judge.writer import Conversation, Writer, Written


@dataclass(frozen=True, kw_only=True)
class Revising:
    """Number of revisions of an answer, and the sampling options."""

    rounds: int = 1
    """Revisions of each answer, each by another principle, starting from the previous revision."""
    max_tokens: int = 512
    """Longest answer, critique or revision."""
    temperature: float = 0.0
    seed: int = 0
    """Seed of the sampling and of the choice of principles."""

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.max_tokens < 1:
            raise ValueError("rounds and max_tokens must be 1 or more")
        if not 0 <= self.temperature <= 5:
            raise ValueError(f"temperature must lie in 0 ... 5, not {self.temperature}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    prompt: str
    initial: str
    """The answer before this revision."""
    critique: str
    revision: str
    principle: str
    """Name of the principle in the constitution."""


def critique(
    writer: Writer,
    cases: Sequence[tuple[str, str, Principle]],
    how: Revising = Revising(),
) -> list[Written]:
    """Criticise each (prompt, answer) by its principle."""
    return _write(writer, [critique_turns(*case) for case in cases], how)


def revise(
    writer: Writer,
    cases: Sequence[tuple[str, str, Principle, str]],
    how: Revising = Revising(),
) -> list[Written]:
    """Rewrite the answer of each (prompt, answer, principle, critique)."""
    return _write(writer, [revision_turns(*case) for case in cases], how)


def critique_turns(prompt: str, answer: str, principle: Principle) -> list[Message]:
    """Return the conversation that asks a model to criticise its answer by a principle."""
    request = f"{principle.critique} Do not write a new answer yet."
    return [_turn("user", prompt), _turn("assistant", answer), _turn("user", request)]


def revision_turns(prompt: str, answer: str, principle: Principle, fault: str) -> list[Message]:
    """Return the conversation of `critique_turns`, the critique, and the request for a new answer."""
    request = f"{principle.revision} Reply with the new answer alone."
    return [*critique_turns(prompt, answer, principle), _turn("assistant", fault), _turn("user", request)]


def _turn(role: str, text: str) -> Message:
    return {"role": role, "content": defused(text)}


def _write(writer: Writer, conversations: Sequence[Conversation], how: Revising) -> list[Written]:
    if not conversations:
        return []
    return writer.write(conversations, max_tokens=how.max_tokens, temperature=how.temperature, seed=how.seed)


def revisions(
    writer: Writer,
    constitution: Constitution,
    prompts: Sequence[str],
    answers: Sequence[str] | None = None,
    how: Revising = Revising(),
) -> tuple[list[Revision], Counter[str]]:
    """Revise answers; return all revisions in the order of the prompts, and counts.

    Without `answers` the writer answers first. A prompt gets no further rounds after one that failed, was
    blank or was cut off at max_tokens. Principles depend on the seed and the prompt alone. Counts: revised,
    blank, cut, unanswered.
    """
    counts: Counter[str] = Counter()
    if answers is None:
        initial = _write(writer, [[_turn("user", prompt)] for prompt in prompts], how)
    else:
        initial = [Written(text=answer) for answer in answers]
    if len(initial) != len(prompts):
        raise ValueError(f"there are {len(initial)} answers to {len(prompts)} prompts")
    present = _keep_usable(range(len(prompts)), initial, counts)
    principles = [constitution.drawn(how.rounds, seed=how.seed, key=prompt) for prompt in prompts]
    rounds: dict[int, list[Revision]] = {i: [] for i in range(len(prompts))}
    for n in range(how.rounds):
        cases = [(prompts[i], text, principles[i][n]) for i, text in present.items()]
        faults = _keep_usable(present, critique(writer, cases, how), counts)
        again = [(prompts[i], present[i], principles[i][n], fault) for i, fault in faults.items()]
        revised = _keep_usable(faults, revise(writer, again, how), counts)
        for i, text in revised.items():
            record = Revision(
                prompt=prompts[i],
                initial=present[i],
                critique=faults[i],
                revision=text,
                principle=principles[i][n].name,
            )
            rounds[i].append(record)
            counts["revised"] += 1
        present = revised
    return [record for revisions_of_one in rounds.values() for record in revisions_of_one], counts


def _keep_usable(
    indices: Sequence[int] | Mapping[int, str], written: Sequence[Written], counts: Counter[str]
) -> dict[int, str]:
    """Return the usable answers by index, and count the others."""
    out = {}
    for i, answer in zip(indices, written, strict=True):
        if answer.failed:
            counts["unanswered"] += 1
        elif answer.cut or not answer.text.strip():
            counts["cut" if answer.cut else "blank"] += 1
        else:
            out[i] = answer.text.strip()
    return out


def write_revisions(
    writer: Writer,
    constitution: Constitution,
    records: Sequence[Mapping[str, object]],
    out: Path,
    how: Revising = Revising(),
) -> Counter[str]:
    """Write the `revisions` of records {"prompt"} or {"prompt", "response"} to `out`, and return the counts.

    Either all records have a response or none has. Raises UserError for a record of another form, and if
    `out` exists.
    """
    answered = any("response" in record for record in records)
    cases = [texts_of(record, n, "response", int(answered)) for n, record in enumerate(records, start=1)]
    total: Counter[str] = Counter()
    with new_file(out) as file:
        for chunk in chunks(cases):
            prompts = [case[0] for case in chunk]
            answers = [case[1] for case in chunk] if answered else None
            revised, counts = revisions(writer, constitution, prompts, answers, how)
            total += counts
            append(file, revised)
    return total
