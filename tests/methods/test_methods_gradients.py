"""Each method's gradient against its paper's formula, token by token, in plain Python."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from posttrain.math import kl, masked
from posttrain.methods.policy_gradient import PolicyGradient
from posttrain.methods.table import build
from posttrain.types import Batch, Outputs

HORIZON = 16
SEEDS = range(3)
Update = Callable[..., tuple[Batch, Outputs]]
Gradients = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
Rows = dict[int, list[int]]


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


def sft(batch: Batch, out: Outputs) -> list[tuple[int, int, float]]:
    """Mean over tokens of log π_t."""
    rows = trained(batch)
    count = sum(map(len, rows.values()))
    return [(i, t, 1 / count) for i, chosen in rows.items() for t in chosen]


PAPERS = {f.__name__: f for f in (grpo, dr_grpo, dapo, rloo, reinforce, gspo, cispo, sft)}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("spread", [8e-4, 0.3])
@pytest.mark.parametrize("name", PAPERS)
def test_the_gradient_is_the_papers(
    name: str, spread: float, seed: int, update: Update, gradients: Gradients
) -> None:
    """With a failed row in the batch, which no formula may count."""
    batch, out = update(seed, spread=spread)
    batch.mask[3] = False
    wanted = torch.zeros_like(out.logp)
    for i, t, ascent in PAPERS[name](batch, out):
        wanted[i, t] = -ascent
    got = gradients(build(name, {}, horizon=HORIZON), batch, out)[1]
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-9)
    assert bool(wanted.any())


def test_the_updates_tried_have_clipped_and_unclipped_tokens_of_both_signs(update: Update) -> None:
    for formula, spread in ((grpo, 0.3), (dapo, 0.3), (dr_grpo, 0.3), (gspo, 8e-4)):
        kinds = set()
        for seed in SEEDS:
            batch, out = update(seed, spread=spread)
            A = whitened(batch)
            kinds |= {(c != 0, A[i] > 0) for i, _, c in formula(batch, out) if A[i] != 0}
        assert len(kinds) == 4, formula.__name__


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_penalty_in_the_loss_adds_its_coefficient_at_every_trained_token(
    estimator: str, update: Update, gradients: Gradients
) -> None:
    batch, out = update(seed=1)
    assert batch.logp_ref is not None
    plain = gradients(build("dapo", {}, horizon=HORIZON), batch, out)[1]
    options = {"kl": estimator, "kl_in_loss": 0.25}
    penalised = gradients(build("dapo", options, horizon=HORIZON), batch, out)[1]
    delta = out.logp - batch.logp_ref
    c = {"k1": torch.ones_like(delta), "k2": delta, "k3": 1 - (-delta).exp()}[estimator]
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
    _, d_logp, d_entropy = gradients(build("dapo", {"entropy_bonus": 0.1}, horizon=HORIZON), batch, out)
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
