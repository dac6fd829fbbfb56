"""AdamW with moments in 8 bits: the format of bitsandbytes, its error, and steps next to AdamW's."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from posttrain.learner import moments, optim
from posttrain.learner.learner import Learner
from posttrain.learner.lora import Lora
from posttrain.learner.moments import Codebook
from posttrain.learner.optim import MOMENTS, Optim, OptimizedWeights
from posttrain.methods.table import SFT
from posttrain.plan.companions import optimizer_sizes
from posttrain.plan.memory import Shape, estimate

Make = Callable[..., Any]
CPU = torch.device("cpu")
EIGHT = Optim(name="adamw_8bit", lr=0.01, max_grad_norm=0.0)
WIDE = {"hidden_size": 64, "intermediate_size": 96}
"""Sizes with which most matrices have 4096 numbers or more, in rows that are not whole blocks."""
OF_BITSANDBYTES = {
    True: "25243f3ad1cc3d07c121c2c1addcd93f1e14c8cfc9183cefce3549b6e1e7d42d34a038bfc5accbc5"
    "54cf3ea3c7fc1b1733d1d7b6413bc83be4f6eaff253d2656c130179b30b7caca",
    False: "90923f4f827344e1449847432497903f9eb8608064ad46c67e622e30a1af87826710563f50236b50"
    "228042155af5a6af70838c2f3c4b5c4ba9ddb9ff90448e1f457fb00a7e30686b",
}
"""What bitsandbytes 0.50.2 stores for `numbers(signed)`: quantize_blockwise, create_dynamic_map(signed)."""


def numbers(signed: bool, *shape: int) -> torch.Tensor:
    x = torch.randn(shape or (1, 72), generator=torch.Generator().manual_seed(0))
    return x if signed else x.square()


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_bitsandbytes(signed: bool) -> None:
    codes, absmax = moments.quantise(numbers(signed), signed=signed)
    apart = codes[0].int() - torch.tensor(list(bytes.fromhex(OF_BITSANDBYTES[signed])))
    if signed:
        assert not apart.any()
    else:  # on a CPU it stores the value next to the nearest now and then
        assert apart.abs().sum() == 2 == apart.count_nonzero()
    assert absmax.tolist() == [[float(numbers(signed).abs().max())]]


@pytest.mark.parametrize("signed", [True, False])
def test_values_are_the_middles_of_equal_parts_of_decades(signed: bool) -> None:
    values = Codebook.of(signed, CPU).values.double()
    assert len(values) == 256
    assert (values.diff() > 0).all()
    assert values[-1] == 1.0
    positive = values[values > 0][:-1]
    for decade in range(7):
        low, high = 10.0 ** (decade - 7), 10.0 ** (decade - 6)
        inside = positive[(positive > low) & (positive < high)]
        parts = 2**decade * (1 if signed else 2)
        middles = low + (high - low) * (torch.arange(parts).double() + 0.5) / parts
        torch.testing.assert_close(inside, middles, rtol=1e-6, atol=0)
    negative = -values[values < 0].flip(0)
    assert torch.equal(negative, positive) if signed else not len(negative)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("shape", [(2, 300), (3, 8, 70), (5, 7)])
def test_the_nearest_value_is_stored(shape: tuple[int, ...], signed: bool) -> None:
    """A slow search through all values finds the same; the error is at most half of the widest gap."""
    x = numbers(signed, *shape) * torch.logspace(-9, 0, shape[-1])
    codes, absmax = moments.quantise(x, signed=signed)
    stored = moments.dequantise(codes, absmax, torch.float32, signed=signed)
    assert stored.shape == x.shape
    rows, count = x.flatten(1), moments.blocks(shape)
    size = -(-rows.shape[1] // count)
    assert size <= moments.BLOCK
    values = Codebook.of(signed, CPU).values
    for row, start in itertools.product(range(len(x)), range(0, rows.shape[1], size)):
        block, got = (y.flatten(1)[row, start : start + size] for y in (x, stored))
        largest = float(block.abs().max())
        assert absmax[row, start // size] == largest
        block, got = block.double(), got.double()
        nearest = (block[:, None] - values.double() * largest).abs().min(1).values
        error = (got - block).abs()
        above = block > 0 if not signed else torch.zeros_like(block, dtype=torch.bool)
        # A small mean of squares is stored as the least value above 0 where 0 is nearer.
        allowed = torch.where(above, torch.maximum(nearest, values[values > 0].min() * largest), nearest)
        assert (error <= allowed + 3e-7 * block.abs() + 1e-12 * largest).all()
        assert error.max() <= largest * 0.45 / (64 if signed else 128) * 1.001 + 4e-7 * largest
    assert (stored[x > 0] > 0).all() or signed


def test_rows_are_quantised_alike_however_they_are_cut() -> None:
    """So a rank's share has the codes of a single process, and a step in pieces those of one in one go."""
    x = numbers(True, 10, 300)
    codes, absmax = moments.quantise(x, signed=True)
    parts = [moments.quantise(part, signed=True) for part in x.split([1, 6, 3])]
    assert torch.equal(torch.cat([part[0] for part in parts]), codes)
    assert torch.equal(torch.cat([part[1] for part in parts]), absmax)


