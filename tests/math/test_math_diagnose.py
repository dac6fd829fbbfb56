"""diagnose: what is logged is what it is called."""

import math

import pytest
import torch

from posttrain.math import diagnose, surrogate


def test_the_coefficient_is_minus_the_derivative() -> None:
    g = torch.Generator().manual_seed(0)
    x, A = torch.randn(2, 3, 5, generator=g, dtype=torch.float64).unbind()
    for function in (surrogate.score, surrogate.unclipped, surrogate.clipped, surrogate.truncated):
        step = 1e-6
        slope = (function(x + step, A) - function(x - step, A)) / (2 * step)
        if function is surrogate.truncated:  # its weight is not differentiated: freeze it
            weight = x.exp().clamp(max=1.28)
            slope = -weight * A
        torch.testing.assert_close(diagnose.coefficient(function, x, A), -slope, atol=1e-6, rtol=1e-6)


def test_the_coefficient_is_found_without_gradients_and_leaves_no_trace() -> None:
    x = torch.zeros(1, 2, requires_grad=True)
    with torch.no_grad():
        c = diagnose.coefficient(surrogate.clipped, x, torch.tensor([[2.0, -3.0]]))
    assert c.tolist() == [[2.0, -3.0]]
    assert not c.requires_grad
    assert x.grad is None


def test_the_clip_fraction_counts_tokens_that_left_in_the_direction_of_their_advantage() -> None:
    r = torch.tensor([[0.5, 0.5, 1.0, 1.5, 1.5, 1.5]])
    A = torch.tensor([[1.0, -1.0, 1.0, 1.0, -1.0, 0.0]])
    c = diagnose.coefficient(surrogate.clipped, r.log(), A)
    assert diagnose.stopped(c, A).tolist() == [[0, 1, 0, 1, 0, 0]]
    truncated = diagnose.coefficient(surrogate.truncated, r.log(), A)
    assert not diagnose.stopped(truncated, A).any(), "no token of CISPO loses its gradient"


def slow_size(logp: torch.Tensor, gen: torch.Tensor, mask: torch.Tensor) -> float:
    w = []
    for p, q, m in zip(logp.tolist(), gen.tolist(), mask.tolist(), strict=True):
        if any(m):
            w.append(math.exp(math.fsum(a - b for a, b, on in zip(p, q, m, strict=True) if on)))
    return math.fsum(w) ** 2 / (len(w) * math.fsum(v * v for v in w))


@pytest.mark.parametrize("seed", range(5))
def test_effective_sample_size_equals_its_formula(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    logp, gen = torch.randn(2, 6, 4, generator=g, dtype=torch.float64).unbind()
    mask = torch.rand(6, 4, generator=g) < 0.5
    mask[0], mask[1] = True, False
    got = diagnose.effective_sample_size(logp, gen, mask).item()
    assert got == pytest.approx(slow_size(logp, gen, mask), rel=1e-12)
    assert 1 / 5 <= got <= 1
    poisoned = [torch.where(mask, x, torch.tensor(math.nan, dtype=x.dtype)) for x in (logp, gen)]
    assert diagnose.effective_sample_size(*poisoned, mask).item() == got
    shifted = logp + (mask.cumsum(-1) == 1) * mask * 3.0
    assert diagnose.effective_sample_size(shifted, gen, mask).item() == pytest.approx(got, rel=1e-9)


def test_effective_sample_size_at_its_ends() -> None:
    mask = torch.ones(4, 1, dtype=torch.bool)
    zero = torch.zeros(4, 1)
    assert diagnose.effective_sample_size(zero - 3, zero - 3, mask).item() == 1
    one_row = torch.tensor([[500.0], [0.0], [0.0], [0.0]])
    assert diagnose.effective_sample_size(one_row, zero, mask).item() == 0.25, "e^500 must not overflow"
    assert diagnose.effective_sample_size(zero, zero, ~mask).isnan()


def test_explained_variance_is_one_less_the_share_that_is_left() -> None:
    g = torch.Generator().manual_seed(3)
    target, value = torch.randn(2, 4, 6, generator=g, dtype=torch.float64)
    mask = torch.rand(4, 6, generator=g) < 0.6

    def spread(x: torch.Tensor) -> float:
        chosen = x[mask].tolist()
        mean = math.fsum(chosen) / len(chosen)
        return math.fsum((c - mean) ** 2 for c in chosen) / len(chosen)

    wanted = 1 - spread(target - value) / spread(target)
    assert float(diagnose.explained_variance(target, value, mask)) == pytest.approx(wanted)
    # a perfect critic, one that is off by a constant, one that says nothing, one that says the opposite
    for guess, said in ((target, 1.0), (target - 9.0, 1.0), (0 * target, 0.0), (-target, -3.0)):
        assert float(diagnose.explained_variance(target, guess, mask)) == pytest.approx(said)
    spoilt = torch.where(mask, target, math.nan), torch.where(mask, value, math.inf)
    assert float(diagnose.explained_variance(*spoilt, mask)) == pytest.approx(wanted)
    assert diagnose.explained_variance(torch.ones(4, 6), value, mask).isnan()


@pytest.mark.parametrize("seed", range(3))
def test_zero_groups_are_those_without_an_advantage_at_any_trained_token(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    advantage = torch.randint(-1, 2, (12, 3), generator=g) * (torch.rand(12, 3, generator=g) < 0.3).float()
    mask = torch.rand(12, 3, generator=g) < 0.6
    group = torch.randint(0, 6, (12,), generator=g)
    held: dict[int, list[float]] = {}
    for n, row, on in zip(group.tolist(), advantage, mask, strict=True):
        held.setdefault(n, []).extend(row[on].tolist())
    trained = [any(values) for values in held.values() if values]
    got = diagnose.share_of_zero_groups(advantage, mask, group)
    assert float(got) == pytest.approx(1 - sum(trained) / len(trained)), seed
    assert diagnose.share_of_zero_groups(advantage, torch.zeros_like(mask), group).isnan()
