"""Evolution strategies: ascent of the reward by the rewards of perturbed weights alone.

Member i of the population has the weights θ + σ ε_i, ε_i ~ N(0, I), and F_i, its fitness, is its mean reward.
With J_σ(θ) = E[J(θ + σε)],

    ∇J_σ(θ) = E[J(θ + σε) ε] / σ ≈ 1/(nσ) Σ_i z(F_i) ε_i

J may be a black box. The estimate is unbiased for ∇J_σ if z is the identity; for a quadratic J that is ∇J.
Sizes: B rows, N members.

Source: arXiv:1703.03864, eq. 1; for language models arXiv:2509.24372, algorithm 1.
"""

import torch
from jaxtyping import Float, Int

from posttrain.math.masked import PerRow

PerMember = Float[torch.Tensor, "N"]
Members = Int[torch.Tensor, "N"]


def fitness(
    returns: PerRow, member: Int[torch.Tensor, "B"], group: Int[torch.Tensor, "B"]
) -> tuple[Members, PerMember]:
    """1/T Σ_t R_{i,t}: the mean over tasks, of each member that has rows.

    Returns (the numbers of these members, F in float64). All are measured on the same tasks: a missing answer
    counts as the mean of the others to its task. Several rows of a member and a task are one episode, each
    with its return. F is rounded to float32, since equal means of other rewards need not have equal bits.

    >>> fitness(torch.tensor([1.0, 0.0, 4.0]), torch.tensor([0, 1, 1]), torch.tensor([7, 7, 8]))
    (tensor([0, 1]), tensor([2.5000, 2.0000], dtype=torch.float64))
    """
    members, row = torch.unique(member, return_inverse=True)
    tasks, column = torch.unique(group, return_inverse=True)
    total = torch.zeros(len(members), len(tasks), dtype=torch.float64, device=returns.device)
    count = total.clone()
    total.index_put_((row, column), returns.double(), accumulate=True)
    count.index_put_((row, column), torch.ones_like(returns, dtype=torch.float64), accumulate=True)
    worth = total / count  # NaN where an answer is missing
    worth = torch.where(count > 0, worth, worth.nanmean(0))
    return members, worth.mean(1).float().double()


# ---------------------------------------------------------------------- shaping: F of all members -> z


def standardised(fitness: PerMember, eps: float = 1e-8) -> PerMember:
    """(F - mean F)/(σ_F + eps): 0 if all members are equal.

    σ_F is the deviation of this population, so the scale of the rewards has no effect. On average the step
    points near ∇J_σ, and has another length.

    Source: arXiv:2509.24372, section 3.2.

    >>> standardised(torch.tensor([1.0, 0.0, 0.0, 1.0]))
    tensor([ 1., -1., -1.,  1.])
    """
    centred = fitness - fitness.mean()
    return centred / (centred.square().mean().sqrt() + eps)


def centred_ranks(fitness: PerMember) -> PerMember:
    """rank(F) from -1/2 to 1/2; equal members share their mean rank.

    Invariant to the scale of F and to outliers; the objective is then not J_σ.

    Source: arXiv:1703.03864, section 2.1, which leaves equal values open.

    >>> centred_ranks(torch.tensor([10.0, -3.0, 1000.0, 10.0]))
    tensor([ 0.0000, -0.5000,  0.5000,  0.0000])
    """
    if len(fitness) < 2:
        return torch.zeros_like(fitness)
    less = (fitness[None, :] < fitness[:, None]).to(fitness.dtype).sum(dim=1)
    same = (fitness[None, :] == fitness[:, None]).to(fitness.dtype).sum(dim=1)
    return (less + (same - 1) / 2) / (len(fitness) - 1) - 0.5


def unshaped(fitness: PerMember) -> PerMember:
    """F itself: the estimate is unbiased for ∇J_σ.

    Source: arXiv:1703.03864, eq. 1.
    """
    return fitness


# ---------------------------------------------------------------------- noise: number of a member -> its ε


def mirrored(member: Members) -> tuple[Members, Members]:
    """floor(i/2), (-1)^i: the members 2j and 2j + 1 have ε_j and -ε_j.

    Returns (number of the noise, its sign) of each member. The estimate is
    1/(nσ) Σ_j (z_{2j} - z_{2j+1}) ε_j: J(θ) itself adds no variance, and half as much noise is drawn.

    Source: mirrored sampling, Brockhoff et al. 2010; arXiv:1703.03864, section 2.1.

    >>> mirrored(torch.tensor([0, 1, 2, 3]))
    (tensor([0, 0, 1, 1]), tensor([ 1, -1,  1, -1]))
    """
    return member // 2, 1 - 2 * (member % 2)


def independent(member: Members) -> tuple[Members, Members]:
    """i, 1: members independent of one another.

    Returns (number of the noise, its sign) of each member.

    Source: arXiv:2509.24372, algorithm 1.

    >>> independent(torch.tensor([0, 1, 2]))
    (tensor([0, 1, 2]), tensor([1, 1, 1]))
    """
    return member, torch.ones_like(member)
