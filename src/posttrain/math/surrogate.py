"""Per-token policy losses: functions of a log-ratio and an advantage.

Every policy-gradient method multiplies the score of each token by a coefficient,

    ∇L_t = -c_t ∇log π(y_t | y_<t),

and differs from the others in that coefficient alone. Each function here returns an
unreduced loss whose gradient has exactly the c_t its docstring states; the tests
compare the two by autograd. Nothing in this file masks, averages or logs.

r stands for exp(log_ratio), A for the advantage, sg for "without gradient".
"""

import math
from typing import Annotated

import torch

from posttrain.math.choice import AtLeast, Share
from posttrain.math.masked import PerToken

Cap = Annotated[float, AtLeast(1)]
"""A bound of ratios; one below 1 would cut the ratio of a fresh sample, which is 1."""
Temperature = Annotated[float, AtLeast(1e-3)]
"""Steepness of a sigmoid; it is also a divisor."""


def score(log_ratio: PerToken, advantage: PerToken) -> PerToken:
    """-A log r, whose gradient is that of -A log π.    c = A

    Source: REINFORCE, Williams 1992. The old policy's constant log-probability only moves the value.

    >>> score(torch.tensor([[0.25, 0.5]]), torch.tensor([[2.0, -1.0]]))
    tensor([[-0.5000,  0.5000]])
    """
    return -advantage * log_ratio


def unclipped(log_ratio: PerToken, advantage: PerToken) -> PerToken:
    """-r A: the importance-weighted surrogate without a bound.    c = r A

    Source: CPI, Kakade & Langford 2002; PPO, arXiv:1707.06347, eq. 6.

    >>> unclipped(torch.tensor([[1.5]]).log(), torch.tensor([[1.0]]))
    tensor([[-1.5000]])
    """
    # An exp that overflows is inf, and inf times an advantage of 0 is NaN, in value and in gradient.
    idle = advantage == 0
    return -log_ratio.masked_fill(idle, 0.0).exp() * advantage


def clipped(
    log_ratio: PerToken, advantage: PerToken, clip_low: float = 0.2, clip_high: float = 0.2
) -> PerToken:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).    c = r A, or 0

    c = 0 for a token whose ratio has already left the range in the direction of its
    advantage, and r A for every other token. The ratio itself is not bounded.

    Source: PPO, arXiv:1707.06347, eq. 7. DAPO, arXiv:2503.14476.

    >>> r, A = torch.tensor([[0.5, 1.5, 1.5]]), torch.tensor([[1.0, 1.0, -1.0]])
    >>> clipped(r.log(), A)
    tensor([[-0.5000, -1.2000,  1.5000]])
    """
    # The minimum bounds r above where A >= 0 and below where A < 0. The bound is put on log r, because
    # an exp that overflows gives inf, and inf times the gradient 0 of a clipped token is NaN.
    low = math.log1p(-clip_low) if clip_low < 1 else -math.inf
    high = math.log1p(clip_high)
    bounded = torch.where(advantage < 0, log_ratio.clamp(min=low), log_ratio.clamp(max=high))
    return -bounded.exp() * advantage


def dual_clipped(
    log_ratio: PerToken, advantage: PerToken, clip_low: float = 0.2, clip_high: float = 0.2, cap: Cap = 3.0
) -> PerToken:
    """clipped, and for A < 0 at most -cap A.    c = r A, or 0

    c = 0 also for a token with A < 0 and r > cap, whose loss would grow without bound.

    Source: dual-clip PPO, arXiv:1912.09729, eq. 3; cap is absolute and above 1.

    >>> dual_clipped(torch.tensor([[5.0]]).log(), torch.tensor([[-1.0]]))
    tensor([[3.]])
    """
    capped = torch.where(advantage < 0, log_ratio.clamp(max=math.log(cap)), log_ratio)
    return clipped(capped, advantage, clip_low, clip_high)


def truncated(log_ratio: PerToken, advantage: PerToken, cap: Cap = 1.28, floor: Share = 0.0) -> PerToken:
    """-sg(w) A log r, w = min(max(r, floor), cap): the ratio only weighs.    c = w A

    No token loses its gradient.

    Source: CISPO, arXiv:2506.13585, eqs. 4 and 5. Both bounds are absolute; the paper's runs have no lower
    one, which is a floor of 0. The paper does not state its cap: 1.28 is where DAPO clips.

    >>> truncated(torch.tensor([[2.0]]).log(), torch.tensor([[1.0]]))
    tensor([[-0.8872]])
    """
    weight = log_ratio.detach().exp().clamp(floor, cap)
    return -weight * advantage * log_ratio


def soft_gated(
    log_ratio: PerToken, advantage: PerToken, tau_up: Temperature = 1.0, tau_down: Temperature = 1.05
) -> PerToken:
    """-(4/τ) sigmoid(τ (r - 1)) A: the gradient fades as r leaves 1, without an edge.    c = 4 g (1 - g) r A

    g = sigmoid(τ (r - 1)), τ = tau_up where A ≥ 0 and tau_down where A < 0. At r = 1, c = A.

    Source: SAPO, arXiv:2511.20347, eq. 6.

    >>> soft_gated(torch.tensor([[1.0, 2.0]]).log(), torch.tensor([[1.0, 1.0]]))
    tensor([[-2.0000, -2.9242]])
    """
    down, up = advantage.new_tensor(tau_down), advantage.new_tensor(tau_up)
    tau = torch.where(advantage < 0, down, up)
    # The gate is closed long before e^80; an expm1 that overflows would make its gradient 0 · inf, NaN.
    return -4 / tau * torch.sigmoid(tau * torch.expm1(log_ratio.clamp(max=80.0))) * advantage
