"""Ψ_t: the credit of a token. Functions of the rewards along an episode, and of a critic's values.

Every policy gradient is E[Σ_t Ψ_t ∇log π(y_t | y_<t)]; notes E list the forms of Ψ_t. The
steps of an episode are its *sampled* tokens: tokens of a user or a tool between them belong to
the step before; those of turns_to_go are turns. V_t is the value of the state before token t is drawn, so V
after the last one is 0: a truncated answer counts as ended.

    δ_t = r_t + γ V_{t+1} - V_t

Each conversation of an episode (`Batch.episode`) is a row with its own steps. The rewards of the other
conversations are not in the row, and their order in time is unknown, so their sum arrives one step after the
row's last, in the place of V. Rewards from before a token then count for it too: that adds variance to the
gradient, and no bias.

A function with a critic returns (advantages, targets), for the policy and for the critic.
With γ < 1 the sum of discounted Ψ_t without the factor γ^t is not the gradient of the discounted
objective (docs/errata.md).
"""

from typing import Annotated, NamedTuple

import torch
from jaxtyping import Int

from posttrain.math.choice import AtLeast, Share
from posttrain.math.masked import Mask, PerRow, PerToken, fill

Credited = tuple[PerToken, PerToken]


def worth(reward: PerToken, mask: Mask, like: torch.Tensor) -> PerRow:
    """Σ_k r_k of each row, added in float64 and rounded to the type of `like`: returns that can be compared.

    A return may be paid in parts (steps, shaping), and the parts of equal returns need not add up to equal
    bits; after rounding they do. Near 0 relative rounding does not help: a sum below the rounding error of
    its n parts, n 2⁻⁵² Σ|r_k|, counts as 0. types.py: worth is the same rule for a list of rewards.

    >>> paid = torch.tensor([[0.1, 0.6, -0.7], [0.0, 0.0, 0.0]], dtype=torch.float64)
    >>> worth(paid, torch.ones(2, 3, dtype=torch.bool), like=torch.zeros(1))
    tensor([0., 0.])
    """
    parts = fill(reward, mask).double()
    return _snap_to_zero(parts.sum(-1), parts.abs().sum(-1), (parts != 0).sum(-1)).to(like)


def shaped(reward: PerToken, mask: Mask, gamma: float) -> PerToken:
    """γ Φ(s_{t+1}) - Φ(s_t), from rewards Φ(s_{t+1}) - Φ(s_t) that end in score - Φ(s_T).

    Gains in a potential sum to the score, but for γ < 1 their discounted sum is
    γ^T score + (1 - γ) Σ_t γ^t Φ(s_{t+1}): states of high Φ are paid for, which changes the optimal policy.
    With the discount inside, G_t = γ^{T-t} score - Φ(s_t), and Φ changes no policy's rank. Φ(s_t) is the sum
    of the rewards before token t, 0 at the start, and counts as 0 after the last token. With γ = 1, and for a
    reward at the last token alone, this is the reward itself.

    Source: Ng, Harada and Russell (1999), theorem 1; that Φ ends at 0: docs/errata.md.

    >>> paid = torch.tensor([[0.5, 0.25, -0.75]])
    >>> shaped(paid, torch.ones(1, 3, dtype=torch.bool), gamma=0.5)
    tensor([[ 0.2500, -0.1250, -0.7500]])
    """
    if gamma == 1.0:
        return reward
    steps, place = _steps(reward, mask)
    potential = _snap_to_zero(steps.cumsum(1), steps.abs().cumsum(1), (steps != 0).cumsum(1))
    last = torch.arange(steps.shape[1], device=steps.device) >= mask.sum(1, keepdim=True) - 1
    return _back(steps - (1 - gamma) * potential.masked_fill(last, 0.0), place, mask)


def overlong(length: Int[torch.Tensor, "B"], horizon: int, buffer: float) -> torch.Tensor:
    """A penalty on length: 0 up to horizon - buffer tokens, then linearly down to -1 at the horizon.

    Without it an answer that is cut off at the horizon is a wrong one without a warning.

    Source: soft overlong punishment, DAPO, arXiv:2503.14476, eq. 13.

    >>> overlong(torch.tensor([60, 80, 95, 100]), horizon=100, buffer=20.0)
    tensor([-0.0000, -0.0000, -0.7500, -1.0000], dtype=torch.float64)
    """
    return -((length.double() - (horizon - buffer)) / buffer).clamp(0, 1)


