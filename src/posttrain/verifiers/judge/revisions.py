"""Critique and revision: a model criticises its own answer by a principle, and writes it again.

The first phase of Constitutional AI, Bai et al. 2022, arXiv:2212.08073, section 3: what is revised is data
for supervised training. A conversation holds one prompt alone, so no answer can speak of another.
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
    """How often an answer is revised, and how the model writes."""

    rounds: int = 1
    """Each by another principle, starting from the revision before it."""
    max_tokens: int = 512
    """Of an answer, a critique or a revision."""
    temperature: float = 0.0
    """Of what is written."""
    seed: int = 0
    """Of what is written and of the principles drawn."""

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.max_tokens < 1:
            raise ValueError("rounds and max_tokens must be 1 or more")
        if not 0 <= self.temperature <= 5:
            raise ValueError(f"temperature must lie in 0 ... 5, not {self.temperature}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    prompt: str
    initial: str
    """The answer before it."""
    critique: str
    revision: str
    principle: str
    """By name."""


def critique(
    writer: Writer,
    cases: Sequence[tuple[str, str, Principle]],
    how: Revising = Revising(),
) -> list[Written]:
    """What the model finds wrong with each (prompt, its answer) by each principle."""
    return _write(writer, [critique_turns(*case) for case in cases], how)


def revise(
    writer: Writer,
    cases: Sequence[tuple[str, str, Principle, str]],
    how: Revising = Revising(),
) -> list[Written]:
    """The new answer to each (prompt, its answer) by each principle, after the critique at the case's end."""
    return _write(writer, [revision_turns(*case) for case in cases], how)


def critique_turns(prompt: str, answer: str, principle: Principle) -> list[Message]:
    """The conversation in which a model is asked what is wrong with its answer by a principle."""
    request = f"{principle.critique} Do not write a new answer yet."
    return [_turn("user", prompt), _turn("assistant", answer), _turn("user", request)]


def revision_turns(prompt: str, answer: str, principle: Principle, fault: str) -> list[Message]:
    """The same with what it said, and the request for a new answer."""
    request = f"{principle.revision} Reply with the new answer alone."
    return [*critique_turns(prompt, answer, principle), _turn("assistant", fault), _turn("user", request)]


def _turn(role: str, text: str) -> Message:
    return {"role": role, "content": defused(text)}


def _write(writer: Writer, asked: Sequence[Conversation], how: Revising) -> list[Written]:
    if not asked:
        return []
    return writer.write(asked, max_tokens=how.max_tokens, temperature=how.temperature, seed=how.seed)


def revisions(
    writer: Writer,
    constitution: Constitution,
    prompts: Sequence[str],
    answers: Sequence[str] | None = None,
    how: Revising = Revising(),
) -> tuple[list[Revision], Counter[str]]:
    """The rounds of each prompt, in the order of the prompts, and counts: revised, blank, cut, unanswered.

    Without `answers` the writer answers first. A prompt whose round fails, or comes out blank or cut off at
    max_tokens, has no further ones. Its principles depend on the seed and on the prompt alone.
    """
    counts: Counter[str] = Counter()
    if answers is None:
        first = _write(writer, [[_turn("user", prompt)] for prompt in prompts], how)
    else:
        first = [Written(text=answer) for answer in answers]
    if len(first) != len(prompts):
        raise ValueError(f"there are {len(first)} answers to {len(prompts)} prompts")
    present = _useful(range(len(prompts)), first, counts)
    drawn = [constitution.drawn(how.rounds, seed=how.seed, key=prompt) for prompt in prompts]
    rounds: dict[int, list[Revision]] = {i: [] for i in range(len(prompts))}
    for n in range(how.rounds):
        cases = [(prompts[i], text, drawn[i][n]) for i, text in present.items()]
        faults = _useful(present, critique(writer, cases, how), counts)
        again = [(prompts[i], present[i], drawn[i][n], fault) for i, fault in faults.items()]
        revised = _useful(faults, revise(writer, again, how), counts)
        for i, text in revised.items():
            record = Revision(
                prompt=prompts[i],
                initial=present[i],
                critique=faults[i],
                revision=text,
                principle=drawn[i][n].name,
            )
            rounds[i].append(record)
            counts["revised"] += 1
        present = revised
    return [record for each in rounds.values() for record in each], counts


def _useful(
    places: Sequence[int] | Mapping[int, str], written: Sequence[Written], counts: Counter[str]
) -> dict[int, str]:
    """The answers that say something, by these places; the others are counted."""
    out = {}
    for i, each in zip(places, written, strict=True):
        if each.failed:
            counts["unanswered"] += 1
        elif each.cut or not each.text.strip():
            counts["cut" if each.cut else "blank"] += 1
        else:
            out[i] = each.text.strip()
    return out


def write_revisions(
    writer: Writer,
    constitution: Constitution,
    records: Sequence[Mapping[str, object]],
    out: Path,
    how: Revising = Revising(),
) -> Counter[str]:
    """The counts of `revisions` on records {"prompt"} or {"prompt", "response"}; rounds are lines of `out`.

    All records have a response, or none has. Raises UserError for a record of another form, and for a file
    that is there already.
    """
    answered = any("response" in record for record in records)
    cases = [texts_of(record, n, "response", int(answered)) for n, record in enumerate(records, start=1)]
    total: Counter[str] = Counter()
    with new_file(out) as file:
        for chunk in chunks(cases):
            prompts = [case[0] for case in chunk]
            answers = [case[1] for case in chunk] if answered else None
            made, counts = revisions(writer, constitution, prompts, answers, how)
            total += counts
            append(file, made)
    return total
