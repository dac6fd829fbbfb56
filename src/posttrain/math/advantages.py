"""Advantages of trajectories: functions of the returns R_i and of the groups that were sampled together.

Rows of one task form a group of K samples. Every function takes the returns and the group
numbers of *all* rows of an update and returns one number a row, which each token of that row
then carries as its advantage (credit_rows, at the end). None divides by a length: reduce.py does.
Where a method credits each token by itself (credit_tokens), read "token" for "row". Where rows
lie on several ranks, each group lies on one, and functions that look beyond groups take `everywhere`.

A baseline that contains its own row shrinks the gradient: with the group mean, E[Σ A_i ∇log π_i]
= (K - 1)/K · K∇J, exactly. leave_one_out is unbiased. Dividing by the group's deviation
is not a baseline at all; it weighs tasks by 1/σ (docs/errata.md; tests/posttrain_study/truth).
"""

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float, Int

from posttrain.math.choice import choice, function_of, least_group, takes
from posttrain.math.episodes import number_turns
from posttrain.math.everywhere import HERE, Everywhere
from posttrain.math.masked import Group, Mask, PerRow, PerToken, fill, group_mean, group_size

Credit = Callable[..., PerRow]


def raw(returns: PerRow, group: Group) -> PerRow:
    """R_i: no baseline.

    Source: REINFORCE, Williams 1992.

    >>> raw(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]))
    tensor([1., 0.])
    """
    return returns.clone()


def against_greedy(returns: PerRow, group: Group, greedy: PerRow) -> PerRow:
    """R_i - R of the greedy answer to its task, which is not trained on; 0 where that has no verdict (NaN).

    The greedy answer is the same whatever is drawn, so the baseline is unbiased, for groups of one too.

    Source: ReMax, arXiv:2310.10505, eq. 5.

    >>> against_greedy(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), greedy=torch.tensor([1.0, 1.0]))
    tensor([ 0., -1.])
    """
    return torch.where(greedy.isnan(), torch.zeros_like(returns), returns - greedy)


@choice(compares="group", by_token=True)
def centred(returns: PerRow, group: Group) -> PerRow:
    """R_i - mean(R of its group), the row itself included.

    A group whose returns are all equal gets exactly 0, even if its mean is rounded.

    Source: Dr. GRPO, arXiv:2503.20783, eq. 3. Its expectation is (K - 1)/K times that of
    leave_one_out; a group of one gets 0.

    >>> centred(torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([0, 0, 0, 0]))
    tensor([ 0.5000, -0.5000,  0.5000, -0.5000])
    """
    numbers, index = torch.unique(group, return_inverse=True)
    low = returns.new_full((len(numbers),), torch.inf).scatter_reduce(0, index, returns, "amin")
    high = returns.new_full((len(numbers),), -torch.inf).scatter_reduce(0, index, returns, "amax")
    # The mean of three times 0.1 is not 0.1 in floating point, and 1e-8 / 1e-8 is 1, not 0.
    equal = (low == high)[index]
    return torch.where(equal, torch.zeros_like(returns), returns - group_mean(returns, group))


@choice(compares="group")
def normalised(returns: PerRow, group: Group, eps: float = 1e-6) -> PerRow:
    """(R_i - mean) / (σ + eps) within each group, σ the population deviation (ddof 0).

    A group whose returns are all equal gets exactly 0. Lines of methods/table.py that extend GRPO take this
    credit too, unless they name another.

    Source: GRPO, arXiv:2402.03300, section 4.1.2, which leaves ddof open. Notes A write ddof 0;
    verl, TRL and slime use ddof 1 (see normalised_sample), and eps between 1e-6 and 1e-4.

    >>> normalised(torch.tensor([0.2, 0.8, 0.5, 0.1]), torch.zeros(4, dtype=torch.long))
    tensor([-0.7303,  1.4606,  0.3651, -1.0954])
    """
    return _scaled(returns, group, eps, ddof=0)


@choice(compares="group")
def normalised_sample(returns: PerRow, group: Group, eps: float = 1e-6) -> PerRow:
    """(R_i - mean) / (s + eps) within each group, s the sample deviation (ddof 1).

    Source: GRPO as TRL, verl and slime compute it: √(K/(K-1)) smaller than `normalised`.
    A group of one gets 0.

    >>> normalised_sample(torch.tensor([0.2, 0.8, 0.5, 0.1]), torch.zeros(4, dtype=torch.long))
    tensor([-0.6325,  1.2649,  0.3162, -0.9487])
    """
    return _scaled(returns, group, eps, ddof=1)


