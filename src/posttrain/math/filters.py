"""Filters: which of an update's tokens keep their advantage.

The advantage of the other tokens becomes 0, and with it their policy loss. Penalties on them stay, and so do
the divisors of the reduction, which count every trained token, as in the papers' formulas and in TRL.

A filter is called with the mask of all rows of the update and with `everywhere`, and with the columns of the
batch that it names as parameters (math/choice.py: COLUMNS). It returns True at the tokens that are kept. Its
quantiles, means and counts are over all ranks, so neither microbatches nor ranks change which tokens these
are. Numbers that are equal share their fate: no order of rows decides between two tokens.
"""

import math
from collections.abc import Callable

import numpy
import torch
from jaxtyping import Int

from posttrain.math.choice import Share
from posttrain.math.everywhere import HERE, Everywhere
from posttrain.math.masked import Group, Mask, PerToken, mean


def every_token(mask: Mask, everywhere: Everywhere = HERE) -> Mask:
    """Every trained token.

    >>> every_token(torch.tensor([[True, False]]))
    tensor([[ True, False]])
    """
    return mask


def top_entropy(
    mask: Mask, everywhere: Everywhere = HERE, *, entropy: PerToken, top_share: Share = 0.2
) -> Mask:
    """The tokens with H ≥ the (1 - top_share) quantile of the update: where the policy was least decided.

    H is the entropy of the policy's distribution before the token, at the start of the update. 1 keeps every
    token, 0 those of the largest entropy alone.

    Source: the 80/20 rule, arXiv:2506.01939, whose quantile is that of the rows that are trained together.
    TRL takes it within a microbatch of all ranks, so there its tokens depend on how a step is cut.

    >>> top_entropy(torch.ones(1, 5, dtype=torch.bool), entropy=torch.tensor([[0.1, 2.0, 0.3, 0.4, 0.2]]))
    tensor([[False,  True, False, False, False]])
    """
    last = int(everywhere.sum(mask.sum())) - 1
    # Of a quantile's two neighbours the upper one is kept. In floats 0.57 · 100 is below 57.
    return _largest(entropy, mask, 1 + math.floor(top_share * last + 1e-9), everywhere)


def low_second_moment(
    mask: Mask,
    everywhere: Everywhere = HERE,
    *,
    logp_old: PerToken,
    logp_gen: PerToken,
    max_second_moment: float = 0.04,
) -> Mask:
    """All but the fewest tokens, the largest (log π_old/μ)² first, without which their mean is small enough.

    The mean of (log π_old - log μ)² over the tokens that are kept is at most max_second_moment, μ being the
    probability that the sampler gave. The moment is that of the start of the update. If every token is
    further away, none is kept.

    Source: M2PO, arXiv:2510.01161, which computes the moment in each step again. Its authors' code differs
    from the paper: the moment is that of the tokens with A > 0 and r > 1, or A < 0 and r < 1, r = π/μ, whose
    ratios are then clipped at one bound; other tokens have none. AReaL takes the moment within a microbatch
    and always keeps a token.

    >>> old, gen = torch.tensor([[-1.0, -1.0, -1.0]]), torch.tensor([[-1.1, -1.2, -2.0]])
    >>> low_second_moment(torch.ones(1, 3, dtype=torch.bool), logp_old=old, logp_gen=gen)
    tensor([[ True,  True, False]])
    """
    squares = (logp_old.double() - logp_gen.double()).square()
    order = _order(squares)
    among, values = order[mask], squares[mask]

    def is_within(bound: int) -> bool:
        inside = among <= bound
        total, count = everywhere.sum(torch.stack([values[inside].sum(), inside.sum().double()])).tolist()
        return bool(total <= max_second_moment * count)

    return mask & (order <= _last(is_within))


