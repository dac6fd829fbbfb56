"""Losses of reward models that score an answer, or a step, by itself; and of rankings of several answers.

Comparisons of two answers are functions of a margin: see math/preference.py. Bradley and Terry's
likelihood is preference.logistic with β = 1. Losses are unreduced.
"""

import torch
from jaxtyping import Bool
from torch.nn.functional import binary_cross_entropy_with_logits

from posttrain.math.masked import PerRow, PerToken


def regression(score: PerToken, target: PerToken) -> PerToken:
    """½ (s - target)².

    >>> regression(torch.tensor([[1.0]]), torch.tensor([[3.0]]))
    tensor([[2.]])
    """
    return (score - target).square() / 2


def classification(score: PerToken, target: PerToken) -> PerToken:
    """-target log σ(s) - (1 - target) log σ(-s): the cross-entropy of σ(s) with a target in [0, 1].

    Over many labels of one answer or step its minimum is at their mean.

    Source: PRM, arXiv:2305.20050, appendix F; with shares of successes as targets, Math-Shepherd,
    arXiv:2312.08935, eq. 6.

    >>> classification(torch.tensor([[0.0]]), torch.tensor([[1.0]]))
    tensor([[0.6931]])
    """
    return binary_cross_entropy_with_logits(score, target, reduction="none")


def plackett_luce(score: PerRow, worth: PerRow, together: Bool[torch.Tensor, "B B"]) -> PerRow:
    """-Σ_k log exp(s_(k)) / Σ_{j ≥ k} exp(s_(j)) of each row's group, ordered by worth, best first.

    The negative log-likelihood of the ranking; answers of equal worth are not compared with one another.
    Rows i and j are of one group where together[i, j] is True. For two answers it is -log σ(s_w - s_l).

    Source: Plackett 1975; for language models arXiv:2305.18290, appendix A.3, eq. 18.

    >>> plackett_luce(torch.tensor([0.0, 0.0, 0.0]), torch.tensor([3.0, 2.0, 1.0]), torch.ones(3, 3).bool())
    tensor([1.7918, 1.7918, 1.7918])
    """
    # Row k competes with itself and with all rows that are worth less.
    rivals = together & (worth[:, None] > worth[None, :])
    itself = torch.eye(len(score), dtype=torch.bool, device=score.device) & together
    against = torch.where(rivals | itself, score[None, :], torch.full_like(score[None, :], -torch.inf))
    counts = together.diagonal()
    best = torch.where(counts, score, torch.zeros_like(score))
    sums = torch.where(counts[:, None], against, torch.zeros_like(against)).logsumexp(-1)
    term = torch.where(rivals.any(-1), sums - best, torch.zeros_like(best))
    return (together.to(score.dtype) * term[None, :]).sum(-1)
