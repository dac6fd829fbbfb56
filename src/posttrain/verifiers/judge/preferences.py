"""Label preferences between answers by a language model: data for a reward model or for DPO.

Source: RLAIF, Lee et al. 2023, arXiv:2309.00267 (both orders); with a constitution, the labels of the second
phase of Constitutional AI, Bai et al. 2022, arXiv:2212.08073.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.types import Message
from posttrain.verifiers.judge.constitution import Constitution
from posttrain.verifiers.judge.judge import Judging, Reading, ask, both_orders, combine_orders
from posttrain.verifiers.judge.records import append, chunks, new_file, texts_of
from posttrain.verifiers.judge.rubric import Rubric
from posttrain.verifiers.judge.writer import Writer


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedPair:
    """A pair of answers, judged in both orders."""

    prompt: str
    chosen: str
    rejected: str
    margin: float
    """|2 p - 1| with p the mean of both verdicts: 1 if the orders agree, 0 if they contradict each other."""
    agree: bool
    """Whether both orders give the same verdict; for probabilities, whether both prefer the same answer."""


def preferences(
    writer: Writer,
    rubric: Rubric,
    prompts: Sequence[str],
    pairs: Sequence[tuple[str, str]],
    *,
    constitution: Constitution | None = None,
    keep: bool = False,
    how: Judging = Judging(),  # noqa: B008  frozen
) -> tuple[list[JudgedPair], Counter[str]]:
    """Return the preferences between the two answers of each pair, and counts of the results.

    Pairs that are equal, or on which the orders disagree, are left out; with `keep` they stay in the given
    order with margin 0. With a constitution each pair is judged by one principle, drawn by `how.seed` and the
    prompt.

    Counts of pairs: better, equal, disagree, same (identical texts; the judge is not asked), unanswered,
    unparsable. Counts of verdicts, two per pair: verdicts, and first (those that prefer the text read first;
    half of the verdicts if the judge has no bias).

    Raises ValueError if the rubric is not pairwise, or does not go with the constitution.
    """
    _check(rubric, constitution)
    cases = list(zip(prompts, pairs, strict=True))
    visible = [(how.visible(one), how.visible(other)) for _, (one, other) in cases]
    different = [(*case, pair) for case, pair in zip(cases, visible, strict=True) if pair[0] != pair[1]]
    conversations: list[list[Message]] = []
    for prompt, _, (one, other) in different:
        principles_drawn = constitution.drawn(1, seed=how.seed, key=prompt) if constitution else []
        principles = "".join(f"- {principle.text}" for principle in principles_drawn)
        conversations += both_orders(rubric, {"question": prompt}, one, other, principles)
    readings = ask(writer, rubric, conversations, how) if conversations else []
    counts = Counter({"same": len(cases) - len(different)} if len(cases) > len(different) else {})
    result = []
    for n, (prompt, pair, _) in enumerate(different):
        preference = _preference(prompt, pair, readings[2 * n : 2 * n + 2], counts)
        if preference is not None and (keep or preference.margin > 0):
            result.append(preference)
    return result, counts


def _check(rubric: Rubric, constitution: Constitution | None) -> None:
    if rubric.kind != "pairwise":
        raise ValueError("preferences need a pairwise rubric")
    if rubric.wants("principles") != (constitution is not None):
        raise ValueError("a rubric with {principles} and a constitution go together")
    if rubric.wants("reference"):
        raise ValueError("preferences are between two answers, and there is no {reference}")


def _preference(
    prompt: str, pair: tuple[str, str], readings: Sequence[Reading[float]], counts: Counter[str]
) -> JudgedPair | None:
    """Combine and count the verdicts of both orders on a pair; None if an order has no verdict."""
    values = [reading.value for reading in readings if reading.value is not None]
    if len(values) < 2:
        counts[next(reading.label for reading in readings if reading.label)] += 1
        return None
    first, second = values[0], 1.0 - values[1]
    score, label = combine_orders(first, second)
    counts["better" if label == "worse" else label] += 1
    counts["verdicts"] += 2
    counts["first"] += sum(value > 0.5 for value in values)
    chosen, rejected = pair if score >= 0.5 else (pair[1], pair[0])
    return JudgedPair(
        prompt=prompt,
        chosen=chosen,
        rejected=rejected,
        margin=abs(2 * score - 1),
        agree=first == second or (first - 0.5) * (second - 0.5) > 0,
    )


def write_preferences(
    writer: Writer,
    rubric: Rubric,
    records: Sequence[Mapping[str, object]],
    out: Path,
    *,
    constitution: Constitution | None = None,
    keep: bool = False,
    how: Judging = Judging(),  # noqa: B008  frozen
) -> Counter[str]:
    """Write the `preferences` of records {"prompt", "responses": [a, b]} to `out`, and return the counts.

    Raises UserError for a record of another form, and if `out` exists.
    """
    cases = [texts_of(record, number, "responses", 2) for number, record in enumerate(records, start=1)]
    total: Counter[str] = Counter()
    with new_file(out) as file:
        for chunk in chunks(cases):
            prompts, pairs = [case[0] for case in chunk], [(case[1], case[2]) for case in chunk]
            labelled, counts = preferences(
                writer, rubric, prompts, pairs, constitution=constitution, keep=keep, how=how
            )
            total += counts
            append(file, labelled)
    return total