def clip_cov(
    mask: Mask,
    everywhere: Everywhere = HERE,
    *,
    advantage: PerToken,
    logp_old: PerToken,
    uniform: PerToken,
    cov_share: Share = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> Mask:
    """All but some of the tokens with cov_low ≤ (A - Ā)(log π_old - its mean) ≤ cov_high, drawn at random.

    Each token between the bounds is dropped with the same probability, so that cov_share of the update's
    tokens are on average, or all between the bounds if these are fewer. Such tokens lower the entropy most. A
    token's draw depends on the seed, the update and its row. 0 keeps every token.

    Source: Clip-Cov, arXiv:2505.22617, which drops exactly this share. At the start of an update no ratio has
    left its range, so that no token is left out for being clipped. verl takes the means within a microbatch
    and draws from an unseeded generator, so there two runs of a recipe differ.

    >>> A, old = torch.tensor([[3.0, -1.0, -1.0, -1.0]]), torch.tensor([[-1.0, -2.0, -2.0, -2.0]])
    >>> clip_cov(torch.ones(1, 4, dtype=torch.bool), advantage=A, logp_old=old, uniform=torch.zeros(1, 4))
    tensor([[False,  True,  True,  True]])
    """
    covariance = covariances(advantage, logp_old, mask, everywhere)
    band = mask & (covariance >= cov_low) & (covariance <= cov_high)
    tokens, within = everywhere.sum(torch.stack([mask.sum(), band.sum()])).tolist()
    dropped: Mask = band & (uniform < cov_share * tokens / max(within, 1))
    return mask & ~dropped


def top_covariance(
    advantage: PerToken, logp_old: PerToken, mask: Mask, share: float, everywhere: Everywhere = HERE
) -> Mask:
    """The share of an update's tokens with the largest (A - Ā)(log π_old - its mean), rounded up.

    Source: KL-Cov, arXiv:2505.22617.

    >>> A, old = torch.tensor([[1.0, -1.0, -1.0]]), torch.tensor([[-1.0, -2.0, -3.0]])
    >>> top_covariance(A, old, torch.ones(1, 3, dtype=torch.bool), 0.1)
    tensor([[ True, False, False]])
    """
    count = math.ceil(share * int(everywhere.sum(mask.sum())) - 1e-9)
    return _largest(covariances(advantage, logp_old, mask, everywhere), mask, count, everywhere)


def covariances(advantage: PerToken, logp: PerToken, mask: Mask, everywhere: Everywhere = HERE) -> PerToken:
    """(A - Ā)(log π - its mean) of each token, in float64: their mean is the covariance of A and log π.

    For a softmax over separate logits, a natural-gradient step of size η changes the entropy by -η Cov(log π,
    A), and a plain one by -η Cov(log π, π A), to the first order.

    Source: arXiv:2505.22617.

    >>> covariances(torch.tensor([[1.0, -1.0]]), torch.tensor([[-1.0, -2.0]]), torch.tensor([[True, True]]))
    tensor([[0.5000, 0.5000]], dtype=torch.float64)
    """
    A, x = advantage.double(), logp.double()
    return (A - mean(A, mask, everywhere)) * (x - mean(x, mask, everywhere))


def uniform_draws(
    tokens: Int[torch.Tensor, "B T"], mask: Mask, group: Group, seed: tuple[int, int]
) -> PerToken:
    """Numbers from [0, 1) for trained tokens, which depend on the seed, the row's tokens and its group alone.

    So equal answers to a task share them. 0 elsewhere.

    >>> rows, mask = torch.tensor([[7, 3], [7, 4]]), torch.tensor([[False, True], [False, True]])
    >>> both = uniform_draws(rows, mask, torch.tensor([0, 0]), seed=(0, 1))
    >>> bool((both[:1] == uniform_draws(rows[:1], mask[:1], torch.tensor([0]), seed=(0, 1))).all())
    True
    """
    out = torch.zeros(mask.shape, dtype=torch.float64)
    for i in mask.any(-1).nonzero().flatten().tolist():
        answer = tokens[i, : 1 + int(mask[i].nonzero().max())].tolist()
        generator = numpy.random.default_rng(hash((*seed, int(group[i]), *answer)) % 2**63)
        out[i, mask[i]] = torch.from_numpy(generator.random(int(mask[i].sum())))
    return out


def _largest(x: PerToken, mask: Mask, count: int, everywhere: Everywhere) -> Mask:
    """Return True at the `count` largest numbers under the mask, and at those equal to the least one."""
    order = _order(x)
    among = order[mask]
    least = _last(lambda bound: int(everywhere.sum((among >= bound).sum())) >= count)
    return mask & (order >= least)


def _order(x: PerToken) -> Int[torch.Tensor, "B T"]:
    """Return integers in the order of the numbers: their bits in float64, whose sign is apart."""
    bits = (x.double() + 0.0).view(torch.int64)  # -0.0 + 0.0 is 0.0
    return torch.where(bits < 0, bits ^ torch.iinfo(torch.int64).max, bits)


def _last(holds: Callable[[int], bool]) -> int:
    """Return the last 64-bit integer for which `holds` is True, being False for all behind it.

    Ranks can sum and cannot sort together, so an order statistic is found by 64 counts.
    """
    low, high = -(2**63), 2**63 - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
