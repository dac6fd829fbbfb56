"""ratios: values equal loops, gradients are the ones the papers print, and masks are absolute."""

import math
from collections.abc import Callable

import pytest
import torch

from posttrain.math import ratios

Ratio = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
ALL = [ratios.by_token, ratios.by_sequence, ratios.by_sequence_token, ratios.by_trajectory]
"""Those that no advantage changes."""
every_ratio = pytest.mark.parametrize("ratio", ALL, ids=lambda f: f.__name__)
SEEDS = range(4)


def example(seed: int, B: int = 5, T: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """logp, logp_old and a mask with holes, one full row and one empty row."""
    g = torch.Generator().manual_seed(seed)
    logp, old = (-torch.rand(2, B, T, generator=g, dtype=torch.float64) * 3).unbind()
    mask = torch.rand(B, T, generator=g) < 0.6
    mask[0], mask[1] = True, False
    return logp, old, mask


def slowly(name: str, logp: torch.Tensor, old: torch.Tensor, mask: torch.Tensor) -> list[list[float]]:
    rows = []
    for p, q, m in zip(logp.tolist(), old.tolist(), mask.tolist(), strict=True):
        each = [a - b for a, b, on in zip(p, q, m, strict=True) if on]
        total = math.fsum(each)
        mean = total / len(each) if each else 0.0
        shared = {"by_sequence": mean, "by_sequence_token": mean, "by_trajectory": total}
        own = iter(each)
        rows.append([(next(own) if name == "by_token" else shared[name]) if on else 0.0 for on in m])
    return rows


@every_ratio
@pytest.mark.parametrize("seed", SEEDS)
def test_values_equal_loops(ratio: Ratio, seed: int) -> None:
    logp, old, mask = example(seed)
    torch.testing.assert_close(
        ratio(logp, old, mask), torch.tensor(slowly(ratio.__name__, logp, old, mask), dtype=torch.float64)
    )


@every_ratio
@pytest.mark.parametrize("seed", SEEDS)
def test_which_token_moves_which_ratio(ratio: Ratio, seed: int) -> None:
    """∂ log-ratio_t / ∂ logp_s: the identity, 1/|y| within the row, the identity, 1 within the row."""
    logp, old, mask = example(seed)
    J = torch.autograd.functional.jacobian(lambda x: ratio(x, old, mask), logp)
    assert isinstance(J, torch.Tensor)
    B, T = logp.shape
    for b in range(B):
        length = int(mask[b].sum())
        for t in range(T):
            for c in range(B):
                for s in range(T):
                    within = b == c and bool(mask[b, t]) and bool(mask[c, s])
                    wanted = {
                        "by_token": float(s == t),
                        "by_sequence": 1 / max(length, 1),
                        "by_sequence_token": float(s == t),
                        "by_trajectory": 1.0,
                    }[ratio.__name__]
                    assert float(J[b, t, c, s]) == pytest.approx(wanted if within else 0.0, abs=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_gspo_gradients_of_the_paper(seed: int) -> None:
    """Both forms give ∇ Σ_t (1/|y|) s A = s A (1/|y|) Σ_t ∇log π_t when A is one number a row.

    arXiv:2507.18071, eqs. 10 and 17. With an advantage of its own on each token only the token form
    credits token t with A_t: s A_t (1/|y|) ∇log π_t; the sequence form spreads the mean.
    """
    logp, old, mask = example(seed)
    A = torch.randn(logp.shape, generator=torch.Generator().manual_seed(100 + seed), dtype=torch.float64)
    for ratio in (ratios.by_sequence, ratios.by_sequence_token):
        for advantage in (A[:, :1].expand_as(A), A):
            x = logp.clone().requires_grad_()
            length = mask.sum(-1, keepdim=True).clamp(min=1)
            objective = (ratio(x, old, mask).exp() * advantage / length)[mask].sum()
            (got,) = torch.autograd.grad(objective, x)
            for i in range(len(logp)):
                chosen = [t for t in range(logp.shape[1]) if mask[i, t]]
                if not chosen:
                    assert not got[i].any()
                    continue
                n = len(chosen)
                s = math.exp(math.fsum(float(logp[i, t] - old[i, t]) for t in chosen) / n)
                mean = math.fsum(float(advantage[i, t]) for t in chosen) / n
                for t in chosen:
                    credit = float(advantage[i, t]) if ratio is ratios.by_sequence_token else mean
                    assert float(got[i, t]) == pytest.approx(s * credit / n, abs=1e-12)


def test_the_token_form_has_the_value_of_the_sequence_form_to_the_last_bit() -> None:
    """Adding and subtracting logp must not cost digits: the clip range of GSPO is 3e-4 wide."""
    logp, old, mask = (x.float() if x.is_floating_point() else x for x in example(seed=9))
    logp, old = logp * 7, old * 7
    assert torch.equal(ratios.by_sequence_token(logp, old, mask), ratios.by_sequence(logp, old, mask))


@every_ratio
def test_on_policy_every_log_ratio_is_exactly_zero(ratio: Ratio) -> None:
    logp, _, mask = example(seed=3)
    assert not ratio(logp.float(), logp.float(), mask).any()


@every_ratio
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_lies_outside_the_mask_changes_no_bit(ratio: Ratio, poison: float) -> None:
    logp, old, mask = example(seed=5)
    values, gradients = [], []
    for filler in (-1.0, poison):
        x, y = (torch.where(mask, v.float(), torch.tensor(filler)) for v in (logp, old))
        x.requires_grad_()
        out = ratio(x, y, mask)
        values.append(out.detach())
        gradients.append(torch.autograd.grad(out.exp().sum(), x)[0])
    assert torch.equal(*values)
    assert torch.equal(*gradients)
    assert not values[1][~mask].any()
    assert not gradients[1][~mask].any()


@every_ratio
def test_padding_changes_nothing(ratio: Ratio) -> None:
    logp, old, mask = example(seed=6)
    wide = [torch.cat([v, v.new_full((len(v), 3), 0)], -1) for v in (logp, old, mask)]
    torch.testing.assert_close(ratio(*wide)[:, : logp.shape[1]], ratio(logp, old, mask))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("clip_log", [0.0, 0.4, 1.0])
def test_a_bounded_sequence_is_the_mean_of_what_its_tokens_may_move(seed: int, clip_log: float) -> None:
    """And a token has a gradient only where it is within the bound that its advantage sets."""
    logp, old, mask = example(seed)
    A = torch.tensor([1.0, 0.0, -1.0, -2.0, 0.5], dtype=torch.float64)[:, None].expand_as(logp)
    logp.requires_grad_()
    got = ratios.by_bounded_sequence(logp, old, mask, torch.where(mask, A, math.nan), clip_log)
    (slope,) = torch.autograd.grad(got.sum(), logp)
    for i, row in enumerate(mask.tolist()):
        places = [t for t, on in enumerate(row) if on]
        each = {t: float(logp[i, t].detach() - old[i, t]) for t in places}
        bounded = {t: max(x, -clip_log) if A[i, 0] < 0 else min(x, clip_log) for t, x in each.items()}
        mean = math.fsum(bounded.values()) / max(len(places), 1)
        assert got[i].tolist() == pytest.approx([mean if t in each else 0.0 for t in range(len(row))])
        wanted = [float(t in each and each[t] == bounded[t]) for t in range(len(row))]
        assert slope[i].tolist() == pytest.approx(wanted)


def test_every_public_ratio_is_tested_here() -> None:
    public = {n for n, f in vars(ratios).items() if getattr(f, "__module__", "") == ratios.__name__}
    assert public == {f.__name__ for f in ALL} | {"by_bounded_sequence"}