class Path(NamedTuple):
    """Episodes as a credit sees them; entry t belongs to token t."""

    reward: PerToken
    mask: Mask
    value: PerToken | None = None
    """The critic's V of the state before each token."""
    log_weight: PerToken | None = None
    """log π/μ of each token, π the trained policy and μ the one that drew it (for vtrace)."""
    beyond: PerRow | None = None
    """Σ rewards of the episode's other conversations, one step after each row's last; None: 0."""


def total(path: Path) -> PerToken:
    """Σ_k r_k: the return of the episode, at each of its tokens.

    Source: notes E, "total reward of the trajectory".

    >>> total(Path(torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[True, True, True]])))
    tensor([[3., 3., 3.]])
    """
    R = worth(_rewards(path, 1.0), path.mask, like=path.reward)
    return fill(R[:, None].expand_as(path.reward), path.mask)


def total_by_token(path: Path) -> PerToken:
    """total, credited token by token: a credit that averages then weighs an answer by its length.

    With advantages.centred the baseline is Σ |y_i| R_i / Σ |y_i|, the one of least variance if the
    squared norm of an answer's score is proportional to its length.

    Source: OPO, arXiv:2505.23585, eq. 8.

    >>> total_by_token(Path(torch.tensor([[0.0, 1.0]]), torch.tensor([[True, True]])))
    tensor([[1., 1.]])
    """
    return total(path)


def to_go(path: Path, gamma: Share = 1.0) -> PerToken:
    """Σ_{k ≥ t} γ^{k-t} r_k: the reward to go. Rewards before a token do not count for it.

    Source: notes E, "reward following the action". Notes D print the sum from t = 1 (docs/errata.md).

    >>> to_go(Path(torch.tensor([[1.0, 7.0, 2.0]]), torch.tensor([[True, False, True]])), gamma=0.5)
    tensor([[2., 0., 2.]])
    """
    reward, place = _steps(_rewards(path, gamma), path.mask)
    parts = (reward != 0).flip(1).cumsum(1).flip(1)
    G = _snap_to_zero(_discounted(reward, gamma), _discounted(reward.abs(), gamma), parts)
    return _back(G, place, path.mask)


def turns_to_go(path: Path, starts: Mask, gamma: Share = 1.0) -> PerToken:
    """Σ_{k ≥ n} γ^{k-n} r_k at each token of turn n, r_k the sum of the rewards of turn k.

    starts: True at each turn's first token; a turn lasts to the next one's, and γ counts turns and not
    tokens. Tokens before the first turn get 0.

    Source: GiGPO, arXiv:2505.10978, section 4.2.

    >>> rewards, every = torch.tensor([[0.0, 1.0, 4.0]]), torch.tensor([[True, True, True]])
    >>> turns_to_go(Path(rewards, every), torch.tensor([[True, False, True]]), gamma=0.5)
    tensor([[3., 3., 4.]])
    """
    turn = (starts & path.mask).cumsum(1)
    reward = fill(_rewards(path, gamma), path.mask)

    def ahead(x: PerToken, rate: float) -> PerToken:
        sums = x.new_zeros(len(x), x.shape[1] + 1).scatter_add(1, turn, x)
        return _discounted(sums, rate).gather(1, turn)

    parts = ahead((reward != 0).to(reward), 1.0)
    G = _snap_to_zero(ahead(reward, gamma), ahead(reward.abs(), gamma), parts)
    return fill(G, path.mask & (turn > 0))


def monte_carlo(path: Path, gamma: Share = 1.0) -> Credited:
    """A_t = G_t - V_t, target G_t, with G_t = Σ_{k ≥ t} γ^{k-t} r_k. Unbiased whatever V is.

    Source: REINFORCE with a learned baseline, notes E; GAE with λ = 1.

    >>> p = Path(torch.tensor([[0.0, 1.0]]), torch.tensor([[True, True]]), torch.tensor([[0.4, 0.7]]))
    >>> monte_carlo(p)
    (tensor([[0.6000, 0.3000]]), tensor([[1., 1.]]))
    """
    G = to_go(path, gamma)
    return G - fill(_value(path), path.mask), G


def td(path: Path, gamma: Share = 1.0) -> Credited:
    """A_t = δ_t, target r_t + γ V_{t+1}: the least variance, and all of the critic's error.

    Source: A2C with one step; GAE with λ = 0.

    >>> p = Path(torch.tensor([[0.0, 1.0]]), torch.tensor([[True, True]]), torch.tensor([[0.4, 0.7]]))
    >>> td(p)
    (tensor([[0.3000, 0.3000]]), tensor([[0.7000, 1.0000]]))
    """
    return n_step(path, gamma, n=1)