def _scaled(returns: PerRow, group: Group, eps: float, ddof: int) -> PerRow:
    difference = centred(returns, group)
    size = group_size(group)
    variance = group_mean(difference.square(), group) * size / (size - ddof).clamp(min=1)
    scaled = difference / (variance.sqrt() + eps)
    return torch.where(variance == 0, torch.zeros_like(returns), scaled)


@choice(compares="group")
def leave_one_out(returns: PerRow, group: Group) -> PerRow:
    """R_i - mean(R of the other rows of its group) = K/(K-1) · centred.

    Raises ValueError for a group of one row.

    Source: RLOO, arXiv:2402.14740, eq. 5; Kool et al. 2019.

    >>> leave_one_out(torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([0, 0, 0, 0]))
    tensor([ 0.6667, -0.6667,  0.6667, -0.6667])
    """
    size = group_size(group)
    if bool((size < 2).any()):
        raise ValueError("leave_one_out needs at least 2 samples in every group")
    return centred(returns, group) * size / (size - 1)


@choice(compares="group", by_token=True)
def optimal_by_token(
    returns: PerRow, group: Group, step: Int[torch.Tensor, "N"], score_norm: PerRow
) -> PerRow:
    """G_t - B_t, B_t = Σ G_t W_t / Σ W_t over the answers of the group that have a token t.

    step: index t of the token in its answer. score_norm: W_t = Σ_{j ≤ t} ‖∇ log π(y_j)‖², the gradient in the
    logits. B is the baseline of least variance of Σ_{j ≤ t} ∇ log π(y_j) (G_t - B) as groups grow, if the
    network's Jacobian has the same norm for every answer. As it contains the token's own G_t, it shrinks the
    gradient as the group's mean does: more where an answer is surprising, since its own weight is larger. A
    token that no other answer reaches gets 0; so do tokens of answers whose G_t are all equal.

    Source: optimal token baseline, arXiv:2602.07078.

    >>> optimal_by_token(
    ...     torch.tensor([1.0, 0.0, 1.0]),
    ...     group=torch.tensor([0, 0, 0]),
    ...     step=torch.tensor([0, 0, 1]),
    ...     score_norm=torch.tensor([1.0, 3.0, 2.0]),
    ... )
    tensor([ 0.7500, -0.2500,  0.0000])
    """
    _, index = torch.unique(torch.stack([group, step], dim=1), dim=0, return_inverse=True)
    difference = centred(returns, index)  # so that equal returns are exactly 0
    weight = group_mean(score_norm, index)
    shift = group_mean(score_norm * difference, index) / weight
    return torch.where(weight == 0, difference, difference - shift)


def batch_normalised(
    returns: PerRow, group: Group, eps: float = 1e-6, everywhere: Everywhere = HERE
) -> PerRow:
    """(R_i - mean) / (σ + eps) over all rows of the update, σ with ddof 0; groups are ignored.

    Source: REINFORCE++, arXiv:2501.03262, eq. 7. As the batch grows it tends to ∇J/σ(R), not to ∇J.

    >>> batch_normalised(torch.tensor([1.0, 0.0]), torch.tensor([0, 1]))
    tensor([ 1.0000, -1.0000])
    """
    return _whitened(returns, eps, 0, everywhere)


def batch_normalised_sample(
    returns: PerRow, group: Group, eps: float = 1e-6, everywhere: Everywhere = HERE
) -> PerRow:
    """(R_i - mean) / (s + eps) over all rows of the update, s with ddof 1; groups are ignored.

    Source: the whitening of PPO and REINFORCE++ as TRL, verl and OpenRLHF compute it. An
    update of one row gets 0.

    >>> batch_normalised_sample(torch.tensor([1.0, 0.0]), torch.tensor([0, 1]))
    tensor([ 0.7071, -0.7071])
    """
    return _whitened(returns, eps, 1, everywhere)


@choice(compares="group")
def centred_batch_normalised(
    returns: PerRow, group: Group, eps: float = 1e-6, everywhere: Everywhere = HERE
) -> PerRow:
    """centred / (σ + eps), σ² the mean of centred² over all rows of the update (ddof 0).

    Unlike `normalised`, it does not scale a task whose answers hardly differ up to the size of the others.
    The mean over the update is always 0, and a group whose returns are all equal gets exactly 0.

    Source: REINFORCE++-baseline, arXiv:2501.03262. verl and OpenRLHF take σ over tokens, so that
    a long answer counts more; here it is over answers.

    >>> centred_batch_normalised(torch.tensor([3.0, 1.0, 0.1, 0.1]), torch.tensor([0, 0, 7, 7]))
    tensor([ 1.4142, -1.4142,  0.0000,  0.0000])
    """
    difference = centred(returns, group)
    variance = everywhere.sum(difference.square().sum()) / everywhere.sum(torch.tensor(len(returns)))
    scaled = difference / (variance.sqrt() + eps)
    return torch.where(difference == 0, torch.zeros_like(difference), scaled)


