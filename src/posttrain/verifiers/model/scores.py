"""Pure functions on a reward model's outputs: splitting steps, reductions, ensembles, normalisation."""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from posttrain.types import UserError
from posttrain.verifiers.combine.formula import combine_scores

Kind = Literal["outcome", "process"]
OverSteps = Literal["last", "min", "mean", "product"]
OverModels = Literal["mean", "min", "lower"]


@dataclass(frozen=True, slots=True)
class ResponseStep:
    """A step of a response: its text without separators, and its end in the response."""

    text: str
    end: int
    """Number of characters of the response up to the end of this step and of the separators after it."""


def steps(response: str, separator: str) -> list[ResponseStep]:
    """Split a response at the separators and leave out blank steps; a blank response is one step.

    >>> steps("2 + 2 = 4\\n\\nSo 4.", "\\n\\n")
    [ResponseStep(text='2 + 2 = 4', end=11), ResponseStep(text='So 4.', end=16)]
    >>> steps("a\\n\\n\\n\\nb\\n\\n", "\\n\\n")
    [ResponseStep(text='a', end=5), ResponseStep(text='b', end=8)]
    """
    starts, texts, at = [], [], 0
    for text in response.split(separator):
        if text.strip():
            starts.append(at)
            texts.append(text)
        at += len(text) + len(separator)
    if not texts:
        return [ResponseStep(response, len(response))]
    return [ResponseStep(t, end) for t, end in zip(texts, [*starts[1:], len(response)], strict=True)]


def over_steps(scores: Sequence[float], how: OverSteps) -> float:
    """Reduce the scores of the steps to one score.

    With probabilities the product and the minimum can only fall with each further step.

    >>> over_steps([0.9, 0.5, 0.8], "last"), over_steps([0.9, 0.5, 0.8], "min")
    (0.8, 0.5)
    >>> round(over_steps([0.9, 0.5, 0.8], "product"), 6), round(over_steps([0.9, 0.5, 0.8], "mean"), 6)
    (0.36, 0.733333)
    """
    if how == "last":
        return scores[-1]
    if how == "min":
        return min(scores)
    return math.prod(scores) if how == "product" else statistics.fmean(scores)


def over_models(scores: Sequence[float], how: OverModels, k: float) -> float:
    """Reduce the scores of an ensemble: to their mean, their minimum, or mean - k std ("lower").

    >>> over_models([1.0, 3.0], "mean", 0.0), over_models([1.0, 3.0], "min", 0.0)
    (2.0, 1.0)
    >>> over_models([1.0, 3.0], "lower", 0.5)
    1.5
    """
    return combine_scores("mean_minus_std" if how == "lower" else how, scores, k)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Normalisation of one model's scores: (score - mean) / std.

    >>> Scale(mean=1.0, std=2.0)(5.0)
    2.0
    """

    mean: float = 0.0
    std: float = 1.0

    def __call__(self, score: float) -> float:
        return (score - self.mean) / self.std


def scale_of(scores: Sequence[float], where: str) -> Scale:
    """Return the scale on which these scores have mean 0 and variance 1 (ddof 0).

    Raises UserError if there are fewer than two, or if they are all the same.

    >>> scale_of([1.0, 3.0], "reference.jsonl")
    Scale(mean=2.0, std=1.0)
    """
    if len(scores) < 2:
        raise UserError(where, f"has {len(scores)} responses, and a scale needs two or more")
    if not all(math.isfinite(score) for score in scores):
        raise UserError(where, "has a response whose score is not finite")
    mean, std = statistics.fmean(scores), statistics.pstdev(scores)
    if std == 0:
        raise UserError(where, f"all its scores are {mean:g}, which makes no scale")
    return Scale(mean=mean, std=std)


def read_reference(file: Path) -> list[tuple[str, str]]:
    """Read (prompt, response) from each line of a JSONL file. Raises UserError at a line without them."""
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(str(file), f"the reference cannot be read: {error}") from None
    out = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            pair = (record["prompt"], record["response"])
        except (ValueError, KeyError, TypeError, RecursionError):
            pair = (None, None)
        if not (isinstance(pair[0], str) and isinstance(pair[1], str)):
            raise UserError(
                f"{file}:{number}",
                "is no reference",
                'write {"prompt": "...", "response": "..."} on each line',
            )
        out.append(pair)
    return out
