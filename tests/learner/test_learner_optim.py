"""The optimiser against closed forms, torch's own AdamW and an explicit account of float32 masters."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from posttrain.learner.forward import Net, forward
from posttrain.learner.learner import Learner, Steps
from posttrain.learner.optim import MasterWeights, Optim, OptimizedWeights, learning_rate
from posttrain.learner.pack import microbatches
from posttrain.learner.recompute import keep_less
from posttrain.math import reduce
from posttrain.methods.table import REINFORCE, SFT
from posttrain.models.rounding import dither
from posttrain.types import Batch, RunError

Make = Callable[..., Any]
GROUPED = ("embed", "proj", "head")


def bits(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten().float().view(torch.int32) for p in model.parameters()])


def test_the_schedules_are_their_closed_forms() -> None:
    def rates(total: int, **numbers: Any) -> list[float]:
        return [learning_rate(Optim(lr=2.0, **numbers), s, total) for s in range(total)]

    assert rates(3) == [2.0, 2.0, 2.0]
    assert rates(4, warmup_steps=3) == [0.5, 1.0, 1.5, 2.0]
    assert rates(4, schedule="linear") == [2.0, 1.5, 1.0, 0.5]
    assert rates(4, schedule="linear", min_lr_ratio=0.5) == [2.0, 1.75, 1.5, 1.25]
    cosine = [1 + math.cos(math.pi * s / 5) for s in range(5)]
    assert rates(5, schedule="cosine") == pytest.approx(cosine, abs=1e-15)
    warmed = rates(8, schedule="cosine", warmup_steps=3, min_lr_ratio=0.1)
    assert warmed[:4] == [0.5, 1.0, 1.5, 2.0]
    assert warmed[4:] == pytest.approx([0.2 + 0.9 * cosine[s] for s in range(1, 5)], abs=1e-15)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_rate_past_the_end_stays_at_its_lowest(schedule: Any) -> None:
    config = Optim(lr=1.0, schedule=schedule, min_lr_ratio=0.25, warmup_steps=2)
    assert learning_rate(config, 10, 10) == learning_rate(config, 99, 10) == 0.25
    assert learning_rate(config, 0, 1) == pytest.approx(1 / 3)  # a run shorter than its warm-up


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr", -1.0),
        ("lr", math.nan),
        ("betas", (0.9, 1.0)),
        ("momentum", 1.0),
        ("eps", 0.0),
        ("weight_decay", -0.1),
        ("max_grad_norm", -1.0),
        ("warmup_steps", -1),
        ("min_lr_ratio", 1.5),
    ],
)
def test_a_number_out_of_range_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=key):
        Optim(**{key: value})


@pytest.mark.usefixtures("float64")
def test_a_run_is_torchs_adamw_on_gradients_taken_by_hand(llama: Make, rows_of: Make, by_hand: Make) -> None:
    """Three updates: schedule, clipping, decay on matrices alone."""
    config = Optim(lr=0.05, betas=(0.8, 0.95), weight_decay=0.3, max_grad_norm=0.5, schedule="linear")
    plain = llama(0).double().eval()
    learner = Learner(
        copy.deepcopy(plain), SFT, optim=config, total_steps=4, steps=Steps(microbatch_tokens=9)
    )
    matrices = [p for n, p in plain.named_parameters() if any(word in n for word in GROUPED)]
    vectors = [p for n, p in plain.named_parameters() if not any(word in n for word in GROUPED)]
    assert {p.ndim for p in matrices} == {2}
    assert {p.ndim for p in vectors} == {1}
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, lr=0.05, betas=(0.8, 0.95), weight_decay=0.3)
    for step in range(3):
        batch = rows_of(seed=step)
        logp, _ = by_hand(plain, batch, 1.0)
        theirs.zero_grad()
        (-logp.sum() / batch.mask.sum()).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        for group in theirs.param_groups:
            group["lr"] = 0.05 * (1 - step / 4)
        theirs.step()
        metrics = learner.update(batch).metrics
        assert float(norm) > 0.5
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-6)
        assert metrics["lr"] == pytest.approx(0.05 * (1 - step / 4))
        assert metrics["loss"] == pytest.approx(float(-logp.detach().sum() / batch.mask.sum()), rel=1e-6)
        for ours, wanted in zip(learner.model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-5)


def test_decay_reaches_matrices_and_no_vector() -> None:
    layer = nn.Linear(3, 3)
    before = [p.detach().clone() for p in layer.parameters()]
    weights = OptimizedWeights(layer.named_parameters(), Optim(weight_decay=0.5))
    for p in layer.parameters():
        p.grad = torch.zeros_like(p)
    weights.step(0.1)
    torch.testing.assert_close(layer.weight.detach(), before[0] * 0.95)
    assert torch.equal(layer.bias, before[1])


@pytest.mark.parametrize("longest", [0.0, 0.5, 1e6])
def test_clipping_is_torchs(longest: float) -> None:
    ours, theirs = nn.Linear(4, 3), nn.Linear(4, 3)
    for layer in (ours, theirs):
        torch.manual_seed(0)
        for p in layer.parameters():
            p.grad = 5 * torch.randn_like(p)
    weights = MasterWeights(ours.named_parameters())
    norm = weights.clip(longest)
    wanted = nn.utils.clip_grad_norm_(theirs.parameters(), longest or math.inf)
    assert norm == pytest.approx(float(wanted), rel=1e-6)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        if longest == 0.5:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=0)
        else:
            assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_clipped_together_has_the_bits_of_each_by_itself(dtype: torch.dtype) -> None:
    """Tensors of odd sizes and strides, with large and small gradients; seed 0."""
    torch.manual_seed(0)
    shapes = [(3, 5), (7,), (), (64, 33), (1, 1), (257,), (5, 3)]
    named = [(f"w{n}", nn.Parameter(torch.randn(shape).to(dtype))) for n, shape in enumerate(shapes)]
    named[-1] = ("w6", nn.Parameter(torch.randn(3, 5).to(dtype).t()))
    weights = MasterWeights(named)
    for n, master in enumerate(weights.masters):
        master.grad = torch.randn_like(master.zeros()) * 10.0 ** (n - 3)
    masters = [master.numbers().clone() for master in weights.masters]
    grads = [master.grad.clone() for master in weights.masters if master.grad is not None]
    norm = weights.clip(0.7)
    assert norm > 0.7
    for (_, parameter), before, master, g in zip(named, masters, weights.masters, grads, strict=True):
        assert torch.equal(master.grad, g.mul_(0.7 / norm))
        assert torch.equal(master.numbers(), before)
        assert torch.equal(parameter, before.to(dtype))


def test_no_other_type_than_these_is_trained() -> None:
    with pytest.raises(ValueError, match=r"w is torch\.float16"):
        MasterWeights([("w", nn.Parameter(torch.zeros(2, dtype=torch.float16)))])


def test_bfloat16_trains_on_gradients_and_weights_kept_in_float32(llama: Make, rows_of: Make) -> None:
    """Bit for bit: each microbatch's gradient is added up in float32, and the step is taken there."""
    config = Optim(lr=1e-3, weight_decay=0.1, max_grad_norm=0.0)
    rounded = llama(0).bfloat16()
    learner = Learner(copy.deepcopy(rounded), SFT, optim=config, steps=Steps(microbatch_tokens=9))
    keep_less(rounded)  # which computes as the learner's does
    shadow = {n: dither(n, p) for n, p in rounded.named_parameters()}
    optimizer = torch.optim.AdamW(
        [
            {"params": [m for m in shadow.values() if m.ndim > 1], "weight_decay": 0.1},
            {"params": [m for m in shadow.values() if m.ndim == 1], "weight_decay": 0.0},
        ],
        lr=1e-3,
        fused=True,
    )
    for seed in range(3):
        batch = rows_of(seed, dtype=torch.float32)
        parts = microbatches(batch, 9)
        assert len(parts) > 2
        for m in shadow.values():
            m.grad = torch.zeros_like(m)
        for part in parts:
            piece = batch.rows(torch.tensor(part))
            out = forward(Net(use(rounded)), piece, 1.0)
            weight = reduce.per_token(batch.mask)[part]
            reduce.weighted_sum(-out.logp, weight, piece.mask).backward()
            for name, p in rounded.named_parameters():
                shadow[name].grad += p.grad.float()
                p.grad = None
        optimizer.step()
        with torch.no_grad():
            for name, p in rounded.named_parameters():
                p.copy_(shadow[name])
        learner.update(batch)
        assert torch.equal(bits(learner.model), bits(rounded))
    for name, master in learner.masters.tensors().items():
        assert torch.equal(master, shadow[name])
        assert master.dtype == torch.float32
    assert learner.compute_dtype == torch.bfloat16