def n_step(path: Path, gamma: Share = 1.0, n: Annotated[int, AtLeast(1)] = 5) -> Credited:
    """A_t = Σ_{k<n} γ^k r_{t+k} + γ^n V_{t+n} - V_t; the target is the same without - V_t.

    Source: A3C, arXiv:1602.01783, section 4.2, where n shrinks towards the end of a segment; here it is n
    for all steps.

    >>> p = Path(torch.tensor([[0.0, 1.0]]), torch.tensor([[True, True]]), torch.tensor([[0.4, 0.7]]))
    >>> n_step(p, n=2)
    (tensor([[0.6000, 0.3000]]), tensor([[1., 1.]]))
    """
    reward, place = _steps(_rewards(path, gamma), path.mask)
    value, _ = _steps(_value(path), path.mask)
    target = _ahead(value, n) * gamma**n
    for k in range(min(n, reward.shape[1])):  # rewards further ahead are 0
        target = target + gamma**k * _ahead(reward, k)
    return _back(target - value, place, path.mask), _back(target, place, path.mask)


def gae(path: Path, gamma: Share = 1.0, lam: Share = 0.95) -> Credited:
    """A_t = Σ_k (γλ)^k δ_{t+k}, target A_t + V_t (the λ-return).

    λ = 0 is td, λ = 1 is monte_carlo; in between the bias O((1 - λ) ‖V - V^π‖) buys variance.

    Source: GAE, arXiv:1506.02438, eq. 16; PPO, arXiv:1707.06347, eq. 11. Notes C print it without λ.

    >>> p = Path(torch.tensor([[0.0, 1.0]]), torch.tensor([[True, True]]), torch.tensor([[0.4, 0.7]]))
    >>> gae(p, lam=0.5)
    (tensor([[0.4500, 0.3000]]), tensor([[0.8500, 1.0000]]))
    """
    reward, place = _steps(_rewards(path, gamma), path.mask)
    value, _ = _steps(_value(path), path.mask)
    delta = reward + gamma * _ahead(value, 1) - value
    advantage = _discounted(delta, gamma * lam)
    return _back(advantage, place, path.mask), _back(advantage + value, place, path.mask)


def decoupled_gae(path: Path, gamma: Share = 1.0, lam: Share = 0.95, critic_lam: Share = 1.0) -> Credited:
    """A_t = Σ_k (γλ)^k δ_{t+k}, target V_t + Σ_k (γ λ_critic)^k δ_{t+k}: gae with a λ for each.

    With λ < 1 a reward at the end of n tokens reaches the target of the first one only by the share
    λ^(n-1); with λ_critic = 1 the target is the return G_t, unbiased whatever V is, and the policy keeps its
    variance low.

    Source: decoupled GAE, VC-PPO, arXiv:2503.01491.

    >>> p = Path(torch.tensor([[0.0, 1.0]]), torch.tensor([[True, True]]), torch.tensor([[0.4, 0.7]]))
    >>> decoupled_gae(p, lam=0.5)
    (tensor([[0.4500, 0.3000]]), tensor([[1., 1.]]))
    """
    return gae(path, gamma, lam)[0], gae(path, gamma, critic_lam)[1]


def vtrace(
    path: Path,
    gamma: Share = 1.0,
    lam: Share = 1.0,
    rho_cap: Annotated[float, AtLeast(1e-3)] = 1.0,
    c_cap: float = 1.0,
) -> Credited:
    """A_t = ρ_t (r_t + γ v_{t+1} - V_t), target v_t, for episodes that another policy drew.

        v_t = V_t + Σ_k γ^k (c_t ... c_{t+k-1}) ρ_{t+k} δ_{t+k}
        ρ = min(rho_cap, π/μ),  c = λ min(c_cap, π/μ)

    Both bounds are absolute. With π = μ and λ = 1 it is monte_carlo; a rho_cap that binds moves the
    fixed point to the value of a policy between μ and π.

    Source: IMPALA, arXiv:1802.01561, eq. 1 and section 4.2.

    >>> p = Path(torch.tensor([[0.0, 1.0]]), torch.tensor([[True, True]]), torch.tensor([[0.4, 0.7]]),
    ...          torch.tensor([[0.5, 2.0]]).log())
    >>> vtrace(p)
    (tensor([[0.3000, 0.3000]]), tensor([[0.7000, 1.0000]]))
    """
    if path.log_weight is None:
        raise ValueError("vtrace needs log π/μ of each token")
    reward, place = _steps(_rewards(path, gamma), path.mask)
    value, _ = _steps(_value(path), path.mask)
    log_weight, _ = _steps(path.log_weight, path.mask)
    weight = log_weight.exp()
    rho, c = weight.clamp(max=rho_cap), lam * weight.clamp(max=c_cap)
    delta = rho * (reward + gamma * _ahead(value, 1) - value)
    correction = torch.zeros_like(delta)
    for t in reversed(range(value.shape[1])):
        after = correction[:, t + 1] if t + 1 < value.shape[1] else 0.0
        correction[:, t] = delta[:, t] + gamma * c[:, t] * after
    target = value + correction
    advantage = rho * (reward + gamma * _ahead(target, 1) - value)
    return _back(advantage, place, path.mask), _back(target, place, path.mask)


