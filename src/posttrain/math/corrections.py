"""Weights that correct for a sampler that differs from the policy: functions of log π_old - log π_gen.

The sampler may compute with other kernels, in another type, cut the distribution (top-p), or hold older
weights; logp_gen is its log-probability of the token it drew. The loss of a token is multiplied by this
weight, without gradient. Together with a ratio π/π_old this is decoupled PPO: behaviour, proximal
and current policy (AReaL, arXiv:2505.24298, eq. 5).

w_t stands for π_old/π_gen of token t, and w for Π_t w_t, the weight of the answer. A function with a
parameter `logp_old` is given log π_old(y_t) too, 0 outside the mask.
"""

from typing import Annotated

import torch
from jaxtyping import Float

from posttrain.math import kl
from posttrain.math.choice import AtLeast, Share
from posttrain.math.masked import Mask, PerToken, fill, row_mean, row_sum

Cap = Annotated[float, AtLeast(1)]
"""A bound of weights; one below 1 would cut a fresh sample's, which is 1."""


def uncorrected(log_weight: PerToken, mask: Mask) -> PerToken:
    """1: no correction.

    >>> uncorrected(torch.tensor([[0.3, -0.1]]), torch.tensor([[True, False]]))
    tensor([[1., 0.]])
    """
    return mask.to(log_weight.dtype)


def token_truncated(log_weight: PerToken, mask: Mask, weight_cap: Cap = 2.0) -> PerToken:
    """min(w_t, weight_cap), token by token, whatever the weights of the tokens before it.

    Source: TIS, "Your efficient RL framework secretly brings you off-policy RL training", 2025.

    >>> token_truncated(torch.tensor([[4.0, 0.5]]).log(), torch.tensor([[True, True]]))
    tensor([[2.0000, 0.5000]])
    """
    return fill(log_weight.exp().clamp(max=weight_cap), mask)


def sequence_truncated(log_weight: PerToken, mask: Mask, weight_cap: Cap = 2.0) -> PerToken:
    """min(w, weight_cap) of the answer, at each of its tokens. Unbiased as weight_cap grows.

    Source: truncated importance sampling, Ionides 2008, over answers.

    >>> sequence_truncated(torch.tensor([[4.0, 0.25]]).log(), torch.tensor([[True, True]]))
    tensor([[1., 1.]])
    """
    return _to_tokens(row_sum(log_weight, mask).exp().clamp(max=weight_cap), mask)


def token_rejected(
    log_weight: PerToken, mask: Mask, weight_floor: Share = 0.5, weight_cap: Cap = 2.0
) -> PerToken:
    """w_t where weight_floor ≤ w_t ≤ weight_cap, and 0 for other tokens. Both bounds are absolute.

    Source: masked importance sampling (MIS), IcePop, 2025.

    >>> token_rejected(torch.tensor([[4.0, 0.5, 0.1]]).log(), torch.tensor([[True, True, True]]))
    tensor([[0.0000, 0.5000, 0.0000]])
    """
    weight = log_weight.exp()
    return fill(torch.where((weight >= weight_floor) & (weight <= weight_cap), weight, 0.0), mask)


def tv_rejected(
    log_weight: PerToken, mask: Mask, logp_old: PerToken, weight_tv: Share = 0.3, weight_cap: Cap = 10.0
) -> PerToken:
    """min(w_t, weight_cap) where |π_old - π_gen| ≤ weight_tv, and 0 for other tokens.

    Source: IPO of prime-rl, 2026, whose weight has no cap.

    >>> w, old = torch.tensor([[3.0, 0.6]]).log(), torch.tensor([[3e-4, 0.59]]).log()
    >>> tv_rejected(w, torch.tensor([[True, True]]), old)
    tensor([[3., 0.]])
    """
    outside = (logp_old.exp() - _sampled(logp_old, log_weight).exp()).abs() > weight_tv
    return fill(log_weight.exp().clamp(max=weight_cap).masked_fill(outside, 0.0), mask)


def kl_rejected(
    log_weight: PerToken, mask: Mask, logp_old: PerToken, weight_kl: float = 0.1, weight_cap: Cap = 10.0
) -> PerToken:
    """min(w_t, weight_cap) where KL(π_old ‖ π_gen) and KL(π_gen ‖ π_old) ≤ weight_kl, and 0 for other tokens.

    The KL, in nats, of the two events that the token is drawn and that it is not.

    Source: KPop, Guo et al. (Ant Group), 2026, whose weight has no cap.

    >>> w, old = torch.tensor([[3.0, 0.6]]).log(), torch.tensor([[3e-4, 0.59]]).log()
    >>> kl_rejected(w, torch.tensor([[True, True]]), old)
    tensor([[3., 0.]])
    """
    logp_gen = _sampled(logp_old, log_weight)
    outside = torch.maximum(kl.of_event(logp_old, logp_gen), kl.of_event(logp_gen, logp_old)) > weight_kl
    return fill(log_weight.exp().clamp(max=weight_cap).masked_fill(outside, 0.0), mask)


def sequence_rejected(
    log_weight: PerToken, mask: Mask, weight_floor: Share = 0.5, weight_cap: Cap = 2.0
) -> PerToken:
    """w of the answer where weight_floor ≤ w ≤ weight_cap, and 0 for other answers.

    Source: sequence-level masked importance sampling, as verl and slime offer it, 2025.

    >>> sequence_rejected(torch.tensor([[4.0, 1.0]]).log(), torch.tensor([[True, True]]))
    tensor([[0., 0.]])
    """
    weight = row_sum(log_weight, mask).exp()
    return _to_tokens(torch.where((weight >= weight_floor) & (weight <= weight_cap), weight, 0.0), mask)


def geometric_rejected(
    log_weight: PerToken, mask: Mask, weight_floor: Share = 0.99, weight_cap: Cap = 1.01
) -> PerToken:
    """1, or 0 for an answer whose geometric mean of w_t lies outside [weight_floor, weight_cap].

    It drops answers and does not weigh them; the bounds do not widen with the length of the answer.

    Source: geometric sequence masking, as verl offers it, 2025.

    >>> geometric_rejected(torch.tensor([[1.001, 1.0], [2.0, 1.0]]).log(), torch.ones(2, 2, dtype=torch.bool))
    tensor([[1., 1.],
            [0., 0.]])
    """
    weight = row_mean(log_weight, mask).exp()
    return _to_tokens(((weight >= weight_floor) & (weight <= weight_cap)).to(log_weight.dtype), mask)


def _sampled(logp_old: PerToken, log_weight: PerToken) -> PerToken:
    """Return log π_gen, at most 0."""
    return (logp_old - log_weight).clamp(max=0.0)


def _to_tokens(x: Float[torch.Tensor, "B"], mask: Mask) -> PerToken:
    return fill(x[:, None].expand(mask.shape), mask)
