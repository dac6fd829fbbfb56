"""Per-token policy losses: functions of a log-ratio and an advantage.

Every policy-gradient method multiplies the score of each token by a coefficient,

    ∇L_t = -c_t ∇log π(y_t | y_<t),

and differs from the others in that coefficient alone. Each function here returns an
unreduced loss whose gradient has exactly the c_t its docstring states; the tests
compare the two by autograd. Nothing in this file masks, averages or logs.

r stands for exp(log_ratio), A for the advantage, sg for "without gradient". A function with a parameter
`logp_old` is given log π_old(y_t) too, 0 outside the mask; π is then π_old r, which is the policy's
probability where the ratio is that of the token (ratios.by_token).
"""

import math
from typing import Annotated

import torch

from posttrain.math import kl
from posttrain.math.choice import AtLeast, Share
from posttrain.math.masked import Mask, PerToken

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


def tapered(log_ratio: PerToken, advantage: PerToken, cap: Annotated[float, AtLeast(0)] = 1.0) -> PerToken:
    """-sg(w) A log r, w = 1 where A ≥ 0 and min(r, cap) where A < 0.    c = w A

    What is to become likelier is imitated, however far the policy has moved; what is to become less likely
    counts less, the less likely it has become, so that the loss is bounded below.

    Source: TOPR, arXiv:2503.14286, by the sign of the advantage where the paper has that of the reward.

    >>> tapered(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[1.0, -1.0]]))
    tensor([[ 0.6931, -0.3466]])
    """
    weight = torch.where(advantage < 0, log_ratio.detach().exp().clamp(max=cap), 1.0)
    return -weight * advantage * log_ratio


def gamma_gated(
    log_ratio: PerToken,
    advantage: PerToken,
    k_up: float = 2.0,
    lambda_up: float = 3.0,
    k_down: float = 3.0,
    lambda_down: float = 2.0,
) -> PerToken:
    """-sg(w) A log r, w = r^k e^(λ (1 - r)): a gate that is largest at r = k/λ.    c = w A

    k_up and lambda_up where A ≥ 0, k_down and lambda_down where A < 0. With λ > 0, w is bounded, and falls
    to 0 for r → 0 (if k > 0) and for r → ∞. At r = 1 it is 1.

    Source: VESPO, arXiv:2602.10693, where r is the ratio of the whole answer (ratios.by_trajectory).

    >>> gamma_gated(torch.tensor([[2.0, 2.0]]).log(), torch.tensor([[1.0, -1.0]]))
    tensor([[-0.1380,  0.7505]])
    """
    down = advantage < 0
    r = log_ratio.detach()
    k = torch.where(down, r.new_tensor(k_down), r.new_tensor(k_up))
    rate = torch.where(down, r.new_tensor(lambda_down), r.new_tensor(lambda_up))
    # A ratio that overflows would make λ · inf NaN for λ = 0; beyond e^80 the gate is shut for any other λ.
    weight = (k * r - rate * torch.expm1(r.clamp(max=80.0))).exp()
    return -weight * advantage * log_ratio


def tv_masked(
    log_ratio: PerToken, advantage: PerToken, logp_old: PerToken, max_tv: Share = 0.15, cap: Cap = 10.0
) -> PerToken:
    """-sg(w) A log r, w = min(r, cap), or 0 where |π - π_old| > max_tv and A asks for more.    c = w A

    |π - π_old| is the total variation of the two events that the token is drawn and that it is not, at most
    that of the two policies. A rare token may double, and a nearly certain one may not lose a fifth: the
    range of r, as in `clipped`, has it the other way round.

    Source: DPPO with binary TV, arXiv:2602.04879. There π_old is the sampler's own probability.

    >>> r, A = torch.tensor([[3.0, 0.8]]), torch.tensor([[1.0, -1.0]])
    >>> tv_masked(r.log(), A, torch.tensor([[1e-4, 0.99]]).log())
    tensor([[-3.2958, -0.0000]])
    """
    outside = (_moved(log_ratio, logp_old).exp() - logp_old.exp()).abs() > max_tv
    return _masked(log_ratio, advantage, outside & (advantage * log_ratio.detach() > 0), cap)


