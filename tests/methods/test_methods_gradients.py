"""Each method's gradient against its paper's formula, token by token, in plain Python."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import pytest
import torch

from posttrain.math import kl, masked
from posttrain.methods.build import build
from posttrain.methods.distillation import Distillation
from posttrain.methods.evolution import Evolution
from posttrain.methods.policy_gradient import PolicyGradient, RewardPart
from posttrain.methods.preference import Preference, Unpaired
from posttrain.methods.reward_model import ListwiseReward, PairwiseReward, PointwiseReward
from posttrain.methods.table import METHODS
from posttrain.types import Batch, Outputs

HORIZON = 16
SEEDS = range(4)
Update = Callable[..., tuple[Batch, Outputs]]
Gradients = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]
Rows = dict[int, list[int]]
Tokens = dict[tuple[int, int], float]
WEIGHTS = (1.0, -0.5, 2.0)
"""Of the parts of a reward."""


def trained(batch: Batch) -> Rows:
    """Positions of each row's trained tokens, of the rows that have any."""
    found = {i: [t for t, on in enumerate(m) if on] for i, m in enumerate(batch.mask.tolist())}
    return {i: chosen for i, chosen in found.items() if chosen}


def returns_of(batch: Batch) -> dict[int, float]:
    return {i: math.fsum(batch.reward[i, t].item() for t in chosen) for i, chosen in trained(batch).items()}


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def group_of(batch: Batch, i: int, *, without: bool = False) -> list[float]:
    R = returns_of(batch)
    same = [j for j in R if batch.group[j] == batch.group[i] and not (without and i == j)]
    return [R[j] for j in same]


def whitened(batch: Batch) -> dict[int, float]:
    """(R_i - mean) / std, GRPO section 4.1.2."""
    out = {}
    for i, R in returns_of(batch).items():
        G = group_of(batch, i)
        m = mean(G)
        out[i] = (R - m) / (math.sqrt(mean([(r - m) ** 2 for r in G])) + 1e-6)
    return out


def ratio(batch: Batch, out: Outputs, i: int, t: int) -> float:
    assert batch.logp_old is not None
    return math.exp(out.logp[i, t].item() - batch.logp_old[i, t].item())


def unclipped_part(r: float, A: float, low: float, high: float) -> float:
    """d/d log π of min(r A, clip(r, 1 - low, 1 + high) A), where it has a derivative."""
    bounded = max(1 - low, min(1 + high, r))
    return r * A if r * A <= bounded * A else 0.0


