"""surrogate: values by the papers' formulas, and gradients by autograd against each docstring's c."""

import itertools
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from posttrain.math import advantages, surrogate

Surrogate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Formula = Callable[[float, float], float]

LOW, HIGH, CAP, FLOOR = 0.1, 0.3, 2.5, 0.6
UP, DOWN = 0.8, 1.7
PULL = 0.4


def clip(r: float, low: float, high: float) -> float:
    return max(low, min(high, r))


def clipped_value(r: float, A: float) -> float:
    return -min(r * A, clip(r, 1 - LOW, 1 + HIGH) * A)


def clipped_c(r: float, A: float) -> float:
    left = (A > 0 and r > 1 + HIGH) or (A < 0 and r < 1 - LOW)
    return 0.0 if left else r * A


def dual_value(r: float, A: float) -> float:
    return min(clipped_value(r, A), -CAP * A) if A < 0 else clipped_value(r, A)


def dual_c(r: float, A: float) -> float:
    return 0.0 if A < 0 and r > CAP else clipped_c(r, A)


def gate(r: float, A: float) -> tuple[float, float]:
    """(τ, sigmoid(τ (r - 1))), τ by the sign of A."""
    tau = DOWN if A < 0 else UP
    x = tau * (r - 1)
    return tau, 1 / (1 + math.exp(-x))


def soft_value(r: float, A: float) -> float:
    tau, g = gate(r, A)
    return -4 / tau * g * A


def soft_c(r: float, A: float) -> float:
    _, g = gate(r, A)
    return 4 * g * (1 - g) * r * A


MU = 0.3
"""π_old of every token of the masked surrogates."""
TV, KL = 0.12, 0.04


def binary_kl(r: float) -> float:
    """KL of (MU, 1 - MU) and (π, 1 - π), π = MU r at most 1."""
    p = min(MU * r, 1.0)
    return math.inf if p == 1 else MU * math.log(MU / p) + (1 - MU) * math.log((1 - MU) / (1 - p))


def masked_c(r: float, A: float, *, outside: bool) -> float:
    return 0.0 if outside and A * math.log(r) > 0 else min(r, CAP) * A


def tv_c(r: float, A: float) -> float:
    return masked_c(r, A, outside=abs(min(MU * r, 1.0) - MU) > TV)


def kl_c(r: float, A: float) -> float:
    return masked_c(r, A, outside=binary_kl(r) > KL)


def tv_bounded_c(r: float, A: float) -> float:
    return 0.0 if abs(min(MU * r, 1.0) - MU) > TV else min(r, CAP) * A


def kl_bounded_c(r: float, A: float) -> float:
    return 0.0 if max(binary_kl(r), reverse_kl(r)) > KL else min(r, CAP) * A


def reverse_kl(r: float) -> float:
    """KL of (π, 1 - π) and (MU, 1 - MU), π = MU r at most 1."""
    p = min(MU * r, 1.0)
    return p * math.log(p / MU) + ((1 - p) * math.log((1 - p) / (1 - MU)) if p < 1 else 0.0)


def tapered_c(r: float, A: float) -> float:
    return A if A >= 0 else min(r, CAP) * A


def gamma_c(r: float, A: float) -> float:
    k, rate = (1.5, 0.5) if A < 0 else (2.5, 3.5)
    return r**k * math.exp(rate * (1 - r)) * A


def weighing(c: Formula) -> Formula:
    """The value of a surrogate whose weight has no gradient: -c log r."""
    return lambda r, A: -c(r, A) * math.log(r)


