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

LOW, HIGH, CAP = 0.1, 0.3, 2.5


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


CASES: list[tuple[Surrogate, Formula, Formula]] = [
    (surrogate.score, lambda r, A: -A * math.log(r), lambda r, A: A),
    (surrogate.unclipped, lambda r, A: -r * A, lambda r, A: r * A),
    (partial(surrogate.clipped, clip_low=LOW, clip_high=HIGH), clipped_value, clipped_c),
    (partial(surrogate.dual_clipped, clip_low=LOW, clip_high=HIGH, cap=CAP), dual_value, dual_c),
    (
        partial(surrogate.truncated, cap=CAP),
        lambda r, A: -min(r, CAP) * A * math.log(r),
        lambda r, A: min(r, CAP) * A,
    ),
]
NAMES = ["score", "unclipped", "clipped", "dual_clipped", "truncated"]
every_surrogate = pytest.mark.parametrize(("function", "value", "c"), CASES, ids=NAMES)
KINKS = [1 - LOW, 1 + HIGH, CAP]


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
    """At π = π_old all of the family is REINFORCE: to the last bit, not nearly."""
    A = torch.randn(1, 64, generator=torch.Generator().manual_seed(0), dtype=dtype)
    x = torch.zeros_like(A, requires_grad=True)
    (gradient,) = torch.autograd.grad(function(x, A).sum(), x)
    assert torch.equal(-gradient, A)


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
    for function in (surrogate.dual_clipped, surrogate.truncated):
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
