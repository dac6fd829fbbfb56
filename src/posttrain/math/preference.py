"""Losses of preferences: functions of a margin between two answers, and implicit rewards of answers.

A pair of answers to one question has a margin

    h = u(preferred) - u(other),

where u is a number that the policy (its implicit reward) or a reward model gives each answer. Every
method of the family is a function of h alone, so each loss here states its slope

    ∇L = -c β ∇h.

The policy's gradient follows from ∇u; for `log_ratio` ∇u is the score of the answer, Σ_t ∇log π(y_t).
σ is the logistic function. No loss here averages, or knows which answers are compared.

Sources: DPO, arXiv:2305.18290; the general view, arXiv:2310.12036 (ΨPO) and arXiv:2402.05749 (GPO).
"""

import math
from typing import Annotated

import torch
from jaxtyping import Bool, Float
from torch.nn.functional import logsigmoid, softplus

from posttrain.math import masked
from posttrain.math.choice import Between
from posttrain.math.masked import Group, Mask, PerRow, PerToken

Pairs = Float[torch.Tensor, "..."]
Flipped = Annotated[float, Between(0, 0.499)]
"""A share of wrong labels; below one half, or they would outnumber the right ones."""

# ---------------------------------------------------------------------- implicit rewards


def log_ratio(logp: PerToken, logp_ref: PerToken, mask: Mask) -> PerRow:
    """Σ_t log π(y_t) - log π_ref(y_t): DPO's implicit reward over β, up to a constant per prompt.

    Source: arXiv:2305.18290, eq. 5.

    >>> log_ratio(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.5]]), torch.tensor([[True, True]]))
    tensor([1.])
    """
    return masked.row_sum(logp, mask) - masked.row_sum(logp_ref, mask)


def mean_log_ratio(logp: PerToken, logp_ref: PerToken, mask: Mask) -> PerRow:
    """(1/|y|) Σ_t log π(y_t) - log π_ref(y_t): log_ratio per token, so that a long answer weighs no more.

    Source: Tulu 3, arXiv:2411.15124, section 5.1.2 (length-normalised DPO).

    >>> logp, logp_ref = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.5]])
    >>> mean_log_ratio(logp, logp_ref, torch.tensor([[True, True]]))
    tensor([0.5000])
    """
    return masked.row_mean(logp, mask) - masked.row_mean(logp_ref, mask)


def mean_logp(logp: PerToken, logp_ref: PerToken | None, mask: Mask) -> PerRow:
    """(1/|y|) Σ_t log π(y_t): no reference.

    Source: SimPO, arXiv:2405.14734, eq. 3.

    >>> mean_logp(torch.tensor([[-1.0, -2.0]]), None, torch.tensor([[True, True]]))
    tensor([-1.5000])
    """
    return masked.row_mean(logp, mask)


def log_odds(logp: PerToken, logp_ref: PerToken | None, mask: Mask) -> PerRow:
    """log p/(1 - p) of p = exp((1/|y|) Σ_t log π(y_t)): no reference.

    Source: ORPO, arXiv:2403.07691, eqs. 4 and 7.

    >>> log_odds(torch.tensor([[0.75, 0.75]]).log(), None, torch.tensor([[True, True]])).exp()
    tensor([3.])
    """
    mean = masked.row_mean(logp, mask)
    # The odds of a row without a token, and of an answer of probability 1, are infinite: the bound is finite.
    below = mean.clamp(max=-1e-7)
    return below - torch.log(-torch.expm1(below))


# ---------------------------------------------------------------------- f-divergences


def reverse_kl(ratio: PerRow) -> PerRow:
    """log u, from f(u) = u log u: the KL(π ‖ π_ref) of DPO.

    Each function here is f'(u) without its constant, u = exp(ratio): the reward of an answer, over β, for
    which the policy is optimal under a penalty D_f(π ‖ π_ref).

    Source: arXiv:2309.16240, table 1.

    >>> reverse_kl(torch.tensor([0.5]))
    tensor([0.5000])
    """
    return ratio


def forward_kl(ratio: PerRow) -> PerRow:
    """-1/u, from f(u) = -log u.

    Source: arXiv:2309.16240, table 1.

    >>> forward_kl(torch.tensor([0.0, 1.0]))
    tensor([-1.0000, -0.3679])
    """
    # exp(40) is beyond any answer's ratio, and its square is still finite in float32.
    return -torch.exp(-ratio.clamp(min=-40.0))


def jensen_shannon(ratio: PerRow) -> PerRow:
    """log 2u/(1 + u), from f(u) = u log u - (1 + u) log((1 + u)/2).

    Source: arXiv:2309.16240, table 1.

    >>> jensen_shannon(torch.tensor([0.0, 50.0]))
    tensor([0.0000, 0.6931])
    """
    return math.log(2) + ratio - softplus(ratio)


def alpha_divergence(ratio: PerRow, alpha: Annotated[float, Between(1e-3, 1)] = 0.5) -> PerRow:
    """(1 - u^-α)/α, from f(u) = (u^(1-α) - (1 - α) u - α)/(α (α - 1)), 0 < α < 1.

    reverse_kl as α → 0, and 1 + forward_kl at α = 1.

    Source: arXiv:2309.16240, table 1.

    >>> alpha_divergence(torch.tensor([0.0, 2.0]))
    tensor([0.0000, 1.2642])
    """
    return -torch.expm1(-(alpha * ratio).clamp(min=-40.0)) / alpha


# ---------------------------------------------------------------------- which answers are compared


