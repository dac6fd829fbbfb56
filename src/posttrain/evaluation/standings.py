"""Summarise a comparison of policies: means with standard errors, and win rates.

Answers to one prompt are not independent, so a standard error is that of the means over prompts.
"""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from posttrain.evaluation.compare import Answer, Compare
from posttrain.evaluation.suites.numbers import wilson

Judged = Sequence[tuple[Answer, float | None]]
"""Answers of a policy, with log π - log π_first of each."""


def standings(compare: Compare, judge: str, judged: Mapping[str, Judged]) -> dict[str, Any]:
    """Return a comparison as JSON: policies, win rates of later over earlier ones, examples, notes."""
    names = list(judged)
    notes = []
    if not compare.measures_kl:
        origin = "greedy" if compare.sampling.greedy else "drawn from less than the whole vocabulary"
        notes.append(f"No KL was measured: the answers are {origin}.")
    elif any(k is None for _, k in judged[names[0]]):
        notes.append("No KL was measured: the policies have different tokenizers or templates.")
    return {
        "judge": judge,
        "temperature": compare.sampling.temperature,
        "max_new_tokens": compare.sampling.max_new_tokens,
        "prompts": len({a.task for a, _ in judged[names[0]]}),
        "samples": compare.samples,
        "first": names[0],
        "policies": [_policy(name, judged[name]) for name in names],
        "wins": [
            {"of": later, "over": earlier, **wins(judged[later], judged[earlier])}
            for earlier, later in combinations(names, 2)
        ],
        "examples": _examples(judged, compare.examples),
        "notes": notes,
    }


def _policy(name: str, pairs: Judged) -> dict[str, Any]:
    answers = [a for a, _ in pairs]
    scores = [(a.task, float(a.score)) for a in answers if a.score is not None]
    return {
        "name": name,
        "score": _mean(scores),
        "kl": _mean([(a.task, k) for a, k in pairs if k is not None]),
        "length": _mean([(a.task, float(a.length)) for a in answers]),
        "cut": sum(a.stop == "length" for a in answers) / len(answers),
        "judged": len(scores),
        "failed": len(answers) - len(scores),
        "labels": dict(Counter(a.label for a in answers).most_common()),
    }


def _mean(values: Sequence[tuple[str, float]]) -> dict[str, float | None] | None:
    """Return mean and standard error of (prompt, value) pairs; None for an empty list."""
    if not values:
        return None
    mean, error = mean_error(_prompt_means(values))
    return {"mean": mean, "error": error}


def _prompt_means(values: Sequence[tuple[str, float]]) -> list[float]:
    by_prompt: dict[str, list[float]] = {}
    for prompt, value in values:
        by_prompt.setdefault(prompt, []).append(value)
    return [statistics.fmean(group) for group in by_prompt.values()]


def mean_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Return (Σ x / n, s / √n) with s² = Σ (x - mean)² / (n - 1); the error of a single value is None.

    >>> mean_error([1.0, 2.0, 3.0])
    (2.0, 0.5773502691896258)
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, None
    return mean, statistics.stdev(values) / math.sqrt(len(values))


def wins(of: Judged, over: Judged) -> dict[str, Any]:
    """Return how often one policy's answer scores above the other's to the same prompt; a tie is half a win.

    The rate is the mean over prompts of Σ wins / pairs, as pairs of one prompt are not independent. Its
    interval is Wilson's at 95 % with the number of prompts as n: a mean p of n independent values from 0 to 1
    has a variance of at most p (1 - p) / n. Pairs with an answer that could not be judged are left out.
    """
    theirs = {(a.task, a.sample): a.score for a, _ in over}
    pairs = [(a.task, a.score, theirs.get((a.task, a.sample))) for a, _ in of]
    scored = [(task, x, y) for task, x, y in pairs if x is not None and y is not None]
    won, lost = sum(x > y for _, x, y in scored), sum(x < y for _, x, y in scored)
    ties = len(scored) - won - lost
    out: dict[str, Any] = {"won": won, "tied": ties, "lost": lost, "left_out": len(pairs) - len(scored)}
    if not scored:
        return out | {"rate": None, "low": None, "high": None}
    means = _prompt_means([(task, (x > y) + (x == y) / 2) for task, x, y in scored])
    rate = statistics.fmean(means)
    low, high = wilson(rate * len(means), len(means))
    return out | {"rate": rate, "low": low, "high": high}


def _examples(judged: Mapping[str, Judged], count: int) -> list[dict[str, Any]]:
    """Return the first answer of each policy to `count` prompts at even distances."""
    tasks = list(dict.fromkeys(a.task for answers in judged.values() for a, _ in answers))
    count = min(count, len(tasks))
    firsts = {name: {a.task: (a, k) for a, k in reversed(answers)} for name, answers in judged.items()}
    out = []
    for task in (tasks[i * len(tasks) // count] for i in range(count)):
        prompt = next(by_task[task][0].prompt for by_task in firsts.values() if task in by_task)
        answers = [
            {"policy": name, "text": a.text, "score": a.score, "label": a.label, "stop": a.stop, "kl": k}
            for name, by_task in firsts.items()
            for a, k in [by_task[task]]
        ]
        out.append({"task": task, "prompt": prompt, "answers": answers})
    return out