def soft_lambda(path: Path, gap: PerToken, gamma: float = 1.0, lam: float = 0.95) -> PerToken:
    """Targets G_t of a KL-regularised Q on tokens, Q_t = g_t + V_t.

        G_t = r_t + γ [(1 - λ) V_{t+1} + λ (G_{t+1} - g_{t+1})],   g_t = β log π/π_ref of token t

    V is the soft value, E_π[Q - g], so an unbiased target over several steps subtracts the g of each drawn
    token. λ = 0 is soft Q-learning's target r_t + γ V_{t+1}; λ = 1 sums the rewards.

    Source: Q(λ) on tokens as in KLQ, arXiv:2508.17000; path consistency, arXiv:1702.08892, eq. 14.

    >>> p = Path(torch.tensor([[0.0, 1.0]]), torch.tensor([[True, True]]), torch.tensor([[0.4, 0.7]]))
    >>> soft_lambda(p, torch.tensor([[0.1, 0.2]]), lam=1.0)
    tensor([[0.8000, 1.0000]])
    """
    reward, place = _steps(_rewards(path, gamma), path.mask)
    value, _ = _steps(_value(path), path.mask)
    gap, _ = _steps(gap, path.mask)
    # With ε_t = r_t + γ V_{t+1} - (g_t + V_t), G_t - Q_t is the (γλ)-discounted sum of the ε.
    error = reward + gamma * _ahead(value, 1) - gap - value
    return _back(gap + value + _discounted(error, gamma * lam), place, path.mask)


def _rewards(path: Path, gamma: float) -> PerToken:
    """Return the rewards, with γ · beyond added at each row's last trained token."""
    if path.beyond is None:
        return path.reward
    last = (path.mask.cumsum(-1) == path.mask.sum(-1, keepdim=True)) & path.mask
    return path.reward + gamma * fill(path.beyond[:, None].expand_as(path.reward), last)


def _value(path: Path) -> PerToken:
    if path.value is None:
        raise ValueError("this credit compares with a critic's values, and there are none")
    return path.value.to(path.reward)


def _snap_to_zero(total: torch.Tensor, absolute: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    """Return the sums, and 0 for a sum within the rounding error of its parts."""
    return torch.where(total.abs() < parts * 2.0**-52 * absolute, torch.zeros_like(total), total)


def _steps(x: PerToken, mask: Mask) -> tuple[PerToken, torch.Tensor]:
    """Return (each row's masked entries at its front, then zeros; the original index of each)."""
    place = (~mask).to(torch.uint8).argsort(dim=1, stable=True)
    return fill(x, mask).gather(1, place), place


def _back(x: PerToken, place: torch.Tensor, mask: Mask) -> PerToken:
    """Undo _steps; 0 outside the mask."""
    return fill(torch.zeros_like(x).scatter(1, place, x), mask)


def _ahead(x: PerToken, n: int) -> PerToken:
    """x_{t+n}; 0 past the end."""
    if n >= x.shape[1]:
        return torch.zeros_like(x)
    return torch.cat([x[:, n:], x.new_zeros(len(x), n)], dim=1)


def _discounted(x: PerToken, rate: float) -> PerToken:
    """Σ_{k ≥ t} rate^{k-t} x_k."""
    out, after = torch.empty_like(x), torch.zeros_like(x[:, 0])
    for t in reversed(range(x.shape[1])):
        after = x[:, t] + rate * after
        out[:, t] = after
    return out
