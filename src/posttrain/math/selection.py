"""Which answers are imitated, and what they weigh against one another.

Expert iteration samples answers, keeps the good ones and makes them likelier. Its choices are

    accepted              the answer is good enough          a bound on its return
    distinct, counted     it is said once, or often          within its task
    every, best           which of those are kept
    unbalanced, by_task   what the kept ones weigh           rescales the weights of a reduction

Rows are answers (an agent's episode is one, its conversations side by side), and come best first: of equal
answers one of the highest return is taken, whatever their order in the batch.
"""

import torch
from jaxtyping import Bool, Float, Int

from posttrain.math.everywhere import HERE, Everywhere
from posttrain.math.masked import group_mean, group_size

PerToken = Float[torch.Tensor, "B T"]
PerRow = Float[torch.Tensor, "B"]
Rows = Bool[torch.Tensor, "B"]
Mask = Bool[torch.Tensor, "B T"]
Group = Int[torch.Tensor, "B"]


def accepted(returns: PerRow, accept: float) -> Rows:
    """R_i ≥ accept, the bound rounded as the returns are.

    >>> accepted(torch.tensor([0.7, 0.2]), 0.7)
    tensor([ True, False])
    """
    return returns >= returns.new_tensor(accept)


def distinct(tokens: Int[torch.Tensor, "B T"], mask: Mask, group: Group, among: Rows) -> Rows:
    """The rows of `among`, but for those whose trained tokens an earlier one of the same group has.

    As rows come best first, the highest return of equal answers counts.

    Repeated with reduce.per_row, the policy tends to all right answers alike, and stays as diverse as they
    are (`posttrain truth`). Where answers are so short that most are equal, a rare right one counts as much
    as the usual one, which loses by it.

    Source: RFT, arXiv:2308.01825, which compares equations where this compares tokens.

    >>> distinct(torch.tensor([[7, 3], [7, 3], [7, 4]]), torch.tensor([[False, True]] * 3),
    ...          torch.tensor([0, 0, 0]), torch.tensor([True, True, True]))
    tensor([ True, False,  True])
    """
    seen: set[tuple[int, ...]] = set()
    out = torch.zeros_like(among)
    for i in among.nonzero().flatten().tolist():
        said = (int(group[i]), *tokens[i, mask[i]].tolist())
        out[i] = said not in seen
        seen.add(said)
    return out


def counted(tokens: Int[torch.Tensor, "B T"], mask: Mask, group: Group, among: Rows) -> Rows:
    """Every row of `among`: an answer counts as often as it was given.

    Repeated with reduce.per_row, the policy is its first self given that it is right: after one round, and
    in expectation ever after. What chance does to groups that are finite adds up, towards single answers.

    >>> counted(torch.tensor([[7], [7]]), torch.tensor([[True]] * 2), torch.tensor([0, 0]),
    ...         torch.tensor([True, True]))
    tensor([True, True])
    """
    return among


def every(returns: PerRow, group: Group, among: Rows) -> Rows:
    """Every row of `among`.

    Source: rejection sampling as in STaR, arXiv:2203.14465, and ReST, arXiv:2308.08998.

    >>> every(torch.tensor([1.0, 3.0]), torch.tensor([0, 0]), torch.tensor([True, True]))
    tensor([True, True])
    """
    return among


def best(returns: PerRow, group: Group, among: Rows) -> Rows:
    """The rows of `among` with the highest return of their group: best of n.

    Equally good ones are all kept. With by_task they share one weight, so what is trained is the mean over
    ways to choose one of them; with rewards of 0 and 1 that is what `every` does.

    Source: RAFT, arXiv:2304.06767, which takes one of them.

    >>> best(torch.tensor([1.0, 3.0, 2.0]), torch.tensor([0, 0, 5]), torch.tensor([True, True, True]))
    tensor([False,  True,  True])
    """
    numbers, index = torch.unique(group, return_inverse=True)
    value = torch.where(among, returns, -torch.inf)
    top = value.new_full((len(numbers),), -torch.inf).scatter_reduce(0, index, value, "amax")
    return among & (value == top[index])


def unbalanced(weight: PerToken, group: Group, everywhere: Everywhere = HERE) -> PerToken:
    """The weights as they are: a task counts by how many of its answers are kept.

    With every and counted, and groups that grow, the step is along Σ_tasks ∇p, p the chance that an answer
    is accepted: tasks that are easy or half learnt weigh most.

    >>> unbalanced(torch.tensor([[0.5], [0.5]]), torch.tensor([0, 1]))
    tensor([[0.5000],
            [0.5000]])
    """
    return weight


def by_task(weight: PerToken, group: Group, everywhere: Everywhere = HERE) -> PerToken:
    """w n / (n_task · tasks): every task with a kept answer counts the same, by answers; n are kept in all.

    With reduce.per_row, every and counted the expected step is along Σ ∇log p over the tasks that have a
    kept answer, p the chance that an answer is accepted: the rarer, the more one that is found counts.

    Source: the end that the bound on answers a problem serves in ReST-EM, arXiv:2312.06585.

    >>> by_task(torch.tensor([[0.3], [0.3], [0.3], [0.0]]), torch.tensor([0, 0, 1, 2]))
    tensor([[0.2250],
            [0.2250],
            [0.4500],
            [0.0000]])
    """
    kept = (weight > 0).any(-1)
    of_task = group_mean(kept.double(), group) * group_size(group)
    tasks = everywhere.sum(torch.tensor(len(torch.unique(group[kept]))))
    share = everywhere.sum(kept.sum()) / (of_task.clamp(min=1) * tasks.clamp(min=1))
    return weight * share.to(weight)[:, None]