def use(model: Any) -> Any:
    """The model, attending through layouts."""
    model.set_attn_implementation("posttrain")
    return model


def test_a_step_of_a_millionth_is_not_lost() -> None:
    weight = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    weights = OptimizedWeights([("weight", weight)], Optim())
    for _ in range(3000):
        weight.sum().backward()
        assert weight.grad is None
        weights.step(1e-6)
    wanted = dither("weight", torch.ones(4, 4, dtype=torch.bfloat16)) - 3e-3
    # Above 1 a float32 has steps of 1.2e-7, so that each of the 3000 may be rounded by a twentieth.
    [master] = weights.masters.tensors().values()
    torch.testing.assert_close(master, wanted, rtol=0, atol=2e-4)
    assert torch.equal(weight, master.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reward", [math.inf, 1e30])
def test_a_loss_that_is_not_finite_stops_the_run_and_moves_nothing(
    dtype: torch.dtype, reward: float, llama: Make, rows_of: Make
) -> None:
    """inf makes an advantage infinite; 1e30 only the sum of squares of the gradient."""
    batch: Batch = rows_of(seed=1, dtype=torch.float32)
    learner = Learner(llama(0).to(dtype), REINFORCE, optim=Optim(lr=0.01))
    learner.update(batch)
    fresh = Learner(copy.deepcopy(learner.model), REINFORCE, optim=Optim(lr=0.01))
    fresh.restore(learner.tensors(), learner.state())
    before = {k: v.clone() for part in learner.tensors().values() for k, v in part.items()}
    model = bits(learner.model)
    what = "is not finite" if math.isinf(reward) else r"optimiser step 2: .*(inf|nan)"
    with pytest.raises(RunError, match=what):
        learner.update(replace(batch, reward=batch.reward.clamp(max=1) * reward * batch.mask))
    after = {k: v for part in learner.tensors().values() for k, v in part.items()}
    assert torch.equal(bits(learner.model), model)
    assert all(torch.equal(after[k], v) for k, v in before.items())
    assert learner.state() == {"step": 1, "critic_steps": 0, "update": 1, "method": {}}
    assert all(p.grad is None for p in learner.model.parameters())
    learner.update(batch)  # and nothing of the bad step is left in the sums
    fresh.update(batch)
    assert torch.equal(bits(learner.model), bits(fresh.model))