CASES: list[tuple[Surrogate, Formula, Formula]] = [
    (surrogate.score, lambda r, A: -A * math.log(r), lambda r, A: A),
    (surrogate.unclipped, lambda r, A: -r * A, lambda r, A: r * A),
    (partial(surrogate.clipped, clip_low=LOW, clip_high=HIGH), clipped_value, clipped_c),
    (partial(surrogate.dual_clipped, clip_low=LOW, clip_high=HIGH, cap=CAP), dual_value, dual_c),
    (
        partial(surrogate.truncated, cap=CAP, floor=FLOOR),
        lambda r, A: -clip(r, FLOOR, CAP) * A * math.log(r),
        lambda r, A: clip(r, FLOOR, CAP) * A,
    ),
    (partial(surrogate.soft_gated, tau_up=UP, tau_down=DOWN), soft_value, soft_c),
    (partial(surrogate.tapered, cap=CAP), weighing(tapered_c), tapered_c),
    (
        partial(surrogate.gamma_gated, k_up=2.5, lambda_up=3.5, k_down=1.5, lambda_down=0.5),
        weighing(gamma_c),
        gamma_c,
    ),
    (
        lambda x, A: surrogate.tv_masked(x, A, torch.full_like(x, math.log(MU)), max_tv=TV, cap=CAP),
        weighing(tv_c),
        tv_c,
    ),
    (
        lambda x, A: surrogate.kl_masked(x, A, torch.full_like(x, math.log(MU)), max_kl=KL, cap=CAP),
        weighing(kl_c),
        kl_c,
    ),
    (
        lambda x, A: surrogate.tv_bounded(x, A, torch.full_like(x, math.log(MU)), max_tv=TV, cap=CAP),
        weighing(tv_bounded_c),
        tv_bounded_c,
    ),
    (
        lambda x, A: surrogate.kl_bounded(x, A, torch.full_like(x, math.log(MU)), max_kl=KL, cap=CAP),
        weighing(kl_bounded_c),
        kl_bounded_c,
    ),
    (
        partial(surrogate.regressed, pull=PULL),
        lambda r, A: -A * math.log(r) + PULL / 2 * math.log(r) ** 2,
        lambda r, A: A - PULL * math.log(r),
    ),
]
NAMES = ["score", "unclipped", "clipped", "dual_clipped", "truncated", "soft_gated"]
NAMES += ["tapered", "gamma_gated", "tv_masked", "kl_masked", "tv_bounded", "kl_bounded", "regressed"]
every_surrogate = pytest.mark.parametrize(("function", "value", "c"), CASES, ids=NAMES)
KINKS = [1 - LOW, 1 + HIGH, CAP, FLOOR, 1 - TV / MU, 1 + TV / MU, 1 / MU]


def test_every_public_surrogate_is_tested_here() -> None:
    own = {n for n, f in vars(surrogate).items() if getattr(f, "__module__", "") == surrogate.__name__}
    public = {name for name in own if not name.startswith("_")}
    assert public == set(NAMES)


@every_surrogate
@given(
    tokens=st.lists(
        st.tuples(
            st.one_of(st.floats(-4, 4), st.floats(-0.5, 0.5), st.just(0.0)),
            st.one_of(st.floats(-3, 3), st.just(0.0)),
        ),
        min_size=1,
        max_size=8,
    )
)
@settings(max_examples=150, deadline=None)
def test_value_and_gradient_are_those_of_the_docstring(
    function: Surrogate, value: Formula, c: Formula, tokens: list[tuple[float, float]]
) -> None:
    assume(all(abs(math.exp(x) - kink) > 1e-6 for x, _ in tokens for kink in KINKS))
    for kl_of in (binary_kl, reverse_kl):
        assume(all(abs(kl_of(math.exp(x)) - KL) > 1e-6 for x, _ in tokens))
    x = torch.tensor([[x for x, _ in tokens]], dtype=torch.float64, requires_grad=True)
    A = torch.tensor([[A for _, A in tokens]], dtype=torch.float64)
    loss = function(x, A)
    (gradient,) = torch.autograd.grad(loss.sum(), x)
    assert loss[0].tolist() == pytest.approx([value(math.exp(x), A) for x, A in tokens], abs=1e-9)
    assert (-gradient)[0].tolist() == pytest.approx([c(math.exp(x), A) for x, A in tokens], abs=1e-9)


@every_surrogate
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_policy_every_coefficient_is_the_advantage_itself(
    function: Surrogate, value: Formula, c: Formula, dtype: torch.dtype
) -> None:
    """At π = π_old all of the family is REINFORCE: to the last bit, but where a τ is divided by."""
    A = torch.randn(1, 64, generator=torch.Generator().manual_seed(0), dtype=dtype)
    x = torch.zeros_like(A, requires_grad=True)
    (gradient,) = torch.autograd.grad(function(x, A).sum(), x)
    bits = 2 * torch.finfo(dtype).eps if value is soft_value else 0.0
    torch.testing.assert_close(-gradient, A, rtol=bits, atol=0.0)


