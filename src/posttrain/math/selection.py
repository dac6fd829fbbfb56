"""Selection of the answers to imitate, and their weights.

Expert iteration samples answers, keeps the good ones and makes them likelier. Its choices are

    accepted              a lower bound on the return
    distinct, counted     equal answers to a task count once, or each time
    every, best           which of the remaining answers are kept
    unbalanced, by_task   the weights of the kept answers; rescales the weights of a reduction

Rows are answers (an agent's episode is one, its conversations side by side), sorted by return, highest first:
of equal answers the first, one of the highest return, is kept, whatever their order in the batch.
"""

import torch
from jaxtyping import Bool, Int

from posttrain.math.everywhere import HERE, Everywhere
from posttrain.math.masked import Group, Mask, PerRow, PerToken, group_mean, group_size

Rows = Bool[torch.Tensor, "B"]


def accepted(returns: PerRow, accept: float) -> Rows:
    """R_i ≥ accept, with the bound rounded to the type of the returns.

    >>> accepted(torch.tensor([0.7, 0.2]), 0.7)
    tensor([ True, False])
    """
    return returns >= returns.new_tensor(accept)


def distinct(tokens: Int[torch.Tensor, "B T"], mask: Mask, group: Group, among: Rows) -> Rows:
    """The rows of `among` without those that have the trained tokens of an earlier row of their group.

    Rows are sorted by return, so of equal answers one of the highest return is kept.

    Repeated with reduce.per_row, the policy tends to the uniform distribution over right answers
    (`posttrain truth`). Where answers are so short that most are equal, a rare right answer counts as much
    as the usual one, whose probability falls.

    Source: RFT, arXiv:2308.01825, which compares equations where this compares tokens.

    >>> distinct(torch.tensor([[7, 3], [7, 3], [7, 4]]), torch.tensor([[False, True]] * 3),
    ...          torch.tensor([0, 0, 0]), torch.tensor([True, True, True]))
    tensor([ True, False,  True])
    """
    earlier: set[tuple[int, ...]] = set()
    out = torch.zeros_like(among)
    for i in among.nonzero().flatten().tolist():
        answer = (int(group[i]), *tokens[i, mask[i]].tolist())
        out[i] = answer not in earlier
        earlier.add(answer)
    return out


def counted(tokens: Int[torch.Tensor, "B T"], mask: Mask, group: Group, among: Rows) -> Rows:
    """All rows of `among`: an answer counts as often as it was sampled.

    Repeated with reduce.per_row, the policy tends to the first policy conditioned on a right answer: after
    one round, and in expectation after all. The sampling noise of finite groups adds up, towards single
    answers.

    >>> counted(torch.tensor([[7], [7]]), torch.tensor([[True]] * 2), torch.tensor([0, 0]),
    ...         torch.tensor([True, True]))
    tensor([True, True])
    """
    return among


def every(returns: PerRow, group: Group, among: Rows) -> Rows:
    """All rows of `among`.

    Source: rejection sampling as in STaR, arXiv:2203.14465, and ReST, arXiv:2308.08998.

    >>> every(torch.tensor([1.0, 3.0]), torch.tensor([0, 0]), torch.tensor([True, True]))
    tensor([True, True])
    """
    return among


def best(returns: PerRow, group: Group, among: Rows) -> Rows:
    """The rows of `among` with the highest return of their group: best of n.

    Ties are all kept. With by_task they share one weight, so the loss is the mean over the ways to choose one
    answer; with rewards of 0 and 1 that is what `every` does.

    Source: RAFT, arXiv:2304.06767, which takes one answer.

    >>> best(torch.tensor([1.0, 3.0, 2.0]), torch.tensor([0, 0, 5]), torch.tensor([True, True, True]))
    tensor([False,  True,  True])
    """
    numbers, index = torch.unique(group, return_inverse=True)
    value = torch.where(among, returns, -torch.inf)
    top = value.new_full((len(numbers),), -torch.inf).scatter_reduce(0, index, value, "amax")
    return among & (value == top[index])


def unbalanced(weight: PerToken, group: Group, everywhere: Everywhere = HERE) -> PerToken:
    """The weights as they are: a task counts in proportion to its kept answers.

    With every and counted, and in the limit of large groups, the step is along Σ_tasks ∇p, p the probability
    that an answer is accepted: tasks that are easy or half learnt weigh most.

    >>> unbalanced(torch.tensor([[0.5], [0.5]]), torch.tensor([0, 1]))
    tensor([[0.5000],
            [0.5000]])
    """
    return weight


def by_task(weight: PerToken, group: Group, everywhere: Everywhere = HERE) -> PerToken:
    """w n / (n_task · tasks), n kept answers in all: every task with a kept answer counts the same.

    With reduce.per_row, every and counted the expected step is along Σ ∇log p over the tasks that have a
    kept answer, p the probability that an answer is accepted: the rarer an accepted answer, the more it
    counts.

    Source: ReST-EM, arXiv:2312.06585, whose bound on the answers per problem has the same purpose.

    >>> by_task(torch.tensor([[0.3], [0.3], [0.3], [0.0]]), torch.tensor([0, 0, 1, 2]))
    tensor([[0.2250],
            [0.2250],
            [0.4500],
            [0.0000]])
    """
    trained = (weight > 0).any(-1)
    per_task = group_mean(trained.double(), group) * group_size(group)
    tasks = everywhere.sum(torch.tensor(len(torch.unique(group[trained]))))
    share = everywhere.sum(trained.sum()) / (per_task.clamp(min=1) * tasks.clamp(min=1))
    return weight * share.to(weight)[:, None]
