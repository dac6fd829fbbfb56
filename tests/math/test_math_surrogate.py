"""surrogate: values by the papers' formulas, and gradients by autograd against each docstring's c."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from posttrain.math import surrogate

Surrogate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Formula = Callable[[float, float], float]

LOW, HIGH, CAP, FLOOR = 0.1, 0.3, 2.5, 0.6
UP, DOWN = 0.8, 1.7


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
]
NAMES = ["score", "unclipped", "clipped", "dual_clipped", "truncated", "soft_gated"]
every_surrogate = pytest.mark.parametrize(("function", "value", "c"), CASES, ids=NAMES)
KINKS = [1 - LOW, 1 + HIGH, CAP, FLOOR]


def test_every_public_surrogate_is_tested_here() -> None:
    public = {n for n, f in vars(surrogate).items() if getattr(f, "__module__", "") == surrogate.__name__}
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
    for function in (surrogate.dual_clipped, surrogate.truncated, surrogate.soft_gated):
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
