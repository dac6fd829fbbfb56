"""Estimates of KL(π ‖ π_ref) from one sampled token, and the exact value over a vocabulary.

With y ~ π and Δ = log π(y) - log π_ref(y):

| function | value | E[value] | gradient coefficient c (∇ = c ∇log π) | E[gradient] |
|---|---|---|---|---|
| k1 | Δ | KL | 1 | 0: useless in a loss, right in a reward |
| k2 | Δ²/2 | not KL | Δ | ∇KL |
| k3 | e^{-Δ} - 1 + Δ | KL | 1 - e^{-Δ} | ∇KL(π_ref ‖ π), the other direction |

The expectations are over tokens of π at one state. On samples of an older policy all are
biased, and in a sequence no estimate from one token accounts for its effect on later states.

Source: Schulman, "Approximating KL Divergence", 2020. Notes A print k3 with the ratio
upside down; see docs/errata.md.
"""

import torch
from jaxtyping import Float

from posttrain.math.masked import PerToken


def k1(logp: PerToken, logp_ref: PerToken) -> PerToken:
    """log π - log π_ref: unbiased, of either sign.    ∇ = 1 · ∇log π

    >>> k1(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]))
    tensor([[0.5000]])
    """
    return logp - logp_ref


def k2(logp: PerToken, logp_ref: PerToken) -> PerToken:
    """(log π - log π_ref)² / 2: biased as a value; its gradient is unbiased.    ∇ = Δ ∇log π

    >>> k2(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]))
    tensor([[0.1250]])
    """
    return (logp - logp_ref).square() / 2


def k3(logp: PerToken, logp_ref: PerToken) -> PerToken:
    """π_ref/π - 1 - log(π_ref/π): unbiased and never negative.    ∇ = (1 - π_ref/π) ∇log π

    Source: GRPO, arXiv:2402.03300, eq. 4. Nothing is clamped here; verl clamps to ±10.

    >>> k3(torch.tensor([[0.1, -0.5, 0.1, 1.2]]), torch.zeros(1, 4))
    tensor([[0.0048, 0.1487, 0.0048, 0.5012]])
    """
    delta = logp_ref - logp
    return torch.expm1(delta) - delta


def exact(
    log_probs: Float[torch.Tensor, "*S V"], log_probs_ref: Float[torch.Tensor, "*S V"]
) -> Float[torch.Tensor, "*S"]:
    """Σ_v π(v) (log π(v) - log π_ref(v)) over the last axis. Tokens with π(v) = 0 count 0.

    As the estimator of a penalty it has no variance and a right gradient at each state, whoever drew the
    tokens. It costs a second output head and reads the reference in each step, not once an update.

    >>> p = torch.tensor([0.5, 0.5]).log()
    >>> exact(p, torch.tensor([0.25, 0.75]).log())
    tensor(0.1438)
    """
    p = log_probs.exp()
    difference = torch.where(p > 0, log_probs - log_probs_ref, torch.zeros_like(p))
    return (p * difference).sum(-1)
