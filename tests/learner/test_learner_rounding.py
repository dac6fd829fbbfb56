"""Masters of bfloat16 weights: where they begin, and that weights move as they do from the first step."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from posttrain.learner.optim import MasterWeights, Optim, adamw
from posttrain.models.rounding import dither

SIZE = 200_000


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=50))
def test_a_master_rounds_to_its_weight(values: list[float]) -> None:
    weight = torch.tensor(values).bfloat16()
    weight = weight[weight.isfinite()]
    master = dither("w", weight)
    assert master.dtype == torch.float32
    assert torch.equal(master.bfloat16(), weight)
    assert not master[weight == 0].any()


@pytest.mark.parametrize("power", [-130, -20, 0, 7])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_powers_of_two_have_a_shorter_interval_below(power: int, sign: float) -> None:
    weight = torch.full((SIZE,), sign * 2.0**power).bfloat16()
    master = dither("w", weight)
    assert torch.equal(master.bfloat16(), weight)
    away = (master - weight.float()) * sign / 2.0**power
    if power > -126:  # what is not subnormal
        assert float(away.max()) == pytest.approx(2**-8, rel=1e-3)
        assert float(away.min()) == pytest.approx(-(2**-9), rel=1e-3)


def test_masters_are_even_over_the_interval_and_know_nothing_of_one_another() -> None:
    place = (dither("w", torch.full((SIZE,), 1.5).bfloat16()) - 1.5) * 2**7 + 0.5
    assert float(place.min()) > 0
    assert float(place.max()) < 1
    counts = torch.histc(place, 20, 0, 1) / SIZE
    torch.testing.assert_close(counts, torch.full((20,), 0.05), rtol=0, atol=5 * math.sqrt(0.05 / SIZE))
    noise = (place[: 400 * 500].view(400, 500) - 0.5) * math.sqrt(12)
    # The largest singular value of independent numbers; a pattern in them would be many times that.
    assert float(torch.linalg.matrix_norm(noise, 2)) == pytest.approx(20 + 500**0.5, rel=0.05)
    other = (dither("v", torch.full((SIZE,), 1.5).bfloat16()) - 1.5) * 2**7 + 0.5
    assert abs(float(torch.corrcoef(torch.stack([place, other]))[0, 1])) < 5 / math.sqrt(SIZE)


def test_the_place_hangs_on_name_and_position_alone() -> None:
    weight = torch.randn(70, 3000, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(dither("w", weight), dither("w", weight.clone()))
    assert torch.equal(dither("w", weight.T.contiguous().T), dither("w", weight))
    assert torch.equal(dither("w", weight).flatten(), dither("w", weight.flatten()))
    assert not torch.equal(dither("w", weight), dither("v", weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_keep_their_numbers(dtype: torch.dtype) -> None:
    weight = torch.randn(5, dtype=dtype)
    out = dither("w", weight)
    assert torch.equal(out, weight)
    assert out.dtype == dtype
    out += 1
    assert not torch.equal(out, weight)


@pytest.mark.parametrize("rate", [1e-6, 1e-5])
def test_on_average_weights_move_as_their_masters_do_from_the_first_step(rate: float) -> None:
    """After n steps of `rate` down, the mean of weights about 0.1 is lower by n · rate.

    Masters that begin where the weights are stay within half a unit in the last place, and move nothing.
    """
    begun = 0.07 + 0.05 * torch.rand(400, 500, generator=torch.Generator().manual_seed(0))
    weight = nn.Parameter(begun.bfloat16())
    start = weight.detach().float().clone()
    weights = MasterWeights([("weight", weight)])
    optimizer = adamw(Optim(lr=rate), weights)
    for step in (1, 2, 3):
        weight.sum().backward()
        optimizer.step()
        weights.publish()
        weights.zero_grad()
        moved = start - weight.detach().float()
        chance = step * rate / 2**-11  # of being one unit lower, where a unit is that of [1/16, 1/8)
        error = 2**-11 * math.sqrt(chance / weight.numel())
        assert float(moved.double().mean()) == pytest.approx(step * rate, abs=5 * error)
    assert torch.equal((start - step * rate).bfloat16().float(), start)