def grpo(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """1/G Σ_i 1/|o_i| Σ_t min(r A, clip(r) A); arXiv:2402.03300, eq. 3."""
    A, rows = whitened(batch), trained(batch)
    return [
        (i, t, unclipped_part(ratio(batch, out, i, t), A[i], 0.2, 0.2) / len(chosen) / len(rows))
        for i, chosen in rows.items()
        for t in chosen
    ]


def dr_grpo(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """1/G Σ_i 1/L Σ_t min(r A, clip(r) A), A = R - mean(R), L the token budget; arXiv:2503.20783."""
    R, rows = returns_of(batch), trained(batch)
    return [
        (
            i,
            t,
            unclipped_part(ratio(batch, out, i, t), R[i] - mean(group_of(batch, i)), 0.2, 0.2)
            / HORIZON
            / len(rows),
        )
        for i, chosen in rows.items()
        for t in chosen
    ]


def reinforce_pp_baseline(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """1/Σ|o| Σ min(r A, clip(r) A) - 0.01 ½ (log π/π_ref)², A centred in its group over the batch's std."""
    assert batch.logp_ref is not None
    R, rows = returns_of(batch), trained(batch)
    centred = {i: R[i] - mean(group_of(batch, i)) for i in rows}
    sigma = math.sqrt(mean([a * a for a in centred.values()])) + 1e-6
    count = sum(map(len, rows.values()))
    answer = []
    for i, chosen in rows.items():
        for t in chosen:
            pull = out.logp[i, t].item() - batch.logp_ref[i, t].item()
            push = unclipped_part(ratio(batch, out, i, t), centred[i] / sigma, 0.2, 0.2)
            answer.append((i, t, (push - 0.01 * pull) / count))
    return answer


def gdpo(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """GRPO's with Σ_n w_n (r_n - mean) / σ_n, whitened over the update, for A; arXiv:2601.05242, section 3.

    The weights are 1, -0.5 and 2; without parts the return is the only one.
    """
    rows = trained(batch)
    columns = {i: [R] for i, R in returns_of(batch).items()}
    if batch.parts is not None:
        columns = {i: batch.parts[i].tolist() for i in rows}
    A = dict.fromkeys(rows, 0.0)
    for i in rows:
        for n, weight in zip(range(len(columns[i])), WEIGHTS, strict=False):
            same = [columns[j][n] for j in rows if batch.group[j] == batch.group[i]]
            have = [x for x in same if not math.isnan(x)]
            if not math.isnan(columns[i][n]):
                sigma = math.sqrt(mean([(x - mean(have)) ** 2 for x in have])) + 1e-6
                A[i] += weight * (columns[i][n] - mean(have)) / sigma
    middle = mean([*A.values()])
    sigma = math.sqrt(mean([(x - middle) ** 2 for x in A.values()])) + 1e-6
    A = {i: (x - middle) / sigma for i, x in A.items()}
    return [
        (i, t, unclipped_part(ratio(batch, out, i, t), A[i], 0.2, 0.2) / len(chosen) / len(rows))
        for i, chosen in rows.items()
        for t in chosen
    ]


def gmpo(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """1/G Σ_i A_i Π_t (min(r, e^0.4) where A ≥ 0, max(r, e^-0.4) where A < 0)^(1/|o_i|).

    arXiv:2507.20673, eq. 3.
    """
    A, rows = whitened(batch), trained(batch)
    answer = []
    for i, chosen in rows.items():
        logs = [math.log(ratio(batch, out, i, t)) for t in chosen]
        bounded = [max(x, -0.4) if A[i] < 0 else min(x, 0.4) for x in logs]
        geometric = math.exp(mean(bounded))
        answer += [
            (i, t, A[i] * geometric / len(chosen) / len(rows) if x == y else 0.0)
            for t, x, y in zip(chosen, logs, bounded, strict=True)
        ]
    return answer


def pass_at_k_training(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """GRPO of what the best of a pair of answers is worth if one is this; arXiv:2508.10751, section 2.4."""
    R, rows = returns_of(batch), trained(batch)
    answer = []
    for i, chosen in rows.items():
        pairs = [max(pair) for pair in combinations(group_of(batch, i), 2)]
        m = mean(pairs)
        sigma = math.sqrt(mean([(p - m) ** 2 for p in pairs])) + 1e-6
        A = (mean([max(R[i], r) for r in group_of(batch, i, without=True)]) - m) / sigma
        answer += [
            (i, t, unclipped_part(ratio(batch, out, i, t), A, 0.2, 0.2) / len(chosen) / len(rows))
            for t in chosen
        ]
    return answer


def dapo(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """1/Σ|o_i| Σ_i Σ_t min(r A, clip(r, 0.8, 1.28) A); arXiv:2503.14476, eq. 8."""
    A, rows = whitened(batch), trained(batch)
    count = sum(map(len, rows.values()))
    return [
        (i, t, unclipped_part(ratio(batch, out, i, t), A[i], 0.2, 0.28) / count)
        for i, chosen in rows.items()
        for t in chosen
    ]


def rloo(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """1/K Σ_i (R_i - mean of the others) ∇log π(y_i); arXiv:2402.14740, eq. 5."""
    R, rows = returns_of(batch), trained(batch)
    return [
        (i, t, (R[i] - mean(group_of(batch, i, without=True))) / len(rows))
        for i, chosen in rows.items()
        for t in chosen
    ]


def remax(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """1/N Σ_i (R_i - R of the greedy answer) ∇log π(y_i); arXiv:2310.10505."""
    assert batch.greedy is not None
    R, rows = returns_of(batch), trained(batch)
    A = {i: R[i] - float(batch.greedy[i, chosen[0]]) for i, chosen in rows.items()}
    return [(i, t, A[i] / len(rows)) for i, chosen in rows.items() for t in chosen]


def otb(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """1/N Σ_i Σ_t (G_t - Σ_j G_jt W_jt / Σ_j W_jt) ∇log π_t over answers with a token t; arXiv:2602.07078."""
    assert batch.score_norm is not None
    rows = trained(batch)
    answer = []
    for i, chosen in rows.items():
        for n, t in enumerate(chosen):
            above, below = 0.0, 0.0
            for j, others in rows.items():
                if batch.group[j] == batch.group[i] and n < len(others):
                    W = sum(float(batch.score_norm[j, s]) for s in others[: n + 1])
                    above += W * sum(float(batch.reward[j, s]) for s in others[n:])
                    below += W
            G = sum(float(batch.reward[i, s]) for s in chosen[n:])
            answer.append((i, t, (G - above / below) / len(rows)))
    return answer


def reinforce(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """1/N Σ_i R_i ∇log π(y_i); Williams 1992."""
    R, rows = returns_of(batch), trained(batch)
    return [(i, t, R[i] / len(rows)) for i, chosen in rows.items() for t in chosen]


def gspo(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """1/G Σ_i s_i A_i 1/|y_i| Σ_t ∇log π_t for rows not clipped; arXiv:2507.18071, eqs. 5, 7 and 10."""
    A, rows = whitened(batch), trained(batch)
    answer = []
    for i, chosen in rows.items():
        s = math.prod(ratio(batch, out, i, t) for t in chosen) ** (1 / len(chosen))
        each = unclipped_part(s, A[i], 3e-4, 4e-4) / len(chosen) / len(rows)
        answer += [(i, t, each) for t in chosen]
    return answer


def cispo(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """1/Σ|o_i| Σ_i Σ_t sg(min(r, 1.28)) A ∇log π_t; arXiv:2506.13585, eq. 4."""
    A, rows = whitened(batch), trained(batch)
    count = sum(map(len, rows.values()))
    return [
        (i, t, min(ratio(batch, out, i, t), 1.28) * A[i] / count)
        for i, chosen in rows.items()
        for t in chosen
    ]


def luspo(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """1/Σ|o_i| Σ_i |o_i| s_i A_i 1/|o_i| Σ_t ∇log π_t: GSPO's rows times their lengths; arXiv:2602.05261."""
    rows = trained(batch)
    factor = len(rows) / sum(map(len, rows.values()))
    return [(i, t, c * len(rows[i]) * factor) for i, t, c in gspo(batch, out)]


def vespo(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """1/G Σ_i W^k e^{λ (1 - W)} A ∇log π(o_i), (k, λ) = (2, 3) or, where A < 0, (3, 2); arXiv:2602.10693."""
    A, rows = whitened(batch), trained(batch)
    answer = []
    for i, chosen in rows.items():
        W = math.prod(ratio(batch, out, i, t) for t in chosen)
        k, rate = (3, 2) if A[i] < 0 else (2, 3)
        answer += [(i, t, W**k * math.exp(rate * (1 - W)) * A[i] / len(rows)) for t in chosen]
    return answer


def dppo(batch: Batch, out: Outputs, outside: Callable[[float, float], bool]) -> list[tuple[int, int, float]]:
    """1/Σ|o_i| Σ M min(r, 10) A ∇log π_t, M = 0 for tokens outside that A pushes on; arXiv:2602.04879."""
    assert batch.logp_old is not None
    A, rows = whitened(batch), trained(batch)
    count = sum(map(len, rows.values()))
    answer = []
    for i, chosen in rows.items():
        for t in chosen:
            mu, p = math.exp(batch.logp_old[i, t]), math.exp(out.logp[i, t])
            stopped = outside(mu, p) and A[i] * (p - mu) > 0
            answer.append((i, t, 0.0 if stopped else min(p / mu, 10) * A[i] / count))
    return answer


def dppo_tv(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    return dppo(batch, out, lambda mu, p: abs(p - mu) > 0.15)


def dppo_kl(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    return dppo(batch, out, lambda mu, p: event_kl(mu, p) > 0.05)


def event_kl(p: float, q: float) -> float:
    """KL of (p, 1 - p) and (q, 1 - q); the drawn numbers are no probabilities, and count 1 at most."""
    p, q = min(p, 1.0), min(q, 1.0)
    rest = 0.0 if p == 1 else math.inf if q == 1 else (1 - p) * math.log((1 - p) / (1 - q))
    return p * math.log(p / q) + rest


def kpop(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """1/Σ|o_i| Σ m(π, π_old) m(π_old, μ) A ∇log π_t, m = min(ratio, 10), or 0 where a KL is above 0.1.

    Guo et al. 2026, where π_old is π, or μ.
    """
    assert batch.logp_old is not None
    A, rows = whitened(batch), trained(batch)
    count = sum(map(len, rows.values()))
    answer = []
    for i, chosen in rows.items():
        for t in chosen:
            mu, old, p = (math.exp(x[i, t]) for x in (batch.logp_gen, batch.logp_old, out.logp))
            near = all(max(event_kl(a, b), event_kl(b, a)) <= 0.1 for a, b in ((old, p), (mu, old)))
            weight = min(p / old, 10) * min(old / mu, 10) if near else 0.0
            answer.append((i, t, weight * A[i] / count))
    return answer


def dro(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """1/K Σ_i (R_i - mean - 0.05 log π(o_i)/π_old(o_i)) ∇log π(o_i); arXiv:2501.12599, section 2.3.2."""
    R, rows = returns_of(batch), trained(batch)
    answer = []
    for i, chosen in rows.items():
        moved = math.fsum(math.log(ratio(batch, out, i, t)) for t in chosen)
        answer += [(i, t, (R[i] - mean(group_of(batch, i)) - 0.05 * moved) / len(rows)) for t in chosen]
    return answer


def aipo(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """1/K Σ_i Σ_t min(π/π_old, 5) min(π_old/μ, 5) A ∇log π_t; arXiv:2505.24034, where π_old is π."""
    assert batch.logp_old is not None
    w = (batch.logp_old - batch.logp_gen).exp()
    return [
        (i, t, min(ratio(batch, out, i, t), 5.0) * min(w[i, t].item(), 5.0) * c)
        for i, t, c in rloo(batch, out)
    ]


def topr(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """1/G Σ_i w A ∇log π(o_i), w = 1 or, where A < 0, min(W, 1); A leaves its own answer out."""
    rows, A = trained(batch), {i: c for i, _, c in rloo(batch, out)}
    answer = []
    for i, chosen in rows.items():
        W = math.prod(ratio(batch, out, i, t) for t in chosen)
        answer += [(i, t, A[i] * (1.0 if A[i] >= 0 else min(W, 1.0))) for t in chosen]
    return answer


def m2po(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """1/Σ|o_i| Σ M π/μ A ∇log π_t, M = 0 for the fewest tokens, so that (log π_old/μ)² has a mean ≤ 0.04.

    arXiv:2510.01161.
    """
    assert batch.logp_old is not None
    A, rows = whitened(batch), trained(batch)
    squares = {
        (i, t): (batch.logp_old[i, t].item() - batch.logp_gen[i, t].item()) ** 2
        for i, chosen in rows.items()
        for t in chosen
    }
    kept = sorted(squares, key=squares.__getitem__)
    while kept and mean([squares[place] for place in kept]) > 0.04:
        kept.pop()
    assert 0 < len(kept) < len(squares)
    return [
        (i, t, math.exp(out.logp[i, t].item() - batch.logp_gen[i, t].item()) * A[i] / len(squares))
        for i, t in kept
    ]


def dft(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """Mean over tokens of sg(π_t) log π_t; arXiv:2508.05629."""
    return [(i, t, c * math.exp(out.logp[i, t])) for i, t, c in sft(batch, out)]


def sft(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """Mean over tokens of log π_t."""
    rows = trained(batch)
    count = sum(map(len, rows.values()))
    return [(i, t, 1 / count) for i, chosen in rows.items() for t in chosen]


def pretrain(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """The same, of every token of a text."""
    return sft(batch, out)


def grpo_trajectory(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """1/G Σ_i min(ρ A, clip(ρ) A), ρ the product of the answer's ratios; notes A."""
    A, rows = whitened(batch), trained(batch)
    answer = []
    for i, chosen in rows.items():
        whole = math.prod(ratio(batch, out, i, t) for t in chosen)
        answer += [(i, t, unclipped_part(whole, A[i], 0.2, 0.2) / len(rows)) for t in chosen]
    return answer


def gspo_token(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """sg(s_i) π/sg(π) in the place of s_i: with one advantage an answer, GSPO's own gradient."""
    return gspo(batch, out)


def sapo(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """1/G Σ_i 1/|o_i| Σ_t 4/τ sigmoid(τ (r - 1)) A, τ 1 or 1.05 by the sign of A; arXiv:2511.20347, eq. 6."""
    A, rows = whitened(batch), trained(batch)
    answer = []
    for i, chosen in rows.items():
        for t in chosen:
            r, tau = ratio(batch, out, i, t), 1.0 if A[i] > 0 else 1.05
            g = 1 / (1 + math.exp(-tau * (r - 1)))
            answer.append((i, t, 4 * g * (1 - g) * r * A[i] / len(chosen) / len(rows)))
    return answer


def max_rl(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """GRPO's with (R - mean)/mean for its advantage, and nothing where all failed; arXiv:2602.02710."""
    R, rows = returns_of(batch), trained(batch)
    answer = []
    for i, chosen in rows.items():
        m = mean(group_of(batch, i))
        A = (R[i] - m) / (m + 1e-6) if m > 0 else 0.0
        answer += [
            (i, t, unclipped_part(ratio(batch, out, i, t), A, 0.2, 0.2) / len(chosen) / len(rows))
            for t in chosen
        ]
    return answer


def gigpo(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """GRPO's with A of the episode + A of the turn, γ 0.95 and ω 1; arXiv:2505.10978, eqs. 7 and 8."""
    assert batch.turn_state is not None
    A, rows, turns = whitened(batch), trained(batch), dict[tuple[int, int], tuple[tuple[int, int], float]]()
    for i, chosen in rows.items():
        starts = [t for t in chosen if batch.turn_state[i, t]]
        paid = [0.0] * len(starts)
        for t in chosen:
            paid[sum(s <= t for s in starts) - 1] += batch.reward[i, t].item()
        for n, t in enumerate(starts):
            G = math.fsum(0.95**k * r for k, r in enumerate(paid[n:]))
            turns[i, t] = (int(batch.group[i]), int(batch.turn_state[i, t])), G
    answer = []
    for i, chosen in rows.items():
        for t in chosen:
            state, G = turns[i, max(s for j, s in turns if j == i and s <= t)]
            same = [g for s, g in turns.values() if s == state]
            m = mean(same)
            step = (G - m) / (math.sqrt(mean([(g - m) ** 2 for g in same])) + 1e-6)
            gain = unclipped_part(ratio(batch, out, i, t), A[i] + step, 0.2, 0.2)
            answer.append((i, t, gain / len(chosen) / len(rows)))
    return answer


def opo(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """1/N Σ_i (R_i - Σ |y| R / Σ |y|) ∇log π(y_i), sums over the group; arXiv:2505.23585, eq. 8."""
    R, rows = returns_of(batch), trained(batch)
    answer = []
    for i, chosen in rows.items():
        same = [j for j in rows if batch.group[j] == batch.group[i]]
        baseline = math.fsum(len(rows[j]) * R[j] for j in same) / sum(len(rows[j]) for j in same)
        answer += [(i, t, (R[i] - baseline) / len(rows)) for t in chosen]
    return answer


def pass_at_k(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """1/N Σ_i 2 (mean_j max(R_i, R_j) - mean over pairs of the others of their max) ∇log π(y_i)."""
    R, rows = returns_of(batch), trained(batch)
    answer = []
    for i, chosen in rows.items():
        others = group_of(batch, i, without=True)
        A = 2 * (mean([max(R[i], r) for r in others]) - mean([max(p) for p in combinations(others, 2)]))
        answer += [(i, t, A / len(rows)) for t in chosen]
    return answer


def reinforce_to_go(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """1/N Σ_i Σ_t (Σ_{k ≥ t} r_k) ∇log π_t; notes E."""
    rows = trained(batch)
    return [
        (i, t, math.fsum(batch.reward[i, k].item() for k in chosen[n:]) / len(rows))
        for i, chosen in rows.items()
        for n, t in enumerate(chosen)
    ]


def distill(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """1/Σ|y| Σ_i Σ_t (log π_T - log π_old)_t ∇log π_t, whatever the rewards."""
    assert batch.logp_old is not None
    assert batch.logp_ref is not None
    rows = trained(batch)
    count = sum(map(len, rows.values()))
    nearer = (batch.logp_ref - batch.logp_old) / count
    return [(i, t, nearer[i, t].item()) for i, chosen in rows.items() for t in chosen]


def reinforce_running(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """The first update knows no average yet."""
    return reinforce(batch, out)


def trpo(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """1/N Σ_i Σ_t r_t A_i, A_i leaving one out: the surrogate of arXiv:1502.05477, eq. 14."""
    return [(i, t, ratio(batch, out, i, t) * A) for i, t, A in rloo(batch, out)]


def trpo_gae(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """1/N Σ_i Σ_t r_t A_t, A = GAE(1, 0.95): arXiv:1506.02438, eq. 31, summed over answers."""
    weight = of_rows(batch)
    A = lambda_advantages(batch, 0.95)
    return [(i, t, ratio(batch, out, i, t) * A[i, t] * weight[i, t]) for i, t in A]


def trpo_penalty(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """The same less KL(π_old ‖ π), of which a token drawn by π_old tells r - 1 - log r."""
    n = len(trained(batch))
    return [(i, t, c - (ratio(batch, out, i, t) - 1) / n) for i, t, c in trpo(batch, out)]


# ---------------------------------------------------------------- with values


def rewarded(batch: Batch, beta: float = 0.0) -> dict[int, list[float]]:
    """r_t of each trained token in its order, less β (log π_old - log π_ref)_t."""
    assert batch.logp_old is not None
    assert batch.logp_ref is not None
    out = {}
    for i, chosen in trained(batch).items():
        gap = [batch.logp_old[i, t].item() - batch.logp_ref[i, t].item() for t in chosen]
        out[i] = [batch.reward[i, t].item() - beta * g for t, g in zip(chosen, gap, strict=True)]
    return out


def valued(batch: Batch) -> dict[int, list[float]]:
    """V_old of each trained token in its order, and 0 behind the last."""
    assert batch.value is not None
    return {i: [batch.value[i, t].item() for t in chosen] + [0.0] for i, chosen in trained(batch).items()}


def spread_out(batch: Batch, columns: dict[int, list[float]]) -> Tokens:
    return {
        (i, t): x for i, chosen in trained(batch).items() for t, x in zip(chosen, columns[i], strict=True)
    }


def lambda_advantages(batch: Batch, lam: float) -> Tokens:
    """Σ_l λ^l δ_{t+l}; arXiv:1506.02438, eq. 16 with γ = 1."""
    r, V, out = rewarded(batch), valued(batch), {}
    for i in r:
        delta = [r[i][n] + V[i][n + 1] - V[i][n] for n in range(len(r[i]))]
        out[i] = [math.fsum(lam**k * d for k, d in enumerate(delta[n:])) for n in range(len(delta))]
    return spread_out(batch, out)


def n_step_targets(batch: Batch, n: int) -> Tokens:
    """Σ_{k<n} r_{t+k} + V_{t+n}; arXiv:1602.01783."""
    r, V, out = rewarded(batch), valued(batch), {}
    for i in r:
        end = len(r[i])
        out[i] = [math.fsum(r[i][t : t + n]) + V[i][min(t + n, end)] for t in range(end)]
    return spread_out(batch, out)


def vtrace_of(batch: Batch) -> tuple[Tokens, Tokens]:
    """(ρ_t (r_t + v_{t+1} - V_t), v_t), both bounds 1; arXiv:1802.01561, eq. 1 and section 4.2."""
    assert batch.logp_old is not None
    advantage, target = {}, {}
    for i, chosen in trained(batch).items():
        r, V, n = rewarded(batch)[i], valued(batch)[i], len(chosen)
        w = [min(1.0, math.exp((batch.logp_old[i, t] - batch.logp_gen[i, t]).item())) for t in chosen]
        delta = [w[s] * (r[s] + V[s + 1] - V[s]) for s in range(n)]
        v = [V[s] + math.fsum(math.prod(w[s:t]) * delta[t] for t in range(s, n)) for s in range(n)] + [0.0]
        target[i] = v[:-1]
        advantage[i] = [w[s] * (r[s] + v[s + 1] - V[s]) for s in range(n)]
    return spread_out(batch, advantage), spread_out(batch, target)


def white(A: Tokens) -> Tokens:
    """(A - mean)/σ over all tokens of the update."""
    m = mean(list(A.values()))
    sigma = math.sqrt(mean([(a - m) ** 2 for a in A.values()]))
    return {place: (a - m) / (sigma + 1e-6) for place, a in A.items()}


def of_rows(batch: Batch) -> Tokens:
    """1/N: the sum over tokens, the mean over answers."""
    rows = trained(batch)
    return {(i, t): 1 / len(rows) for i, chosen in rows.items() for t in chosen}


def of_tokens(batch: Batch) -> Tokens:
    count = sum(map(len, trained(batch).values()))
    return dict.fromkeys(of_rows(batch), 1 / count)


def reinforce_pp(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """Mean over tokens of min(r A, clip(r) A), A the whitened Σ_{k ≥ t} (r_k - 0.01 log π_old/π_ref)_k."""
    r, rows = rewarded(batch, beta=0.01), trained(batch)
    to_go = {i: [math.fsum(r[i][n:]) for n in range(len(chosen))] for i, chosen in rows.items()}
    A, weight = white(spread_out(batch, to_go)), of_tokens(batch)
    return [(i, t, unclipped_part(ratio(batch, out, i, t), A[i, t], 0.2, 0.2) * weight[i, t]) for i, t in A]


def reinforce_critic(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """1/N Σ_i Σ_t (Σ_{k ≥ t} r_k - V_t) ∇log π_t."""
    weight = of_rows(batch)
    return [(i, t, A * weight[i, t]) for (i, t), A in lambda_advantages(batch, 1.0).items()]


def a2c(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """1/N Σ_i Σ_t (Σ_{k<5} r_{t+k} + V_{t+5} - V_t) ∇log π_t."""
    V, weight = spread_out(batch, {i: v[:-1] for i, v in valued(batch).items()}), of_rows(batch)
    return [(i, t, (G - V[i, t]) * weight[i, t]) for (i, t), G in n_step_targets(batch, 5).items()]


def impala(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """1/N Σ_i Σ_t ρ_t (r_t + v_{t+1} - V_t) ∇log π_t."""
    weight = of_rows(batch)
    return [(i, t, A * weight[i, t]) for (i, t), A in vtrace_of(batch)[0].items()]


def ppo(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """Mean over tokens of min(r A, clip(r) A), A the whitened GAE(1, 0.95); arXiv:1707.06347, eq. 7."""
    A, weight = white(lambda_advantages(batch, 0.95)), of_tokens(batch)
    return [(i, t, unclipped_part(ratio(batch, out, i, t), A[i, t], 0.2, 0.2) * weight[i, t]) for i, t in A]


def ppo_trajectory(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """1/G Σ_i 1/|o_i| Σ_t min(ρ A_t, clip(ρ) A_t): every token of an answer moves the ratio of all."""
    A, rows, answer = white(lambda_advantages(batch, 0.95)), trained(batch), []
    for i, chosen in rows.items():
        whole = math.prod(ratio(batch, out, i, t) for t in chosen)
        each = mean([unclipped_part(whole, A[i, t], 0.2, 0.2) for t in chosen]) / len(rows)
        answer += [(i, t, each) for t in chosen]
    return answer


def ppo_penalty(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """Mean over tokens of r A - β KL(π_old ‖ π), β = 1 at the start; arXiv:1707.06347, eq. 8."""
    A, weight, answer = white(lambda_advantages(batch, 0.95)), of_tokens(batch), []
    for i, t in A:
        r = ratio(batch, out, i, t)
        answer.append((i, t, (r * A[i, t] - (r - 1)) * weight[i, t]))
    return answer


def decoupled_ppo(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """PPO's with each token weighed by π_proximal/π_behaviour, at most 5; arXiv:2505.24298, eq. 5."""
    assert batch.logp_old is not None
    w = (batch.logp_old - batch.logp_gen).exp()
    return [(i, t, min(w[i, t].item(), 5.0) * c) for i, t, c in ppo(batch, out)]


def soft_errors(batch: Batch, out: Outputs, lam: float) -> Tokens:
    """β log π/π_ref + V - G, G_t = r_t + (1 - λ) V_{t+1} + λ (G - β log π_old/π_ref)_{t+1}, β = 0.1."""
    assert batch.logp_old is not None
    assert batch.logp_ref is not None
    assert out.value is not None
    errors = {}
    for i, chosen in trained(batch).items():
        r, V = rewarded(batch)[i], valued(batch)[i]
        gap = [0.1 * (batch.logp_old[i, t] - batch.logp_ref[i, t]).item() for t in chosen] + [0.0]
        G = [0.0] * (len(chosen) + 1)
        for n in reversed(range(len(chosen))):
            G[n] = r[n] + (1 - lam) * V[n + 1] + lam * (G[n + 1] - gap[n + 1])
        for n, t in enumerate(chosen):
            now = 0.1 * (out.logp[i, t] - batch.logp_ref[i, t]).item() + out.value[i, t].item()
            errors[i, t] = now - G[n]
    return errors


def klq(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """-(Q - G) β ∇log π, mean over tokens, of ½ (Q - G)²; arXiv:2508.17000."""
    weight = of_tokens(batch)
    return [(i, t, -0.1 * e * weight[i, t]) for (i, t), e in soft_errors(batch, out, 0.95).items()]


def expert_iteration(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """Σ_tasks 1/D Σ_kept 1/|K_task| ∇log π, D tasks with answers of R ≥ 1, none said twice."""
    kept: Rows = {}
    said = set()
    for i, chosen in trained(batch).items():
        words = (int(batch.group[i]), *(int(batch.tokens[i, t]) for t in chosen))
        if returns_of(batch)[i] >= 1 and words not in said:
            kept[i] = chosen
        said |= {words} if returns_of(batch)[i] >= 1 else set()
    of_task = Counter(int(batch.group[i]) for i in kept)
    return [
        (i, t, 1 / len(of_task) / of_task[int(batch.group[i])]) for i, chosen in kept.items() for t in chosen
    ]


def klq_offline(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """The same with λ = 0: G_t = r_t + V_{t+1}, whoever drew the tokens."""
    weight = of_tokens(batch)
    return [(i, t, -0.1 * e * weight[i, t]) for (i, t), e in soft_errors(batch, out, 0.0).items()]


PLAIN = (grpo, dr_grpo, dapo, rloo, reinforce, gspo, cispo, sft, grpo_trajectory, gspo_token, sapo, max_rl)
PLAIN += (gigpo, luspo, vespo, dppo_tv, dppo_kl, kpop, dro, aipo, m2po, topr, dft, gdpo, remax)
COMPARED = (reinforce_pp_baseline, gmpo, pass_at_k_training)
OTHERS = (
    *COMPARED,
    opo,
    otb,
    pass_at_k,
    reinforce_to_go,
    distill,
    reinforce_running,
    reinforce_pp,
    trpo,
    trpo_penalty,
    pretrain,
)
VALUED = (reinforce_critic, a2c, impala, ppo, ppo_trajectory, ppo_penalty, decoupled_ppo, klq, klq_offline)
VALUED += (trpo_gae,)
PAPERS = {f.__name__: f for f in (*PLAIN, *OTHERS, *VALUED, expert_iteration)}


def of_answers(batch: Batch) -> Tokens:
    """1/(|o_i| G)."""
    rows = trained(batch)
    return {(i, t): 1 / len(chosen) / len(rows) for i, chosen in rows.items() for t in chosen}


def value_gradient(name: str, batch: Batch, out: Outputs) -> tuple[Tokens, int]:
    """(½ (V - target) of each token, weighed; 0 where V was clipped; how many were clipped)."""
    assert out.value is not None
    weight = of_tokens(batch)
    if name.startswith("klq"):
        errors = soft_errors(batch, out, 0.95 if name == "klq" else 0.0)
        return {place: e * weight[place] for place, e in errors.items()}, 0
    old = spread_out(batch, {i: v[:-1] for i, v in valued(batch).items()})
    if name == "impala":
        target = vtrace_of(batch)[1]
    elif name == "a2c":
        target = n_step_targets(batch, 5)
    else:
        lam = 1.0 if name == "reinforce_critic" else 0.95
        target = {place: A + old[place] for place, A in lambda_advantages(batch, lam).items()}
    if name in ("a2c", "impala", "reinforce_critic", "trpo_gae"):
        weight = of_rows(batch)
    elif name == "ppo_trajectory":
        weight = of_answers(batch)
    wanted, stopped = {}, 0
    for (i, t), G in target.items():
        V = out.value[i, t].item()
        near = old[i, t] + max(-0.2, min(0.2, V - old[i, t]))
        clipped = name.startswith(("ppo", "decoupled")) and (near - G) ** 2 > (V - G) ** 2
        stopped += clipped
        wanted[i, t] = 0.0 if clipped else 0.5 * (V - G) * weight[i, t]
    return wanted, stopped


def test_every_line_of_the_table_has_a_formula_here() -> None:
    """But preferences and reward models, which have theirs in test_methods_preference.py, and evolution.

    And distillation over the vocabulary, whose gradients are in tests/learner/test_comparison.py.
    """
    others = (Preference, Unpaired, PairwiseReward, ListwiseReward, PointwiseReward, Distillation, Evolution)
    assert PAPERS.keys() == {n for n, row in METHODS.items() if not isinstance(row.method, others)}


def with_a_failed_row_and_an_older_sampler(made: tuple[Batch, Outputs]) -> tuple[Batch, Outputs]:
    """A row that no formula may count, and rows whose weights π_old/π_gen no longer fit any bound."""
    batch, out = made
    batch.mask[3] = False
    batch.logp_gen[::2] -= 1.5
    return batch, out


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("spread", [1.2e-3, 0.3])
@pytest.mark.parametrize("name", PAPERS)
@pytest.mark.sample("*-[01]")
def test_the_gradient_is_the_papers(
    name: str, spread: float, seed: int, update: Update, gradients: Gradients
) -> None:
    batch, out = with_a_failed_row_and_an_older_sampler(update(seed, spread=spread))
    wanted = torch.zeros_like(out.logp)
    for i, t, ascent in PAPERS[name](batch, out):
        wanted[i, t] = -ascent
    got = gradients(build(name, {}, horizon=HORIZON), batch, out)[1]
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-9)
    assert bool(wanted.any())


@pytest.mark.parametrize("seed", SEEDS)
def test_gdpos_gradient_by_parts_is_the_papers_however_a_step_is_cut(
    seed: int, update: Update, gradients: Gradients
) -> None:
    batch, out = with_a_failed_row_and_an_older_sampler(update(seed))
    g = torch.Generator().manual_seed(seed)
    parts = torch.randint(-2, 3, (len(batch), 3), generator=g).double()
    parts[torch.rand(parts.shape, generator=g) < 0.2] = math.nan
    batch = replace(batch, parts=parts)
    wanted = torch.zeros_like(out.logp)
    for i, t, ascent in gdpo(batch, out):
        wanted[i, t] = -ascent
    columns = tuple(RewardPart("", name, w) for name, w in zip("abc", WEIGHTS, strict=True))
    method = build("gdpo", {}, horizon=HORIZON, parts=columns)
    rows = list(range(len(batch)))
    for size in (len(batch), 6, 3, 1):
        cut = [rows[at : at + size] for at in rows[::size]]
        torch.testing.assert_close(gradients(method, batch, out, cut)[1], wanted, rtol=1e-5, atol=1e-9)
    assert bool(wanted.any())
    with pytest.raises(ValueError, match="has 3 parts, and the batch scores of 1"):
        method.prepare(replace(batch, parts=None))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", PAPERS)
@pytest.mark.sample("*-[01]")
def test_the_critics_gradient_is_the_papers(
    name: str, seed: int, update: Update, gradients: Gradients
) -> None:
    """And a method without a critic has none."""
    batch, out = with_a_failed_row_and_an_older_sampler(update(seed))
    got = gradients(build(name, {}, horizon=HORIZON), batch, out)[3]
    if name not in {f.__name__ for f in VALUED}:
        assert not got.any()
        return
    wanted, stopped = torch.zeros_like(out.logp), 0
    columns, stopped = value_gradient(name, batch, out)
    for (i, t), slope in columns.items():
        wanted[i, t] = slope
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-9)
    assert bool(wanted.any())
    assert (stopped > 0) == name.startswith(("ppo", "decoupled"))


def test_the_updates_tried_have_weights_on_both_sides_of_their_bounds(update: Update) -> None:
    for cap in (1.0, 5.0):
        batch, _ = with_a_failed_row_and_an_older_sampler(update(0))
        assert batch.logp_old is not None
        over = ((batch.logp_old - batch.logp_gen).exp() > cap)[batch.mask]
        assert 0 < int(over.sum()) < len(over)


def test_how_much_the_critic_counts(update: Update, gradients: Gradients) -> None:
    batch, out = update(1)
    half, whole = (
        gradients(build("ppo", {"value_weight": w}, horizon=HORIZON), batch, out) for w in (0.5, 1.0)
    )
    torch.testing.assert_close(whole[3], 2 * half[3])
    assert torch.equal(whole[1], half[1])


def test_the_updates_tried_have_clipped_and_unclipped_tokens_of_both_signs(update: Update) -> None:
    for formula, spread in ((grpo, 0.3), (dapo, 0.3), (dr_grpo, 0.3), (gspo, 1.2e-3)):
        kinds = set()
        for seed in SEEDS:
            batch, out = update(seed, spread=spread)
            A = whitened(batch)
            kinds |= {(c != 0, A[i] > 0) for i, _, c in formula(batch, out) if A[i] != 0}
        assert len(kinds) == 4, formula.__name__


def test_aipo_weighs_by_the_sampler_in_an_only_step_and_the_ratio_alone_does_not(
    update: Update, gradients: Gradients
) -> None:
    """There π_old is the policy itself: its ratio is 1, whatever weights drew the tokens."""
    batch, out = with_a_failed_row_and_an_older_sampler(update(seed=1))
    assert batch.logp_old is not None
    only = replace(batch, logp_old=None)
    options = {"correction": "uncorrected"}
    alone = gradients(build("aipo", options, horizon=HORIZON), only, out)[1]
    plain = gradients(build("rloo", {}, horizon=HORIZON), only, out)[1]
    assert torch.equal(alone, plain)
    weight = (out.logp - batch.logp_gen).exp().clamp(max=5.0)
    assert 0 < int((weight == 5)[batch.mask].sum()) < int(batch.mask.sum())
    got = gradients(build("aipo", {}, horizon=HORIZON), only, out)[1]
    torch.testing.assert_close(got, torch.where(batch.mask, weight * plain, 0.0), rtol=1e-6, atol=1e-12)


def test_a_surrogate_that_pulls_trains_tokens_without_an_advantage(
    update: Update, gradients: Gradients
) -> None:
    """A group whose answers are equally good has A = 0, and goes back to where it was."""
    batch, out = update(seed=2)
    assert batch.logp_old is not None
    even = replace(batch, reward=torch.zeros_like(batch.reward))
    rows = trained(batch)
    got = gradients(build("dro", {"pull": 0.3}, horizon=HORIZON), even, out)[1]
    for i, chosen in rows.items():
        moved = math.fsum((out.logp[i, t] - batch.logp_old[i, t]).item() for t in chosen)
        assert got[i, chosen].tolist() == pytest.approx([0.3 * moved / len(rows)] * len(chosen), rel=1e-5)
    assert not gradients(build("dro", {"pull": 0.0}, horizon=HORIZON), even, out)[1].any()


def test_a_surrogate_without_a_pull_leaves_such_tokens_out(update: Update) -> None:
    batch, _ = update(seed=2)
    even = replace(batch, reward=torch.zeros_like(batch.reward))
    for name, line in METHODS.items():
        method = line.method
        if isinstance(method, PolicyGradient) and "value" not in method.needs and not method.kl_from_old:
            assert method.pulls == (name == "dro"), name
    method = build("dppo_kl", {}, horizon=HORIZON)
    assert not method.weight(method.prepare(even)).any()


def test_without_a_pull_dro_is_the_score_to_the_last_bit(update: Update, gradients: Gradients) -> None:
    batch, out = update(seed=3)
    options = ({"pull": 0.0}, {"surrogate": "score"})
    got, plain = (gradients(build("dro", each, horizon=HORIZON), batch, out)[1] for each in options)
    assert torch.equal(got, plain)


@pytest.mark.parametrize(
    "estimator", ["k1", "k2", "k3", "unbiased_k1", "unbiased_k3", "forward_k1", "forward_k3"]
)
@pytest.mark.parametrize("first", [False, True])
def test_the_penalty_in_the_loss_adds_its_coefficient_at_every_trained_token(
    estimator: str, first: bool, update: Update, gradients: Gradients
) -> None:
    """`first`: in the only step of an update π_old is the policy itself."""
    batch, out = update(seed=1)
    assert batch.logp_ref is not None
    assert batch.logp_old is not None
    old = out.logp if first else batch.logp_old
    batch = replace(batch, logp_old=None) if first else batch
    plain = gradients(build("dapo", {}, horizon=HORIZON), batch, out)[1]
    options = {"kl": estimator, "kl_in_loss": 0.25}
    penalised = gradients(build("dapo", options, horizon=HORIZON), batch, out)[1]
    delta = out.logp - batch.logp_ref
    r, omega = (out.logp - old).exp(), (batch.logp_ref - old).exp()
    c = {
        "k1": torch.ones_like(delta),
        "k2": delta,
        "k3": 1 - (-delta).exp(),
        "unbiased_k1": r * (delta + 1),
        "unbiased_k3": r * delta,
        "forward_k1": -omega,
        "forward_k3": r - omega,
    }[estimator]
    wanted = torch.where(batch.mask, 0.25 * c / batch.mask.sum(), 0.0)
    torch.testing.assert_close(penalised - plain, wanted, rtol=1e-5, atol=1e-9)


def test_the_penalty_in_the_reward_moves_every_return(update: Update) -> None:
    """R_i = Σ_t reward - β Σ_t (log π_old - log π_ref), then credited: here as it is, with raw."""
    batch, _ = update(seed=2)
    assert batch.logp_old is not None
    assert batch.logp_ref is not None
    advantage = build("reinforce", {"kl_in_reward": 0.5}, horizon=HORIZON).prepare(batch).advantage
    assert advantage is not None
    R = returns_of(batch)
    for i, chosen in trained(batch).items():
        gap = math.fsum((batch.logp_old[i, t] - batch.logp_ref[i, t]).item() for t in chosen)
        assert advantage[i, chosen].tolist() == pytest.approx([R[i] - 0.5 * gap] * len(chosen), abs=1e-9)
    assert not advantage[~batch.mask].any()


def test_the_entropy_bonus_pushes_every_tokens_entropy_up(update: Update, gradients: Gradients) -> None:
    batch, out = update(seed=3)
    _, d_logp, d_entropy, *_ = gradients(build("dapo", {"entropy_bonus": 0.1}, horizon=HORIZON), batch, out)
    torch.testing.assert_close(
        d_entropy, torch.where(batch.mask, -0.1 / batch.mask.sum(), 0.0).double(), rtol=1e-5, atol=0
    )
    torch.testing.assert_close(d_logp, gradients(build("dapo", {}, horizon=HORIZON), batch, out)[1])


def test_all_rewards_of_a_row_count_whichever_trained_token_they_arrive_with(update: Update) -> None:
    """Process rewards and outcome rewards are the same column; rewards outside the mask are not read."""
    batch, _ = update(seed=4)
    method = build("grpo", {}, horizon=HORIZON)
    late = torch.zeros_like(batch.reward)
    for i, chosen in trained(batch).items():
        late[i, chosen[-1]] = batch.reward[i, chosen].sum()
    spread_out, at_the_end = (
        method.prepare(replace(batch, reward=r)).advantage for r in (batch.reward, late)
    )
    assert spread_out is not None
    assert at_the_end is not None
    torch.testing.assert_close(spread_out, at_the_end)


def test_what_is_watched_are_the_quantities_named(update: Update) -> None:
    batch, out = update(seed=5)
    assert batch.logp_old is not None
    assert batch.logp_ref is not None
    method = build("grpo", {}, horizon=HORIZON)
    batch = method.prepare(batch)
    seen = method.watch(out, batch)
    assert seen.keys() == {"clip/fraction", "kl/old", "kl/ref"}
    A, clipped = whitened(batch), {(i, t): c == 0 for i, t, c in grpo(batch, out)}
    for (i, t), stopped in clipped.items():
        assert seen["clip/fraction"][i, t].item() == (stopped and A[i] != 0)
    torch.testing.assert_close(
        masked.fill(seen["kl/ref"], batch.mask), masked.fill(kl.k3(out.logp, batch.logp_ref), batch.mask)
    )
    without = method.watch(out, replace(batch, logp_ref=None))
    assert without.keys() == {"clip/fraction", "kl/old"}
    first_pass = method.watch(out, replace(batch, logp_old=None))
    assert not first_pass["kl/old"].any()
    assert not first_pass["clip/fraction"].any()


def test_kl_old_is_unbiased_on_tokens_that_the_old_policy_drew() -> None:
    """Summed over a vocabulary with the old policy's probabilities it is KL(π_old ‖ π), exactly."""
    g = torch.Generator().manual_seed(0)
    old, new = torch.randn(2, 9, 1, generator=g, dtype=torch.float64).log_softmax(1)
    V = len(old)
    zeros, ones = torch.zeros(V, 1, dtype=torch.float64), torch.ones(V, 1, dtype=torch.bool)
    batch = Batch(
        tokens=torch.arange(V)[:, None],
        mask=ones,
        length=torch.ones(V, dtype=torch.long),
        group=torch.zeros(V, dtype=torch.long),
        reward=zeros,
        logp_gen=old,
        logp_policy=old,
        version=torch.zeros(V, 1, dtype=torch.long),
        logp_old=old,
        advantage=zeros,
    )
    method = build("grpo", {}, horizon=1)
    assert isinstance(method, PolicyGradient)
    seen = method.watch(Outputs(logp=new, entropy=zeros), batch)["kl/old"]
    truth = math.fsum(
        (math.exp(p) * (p - q)) for p, q in zip(old[:, 0].tolist(), new[:, 0].tolist(), strict=True)
    )
    assert (old.exp() * seen).sum().item() == pytest.approx(truth, abs=1e-12)
    assert truth > 0.05
