"""Masters of bfloat16 weights: where they begin, and that weights move as they do from the first step."""

import math
from weakref import ref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from posttrain.learner import kernels
from posttrain.learner.optim import Master, Optim, OptimizedWeights
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
    weights = OptimizedWeights([("weight", weight)], Optim())
    for step in (1, 2, 3):
        weight.sum().backward()
        weights.step(rate)
        moved = start - weight.detach().float()
        chance = step * rate / 2**-11  # of being one unit lower, where a unit is that of [1/16, 1/8)
        error = 2**-11 * math.sqrt(chance / weight.numel())
        assert float(moved.double().mean()) == pytest.approx(step * rate, abs=5 * error)
    assert torch.equal((start - step * rate).bfloat16().float(), start)


@pytest.mark.parametrize("compiled", [True, False])
@given(values=st.lists(st.floats(width=32), min_size=1, max_size=50), low=st.integers(0, 2**16 - 1))
def test_a_master_is_its_weight_and_the_rest(compiled: bool, values: list[float], low: int) -> None:
    """To the last bit, whatever number it is; but one in the middle between two weights by that bit."""
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(kernels, "suits", lambda x: False)
        check(values, low)


def check(values: list[float], low: int) -> None:
    patterns = torch.tensor(values).view(torch.int32)
    numbers = torch.cat([patterns, patterns & -(2**16) | low]).view(torch.float32)
    numbers = numbers[~numbers.isnan()]
    weight = nn.Parameter(torch.zeros(len(numbers)).bfloat16())
    master = Master("w", weight)
    master.set(numbers)
    rounded = numbers.bfloat16()
    assert torch.equal(weight.view(torch.int16), rounded.view(torch.int16))
    moved = numbers.view(torch.int32) - master.numbers().view(torch.int32)
    held = (rounded != 0) | (numbers == 0)  # what is rounded to 0 is below the normal numbers
    middle = numbers.view(torch.int32) & 0xFFFF == 2**15
    assert not moved[held & ~middle].any()
    assert set(moved[held & middle].tolist()) <= {0, 1}
    again = master.numbers()
    master.set(again)
    assert torch.equal(master.numbers().view(torch.int32), again.view(torch.int32))


def test_a_master_steps_in_pieces_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices, stacks, vectors and single numbers, also transposed, in pieces of even lengths; seed 0."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(64, 48), (3, 16, 32), (80,), (), (1, 2000), (0, 4)]
    begun = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    begun.append(torch.randn(48, 64, generator=generator).bfloat16().t())

    def stepped() -> list[torch.Tensor]:
        named = [(f"w{n}", nn.Parameter(x.clone())) for n, x in enumerate(begun)]
        weights = OptimizedWeights(named, Optim(weight_decay=0.1))
        noise = torch.Generator().manual_seed(1)
        for _ in range(3):
            for m in weights.masters.masters:
                m.grad = torch.randn(m.parameter.shape, generator=noise)
            weights.step(0.01)
        return [x for part in weights.tensors() for x in part.values()]

    whole = stepped()
    monkeypatch.setattr("posttrain.learner.optim._PIECE", 256)
    assert all(torch.equal(a, b) for a, b in zip(stepped(), whole, strict=True))


def test_a_model_whose_masters_are_gone_keeps_its_gradients() -> None:
    weight = nn.Parameter(torch.ones(3).bfloat16())
    weights = OptimizedWeights([("w", weight)], Optim())
    weight.sum().backward()
    assert weight.grad is None
    masters = [ref(m) for m in weights.masters.masters]
    del weights
    assert [m() for m in masters] == [None]
    weight.sum().backward()
    assert torch.equal(weight.grad, torch.ones(3).bfloat16())


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("shape", [(64,), (48, 64), (70, 48), (2, 48)])
def test_masters_of_another_shape_are_refused(
    compiled: bool, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(kernels, "suits", lambda x: False)
    weight = nn.Parameter(torch.ones(64, 48).bfloat16())
    weights = OptimizedWeights([("w", weight)], Optim())
    with pytest.raises(RuntimeError, match="size"):
        weights.restore({"w": torch.zeros(shape)}, {})
    assert torch.equal(weight, torch.ones(64, 48).bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_transposed_weight_goes_on_from_a_file_as_it_would_have(dtype: torch.dtype) -> None:
    """A file holds tensors row by row."""
    begun = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(dtype).t()

    def made() -> tuple[nn.Parameter, OptimizedWeights]:
        weight = nn.Parameter(begun.clone())
        return weight, OptimizedWeights([("w", weight)], Optim())

    def step(weight: nn.Parameter, weights: OptimizedWeights) -> None:
        (weight * factors).sum().backward()
        weights.step(0.01)

    factors = torch.arange(35).view(7, 5).to(dtype) - 17
    weight, weights = made()
    step(weight, weights)
    again, resumed = made()
    resumed.restore(*({k: x.contiguous().clone() for k, x in part.items()} for part in weights.tensors()))
    for each in ((weight, weights), (again, resumed)):
        step(*each)
    assert torch.equal(weight, again)