@pytest.mark.parametrize("function", [surrogate.clipped, surrogate.dual_clipped], ids=["clipped", "dual"])
@pytest.mark.parametrize("A", [1.0, 0.0])
def test_a_clipped_token_whose_ratio_overflows_has_no_gradient(function: Surrogate, A: float) -> None:
    """exp(200) is inf in float32: inf · 0 must not become NaN."""
    x = torch.tensor([[200.0]], requires_grad=True)
    loss = function(x, torch.tensor([[A]]))
    assert loss.item() == pytest.approx(-1.2 * A)
    assert torch.autograd.grad(loss.sum(), x)[0].item() == 0


@pytest.mark.parametrize("A", [1.0, -1.0, 0.0])
def test_bounded_surrogates_stay_finite_for_any_ratio(A: float) -> None:
    logp_old = torch.tensor([[-1e4, -300.0, -1e-9, 0.0]])
    stopping = (surrogate.tv_masked, surrogate.kl_masked, surrogate.tv_bounded, surrogate.kl_bounded)
    masks = [partial(f, logp_old=logp_old) for f in stopping]
    others = (surrogate.truncated, surrogate.soft_gated, surrogate.gamma_gated)
    for function in (surrogate.dual_clipped, *others, *masks):
        x = torch.tensor([[-1e4, -200.0, 200.0, 1e4]], requires_grad=True)
        loss = function(x, torch.full((1, 4), A))
        assert bool(loss.isfinite().all())
        assert bool(torch.autograd.grad(loss.sum(), x)[0].isfinite().all())


@pytest.mark.parametrize("clip_low", [1.0, 1.5])
def test_a_lower_bound_of_nothing_never_stops_a_token(clip_low: float) -> None:
    x = torch.tensor([[-30.0, -1.0, 1.0]], dtype=torch.float64, requires_grad=True)
    A = -torch.ones_like(x)
    (gradient,) = torch.autograd.grad(surrogate.clipped(x, A, clip_low=clip_low).sum(), x)
    torch.testing.assert_close(-gradient, x.detach().exp() * A)