@choice(compares="group")
def normalised_by_part(
    returns: PerRow,
    group: Group,
    parts: Float[torch.Tensor, "B N"],
    weights: Float[torch.Tensor, "N"],
    eps: float = 1e-6,
    everywhere: Everywhere = HERE,
) -> PerRow:
    """Σ_n w_n (r_n - mean) / (σ_n + eps), each part r_n of the reward within its group, over σ + eps.

    σ² is the mean over all rows of the update of the square of this sum, whose mean is 0: the whitening of
    the paper. Only the weights say how much a part counts, since no scale or shift of a part changes
    anything. A part that a row lacks (NaN) adds 0 to it, and is compared among the other rows of the group. A
    reward without parts is its own only part: `normalised`, then `centred_batch_normalised`.

    Source: GDPO, arXiv:2601.05242, section 3; TRL's multi_objective_aggregation = "normalize_then_sum".

    >>> normalised_by_part(
    ...     torch.tensor([0.0, 1.0, 0.0, 2.0]),
    ...     group=torch.tensor([0, 0, 7, 7]),
    ...     parts=torch.tensor([[0.0, 0.0], [0.0, 1.0], [0.0, 0.0], [1.0, 1.0]]),
    ...     weights=torch.tensor([1.0, 1.0]),
    ... )
    tensor([-0.6325,  0.6325, -1.2649,  1.2649])
    """
    total = torch.zeros_like(returns)
    for score, weight in zip(parts.T, weights, strict=True):
        rows = ~score.isnan()
        total[rows] += weight * normalised(score[rows], group[rows], eps)
    return centred_batch_normalised(total, group, eps, everywhere)


def _whitened(returns: PerRow, eps: float, ddof: int, everywhere: Everywhere) -> PerRow:
    """(R - mean) / (σ + eps) over the rows of all ranks; exactly 0 if all returns are equal."""
    count = everywhere.sum(torch.tensor(len(returns)))
    least = returns.new_tensor([torch.inf])
    bounds = everywhere.max(torch.stack([torch.cat([x, -least]).max() for x in (returns, -returns)]))
    difference = returns - everywhere.sum(returns.sum()) / count
    variance = everywhere.sum(difference.square().sum()) / (count - ddof).clamp(min=1)
    equal = bool(bounds[0] == -bounds[1]) or not variance
    return torch.zeros_like(returns) if equal else difference / (variance.sqrt() + eps)


@choice(compares="group")
def over_mean(returns: PerRow, group: Group, eps: float = 1e-6) -> PerRow:
    """(R_i - mean) / (mean + eps) within each group: a success weighs more, the rarer it is.

    For returns in {0, 1} and a chance p of success, E[mean of A_i ∇log π_i] = ∇p (1 - (1 - p)^(K-1))/p =
    Σ_{k<K} (1 - p)^(k-1) ∇p: the gradient of log p's series in 1 - p up to its term K - 1. K = 2 is plain
    ∇p; ∇log p is the limit of large groups. Groups whose mean is not above 0 get 0.

    Source: MaxRL, arXiv:2602.02710.

    >>> over_mean(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.long))
    tensor([ 3.0000, -1.0000, -1.0000, -1.0000])
    """
    mean = group_mean(returns, group)
    return torch.where(mean <= 0, torch.zeros_like(returns), centred(returns, group) / (mean + eps))


# ---------------------------------------------------------------------- from returns to tokens


