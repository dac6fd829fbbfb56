"""value: losses by the formulas, gradients by autograd against what the docstrings say of them."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from posttrain.math import value

CLIP = 0.3
tokens = st.lists(st.tuples(*[st.floats(-3, 3)] * 3), min_size=1, max_size=8)


def columns(drawn: list[tuple[float, float, float]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    V, target, old = torch.tensor(drawn, dtype=torch.float64).T[:, None]
    return V.clone().requires_grad_(), target, old


def near(V: float, old: float) -> float:
    return old + max(-CLIP, min(CLIP, V - old))


def stopped(V: float, target: float, old: float) -> bool:
    """It has moved by more than the bound towards its target, and not yet as far past it."""
    return abs(V - target) < abs(near(V, old) - target)


@given(drawn=tokens)
@settings(max_examples=60, deadline=None)
def test_squared_pulls_with_the_difference(drawn: list[tuple[float, float, float]]) -> None:
    V, target, old = columns(drawn)
    loss = value.squared(V, target, old)
    (gradient,) = torch.autograd.grad(loss.sum(), V)
    assert loss[0].tolist() == pytest.approx([(v - t) ** 2 / 2 for v, t, _ in drawn], abs=1e-12)
    assert gradient[0].tolist() == pytest.approx([v - t for v, t, _ in drawn], abs=1e-12)


@given(drawn=tokens)
@settings(max_examples=150, deadline=None)
def test_clipped_takes_the_worse_of_two_and_stops_what_has_moved_far_enough(
    drawn: list[tuple[float, float, float]],
) -> None:
    assume(all(abs(abs(v - o) - CLIP) > 1e-6 for v, _, o in drawn))
    assume(all(abs(abs(v - t) - abs(near(v, o) - t)) > 1e-6 or near(v, o) == v for v, t, o in drawn))
    V, target, old = columns(drawn)
    loss = value.clipped(V, target, old, value_clip=CLIP)
    (gradient,) = torch.autograd.grad(loss.sum(), V)
    worse = [max((v - t) ** 2, (near(v, o) - t) ** 2) / 2 for v, t, o in drawn]
    assert loss[0].tolist() == pytest.approx(worse, abs=1e-12)
    wanted = [0.0 if stopped(v, t, o) else v - t for v, t, o in drawn]
    assert gradient[0].tolist() == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_which_way_it_moved_decides(sign: float) -> None:
    """Old 0, bound 0.3, target ±2: moved towards it beyond the bound, within it, and away from it."""
    V = (sign * torch.tensor([[0.5, 0.2, -0.5, 1.9]])).requires_grad_()
    target, old = sign * torch.full((1, 4), 2.0), torch.zeros(1, 4)
    (gradient,) = torch.autograd.grad(value.clipped(V, target, old, CLIP).sum(), V)
    assert (gradient != 0).tolist() == [[False, True, True, False]]


def test_before_the_first_step_both_are_the_same_to_the_last_bit() -> None:
    V, target = torch.randn(2, 1, 64, generator=torch.Generator().manual_seed(0))
    grads = []
    for function in (value.squared, value.clipped):
        x = V.clone().requires_grad_()
        grads.append(torch.autograd.grad(function(x, target, V).sum(), x)[0])
        assert torch.equal(function(V, target, V), (V - target).square() / 2)
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], V - target)
