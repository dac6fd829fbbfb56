"""A row of the table: one number with its verdict, and why it is so."""

from dataclasses import dataclass

import torch
from jaxtyping import Float

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
    """What was measured: a line of the methods table, a baseline, a number of samples ..."""
    quantity: str
    number: float
    verdict: str
    """unbiased; scaled (the right direction, of another length); biased; - where it is no such question."""
    sentence: str


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """|got - wanted| / |wanted|, of numbers of any shape.

    >>> error(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0]))
    1.0
    """
    return float((got - wanted).norm() / wanted.norm())


def sine(got: Gradient, wanted: Gradient) -> float:
    """Of the angle between them: what is left of the error after the best rescaling.

    >>> sine(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0]))
    0.0
    """
    along = (got @ wanted) / (wanted @ wanted) * wanted
    return float((got - along).norm() / got.norm())


def verdict(got: Gradient, wanted: Gradient) -> str:
    """unbiased, scaled or biased.

    >>> verdict(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0]))
    'scaled'
    """
    if error(got, wanted) < EXACT:
        return "unbiased"
    if sine(got, wanted) < EXACT and float(got @ wanted) > 0:
        return "scaled"
    return "biased"