def credit_rows(
    credit: Credit,
    returns: PerToken,
    mask: Mask,
    group: Group,
    episode: Int[torch.Tensor, "B"] | None = None,
    everywhere: Everywhere = HERE,
    parts: Float[torch.Tensor, "B N"] | None = None,
    greedy: PerToken | None = None,
) -> PerToken:
    """credit(R) at each trained token of the row, R the return at its first trained token; 0 elsewhere.

    A row without a trained token (its verifier failed) has no return and is left out: a 0 would count as a
    wrong answer in the baseline of its group. Rows of one `episode` share its return, which counts once.
    A credit that asks for `parts` is given those of its rows; without any, R is the only part. One that asks
    for `greedy` is given it at each row's first trained token.

    >>> R, mask = torch.tensor([[1.0, 1.0], [0.0, 0.0]]), torch.tensor([[True, True], [True, False]])
    >>> credit_rows(centred, R, mask, torch.tensor([0, 0]))
    tensor([[ 0.5000,  0.5000],
            [-0.5000,  0.0000]])
    """
    rows, first = mask.any(-1).nonzero().flatten(), mask.to(torch.uint8).argmax(-1)
    representatives, index = rows, torch.arange(len(rows))
    if episode is not None:
        numbers, index = torch.unique(episode[rows], return_inverse=True)
        empty = rows.new_zeros(len(numbers))
        representatives = empty.scatter_reduce(0, index, rows, "amin", include_self=False)
    R = returns[representatives, first[representatives]]
    if takes(function_of(credit), "parts"):
        scores = R[:, None] if parts is None else parts[representatives].to(R)
        credit = partial(credit, parts=scores)
    if takes(function_of(credit), "greedy") and greedy is not None:
        credit = partial(credit, greedy=greedy[representatives, first[representatives]].to(R))
    advantage = torch.zeros_like(returns[:, 0])
    advantage[rows] = _apply_credit(credit, R, group[representatives], everywhere)[index]
    return fill(advantage[:, None].expand_as(returns), mask)


def credit_tokens(
    credit: Credit,
    x: PerToken,
    mask: Mask,
    group: Group,
    everywhere: Everywhere = HERE,
    greedy: PerToken | None = None,
    score_norm: PerToken | None = None,
) -> PerToken:
    """credit(x) over trained tokens, each in the group of its row; 0 elsewhere.

    A credit that asks for `step` is given each token's index among those of its row, and for `score_norm` its
    sum over the row's tokens up to this one.

    >>> credit_tokens(raw, torch.tensor([[1.0, 2.0]]), torch.tensor([[True, False]]), torch.tensor([0]))
    tensor([[1., 0.]])
    """
    out = torch.zeros_like(x)
    if takes(function_of(credit), "greedy") and greedy is not None:
        credit = partial(credit, greedy=greedy[mask].to(x))
    if takes(function_of(credit), "step"):
        credit = partial(credit, step=(mask.cumsum(-1) - 1)[mask])
    if takes(function_of(credit), "score_norm") and score_norm is not None:
        credit = partial(credit, score_norm=fill(score_norm, mask).cumsum(-1)[mask].to(x))
    out[mask] = _apply_credit(credit, x[mask], group[:, None].expand(x.shape)[mask], everywhere)
    return out


def credit_turns(
    credit: Credit,
    returns: PerToken,
    turn_state: Int[torch.Tensor, "B T"],
    mask: Mask,
    group: Group,
    everywhere: Everywhere = HERE,
) -> PerToken:
    """credit(G) among the turns of a group that begin in one state, at each token of the turn; 0 elsewhere.

    turn_state: number of the state at each turn's first token, 0 elsewhere. returns: G of the turn there. A
    state with fewer turns than the credit compares gets 0. With `centred` the mean of A over the turns that
    took action a in state s tends to Q(s, a) - V(s) as turns in s grow; with `normalised` to that over the
    deviation of G in s. If an episode comes back to a state, its later return, which its earlier action
    influenced, is in the baseline of the earlier one: in a small group a bias, whatever the credit.

    Source: GiGPO, arXiv:2505.10978, eq. 7.

    >>> G, state = torch.tensor([[3.0, 3.0], [1.0, 5.0]]), torch.tensor([[7, 0], [7, 4]])
    >>> credit_turns(centred, G, state, torch.ones(2, 2, dtype=torch.bool), torch.tensor([0, 0]))
    tensor([[ 1.,  1.],
            [-1.,  0.]])
    """
    starts, index, count = number_turns(turn_state, mask, group)
    compared = (count >= least_group(credit))[index]
    G, advantage = returns[starts], torch.zeros_like(returns[starts])
    advantage[compared] = _apply_credit(credit, G[compared], index[compared], everywhere)
    first = torch.zeros_like(returns).masked_scatter(starts, advantage)
    columns = torch.arange(returns.shape[1], device=returns.device).expand_as(turn_state)
    begins = torch.where(starts, columns, 0).cummax(1).values  # token 0 is never sampled
    return fill(first.gather(1, begins), mask)


def _apply_credit(credit: Credit, returns: PerRow, group: Group, everywhere: Everywhere) -> PerRow:
    if takes(function_of(credit), "everywhere"):
        credit = partial(credit, everywhere=everywhere)
    return credit(returns, group)
