"""Log-ratios between the training policy and the anchor that drew the data.

log_ratio = log π(y_t | ...) - log π_old(y_t | ...). The surrogates take the exponential; a log-ratio is never
called a KL. Each function returns one number a token, so that surrogates need not know whether the
ratio is one of tokens or sequences. Only by_bounded_sequence reads the advantage.
"""

import torch

from posttrain.math.masked import Mask, PerToken, fill, row_mean, row_sum


def by_token(logp: PerToken, logp_old: PerToken, mask: Mask, advantage: PerToken | None = None) -> PerToken:
    """log π(y_t) - log π_old(y_t); 0 outside the mask.

    It does not correct for the states that the sampler visited: exact only at π = π_old.

    Source: PPO, arXiv:1707.06347, eq. 6.

    >>> m = torch.tensor([[True, True, False]])
    >>> by_token(torch.tensor([[-1.0, -2.0, 7.0]]), torch.tensor([[-1.5, -2.0, 3.0]]), m)
    tensor([[0.5000, 0.0000, 0.0000]])
    """
    return fill(logp, mask) - fill(logp_old, mask)


def by_sequence(
    logp: PerToken, logp_old: PerToken, mask: Mask, advantage: PerToken | None = None
) -> PerToken:
    """(1/|y|) Σ_t log-ratio_t, the same number at every token of the row; 0 outside the mask.

    The exponential is the geometric mean of the token ratios. With reduce.per_sequence each row
    counts once.

    Source: GSPO, arXiv:2507.18071, eq. 7.

    >>> m = torch.tensor([[True, True, False]])
    >>> by_sequence(torch.tensor([[-1.0, -2.0, 7.0]]), torch.tensor([[-1.5, -2.0, 3.0]]), m)
    tensor([[0.2500, 0.2500, 0.0000]])
    """
    mean = row_mean(by_token(logp, logp_old, mask), mask)
    return fill(mean[:, None].expand_as(logp), mask)


def by_sequence_token(
    logp: PerToken, logp_old: PerToken, mask: Mask, advantage: PerToken | None = None
) -> PerToken:
    """sg(by_sequence) + logp - sg(logp): the sequence's value with each token's own gradient.

    Source: GSPO-token, arXiv:2507.18071, eq. 14.

    >>> m = torch.tensor([[True, True]])
    >>> by_sequence_token(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.0]]), m)
    tensor([[0.2500, 0.2500]])
    """
    logp = fill(logp, mask)
    return by_sequence(logp.detach(), logp_old, mask) + (logp - logp.detach())


def by_bounded_sequence(
    logp: PerToken, logp_old: PerToken, mask: Mask, advantage: PerToken, clip_log: float = 0.4
) -> PerToken:
    """by_sequence of token log-ratios, each at most clip_log where A ≥ 0 and at least -clip_log where A < 0.

    A token whose ratio is beyond the bound in the direction of its advantage counts with the bound, and has
    no gradient; the other tokens keep theirs.

    Source: GMPO, arXiv:2507.20673, eq. 3; ratios between e^-0.4 and e^0.4 are those of its section 4.

    >>> logp, old, A = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.8, -2.0]]), torch.ones(1, 2)
    >>> by_bounded_sequence(logp, old, torch.tensor([[True, True]]), A)
    tensor([[0.2000, 0.2000]])
    """
    log_ratio = by_token(logp, logp_old, mask)
    bounded = torch.where(advantage < 0, log_ratio.clamp(min=-clip_log), log_ratio.clamp(max=clip_log))
    return fill(row_mean(bounded, mask)[:, None].expand_as(logp), mask)


def by_trajectory(
    logp: PerToken, logp_old: PerToken, mask: Mask, advantage: PerToken | None = None
) -> PerToken:
    """Σ_t log-ratio_t, the log-ratio of the row, at every token; 0 outside the mask.

    Source: notes A's GRPO, one ratio a response.

    >>> m = torch.tensor([[True, True, False]])
    >>> by_trajectory(torch.tensor([[-1.0, -2.0, 7.0]]), torch.tensor([[-1.5, -2.0, 3.0]]), m)
    tensor([[0.5000, 0.5000, 0.0000]])
    """
    total = row_sum(by_token(logp, logp_old, mask), mask)
    return fill(total[:, None].expand_as(logp), mask)