def test_zeros_and_another_default_dtype_are_stored_exactly() -> None:
    zeros = torch.zeros(2, 300)
    for signed in (True, False):
        assert not moments.dequantise(
            *moments.quantise(zeros, signed=signed), zeros.dtype, signed=signed
        ).any()
    x = numbers(True)
    exact = moments.quantise(x, signed=True)[0]
    Codebook.of.cache_clear()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(moments.quantise(x, signed=True)[0], exact)
    finally:
        torch.set_default_dtype(before)


def weights_of(name: Any, dtype: torch.dtype, *shape: int) -> tuple[OptimizedWeights, nn.Parameter]:
    parameter = nn.Parameter(numbers(True, *shape).to(dtype))
    return OptimizedWeights([("w", parameter)], replace(EIGHT, name=name, weight_decay=0.1)), parameter


def take_step(weights: OptimizedWeights, seed: int) -> None:
    [master] = weights.masters.masters
    g = torch.Generator().manual_seed(seed)
    master.grad = torch.randn(master.parameter.shape, generator=g).to(master.zeros())
    weights.step(0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_first_step_has_the_bits_of_adamw(dtype: torch.dtype) -> None:
    """Moments of 0 are exact. The second step reads stored ones, which are off by a few percent."""
    eight, plain = (weights_of(name, dtype, 64, 300)[0] for name in ("adamw_8bit", "adamw"))
    for weights in (eight, plain):
        take_step(weights, 1)
    ours, theirs = (next(iter(w.masters.tensors().values())).clone() for w in (eight, plain))
    assert torch.equal(ours, theirs)
    for weights in (eight, plain):
        take_step(weights, 2)
    second = [next(iter(w.masters.tensors().values())) for w in (eight, plain)]
    moved, apart = (second[1] - theirs).abs(), (second[0] - second[1]).abs()
    assert 0 < apart.max() < 0.01, "no number is off by as much as a step"
    assert apart.mean() < 0.03 * moved.mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_matrices_and_vectors_are_moved_by_adamw(dtype: torch.dtype) -> None:
    for shape in ((15, 273), (5000,)):
        eight, plain = (weights_of(name, dtype, *shape)[0] for name in ("adamw_8bit", "adamw"))
        for weights, seed in itertools.product((eight, plain), (1, 2, 3)):
            take_step(weights, seed)
        assert torch.equal(eight.masters.masters[0].parameter, plain.masters.masters[0].parameter)
        assert eight.tensors()[1].keys() == plain.tensors()[1].keys()


class Largest(TorchDispatchMode):
    """Records the most numbers of a new tensor in floating point."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {x.untyped_storage().data_ptr() for x in tensors([args, kwargs])}
        out = function(*args, **(kwargs or {}))
        for x in tensors([out]):
            if x.is_floating_point() and x.untyped_storage().data_ptr() not in before:
                self.numbers = max(self.numbers, x.numel())
        return out


def tensors(nested: Any) -> Sequence[torch.Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(nested) if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_moment_exists_whole_in_float32(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a step in pieces has the bits of one in one go."""
    whole, _ = weights_of("adamw_8bit", dtype, 64, 512)
    for seed in (1, 2):
        take_step(whole, seed)
    monkeypatch.setattr(optim, "_PIECE", 2048)
    weights, parameter = weights_of("adamw_8bit", dtype, 64, 512)
    take_step(weights, 1)
    weights.masters.masters[0].grad = torch.randn(64, 512, generator=torch.Generator().manual_seed(2))
    with Largest() as largest:
        weights.step(0.01)
    assert 0 < largest.numbers <= 2048
    assert torch.equal(parameter, whole.masters.masters[0].parameter)
    state = weights.tensors()[1]
    assert all(torch.equal(x, whole.tensors()[1][name]) for name, x in state.items())
    count = parameter.numel()
    assert sum(x.nbytes for x in state.values()) == 2 * count + 2 * 4 * count // 256 + 4


@pytest.mark.parametrize("adapter", [Lora(), Lora(rank=64)], ids=["all weights", "an adapter"])
def test_the_estimate_counts_bytes_of_the_state(adapter: Lora, llama: Make, rows_of: Make) -> None:
    learner = Learner(llama(0, **WIDE), SFT, optim=EIGHT, lora=adapter)
    learner.update(rows_of(seed=0, dtype=torch.float32))
    state = {n: x for n, x in learner.tensors()["optimizer"].items() if not n.endswith("/step")}
    trained = sum(p.numel() for p in learner.model.parameters() if p.requires_grad)
    model = llama(0, **WIDE)
    shape = Shape.of(model, trained, **optimizer_sizes(model.config, EIGHT, adapter))
    parts = estimate(shape, dtype=torch.float32, microbatch_tokens=1).parts
    assert parts["AdamW moments"] == sum(x.nbytes for x in state.values())
    in_bytes = sum(x.numel() for x in state.values() if x.dtype == torch.uint8)
    assert 0.5 * 2 * trained < in_bytes < 2 * trained


def test_tiny_sft_reaches_the_loss_of_adamw(llama: Make, rows_of: Make) -> None:
    """The last of 40 losses is below half of the first, and within 5 % of AdamW's."""
    batch, last = rows_of(seed=0, dtype=torch.float32), {}
    for name in ("adamw", "adamw_8bit"):
        learner = Learner(llama(0, **WIDE), SFT, optim=Optim(name=name, lr=3e-3))  # type: ignore[arg-type]
        losses = [learner.update(batch).metrics["loss"] for _ in range(40)]
        last[name] = losses[-1]
        assert losses[-1] < 0.5 * losses[0]
    assert last["adamw_8bit"] == pytest.approx(last["adamw"], rel=0.05)
    assert last["adamw_8bit"] != last["adamw"]


def test_the_state_of_adamw_is_refused(llama: Make, rows_of: Make) -> None:
    eight, plain = (
        Learner(llama(0, **WIDE), SFT, optim=replace(EIGHT, name=n)) for n in ("adamw_8bit", "adamw")
    )
    for learner in (eight, plain):
        learner.update(rows_of(seed=0, dtype=torch.float32))
    saved = [(learner.tensors(), learner.state()) for learner in (plain, eight)]
    for learner, checkpoint in zip((eight, plain), saved, strict=True):
        with pytest.raises(KeyError, match="absmax"):
            learner.restore(*checkpoint)
    assert {f"{key}_absmax" for key in MOMENTS} <= {
        name.rpartition("/")[2] for name in saved[1][0]["optimizer"]
    }