def better(worth: PerRow, group: Group, counts: Bool[torch.Tensor, "B"]) -> Bool[torch.Tensor, "B B"]:
    """True at [i, j] where rows i and j answer the same question, both count, and worth_i > worth_j.

    >>> worth, group = torch.tensor([1.0, 0.0, 5.0]), torch.tensor([0, 0, 1])
    >>> better(worth, group, torch.tensor([True, True, True])).nonzero()
    tensor([[0, 1]])
    """
    together = (group[:, None] == group[None, :]) & counts[:, None] & counts[None, :]
    return together & (worth[:, None] > worth[None, :])


def over_pairs(x: Float[torch.Tensor, "B B"], pairs: Bool[torch.Tensor, "B B"], group: Group) -> PerRow:
    """For each row, the mean of x over the pairs of its group; 0 for a group without a pair.

    The pairs of a group share one vote, because they are about one question.

    Source: InstructGPT, arXiv:2203.02155, eq. 1.

    >>> better_than = torch.tensor([[False, True], [False, False]])
    >>> over_pairs(torch.tensor([[9.0, 2.0], [9.0, 9.0]]), better_than, torch.tensor([0, 0]))
    tensor([2., 2.])
    """
    total = masked.group_mean(masked.row_sum(x, pairs), group)
    count = masked.group_mean(pairs.sum(-1).to(x.dtype), group)
    return torch.where(count > 0, total / count.clamp(min=1e-9), torch.zeros_like(total))


# ---------------------------------------------------------------------- losses of a margin


def logistic(margin: Pairs, beta: float, target_margin: float = 0.0) -> Pairs:
    """-log σ(β h - γ), γ the target_margin.    c = σ(γ - β h)

    The likelihood of the preference under Bradley and Terry's model.

    Source: DPO, arXiv:2305.18290, eq. 7; with γ > 0 SimPO, arXiv:2405.14734, eq. 6.

    >>> logistic(torch.tensor([0.0, 10.0]), beta=0.1)
    tensor([0.6931, 0.3133])
    """
    return -logsigmoid(beta * margin - target_margin)


def squared(margin: Pairs, beta: float) -> Pairs:
    """(h - 1/(2β))².    c = (1/β - 2h)/β

    Unlike the logistic loss it has a minimum, so that certain preferences do not drive h to infinity.

    Source: IPO, arXiv:2310.12036, eq. 17, with β for its τ.

    >>> squared(torch.tensor([0.0, 5.0]), beta=0.1)
    tensor([25.,  0.])
    """
    return (margin - 1 / (2 * beta)).square()


def hinge(margin: Pairs, beta: float, delta: float = 1.0) -> Pairs:
    """max(0, δ - β h).    c = 1 where β h < δ, else 0

    Source: SLiC-HF, arXiv:2305.10425, eq. 1; on log-ratios as in RSO, arXiv:2309.06657, eq. 9.

    >>> hinge(torch.tensor([0.0, 5.0, 20.0]), beta=0.1)
    tensor([1.0000, 0.5000, 0.0000])
    """
    return (delta - beta * margin).clamp(min=0)


def exponential(margin: Pairs, beta: float) -> Pairs:
    """exp(-β h).    c = exp(-β h)

    Source: GPO, arXiv:2402.05749, table 1.

    >>> exponential(torch.tensor([0.0, 10.0]), beta=0.1)
    tensor([1.0000, 0.3679])
    """
    return torch.exp(-(beta * margin).clamp(min=-50.0))


def smoothed(margin: Pairs, beta: float, flipped: Flipped = 0.1) -> Pairs:
    """-(1 - ε) log σ(β h) - ε log σ(-β h), ε = flipped.    c = σ(-β h) - ε

    Conservative DPO: it assumes that a share ε of the labels is wrong, and the margin stops where
    σ(β h) = 1 - ε. The label smoothing of reward models.

    Source: E. Mitchell 2023, "A note on DPO with noisy preferences", eq. 3.

    >>> smoothed(torch.tensor([0.0, 10.0]), beta=0.1)
    tensor([0.6931, 0.4133])
    """
    return -(1 - flipped) * logsigmoid(beta * margin) - flipped * logsigmoid(-beta * margin)


def robust(margin: Pairs, beta: float, flipped: Flipped = 0.1) -> Pairs:
    """(-(1 - ε) log σ(β h) + ε log σ(-β h))/(1 - 2ε), ε = flipped < ½.

    c = ((1 - ε) σ(-β h) + ε σ(β h))/(1 - 2ε)

    Where a share ε of the labels is flipped, its expectation is the logistic loss on the true labels.

    Source: rDPO, arXiv:2403.00409, eq. 12.

    >>> robust(torch.tensor([0.0, 10.0]), beta=0.1)
    tensor([0.6931, 0.1883])
    """
    forward, backward = -logsigmoid(beta * margin), -logsigmoid(-beta * margin)
    return ((1 - flipped) * forward - flipped * backward) / (1 - 2 * flipped)


# ---------------------------------------------------------------------- losses of single answers


def prospect(
    reward: PerRow, desirable: Bool[torch.Tensor, "B"], origin: float, gain: float = 1.0, loss: float = 1.0
) -> PerRow:
    """λ_D (1 - σ(r - z)) of a desirable answer, λ_U (1 - σ(z - r)) of an undesirable one.

    r is β times the answer's log-ratio and z, the origin, β times the policy's KL to the reference;
    λ_D is `gain` and λ_U `loss`. ∇L = -λ s σ(r - z) σ(z - r) ∇r, s = 1 if desirable and -1 if not.

    Source: KTO, arXiv:2402.01306, eqs. 7 and 8.

    >>> prospect(torch.tensor([0.0, 0.0]), torch.tensor([True, False]), origin=0.0)
    tensor([0.5000, 0.5000])
    """
    sign = torch.where(desirable, 1.0, -1.0).to(reward)
    scale = torch.where(desirable, reward.new_tensor(gain), reward.new_tensor(loss))
    return scale * torch.sigmoid(-sign * (reward - origin))
