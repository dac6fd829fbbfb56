"""Diagnostics that mean the same for every method.

`coefficient` and `stopped` return one number a token, to be averaged over the trained tokens of a step; the
other functions return one number an update.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int

from posttrain.math.episodes import number_turns
from posttrain.math.everywhere import HERE, Everywhere
from posttrain.math.masked import Group, Mask, PerToken, row_sum, variance


def coefficient(
    surrogate: Callable[[PerToken, PerToken], PerToken], log_ratio: PerToken, advantage: PerToken
) -> PerToken:
    """c_t of a surrogate, where ∇L_t = -c_t ∇log π_t, by autograd.

    >>> from posttrain.math.surrogate import clipped
    >>> r, A = torch.tensor([[0.5, 1.5, 1.0]]), torch.tensor([[1.0, -1.0, 2.0]])
    >>> coefficient(clipped, r.log(), A)
    tensor([[ 0.5000, -1.5000,  2.0000]])
    """
    with torch.enable_grad():
        x = log_ratio.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(surrogate(x, advantage).sum(), x)
    return -gradient


def stopped(c: PerToken, advantage: PerToken) -> PerToken:
    """1 where a token has an advantage but no gradient (it is clipped), else 0.

    >>> stopped(torch.tensor([[0.0, 0.3, 0.0]]), torch.tensor([[1.0, 1.0, 0.0]]))
    tensor([[1., 0., 0.]])
    """
    return ((c == 0) & (advantage != 0)).to(c.dtype)


def effective_sample_size(
    logp: PerToken, logp_gen: PerToken, mask: Mask, everywhere: Everywhere = HERE
) -> Float[torch.Tensor, ""]:
    """(Σ w)² / (B Σ w²) of the rows' importance weights w = Π_t π(y_t)/π_gen(y_t), in (0, 1].

    1 if the sampler drew from the trained policy itself; 1/B if a single row has all the weight.
    Rows without a trained token are left out; NaN without any other.

    >>> m = torch.ones(2, 1, dtype=torch.bool)
    >>> effective_sample_size(torch.zeros(2, 1), torch.zeros(2, 1), m)
    tensor(1.)
    """
    rows = mask.any(-1)
    log_weight = (row_sum(logp, mask) - row_sum(logp_gen, mask))[rows]
    # Both sums are over the same rows, so a common factor cancels and nothing overflows.
    most = everywhere.max(torch.cat([log_weight, log_weight.new_tensor([-torch.inf])]).max())
    w = (log_weight - most).exp()
    sums = everywhere.sum(torch.stack([w.sum(), w.square().sum(), torch.tensor(len(w)).to(w)]))
    return sums[0].square() / (sums[2] * sums[1])


def explained_variance(
    target: PerToken, value: PerToken, mask: Mask, everywhere: Everywhere = HERE
) -> Float[torch.Tensor, ""]:
    """1 - Var(target - V)/Var(target) over the trained tokens: 1 for a perfect critic, 0 for a constant.

    NaN when all targets are equal.

    >>> target, m = torch.tensor([[0.0, 1.0]]), torch.ones(1, 2, dtype=torch.bool)
    >>> explained_variance(target, torch.tensor([[0.25, 0.75]]), m)
    tensor(0.7500)
    """
    spread = variance(target, mask, everywhere)
    return 1 - variance(target - value, mask, everywhere) / spread.where(spread > 0, torch.nan)


def share_of_shared_turns(
    turn_state: Int[torch.Tensor, "B T"], mask: Mask, group: Group, everywhere: Everywhere = HERE
) -> Float[torch.Tensor, ""]:
    """The share of turns that began in a state in which another turn of the group began.

    turn_state: number of the state at each turn's first token, 0 elsewhere. NaN without turns.

    >>> m = torch.ones(2, 2, dtype=torch.bool)
    >>> share_of_shared_turns(torch.tensor([[1, 2], [1, 3]]), m, torch.tensor([0, 0]))
    tensor(0.5000)
    """
    _, _, count = number_turns(turn_state, mask, group)
    sums = everywhere.sum(torch.stack([count[count > 1].sum(), count.sum()]).float())
    return sums[0] / sums[1]


def share_of_zero_groups(
    advantage: PerToken, mask: Mask, group: Group, everywhere: Everywhere = HERE
) -> Float[torch.Tensor, ""]:
    """The share of groups with a trained token in which the advantage of every trained token is 0.

    NaN if no token is trained. All rows of a group lie on one rank.

    >>> m = torch.ones(3, 1, dtype=torch.bool)
    >>> share_of_zero_groups(torch.tensor([[0.0], [1.0], [0.0]]), m, torch.tensor([0, 0, 1]))
    tensor(0.5000)
    """
    learns = ((advantage != 0) & mask).any(-1)
    counts = [len(set(group[rows].tolist())) for rows in (learns, mask.any(-1))]
    sums = everywhere.sum(torch.tensor(counts).to(advantage))
    return 1 - sums[0] / sums[1]
