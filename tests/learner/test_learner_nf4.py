"""4-bit weights under an adapter: the format of bitsandbytes, and the policy of dequantised weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from posttrain.learner.learner import Learner, Steps
from posttrain.learner.lora import Lora, save_adapter, with_saved_adapter
from posttrain.learner.optim import Optim
from posttrain.learner.trust_region import Trust
from posttrain.methods.table import GRPO, METHODS, SFT
from posttrain.models import nf4
from posttrain.types import Batch

Make = Callable[..., Any]
OF_BITSANDBYTES = (
    "4466a96183887bb6329a936da568cca4575897997a679e325ab866966acf33d55bcc2f5915553c6b"
    "7a47b5c96f17337ad2990168879994b36077b93745e58cbd353abaf278416259"
)
"""What bitsandbytes 0.50.2 stores for `numbers()`: quantize_4bit(numbers, quant_type="nf4", blocksize=64)."""
ITS_SIZES = [3.4105026721954346, 2.6133224964141846, 1.9506571292877197]


def numbers() -> torch.Tensor:
    return torch.randn(2, 72, generator=torch.Generator().manual_seed(0))


def learners(
    llama: Make, lora: Lora, dtype: torch.dtype, method: Any = SFT, *, bias: bool = False, **how: Any
) -> list[Learner]:
    """Return a learner over packed weights and one over the numbers that they hold."""
    out = []
    for change in (nf4.pack, nf4.round_trip):
        model = llama(0, attention_bias=bias).to(dtype)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter, generator=torch.Generator().manual_seed(2))
        change(model)
        out.append(Learner(model, method, optim=Optim(lr=0.05), lora=lora, **how))
    return out


def test_indices_and_sizes_are_those_of_bitsandbytes() -> None:
    indices, sizes = nf4.quantise(numbers())
    assert bytes(indices.tolist()).hex() == OF_BITSANDBYTES
    assert sizes.tolist() == ITS_SIZES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(2, 72), (3, 64), (5, 7), (1, 1)])
def test_the_stored_numbers_are_the_nearest_and_stay(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """A slow loop over numbers finds the same, and storing them again changes nothing."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    stored = nf4.stored(weight)
    flat, nearest = weight.flatten().float().tolist(), []
    for n, x in enumerate(flat):
        block = flat[n - n % nf4.BLOCK :][: nf4.BLOCK]
        size = max(map(abs, block))
        nearest.append(min((abs(x / size - value), value * size) for value in nf4.VALUES)[1])
    torch.testing.assert_close(stored.flatten(), torch.tensor(nearest).to(dtype))
    assert torch.equal(nf4.stored(stored), stored)


def test_a_block_of_zeros_stays_one() -> None:
    assert not nf4.stored(torch.zeros(3, 50)).any()


def test_the_default_dtype_changes_nothing() -> None:
    """transformers sets it for the whole process while it builds a model."""
    weight, before = numbers(), torch.get_default_dtype()
    exact = nf4.stored(weight)
    nf4._pairs.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(nf4.stored(weight), exact)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("dtype", "lora", "bias", "checkpointing"),
    [
        (torch.float32, Lora(rank=4), False, False),
        (torch.bfloat16, Lora(rank=4), True, False),
        (torch.bfloat16, Lora(rank=4, dora=True), True, False),
        (torch.float32, Lora(rank=4), True, True),
    ],
    ids=["float32", "bfloat16", "dora", "checkpointing"],
)
def test_packed_weights_train_as_dequantised_ones(
    dtype: torch.dtype, lora: Lora, bias: bool, checkpointing: bool, llama: Make, rows_of: Make
) -> None:
    steps = Steps(gradient_checkpointing=checkpointing)
    packed, plain = learners(llama, lora, dtype, bias=bias, steps=steps)
    for seed in range(3):
        batch = rows_of(seed, dtype=torch.float32)
        losses = [learner.update(batch).metrics["loss"] for learner in (packed, plain)]
        assert losses[0] == losses[1]
    ours, theirs = (dict(learner.weights()) for learner in (packed, plain))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    start = dict(llama(0, attention_bias=bias).to(dtype).named_parameters())
    assert {name for name in ours if not torch.equal(ours[name], start[name])} >= {
        f"model.layers.1.{part}_proj.weight" for part in ("self_attn.q", "mlp.down")
    }


def test_a_trust_region_sees_through_packed_weights(llama: Make, rows_of: Make) -> None:
    """Its products with the Fisher matrix are of derivatives in both directions."""
    method = METHODS["trpo"].method
    both = learners(llama, Lora(rank=2), torch.float32, method=method, trust=Trust())
    batch = rows_of(0, dtype=torch.float32)
    metrics = [learner.update(batch).metrics for learner in both]
    assert metrics[0]["trust/kl"] > 0
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-5)


def test_the_reference_is_the_dequantised_model(llama: Make, rows_of: Make) -> None:
    packed, plain = learners(llama, Lora(rank=4), torch.float32, method=GRPO)
    batch = rows_of(0, dtype=torch.float32)
    for learner in (packed, plain):
        learner.update(batch)
    assert torch.equal(packed.score_reference(batch).logp, plain.score_reference(batch).logp)
    assert not torch.equal(packed.score_reference(batch).logp, packed.score(batch).logp)


def test_a_saved_adapter_is_merged_into_what_the_bits_hold(
    llama: Make, rows_of: Make, tmp_path: Path
) -> None:
    packed, _ = learners(llama, Lora(rank=4), torch.bfloat16)
    packed.update(rows_of(0, dtype=torch.float32))
    save_adapter(packed.model, tmp_path)
    model = llama(0).to(torch.bfloat16)
    nf4.round_trip(model)
    merged = dict(with_saved_adapter(model, tmp_path).named_parameters())
    assert all(torch.equal(merged[name], tensor) for name, tensor in packed.weights())


def saved_bytes(model: PreTrainedModel, x: torch.Tensor) -> int:
    """Return the bytes that the graph of one forward pass saves, without views of the same memory."""
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(inputs_embeds=x)
    return sum(saved.values())


def test_it_takes_four_and_a_half_bits_and_no_graph_more(llama: Make) -> None:
    """A graph over plain weights keeps them (they are there anyway); one over packed weights none."""
    wide = llama(0, hidden_size=64, intermediate_size=128)
    linear = sum(module.weight.numel() for module in nf4.layers(wide).values())
    x = torch.randn(1, 3, 64, requires_grad=True)
    other = saved_bytes(wide.requires_grad_(False), x) - 4 * linear
    nf4.pack(wide)
    buffers = sum(b.nbytes for n, b in wide.named_buffers() if n.endswith((".indices", ".size")))
    assert 8 * buffers == nf4.BITS * linear
    assert saved_bytes(wide, x) <= other
    assert not any(isinstance(m, nf4.NF4Linear) for m in (wide.lm_head, wide.model.embed_tokens))
    assert sum(isinstance(m, nn.Linear) for m in wide.modules()) == 15


def test_split_and_whole_steps_agree(llama: Make, rows_of: Make) -> None:
    whole, _ = learners(llama, Lora(rank=4), torch.float64)
    cut, _ = learners(llama, Lora(rank=4), torch.float64, steps=Steps(microbatch_tokens=16))
    batch: Batch = rows_of(0)
    ours, theirs = whole.update(batch), cut.update(batch)
    assert ours.metrics["grad_norm"] == pytest.approx(theirs.metrics["grad_norm"], rel=1e-9)
