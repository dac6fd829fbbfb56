"""preference: slopes by autograd against each c that is stated; worths and divergences by their formulas."""

import itertools
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.math import preference

Loss = Callable[[torch.Tensor, float], torch.Tensor]
Slope = Callable[[float, float], float]

EPS, DELTA, TARGET = 0.2, 1.3, 0.7
MARGINS = torch.tensor([-9.0, -2.5, -0.4, 0.0, 0.3, 1.9, 8.0], dtype=torch.float64)
BETAS = (0.05, 0.4, 2.0)


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


CASES: dict[str, tuple[Loss, Slope, Slope]] = {
    "logistic": (preference.logistic, lambda h, b: softplus(-b * h), lambda h, b: sigma(-b * h)),
    "logistic, target": (
        partial(preference.logistic, target_margin=TARGET),
        lambda h, b: softplus(TARGET - b * h),
        lambda h, b: sigma(TARGET - b * h),
    ),
    "squared": (
        preference.squared,
        lambda h, b: (h - 1 / (2 * b)) ** 2,
        lambda h, b: (1 / b - 2 * h) / b,
    ),
    "hinge": (
        partial(preference.hinge, delta=DELTA),
        lambda h, b: max(0.0, DELTA - b * h),
        lambda h, b: 1.0 if b * h < DELTA else 0.0,
    ),
    "exponential": (
        preference.exponential,
        lambda h, b: math.exp(-b * h),
        lambda h, b: math.exp(-b * h),
    ),
    "smoothed": (
        partial(preference.smoothed, flipped=EPS),
        lambda h, b: (1 - EPS) * softplus(-b * h) + EPS * softplus(b * h),
        lambda h, b: sigma(-b * h) - EPS,
    ),
    "robust": (
        partial(preference.robust, flipped=EPS),
        lambda h, b: ((1 - EPS) * softplus(-b * h) - EPS * softplus(b * h)) / (1 - 2 * EPS),
        lambda h, b: ((1 - EPS) * sigma(-b * h) + EPS * sigma(b * h)) / (1 - 2 * EPS),
    ),
}
"""Loss, its value, and the c of ∇L = -c β ∇h."""
every_loss = pytest.mark.parametrize("name", CASES)


def slope_of(loss: Loss, margin: torch.Tensor, beta: float) -> torch.Tensor:
    leaf = margin.clone().requires_grad_()
    return torch.autograd.grad(loss(leaf, beta).sum(), leaf)[0]


@every_loss
@pytest.mark.parametrize("beta", BETAS)
def test_values_and_slopes_are_those_of_the_formulas(name: str, beta: float) -> None:
    loss, value, c = CASES[name]
    wanted = [value(h, beta) for h in MARGINS.tolist()]
    assert loss(MARGINS, beta).tolist() == pytest.approx(wanted, rel=1e-12, abs=1e-14)
    slopes = [-c(h, beta) * beta for h in MARGINS.tolist()]
    assert slope_of(loss, MARGINS, beta).tolist() == pytest.approx(slopes, rel=1e-12, abs=1e-14)


