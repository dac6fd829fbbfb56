"""A row of the table: one number with its verdict and its explanation."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float

from posttrain_study.truth.world import Estimate

Gradient = Float[torch.Tensor, "P"]
EXACT = 1e-10
"""A relative difference, or a sine, below it is rounding."""


@dataclass(frozen=True)
class TruthRow:
    """One exact number.

    >>> TruthRow("KL", "k1", "value / KL", 1.0, "unbiased", "log π/π_ref averages to the KL").verdict
    'unbiased'
    """

    section: str
    name: str
    """The subject: a line of the methods table, a baseline, a number of samples ..."""
    quantity: str
    number: float
    verdict: str
    """unbiased; scaled (the right direction, of another length); biased; - if this does not apply."""
    sentence: str


def error(estimate: torch.Tensor, truth: torch.Tensor) -> float:
    """|estimate - truth| / |truth|, of tensors of any shape.

    >>> error(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0]))
    1.0
    """
    return float((estimate - truth).norm() / truth.norm())


def sine(estimate: Gradient, truth: Gradient) -> float:
    """Sine of the angle between both: the error that remains after the best rescaling.

    >>> sine(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0]))
    0.0
    """
    along = (estimate @ truth) / (truth @ truth) * truth
    return float((estimate - along).norm() / estimate.norm())


def verdict(estimate: Gradient, truth: Gradient) -> str:
    """Return unbiased, scaled or biased.

    >>> verdict(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0]))
    'scaled'
    """
    if error(estimate, truth) < EXACT:
        return "unbiased"
    if sine(estimate, truth) < EXACT and float(estimate @ truth) > 0:
        return "scaled"
    return "biased"


def compare(
    section: str, name: str, estimate: Estimate, truth: Gradient, why: str, *quantities: str
) -> Iterator[TruthRow]:
    """Yield a row for each of these quantities of an estimate: error, sine, variance."""
    for quantity in quantities:
        measure = {"error": error, "sine": sine}.get(quantity)
        number = measure(estimate.mean, truth) if measure else estimate.variance
        yield TruthRow(section, name, quantity, number, verdict(estimate.mean, truth), why)
