"""Ranks of a matrix that need not be integers, from its singular values.

Each is k for k equal singular values, lies between 1 and their number, does not change when the matrix is
scaled, and is 0 for the matrix 0. They differ in how much a small singular value counts: most in the
effective rank, least in the stable rank.
"""

import math

import torch
from jaxtyping import Float

Singular = Float[torch.Tensor, "k"]
"""Singular values in descending order."""


def effective_rank(singular: Singular) -> float:
    """exp(−Σ p_i ln p_i) with p_i = σ_i / Σσ.

    Source: Roy & Vetterli 2007, "The effective rank: a measure of effective dimensionality", def. 1.

    >>> round(effective_rank(torch.tensor([2.0, 2.0, 0.0])), 6)
    2.0
    """
    s = singular.double()
    total = s.sum()
    if not total:
        return 0.0
    p = s / total
    return math.exp(-float(torch.xlogy(p, p).sum()))


def participation_rank(singular: Singular) -> float:
    """(Σσ_i)² / Σσ_i²: the nuclear norm over the Frobenius norm, squared.

    >>> participation_rank(torch.tensor([3.0, 1.0]))
    1.6
    """
    s = singular.double()
    return float(s.sum() ** 2 / s.square().sum()) if s.any() else 0.0


def stable_rank(singular: Singular) -> float:
    """Σσ_i² / σ_1²: the Frobenius norm over the spectral norm, squared.

    Source: Rudelson & Vershynin 2007, arXiv:math/0503442, where it is the numerical rank.

    >>> stable_rank(torch.tensor([2.0, 1.0]))
    1.25
    """
    s = singular.double()
    return float(s.square().sum() / s[0] ** 2) if s.any() else 0.0


def energy_rank(singular: Singular, share: float) -> int:
    """The least k with σ_1² + ... + σ_k² ≥ share · Σσ_i², the share kept by the best rank-k approximation.

    >>> [energy_rank(torch.tensor([3.0, 1.0, 0.1]), share) for share in (0.8, 0.9)]
    [1, 2]
    """
    upto = singular.double().square().cumsum(0)
    return int((upto < share * upto[-1]).sum()) + 1 if singular.any() else 0
