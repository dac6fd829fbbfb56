"""Summarise labels: agreement of raters, strengths of sources, reliability and habits of each rater."""

import hashlib
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any

from posttrain.data.messages import comparison_key
from posttrain_people.agreement import cohen_kappa, krippendorff_alpha
from posttrain_people.labels import BAD, TIE, Entry
from posttrain_people.strengths import Strengths, Win, fit_strengths


@dataclass(frozen=True, kw_only=True)
class RaterSummary:
    """Counts of one rater's labels."""

    labels: int
    ties: int
    bad: int
    first: float | None
    """Share of the answer that stood first, among the preferred of pairs: 0.5 without a bias to a side."""
    seconds: float
    """Median time for one label."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What `posttrain label --summary` prints."""

    labels: int
    questions: int
    measure: str
    """kappa for two raters, alpha for more, or empty for one."""
    agreement: float | None
    """None if undefined: no shared questions, or only one label in use."""
    shared: int
    """Units that two or more raters labelled: pairs of answers, or steps."""
    raters: dict[str, RaterSummary]
    strengths: Strengths | None
    remark: str
    """Why there are no strengths."""


def summarise(entries: Sequence[Entry]) -> Summary:
    """Return the summary of the labels that stand."""
    raters = sorted({entry["rater"] for entry in entries})
    measure, value, shared = _agreement(entries, raters)
    comparisons = [c for entry in entries for c in comparisons_of(entry)]
    strengths, remark = None, "no answers of different sources were compared"
    if comparisons:
        try:
            strengths, remark = fit_strengths(comparisons), ""
        except ValueError as error:
            remark = f"{error}, so a strength is unbounded: more labels are needed"
    return Summary(
        labels=len(entries),
        questions=len({entry["question"] for entry in entries}),
        measure=measure,
        agreement=value,
        shared=shared,
        raters={rater: _rater([e for e in entries if e["rater"] == rater]) for rater in raters},
        strengths=strengths,
        remark=remark,
    )


def _agreement(entries: Sequence[Entry], raters: Sequence[str]) -> tuple[str, float | None, int]:
    units: dict[Hashable, dict[str, Hashable]] = defaultdict(dict)
    for entry in entries:
        for unit, category in categories_of(entry).items():
            units[unit][entry["rater"]] = category
    labels = [by_rater for by_rater in units.values() if len(by_rater) > 1]
    if len(raters) == 2:
        one, other = raters
        value, measure = cohen_kappa([(by_rater[one], by_rater[other]) for by_rater in labels]), "kappa"
    else:
        value, measure = krippendorff_alpha([[*by_rater.values()] for by_rater in labels]), "alpha"
    return measure if len(raters) > 1 else "", None if value is None else float(value), len(labels)


def categories_of(entry: Entry) -> dict[Hashable, Hashable]:
    """Return the category of each unit of a label: of each step, or of each pair of answers.

    Which answer of a pair comes first in the data may carry meaning (chosen, rejected), and kappa would count
    the agreement on it as chance. So the category names the preferred side in the order of digests of the
    answers, which is random.
    """
    key, label = entry["question"], entry["label"]
    if entry["mode"] == "steps":
        return {(key, n): value for n, value in enumerate(label) if value is not None}
    units: dict[Hashable, Hashable] = {}
    digests = [_digest(answer) for answer in entry["answers"]]
    for i, j in combinations(range(len(digests)), 2):
        better = label
        if label not in (TIE, BAD):
            first_wins = label == i if entry["mode"] == "pairs" else label[i] < label[j]
            better = int(first_wins == (digests[i] < digests[j]))
        units[key, i, j] = better
    return units


def _digest(answer: Any) -> str:
    content = repr(comparison_key(answer if isinstance(answer, str) else tuple(answer)))
    return hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def comparisons_of(entry: Entry) -> list[Win]:
    """Return the comparisons of sources in a label: none of bad answers, and half in each direction of a tie.

    A ranking of K answers is its K (K - 1) / 2 pairs, each of weight 2 / K, since they are not independent.
    """
    label, sources = entry["label"], entry["sources"]
    if entry["mode"] == "steps" or label == BAD:
        return []
    weight, comparisons = 2 / len(sources), []
    for i, j in combinations(range(len(sources)), 2):
        if sources[i] == sources[j]:
            continue
        if label == TIE:
            comparisons += [
                Win(entry["rater"], sources[a], sources[b], weight / 2) for a, b in ((i, j), (j, i))
            ]
            continue
        first_wins = label == i if entry["mode"] == "pairs" else label[i] < label[j]
        winner, loser = (i, j) if first_wins else (j, i)
        comparisons.append(Win(entry["rater"], sources[winner], sources[loser], weight))
    return comparisons


def _rater(entries: Sequence[Entry]) -> RaterSummary:
    preferred = [e for e in entries if e["mode"] == "pairs" and e["label"] not in (TIE, BAD)]
    firsts = sum(entry["label"] == entry["order"][0] for entry in preferred)
    return RaterSummary(
        labels=len(entries),
        ties=sum(entry["label"] == TIE for entry in entries),
        bad=sum(entry["label"] == BAD for entry in entries),
        first=firsts / len(preferred) if preferred else None,
        seconds=median(float(entry.get("seconds") or 0.0) for entry in entries),
    )
