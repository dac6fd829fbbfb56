"""Agreement of a reward model's scores with the judge whose comparisons it was trained on.

Everything is computed on pairs of answers to one question, the preferred one first. A constant model is right
half the time; one that only counts words shows a length bias.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Float

from posttrain.math import masked, preference, returns
from posttrain.types import Batch, PerToken

MARGINS = (0.5, 1.0, 2.0)
"""Bounds of |s_w - s_l| between which accuracy is reported separately."""
BINS = 10


def agreement(batch: Batch, score: PerToken, lengths: Sequence[int]) -> dict[str, float]:
    """Return accuracy, by margin and by order of lengths, calibration error and length bias.

    accuracy            share of pairs whose scores are in the judge's order
    accuracy_margin_…   the same for pairs with |s_w - s_l| below 0.5, 1, 2, and above
    accuracy_shorter, accuracy_longer   the same for pairs whose preferred answer is shorter, longer
    calibration_error   mean |confidence - accuracy| over ten bins of the confidence σ(|s_w - s_l|)
    length_bias         correlation of score differences with differences in length, in [-1, 1]

    Empty without pairs.
    """
    rows = masked.row_sum(score, batch.mask)
    worth = returns.worth(batch.reward, batch.mask, like=batch.logp_gen)
    pairs = preference.better(worth, batch.group, batch.mask.any(-1)).nonzero()
    if not len(pairs):
        return {}
    w, l = pairs.T  # noqa: E741 - as in every paper
    size = torch.tensor(lengths, dtype=torch.float64)
    margin, longer = (rows[w] - rows[l]).double(), size[w] - size[l]
    right = (margin > 0).double() + 0.5 * (margin == 0).double()
    out = {"accuracy": float(right.mean()), "pairs": float(len(pairs))}
    bounds = (0.0, *MARGINS, math.inf)
    for low, high in pairwise(bounds):
        within = (margin.abs() >= low) & (margin.abs() < high)
        if bool(within.any()):
            name = f"accuracy_margin_{low:g}_{high:g}" if high < math.inf else f"accuracy_margin_{low:g}"
            out[name] = float(right[within].mean())
    for name, subset in (("shorter", longer < 0), ("longer", longer > 0)):
        if bool(subset.any()):
            out[f"accuracy_{name}"] = float(right[subset].mean())
    out["calibration_error"] = calibration_error(margin.abs().sigmoid(), right)
    out["length_bias"] = correlation(margin, longer)
    return out


def calibration_curve(
    confidence: Float[torch.Tensor, "P"], right: Float[torch.Tensor, "P"]
) -> list[tuple[float, float, float]]:
    """(mean confidence, accuracy, share of the pairs) of each non-empty bin of ten between ½ and 1.

    >>> calibration_curve(torch.tensor([0.75, 0.75]), torch.tensor([1.0, 0.0]))
    [(0.75, 0.5, 1.0)]
    """
    place = ((confidence - 0.5) * 2 * BINS).long().clamp(0, BINS - 1)
    bins = [place == number for number in range(BINS)]
    return [
        (float(confidence[b].mean()), float(right[b].to(confidence).mean()), float(b.double().mean()))
        for b in bins
        if bool(b.any())
    ]


def calibration_error(confidence: Float[torch.Tensor, "P"], right: Float[torch.Tensor, "P"]) -> float:
    """Σ_bins (share of pairs in the bin) · |mean confidence - mean right|, over calibration_curve.

    Source: Guo et al. 2017, arXiv:1706.04599, eq. 3.

    >>> calibration_error(torch.tensor([0.75, 0.75]), torch.tensor([1.0, 0.0]))
    0.25
    """
    return sum(share * abs(sure - accuracy) for sure, accuracy, share in calibration_curve(confidence, right))


def correlation(x: Float[torch.Tensor, "P"], y: Float[torch.Tensor, "P"]) -> float:
    """Pearson's correlation without means, as the sign of a pair is arbitrary; 0 if x or y is 0.

    >>> correlation(torch.tensor([1.0, -2.0]), torch.tensor([2.0, -4.0]))
    1.0
    """
    norm = math.sqrt(float((x * x).sum()) * float((y * y).sum()))
    return float((x * y).sum()) / norm if norm else 0.0
