"""Losses of preferences: functions of a margin between two answers, and what an answer is worth to a policy.

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
from jaxtyping import Bool, Float, Int
from torch.nn.functional import logsigmoid, softplus

from posttrain.math import masked
from posttrain.math.choice import Between

PerToken = Float[torch.Tensor, "B T"]
PerRow = Float[torch.Tensor, "B"]
Pairs = Float[torch.Tensor, "..."]
Mask = Bool[torch.Tensor, "B T"]
Flipped = Annotated[float, Between(0, 0.499)]
"""A share of wrong labels, which outnumber the right ones from one half on."""

# ---------------------------------------------------------------------- what an answer is worth


def log_ratio(logp: PerToken, logp_ref: PerToken, mask: Mask) -> PerRow:
    """Σ_t log π(y_t) - log π_ref(y_t): DPO's implicit reward over β, up to a constant of the prompt.

    Source: arXiv:2305.18290, eq. 5.

    >>> log_ratio(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.5]]), torch.tensor([[True, True]]))
    tensor([1.])
    """
    return masked.row_sum(logp, mask) - masked.row_sum(logp_ref, mask)


def mean_log_ratio(logp: PerToken, logp_ref: PerToken, mask: Mask) -> PerRow:
    """(1/|y|) Σ_t log π(y_t) - log π_ref(y_t): the same by token, so that a long answer weighs no more.

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
    # A row without a token, and an answer of probability 1, have no odds: the bound keeps both finite.
    below = mean.clamp(max=-1e-7)
    return below - torch.log(-torch.expm1(below))


# ---------------------------------------------------------------------- f-divergences


def reverse_kl(ratio: PerRow) -> PerRow:
    """log u, from f(u) = u log u: the KL(π ‖ π_ref) of DPO.

    Each function here is f'(u) less its constant, of u = exp(ratio): what an answer is worth, over β, to the
    policy that is best under a penalty D_f(π ‖ π_ref).

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
    # exp(40) is beyond what any answer's ratio should be, and its square is still finite in float32.
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


def better(
    worth: PerRow, group: Int[torch.Tensor, "B"], counts: Bool[torch.Tensor, "B"]
) -> Bool[torch.Tensor, "B B"]:
    """True at [i, j] where rows i and j answer the same question, both count, and i is worth more.

    >>> worth, group = torch.tensor([1.0, 0.0, 5.0]), torch.tensor([0, 0, 1])
    >>> better(worth, group, torch.tensor([True, True, True])).nonzero()
    tensor([[0, 1]])
    """
    together = (group[:, None] == group[None, :]) & counts[:, None] & counts[None, :]
    return together & (worth[:, None] > worth[None, :])


def over_pairs(
    each: Float[torch.Tensor, "B B"], pairs: Bool[torch.Tensor, "B B"], group: Int[torch.Tensor, "B"]
) -> PerRow:
    """For each row, the mean of `each` over the pairs of its group; 0 where the group has none.

    With more than two answers a group's pairs share one vote, as they are of one question.

    Source: InstructGPT, arXiv:2203.02155, eq. 1.

    >>> better_than = torch.tensor([[False, True], [False, False]])
    >>> over_pairs(torch.tensor([[9.0, 2.0], [9.0, 9.0]]), better_than, torch.tensor([0, 0]))
    tensor([2., 2.])
    """
    total = masked.group_mean(masked.row_sum(each, pairs), group)
    count = masked.group_mean(pairs.sum(-1).to(each.dtype), group)
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

    It has a minimum where the logistic loss has none, so that certain preferences do not drive h to infinity.

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

    Conservative DPO: a share ε of the labels is held to be wrong, and the margin stops where
    σ(β h) = 1 - ε. The label smoothing of reward models.

    Source: E. Mitchell 2023, "A note on DPO with noisy preferences", eq. 3.

    >>> smoothed(torch.tensor([0.0, 10.0]), beta=0.1)
    tensor([0.6931, 0.4133])
    """
    return -(1 - flipped) * logsigmoid(beta * margin) - flipped * logsigmoid(-beta * margin)


def robust(margin: Pairs, beta: float, flipped: Flipped = 0.1) -> Pairs:
    """(-(1 - ε) log σ(β h) + ε log σ(-β h))/(1 - 2ε), ε = flipped < ½.

    c = ((1 - ε) σ(-β h) + ε σ(β h))/(1 - 2ε)

    Where a share ε of the labels is flipped, its expectation is the logistic loss of the labels that are not.

    Source: rDPO, arXiv:2403.00409, eq. 12.

    >>> robust(torch.tensor([0.0, 10.0]), beta=0.1)
    tensor([0.6931, 0.1883])
    """
    kept, turned = -logsigmoid(beta * margin), -logsigmoid(-beta * margin)
    return ((1 - flipped) * kept - flipped * turned) / (1 - 2 * flipped)


# ---------------------------------------------------------------------- answers that stand alone


def prospect(
    reward: PerRow, wanted: Bool[torch.Tensor, "B"], origin: float, gain: float = 1.0, loss: float = 1.0
) -> PerRow:
    """λ_D (1 - σ(r - z)) of a wanted answer, λ_U (1 - σ(z - r)) of an unwanted one.

    r is β times the answer's log-ratio and z, the origin, β times the policy's KL to the reference;
    λ_D is `gain` and λ_U `loss`. ∇L = -λ s σ(r - z) σ(z - r) ∇r, s = 1 if wanted and -1 if not.

    Source: KTO, arXiv:2402.01306, eqs. 7 and 8.

    >>> prospect(torch.tensor([0.0, 0.0]), torch.tensor([True, False]), origin=0.0)
    tensor([0.5000, 0.5000])
    """
    sign = torch.where(wanted, 1.0, -1.0).to(reward)
    scale = torch.where(wanted, reward.new_tensor(gain), reward.new_tensor(loss))
    return scale * torch.sigmoid(-sign * (reward - origin))