@every_loss
def test_a_matrix_of_margins_is_each_margin_by_itself(name: str) -> None:
    loss = CASES[name][0]
    h = torch.randn(4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    alone = torch.stack([loss(x, 0.3) for x in h.flatten()]).view(4, 5)
    torch.testing.assert_close(loss(h, 0.3), alone, rtol=1e-14, atol=0)


@every_loss
@pytest.mark.parametrize("beta", [0.1, 1.0, 5.0])
def test_extreme_margins_have_finite_losses_and_slopes_in_float32(name: str, beta: float) -> None:
    loss, h = CASES[name][0], torch.tensor([-1e4, -300.0, 300.0, 1e4])
    assert bool(loss(h, beta).isfinite().all())
    assert bool(slope_of(loss, h, beta).isfinite().all())


def test_a_steep_logistic_loss_is_the_hinge_at_0() -> None:
    """log(1 + exp(-β h))/β → max(0, -h), at most log(2)/β away."""
    for beta in (10.0, 100.0, 1000.0):
        off = preference.logistic(MARGINS, beta) / beta - preference.hinge(MARGINS, 1.0, delta=0.0)
        assert float(off.min()) >= 0
        assert float(off.max()) == pytest.approx(math.log(2) / beta, rel=1e-9)


def test_far_on_the_wrong_side_the_logistic_slope_is_the_hinges() -> None:
    far = torch.tensor([-200.0], dtype=torch.float64)
    torch.testing.assert_close(
        slope_of(preference.logistic, far, 0.5), slope_of(preference.hinge, far, 0.5), rtol=1e-12, atol=0
    )


@given(flipped=st.floats(0.0, 0.45), beta=st.floats(0.01, 5.0), h=st.floats(-20, 20))
@settings(max_examples=60, deadline=None)
def test_robust_is_unbiased_under_flips(flipped: float, beta: float, h: float) -> None:
    """(1 - ε) L(h) + ε L(-h) is the logistic loss of the clean label: in value and in slope."""
    loss = partial(preference.robust, flipped=flipped)
    clean = torch.tensor([h], dtype=torch.float64)
    for of in (lambda f, x: f(x, beta), lambda f, x: slope_of(f, x, beta)):
        turned = of(lambda x, b: loss(-x, b), clean)
        mixed = (1 - flipped) * of(loss, clean) + flipped * turned
        torch.testing.assert_close(mixed, of(preference.logistic, clean), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("flipped", [0.05, 0.1, 0.3])
@pytest.mark.parametrize("beta", BETAS)
def test_smoothed_has_its_minimum_where_sigma_is_the_share_of_right_labels(
    flipped: float, beta: float
) -> None:
    best = math.log((1 - flipped) / flipped) / beta
    h = torch.tensor([best - 0.01, best, best + 0.01], dtype=torch.float64)
    loss = partial(preference.smoothed, flipped=flipped)
    low, at, high = slope_of(loss, h, beta).tolist()
    assert low < 0 < high
    assert at == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("beta", BETAS)
def test_squared_has_its_minimum_at_one_over_two_beta(beta: float) -> None:
    h = torch.tensor([1 / (2 * beta)], dtype=torch.float64)
    assert float(preference.squared(h, beta)) == 0
    assert float(slope_of(preference.squared, h, beta)) == 0


def test_the_losses_without_a_minimum_always_fall() -> None:
    h = torch.linspace(-30, 30, 61, dtype=torch.float64)
    for loss in (preference.logistic, preference.exponential, preference.robust):
        assert bool((slope_of(loss, h, 0.5) < 0).all())


def test_no_smoothing_is_the_logistic_loss() -> None:
    for loss in (preference.smoothed, preference.robust):
        assert torch.equal(loss(MARGINS, 0.3, flipped=0.0), preference.logistic(MARGINS, 0.3))


# ---------------------------------------------------------------------- what an answer is worth


WORTHS = {
    "log_ratio": (preference.log_ratio, lambda p, q: math.fsum(p) - math.fsum(q)),
    "mean_log_ratio": (
        preference.mean_log_ratio,
        lambda p, q: math.fsum(p) / len(p) - math.fsum(q) / len(q),
    ),
    "mean_logp": (preference.mean_logp, lambda p, q: math.fsum(p) / len(p)),
    "log_odds": (
        preference.log_odds,
        lambda p, q: math.log(math.exp(math.fsum(p) / len(p)) / (1 - math.exp(math.fsum(p) / len(p)))),
    ),
}


@pytest.mark.parametrize("name", WORTHS)
@pytest.mark.parametrize("poison", [0.0, math.nan, math.inf, -math.inf])
def test_worths_are_those_of_the_formulas_and_read_nothing_outside_the_mask(name: str, poison: float) -> None:
    worth, formula = WORTHS[name]
    g = torch.Generator().manual_seed(4)
    logp, logp_ref = (-torch.rand(5, 6, generator=g, dtype=torch.float64) - 0.01 for _ in range(2))
    mask = torch.rand(5, 6, generator=g) < 0.6
    mask[:, 0], mask[4] = True, False
    spoilt, reference = (torch.where(mask, x, poison) for x in (logp, logp_ref))
    spoilt.requires_grad_()
    found = worth(spoilt, reference, mask)
    wanted = [
        formula(*([float(x[i, t]) for t in range(6) if mask[i, t]] for x in (logp, logp_ref)))
        for i in range(4)
    ]
    assert found[:4].tolist() == pytest.approx(wanted, rel=1e-12)
    assert bool(found.isfinite().all())
    gradient = torch.autograd.grad(found.sum(), spoilt)[0]
    assert bool(gradient.isfinite().all())
    assert not gradient[~mask].any()


def test_the_gradient_of_the_log_ratio_is_the_answers_score() -> None:
    """And that of its mean is divided by the length."""
    mask = torch.tensor([[False, True, True, True]])
    logp = torch.zeros(1, 4, requires_grad=True)
    for worth, each in ((preference.log_ratio, 1.0), (preference.mean_log_ratio, 1 / 3)):
        found = torch.autograd.grad(worth(logp, torch.zeros(1, 4), mask).sum(), logp)[0]
        assert found[0].tolist() == pytest.approx([0, each, each, each])


@pytest.mark.parametrize("logp", [-1e4, -50.0, -1e-9, 0.0])
def test_log_odds_of_certain_and_impossible_answers_are_finite(logp: float) -> None:
    x = torch.full((1, 3), logp, requires_grad=True)
    found = preference.log_odds(x, None, torch.ones(1, 3, dtype=torch.bool))
    assert bool(found.isfinite())
    assert bool(torch.autograd.grad(found.sum(), x)[0].isfinite().all())


def test_log_odds_rise_with_the_likelihood() -> None:
    x = torch.linspace(-8, -1e-3, 50, dtype=torch.float64)[:, None]
    odds = preference.log_odds(x, None, torch.ones(50, 1, dtype=torch.bool))
    assert bool((odds.diff() > 0).all())


# ---------------------------------------------------------------------- f-divergences

ALPHA = 0.3
F: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "reverse_kl": (preference.reverse_kl, lambda u: u * u.log()),
    "forward_kl": (preference.forward_kl, lambda u: -u.log()),
    "jensen_shannon": (preference.jensen_shannon, lambda u: u * u.log() - (1 + u) * ((1 + u) / 2).log()),
    "alpha_divergence": (
        partial(preference.alpha_divergence, alpha=ALPHA),
        lambda u: (u ** (1 - ALPHA) - (1 - ALPHA) * u - ALPHA) / (ALPHA * (ALPHA - 1)),
    ),
}
"""f'(u) as it stands in the file, and the f that its docstring states."""
RATIOS = torch.linspace(-6, 6, 41, dtype=torch.float64)


@pytest.mark.parametrize("name", F)
def test_each_divergence_is_the_derivative_of_its_f_less_a_constant(name: str) -> None:
    stated, f = F[name]
    u = RATIOS.exp().requires_grad_()
    slope = torch.autograd.grad(f(u).sum(), u)[0]
    off = stated(RATIOS) - slope
    torch.testing.assert_close(off, off[:1].expand_as(off), rtol=1e-10, atol=1e-10)
    assert float(off[0]) == pytest.approx(-1.0 if name == "reverse_kl" else 0.0, abs=1e-10)


@pytest.mark.parametrize("name", F)
def test_each_f_is_a_divergence(name: str) -> None:
    """f(1) = 0 and f' rises: more of an answer is worth more."""
    stated, f = F[name]
    assert float(f(torch.ones((), dtype=torch.float64))) == pytest.approx(0, abs=1e-14)
    assert bool((stated(RATIOS).diff() > 0).all())


def test_the_alpha_family_ends_in_the_two_divergences_of_kullback_and_leibler() -> None:
    near = preference.alpha_divergence(RATIOS, alpha=1e-7)
    torch.testing.assert_close(near, preference.reverse_kl(RATIOS), rtol=1e-5, atol=1e-6)
    at_one = preference.alpha_divergence(RATIOS, alpha=1.0)
    torch.testing.assert_close(at_one, 1 + preference.forward_kl(RATIOS), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", F)
def test_extreme_ratios_are_finite_in_float32_and_so_are_margins_squared(name: str) -> None:
    """The squared loss of a margin of two such worths is the largest number that is ever made of them."""
    x = torch.tensor([-1e4, -200.0, 0.0, 200.0, 1e4], requires_grad=True)
    worth = F[name][0](x)
    loss = preference.squared(worth[:, None] - worth[None, :], 0.1)
    assert bool(loss.isfinite().all())
    assert bool(torch.autograd.grad(loss.sum(), x)[0].isfinite().all())


# ---------------------------------------------------------------------- which answers are compared

ROWS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(-2, 2), st.booleans()), min_size=1, max_size=9
)  # worth, group, counts


