"""The parts of a trust-region step: products with the Fisher matrix, a linear solver, a line search.

TRPO maximises the surrogate L(θ) within D(θ_old, θ) ≤ δ, D the mean KL(π_old ‖ π_θ) over sampled states.
Near θ_old, D ≈ ½ Δᵀ F Δ, so that the best step is along s = F⁻¹ g with length √(2δ / sᵀ F s). F is never
stored: with J the derivative of the logits, F = Jᵀ M J, M = diag(p) - p pᵀ state by state.

Source: TRPO, arXiv:1502.05477, section 6 and appendix C.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float

Vector = Float[torch.Tensor, "P"]


def softmax_fisher(
    log_probs: Float[torch.Tensor, "N V"], direction: Float[torch.Tensor, "N V"]
) -> Float[torch.Tensor, "N V"]:
    """(diag(p) - p pᵀ) u: the second derivative of KL(p ‖ softmax z) in z, times u.

    >>> softmax_fisher(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[1.0, 0.0]]))
    tensor([[ 0.2500, -0.2500]])
    """
    p = log_probs.exp()
    return p * (direction - (p * direction).sum(-1, keepdim=True))


def conjugate_gradient(
    product: Callable[[Vector], Vector], b: Vector, *, iterations: int, tolerance: float = 1e-10
) -> tuple[Vector, Vector]:
    """(x, A x) with A x ≈ b, for a positive definite A; product(v) returns A v.

    Stops after `iterations` products, or when ‖b - A x‖² ≤ tolerance · ‖b‖². In exact arithmetic n products
    solve n unknowns.

    Source: Hestenes and Stiefel 1952.

    >>> A = torch.tensor([[4.0, 1.0], [1.0, 3.0]])
    >>> conjugate_gradient(lambda v: A @ v, torch.tensor([1.0, 2.0]), iterations=2)[0]
    tensor([0.0909, 0.6364])
    """
    x, residual = torch.zeros_like(b), b.clone()
    search, norm = residual.clone(), residual @ residual
    enough = tolerance * float(norm)
    for _ in range(iterations):
        if float(norm) <= enough:
            break
        image = product(search)
        step = norm / (search @ image)
        x += step * search
        residual -= step * image
        before, norm = norm, residual @ residual
        search = residual + (norm / before) * search
    return x, b - residual


def step_length(direction: Vector, image: Vector, max_kl: float) -> float:
    """√(2δ / sᵀ F s): the length along s at which the quadratic model of the KL is δ. `image` is F s.

    >>> step_length(torch.tensor([2.0]), torch.tensor([2.0]), max_kl=0.02)
    0.1
    """
    curvature = float(direction @ image)
    return math.sqrt(2 * max_kl / curvature) if curvature > 0 else 0.0


def line_search(
    judge: Callable[[float], tuple[float, float]], *, max_kl: float, shrink: float, tries: int
) -> tuple[float, float, float]:
    """(share, gain, KL) of the first of 1, shrink, shrink² ... with gain > 0 and KL ≤ max_kl; or (0, 0, 0).

    judge(share) returns (gain of the surrogate, KL) after that share of the step. A share whose gain or KL is
    NaN fails.

    >>> line_search(lambda share: (share, share**2), max_kl=0.3, shrink=0.5, tries=5)
    (0.5, 0.5, 0.25)
    """
    for n in range(tries):
        share = shrink**n
        gain, kl = judge(share)
        if gain > 0 and kl <= max_kl:
            return share, gain, kl
    return 0.0, 0.0, 0.0