def test_truncation_passes_no_gradient_through_the_ratio() -> None:
    """c of truncated is min(r, cap) A; if the ratio were differentiated it would be r A (1 + log r)."""
    x = torch.tensor([[0.5]], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(surrogate.truncated(x, torch.ones_like(x), cap=9.0).sum(), x)
    assert -gradient.item() == pytest.approx(math.exp(0.5))


@pytest.mark.parametrize("A", [1.0, -1.0])
def test_a_soft_gate_fades_on_both_sides_and_has_no_edge(A: float) -> None:
    """c/A falls from 1 at r = 1 to 0 far above it; below, r itself takes it to 0."""
    r = torch.linspace(0.0, 60.0, 6001, dtype=torch.float64)[None, 1:]
    x = r.log().requires_grad_()
    (gradient,) = torch.autograd.grad(surrogate.soft_gated(x, torch.full_like(r, A)).sum(), x)
    c = -gradient[0] / A
    assert float(c[-1]) < 1e-15
    assert float(c[0]) < 0.02
    assert float(c.diff().abs().max()) < 0.02, "an edge would be a jump"
    peak = int(c.argmax())
    assert bool((c[: peak + 1].diff() > 0).all())
    assert bool((c[peak:].diff() < 1e-12).all())
    assert c[99].item() == pytest.approx(1.0)


def test_each_sign_of_the_advantage_has_its_own_temperature() -> None:
    x = torch.full((1, 2), 0.6, dtype=torch.float64, requires_grad=True)
    A = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    (equal,) = torch.autograd.grad(surrogate.soft_gated(x, A, 2.0, 2.0).sum(), x)
    (other,) = torch.autograd.grad(surrogate.soft_gated(x, A, 2.0, 5.0).sum(), x)
    assert equal[0, 0] == other[0, 0] == -equal[0, 1]
    assert 0 < other[0, 1] < equal[0, 1]


def test_a_mask_by_probability_has_pairs_the_other_way_round_than_the_range_of_the_ratio() -> None:
    """A rare token that triples is within and beyond; a sure one that loses 18 % is beyond and within."""
    r, A = torch.tensor([[3.0, 0.82]]), torch.tensor([[1.0, -1.0]])
    mu = torch.tensor([[1e-4, 0.99]])
    assert (mu * (r - 1)).abs()[0].tolist() == pytest.approx([2e-4, 0.178], abs=1e-3)
    moves = []
    for function in (surrogate.clipped, partial(surrogate.tv_masked, logp_old=mu.log())):
        x = r.log().requires_grad_()
        (gradient,) = torch.autograd.grad(function(x, A).sum(), x)
        moves.append((gradient[0] != 0).tolist())
    assert moves == [[False, True], [True, False]]


def test_a_mask_without_a_bound_is_truncation() -> None:
    g = torch.Generator().manual_seed(0)
    x, A, old = (
        torch.randn(1, 99, generator=g),
        torch.randn(1, 99, generator=g),
        -torch.rand(1, 99, generator=g),
    )
    for function, bound in ((surrogate.tv_masked, 1.0), (surrogate.kl_masked, math.inf)):
        assert torch.equal(function(x, A, old, bound, 3.0), surrogate.truncated(x, A, cap=3.0))


def test_the_divergence_of_a_token_is_at_most_that_of_the_policies() -> None:
    """By enumeration of vocabularies of five tokens."""
    g = torch.Generator().manual_seed(0)
    for _ in range(200):
        p, q = torch.randn(2, 5, generator=g, dtype=torch.float64).mul(2).log_softmax(-1)
        binary = torch.stack([p.exp(), -torch.expm1(p)]), torch.stack([q.exp(), -torch.expm1(q)])
        tv, kl = (
            (binary[0] - binary[1]).abs().sum(0) / 2,
            (binary[0] * (binary[0] / binary[1]).log()).sum(0),
        )
        A = (q - p).sign()[None]
        whole_tv, whole_kl = float((p.exp() - q.exp()).abs().sum() / 2), float((p.exp() * (p - q)).sum())
        assert float(tv.max()) <= whole_tv + 1e-12
        assert float(kl.max()) <= whole_kl + 1e-12
        for function, whole in ((surrogate.tv_masked, whole_tv), (surrogate.kl_masked, whole_kl)):
            bound = whole + 1e-9  # where the whole policy is within, no token is stopped
            assert bool(
                (
                    function((q - p)[None], A, p[None], min(bound, 1.0) if whole_tv is whole else bound) != 0
                ).all()
            )


@pytest.mark.parametrize(("k", "rate"), [(2.0, 3.0), (3.0, 2.0), (0.5, 4.0)])
def test_a_gamma_gate_is_largest_at_k_over_lambda_and_shut_at_both_ends(k: float, rate: float) -> None:
    r = torch.linspace(0.001, 8.0, 8000, dtype=torch.float64)[None]
    x = r.log().requires_grad_()
    (gradient,) = torch.autograd.grad(surrogate.gamma_gated(x, torch.ones_like(x), k, rate).sum(), x)
    assert float(r[0, (-gradient).argmax()]) == pytest.approx(k / rate, abs=2e-3)
    for far in (700.0, -700.0):
        x = torch.tensor([[far]], dtype=torch.float64, requires_grad=True)
        loss = surrogate.gamma_gated(x, torch.ones_like(x), k, rate)
        assert abs(float(loss.detach())) < 1e-100


def test_tapering_bounds_what_plain_reinforce_drives_to_minus_infinity() -> None:
    """A bandit of two arms, drawn by a policy that stays: the second is bad, and pushed down for ever."""
    losses = {}
    for function in (surrogate.score, surrogate.tapered):
        logits = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        for _ in range(4000):
            x = logits.log_softmax(0)[1] - math.log(0.5)
            loss = function(x[None, None], torch.tensor([[-1.0]], dtype=torch.float64))
            (gradient,) = torch.autograd.grad(loss.sum(), logits)
            logits = (logits - gradient).detach().requires_grad_()
        losses[function] = float(logits.detach().log_softmax(0)[1])
    assert losses[surrogate.score] < -4000
    assert losses[surrogate.tapered] > -12


P_OLD, R = torch.tensor([[0.5, 0.3, 0.2], [0.0, 0.4, 1.0]], dtype=torch.float64)
"""A bandit of three arms, as the sampler draws them, and their rewards."""
BETA = 0.25


def push(p: torch.Tensor, A: torch.Tensor, beta: float) -> torch.Tensor:
    """The gradient of Σ_y π_old(y) regressed(y) in the logits of a policy p."""
    logits = p.log().requires_grad_()
    log_ratio = logits.log_softmax(0) - P_OLD.log()
    loss = (P_OLD * surrogate.regressed(log_ratio[None], A[None], beta)[0]).sum()
    return torch.autograd.grad(loss, logits)[0]


def settled(A: torch.Tensor, beta: float) -> torch.Tensor:
    """The p of sum 1 with A = β log r + λ r, r = p/π_old, by two bisections."""
    old, advantage = P_OLD.tolist(), A.tolist()

    def root(rising: Callable[[float], float]) -> float:
        low, high = -50.0, 50.0
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if rising(middle) < 0 else (low, middle)
        return low

    def policy(log_lam: float) -> list[float]:
        return [
            p * math.exp(root(lambda x, a=a: beta * x + math.exp(log_lam + x) - a))
            for p, a in zip(old, advantage, strict=True)
        ]

    return torch.tensor(policy(root(lambda x: 1 - math.fsum(policy(x)))), dtype=torch.float64)


def test_regression_settles_at_the_optimum_with_the_soft_mean_as_baseline() -> None:
    best = (P_OLD.log() + R / BETA).softmax(0)
    A = R - BETA * (P_OLD * (R / BETA).exp()).sum().log()
    assert float(push(best, A, BETA).abs().max()) < 1e-12
    assert float(push(best, R - P_OLD @ R, BETA).abs().max()) > 0.05, "with the mean it moves on"


def test_regression_settles_nearer_with_the_mean_as_baseline() -> None:
    """By how much: the best arm has 0.62 where the optimum has 0.85, at 0.48 nats for 1.01."""
    A = R - P_OLD @ R
    p, best = settled(A, BETA), (P_OLD.log() + R / BETA).softmax(0)
    assert float(push(p, A, BETA).abs().max()) < 1e-12
    moved = float(P_OLD @ (P_OLD / p).log())
    torch.testing.assert_close(A, BETA * (p / P_OLD).log() + BETA * moved * p / P_OLD)
    assert [float(p[2]), float(best[2])] == pytest.approx([0.615, 0.846], abs=1e-3)
    assert [float(q @ (q / P_OLD).log()) for q in (p, best)] == pytest.approx([0.484, 1.011], abs=1e-3)


def test_a_group_of_k_pulls_by_k_over_k_minus_1() -> None:
    """Its mean holds the answer itself, which takes 1/K of every advantage; the pull stays."""
    K = 3
    p = settled(R - P_OLD @ R, BETA * K / (K - 1))
    total = torch.zeros(3, dtype=torch.float64)
    for group in itertools.product(range(3), repeat=K):
        arms = torch.tensor(group)
        logits = p.log().requires_grad_()
        log_ratio = (logits.log_softmax(0) - P_OLD.log())[arms]
        A = advantages.centred(R[arms], torch.zeros(K, dtype=torch.long))
        loss = surrogate.regressed(log_ratio[None], A[None], BETA).mean()
        total += P_OLD[arms].prod() * torch.autograd.grad(loss, logits)[0]
    assert float(total.abs().max()) < 1e-12


def test_a_bound_stops_a_token_whatever_its_advantage_asks() -> None:
    """Where a mask lets it come back: π fell from 0.99 to 0.59, and A asks for more of it."""
    x, mu = torch.tensor([[0.6]]).log(), torch.tensor([[0.99]]).log()
    pairs = ((surrogate.tv_masked, surrogate.tv_bounded), (surrogate.kl_masked, surrogate.kl_bounded))
    for masks, bounds in pairs:
        for A in (torch.ones(1, 1), -torch.ones(1, 1)):
            assert bool(masks(x, A, mu).any()) == bool(A > 0)
            assert not bounds(x, A, mu).any()


def test_a_bound_in_both_directions_stops_what_one_direction_lets_pass() -> None:
    """From 0.02 to 0.2: 0.13 nats from π_old, and 0.30 back; and a bound of infinity stops nothing."""
    x, mu, A = torch.tensor([[10.0]]).log(), torch.tensor([[0.02]]).log(), torch.ones(1, 1)
    assert surrogate.kl_masked(x, A, mu, 0.2).any()
    assert not surrogate.kl_bounded(x, A, mu, 0.2).any()
    free = surrogate.truncated(x, A, cap=10.0)
    assert torch.equal(surrogate.kl_bounded(x, A, mu, math.inf), free)
    assert torch.equal(surrogate.tv_bounded(x, A, mu, 1.0), free)