def kl_masked(
    log_ratio: PerToken, advantage: PerToken, logp_old: PerToken, max_kl: float = 0.05, cap: Cap = 10.0
) -> PerToken:
    """-sg(w) A log r, w = min(r, cap), or 0 where KL(π_old ‖ π) > max_kl and A asks for more.    c = w A

    The KL, in nats, of the two events that the token is drawn and that it is not, at most that of the two
    policies.

    Source: DPPO with binary KL, arXiv:2602.04879. There π_old is the sampler's own probability.

    >>> r, A = torch.tensor([[3.0, 0.8]]), torch.tensor([[1.0, -1.0]])
    >>> kl_masked(r.log(), A, torch.tensor([[1e-4, 0.99]]).log())
    tensor([[-3.2958, -0.0000]])
    """
    outside = kl.of_event(logp_old, _moved(log_ratio, logp_old)) > max_kl
    return _masked(log_ratio, advantage, outside & (advantage * log_ratio.detach() > 0), cap)


def tv_bounded(
    log_ratio: PerToken, advantage: PerToken, logp_old: PerToken, max_tv: Share = 0.3, cap: Cap = 10.0
) -> PerToken:
    """-sg(w) A log r, w = min(r, cap), or 0 where |π - π_old| > max_tv.    c = w A

    As `tv_masked`, whatever the sign of A: a token that is far away is not called back either.

    Source: IPO of prime-rl, 2026, whose ratio has no cap.

    >>> r, A = torch.tensor([[3.0, 0.6]]), torch.tensor([[1.0, 1.0]])
    >>> tv_bounded(r.log(), A, torch.tensor([[1e-4, 0.99]]).log())
    tensor([[-3.2958,  0.0000]])
    """
    outside = (_moved(log_ratio, logp_old).exp() - logp_old.exp()).abs() > max_tv
    return _masked(log_ratio, advantage, outside, cap)


def kl_bounded(
    log_ratio: PerToken, advantage: PerToken, logp_old: PerToken, max_kl: float = 0.1, cap: Cap = 10.0
) -> PerToken:
    """-sg(w) A log r, w = min(r, cap), or 0 where KL(π_old ‖ π) or KL(π ‖ π_old) > max_kl.    c = w A

    As `kl_masked` in both directions, whatever the sign of A.

    Source: KPop, Guo et al. (Ant Group), 2026, whose ratio has no cap: a rare token's may be thousands.

    >>> r, A = torch.tensor([[3.0, 0.6]]), torch.tensor([[1.0, 1.0]])
    >>> kl_bounded(r.log(), A, torch.tensor([[1e-4, 0.99]]).log())
    tensor([[-3.2958,  0.0000]])
    """
    logp = _moved(log_ratio, logp_old)
    outside = torch.maximum(kl.of_event(logp_old, logp), kl.of_event(logp, logp_old)) > max_kl
    return _masked(log_ratio, advantage, outside, cap)


def regressed(log_ratio: PerToken, advantage: PerToken, pull: float = 0.05) -> PerToken:
    """-A log r + pull/2 (log r)²: the score, with a squared pull to π_old.    c = A - pull log r

    But for a constant it is pull/2 (log r - A/pull)²: log r is fitted to A/pull. It pulls where A = 0 too.

    Write β for pull, and let r be that of the whole answer (ratios.by_trajectory), which π_old gave. With
    A = R - β log E[exp(R/β)] it is stationary at π ∝ π_old exp(R/β), the maximum of E[R] - β KL(π ‖ π_old).
    With A = R - E[R] it is where A = β log r + β KL(π_old ‖ π) r, which is nearer to π_old.

    Source: Kimi k1.5, arXiv:2501.12599, section 2.3.2; DRO, arXiv:2405.19107; with the mean arXiv:2602.05933.

    >>> regressed(torch.tensor([[1.0, 20.0]]), torch.tensor([[1.0, 1.0]]))
    tensor([[ -0.9750, -10.0000]])
    """
    return -advantage * log_ratio + pull / 2 * log_ratio.square()


def _moved(log_ratio: PerToken, logp_old: PerToken) -> PerToken:
    """Return log π, at most 0, without a gradient."""
    return (logp_old + log_ratio.detach()).clamp(max=0.0)


def _masked(log_ratio: PerToken, advantage: PerToken, stopped: Mask, cap: float) -> PerToken:
    """-sg(min(r, cap)) A log r, and 0 for tokens that are stopped."""
    weight = log_ratio.detach().exp().clamp(max=cap).masked_fill(stopped, 0.0)
    return -weight * advantage * log_ratio