def columns(rows: list[tuple[int, int, bool]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    worth, group, counts = zip(*rows, strict=True)
    return torch.tensor(worth).double(), torch.tensor(group), torch.tensor(counts)


@given(rows=ROWS)
@settings(max_examples=60, deadline=None)
def test_better_is_within_a_group_among_rows_that_count_and_strict(rows: list[tuple[int, int, bool]]) -> None:
    found = preference.better(*columns(rows))
    for (i, (Ri, gi, ci)), (j, (Rj, gj, cj)) in itertools.product(enumerate(rows), repeat=2):
        assert bool(found[i, j]) == (gi == gj and ci and cj and Ri > Rj)


@given(rows=ROWS, seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_over_pairs_is_the_mean_over_the_pairs_of_each_rows_group(
    rows: list[tuple[int, int, bool]], seed: int
) -> None:
    pairs, group = preference.better(*columns(rows)), columns(rows)[1]
    n = len(rows)
    each = torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    each = torch.where(pairs, each, math.nan)
    found = preference.over_pairs(each, pairs, group)
    for i in range(n):
        own = [
            float(each[a, b])
            for a, b in itertools.product(range(n), repeat=2)
            if pairs[a, b] and group[a] == group[i]
        ]
        assert float(found[i]) == pytest.approx(math.fsum(own) / len(own) if own else 0.0, abs=1e-12)


def test_pairs_that_are_none_pull_at_nothing() -> None:
    """Neither another question's answers, nor a group where all are worth the same."""
    u = torch.tensor([1.0, -2.0, 0.5, 0.5], dtype=torch.float64, requires_grad=True)
    group, worth = torch.tensor([0, 0, 1, 1]), torch.tensor([1.0, 0.0, 1.0, 1.0])
    pairs = preference.better(worth, group, torch.ones(4, dtype=torch.bool))
    each = preference.logistic(u[:, None] - u[None, :], 1.0)
    found = preference.over_pairs(each, pairs, group)
    wanted = softplus(-3.0)
    assert found.tolist() == pytest.approx([wanted, wanted, 0.0, 0.0])
    gradient = torch.autograd.grad(found[[0, 2]].sum(), u)[0].tolist()
    assert gradient == pytest.approx([-sigma(-3.0), sigma(-3.0), 0.0, 0.0])


# ---------------------------------------------------------------------- answers that stand alone


@pytest.mark.parametrize("origin", [0.0, 0.4])
@pytest.mark.parametrize(("gain", "loss"), [(1.0, 1.0), (0.5, 2.0), (0.1, 4 / 3)])
def test_prospect_is_the_papers_value_function(origin: float, gain: float, loss: float) -> None:
    """λ - v, v = λ_D σ(r - z) of a wanted answer and λ_U σ(z - r) of an unwanted one; and its slope."""
    r = MARGINS.clone().requires_grad_()
    for wanted, weight in ((True, gain), (False, loss)):
        found = preference.prospect(r, torch.full((len(r),), wanted), origin, gain, loss)
        sign = 1 if wanted else -1
        assert found.tolist() == pytest.approx(
            [weight * (1 - sigma(sign * (x - origin))) for x in MARGINS.tolist()], rel=1e-14
        )
        slopes = [-weight * sign * sigma(x - origin) * sigma(origin - x) for x in MARGINS.tolist()]
        assert torch.autograd.grad(found.sum(), r)[0].tolist() == pytest.approx(slopes, abs=1e-14)


def test_prospect_mixes_answers_of_both_kinds_and_stays_finite() -> None:
    r = torch.tensor([1e4, -1e4, 1e4, -1e4], requires_grad=True)
    found = preference.prospect(r, torch.tensor([True, True, False, False]), 0.1, 1.0, 2.0)
    assert found.tolist() == [0.0, 1.0, 2.0, 0.0]
    assert bool(torch.autograd.grad(found.sum(), r)[0].isfinite().all())
