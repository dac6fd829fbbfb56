"""FLOPs of passes in closed form against torch's own count of the operators that run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from posttrain.learner import packed_attention
from posttrain.learner.flops import ModelFlops, seen
from posttrain.learner.forward import Net, forward
from posttrain.learner.learner import Learner, Steps
from posttrain.learner.lora import Lora, add_adapter, base
from posttrain.learner.pack import Pack, pack
from posttrain.learner.prompt_group import PromptGroup, sees
from posttrain.methods.table import GRPO, SFT
from posttrain.models import attention
from posttrain.models.attention import use_layouts
from posttrain.plan.memory import Shape
from posttrain.types import Batch

Make = Callable[..., Any]
SIZES = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "max_position_embeddings": 64}
SIZES |= {
    "vocab_size": 23,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "num_attention_heads": 4,
}


def moe() -> PreTrainedModel:
    """Two of five experts are active."""
    sizes = {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "num_key_value_heads": 2,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **sizes, experts_implementation="eager"))


def windowed() -> PreTrainedModel:
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **kinds, num_key_value_heads=1, intermediate_size=24))


def uneven() -> PreTrainedModel:
    """Layers have heads of several sizes."""
    kinds = {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 3,
        "global_head_dim": 16,
    }
    sizes = {"num_key_value_heads": 1, "intermediate_size": 24, "hidden_size_per_layer_input": 0}
    return Gemma4ForCausalLM(Gemma4TextConfig(**SIZES, **kinds, **sizes))


def visible(packed: Pack, window: int | None) -> int:
    """Return the pairs of tokens by the masks of attention."""
    prefix = packed.shared_prefix
    groups = [PromptGroup(0, prefix, ()), *packed.prompt_groups] if prefix else packed.prompt_groups
    return sum(
        int(sees(g, prefix if g.start else 0, packed.positions[g.start : g.stop], window).sum())
        for g in groups
    )


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("system", [0, 40])
@pytest.mark.parametrize("trees", [True, False])
def test_pairs_are_those_of_the_masks(rows_of: Make, window: int | None, system: int, trees: bool) -> None:
    for seed in range(4):
        packed = pack(rows_of(seed, system=system), trees=trees)
        assert bool(packed.shared_prefix) == bool(system)
        assert seen(packed.positions, window) == visible(packed, window)


def of_addmm(out: Any, a: Any, b: Any, **_: Any) -> int:
    """Return the operations of a product of matrices of these shapes, which torch counts in another form."""
    return 2 * int(a[0] * a[1] * b[1])


IN_PLACE = {torch.ops.aten.addmm_: of_addmm}
KINDS: dict[str, tuple[Callable[[Make], PreTrainedModel], Lora]] = {
    "grouped queries": (lambda llama: llama(0), Lora()),
    "tied embeddings": (lambda llama: llama(0, tie_word_embeddings=True), Lora()),
    "grouped queries, an adapter": (lambda llama: llama(0), Lora(rank=3)),
    "experts": (lambda llama: moe(), Lora()),
    "experts, an adapter": (
        lambda llama: moe(),
        Lora(rank=3, targets=("q_proj", "k_proj", "v_proj", "o_proj")),
    ),
    "windows": (lambda llama: windowed(), Lora()),
    "heads by layer": (lambda llama: uneven(), Lora()),
}


def first_inputs(model: Any, lora: Lora) -> int:
    """Return the weights of the first layer's projections of the embedding, which needs no gradient."""
    attend = base(model).get_decoder().layers[0].self_attn
    out = 0
    for part in (attend.q_proj, attend.k_proj, attend.v_proj):
        plain = getattr(part, "base_layer", part)
        adapted = plain is not part
        out += plain.weight.numel() + (lora.rank * plain.in_features if adapted else 0)
    return out


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_passes_count_what_torch_counts(
    kind: str, learns: bool, llama: Make, rows_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal, but for three parts that are known.

    Products with masks compute pairs that no token sees. Chunks of the head are computed again for the
    gradient. Under an adapter nothing needs the gradient of the embedding: the first layer's projections, all
    of them adapted, make none.
    """
    build, lora = KINDS[kind]
    model = build(llama)
    use_layouts(model)
    monkeypatch.setattr(packed_attention, "suits", lambda *_: False)  # torch does not see compiled kernels
    monkeypatch.setattr(attention, "is_fusible", lambda *_: False)
    if lora.rank:
        model = add_adapter(model, lora, seed=0)
    net = Net(base(model))
    batch: Batch = rows_of(seed=1, dtype=torch.float32)
    packed = pack(batch, trees=True)
    with torch.set_grad_enabled(learns), FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
        out = forward(net, batch, 1.0)
        if learns:
            out.logp.sum().backward()
    sizes = ModelFlops.of(base(model))
    dense = sum((g.stop - g.start) * (g.stop - g.start + packed.shared_prefix) for g in packed.prompt_groups)
    hidden = sum(n * (dense - seen(packed.positions, w)) for w, n in sizes.pairs.items())
    passes = 3 if learns else 1
    causes = 2 * passes * hidden
    if learns:
        causes += 2 * sizes.head * len(packed.target)
    if learns and lora.rank:
        causes -= 2 * first_inputs(model, lora) * len(packed.tokens)
    assert not packed.shared_prefix
    assert counter.get_total_flops() == net.flops + causes
    assert net.flops > abs(causes) > 0


def test_the_estimate_takes_the_largest_heads() -> None:
    assert Shape.of(uneven()).head_size == 16


def test_an_update_counts_every_pass(llama: Make, rows_of: Make) -> None:
    """The steps of two epochs, and not evaluations between updates."""
    batch = rows_of(seed=1, dtype=torch.float32)
    learner = Learner(llama(0), SFT, steps=Steps(epochs=2))
    sizes, packed = ModelFlops.of(base(learner.model)), pack(batch, trees=True)
    once = sizes.of_pass(packed.positions, len(packed.target), learns=True)
    learner.score(batch)
    learner.update(batch)
    learner.assess(batch)
    assert learner.flops == 2 * once
    learner.score(batch)
    learner.forward_backward(batch)
    assert learner.flops == 3 * once


def test_recomputation_does_not_count(llama: Make, rows_of: Make) -> None:
    batch, counts = rows_of(seed=1, dtype=torch.float32), []
    for again in (False, True):
        learner = Learner(llama(0), GRPO, steps=Steps(gradient_checkpointing=again))
        learner.update(batch)
        counts.append(learner.flops)
    assert counts[0] == counts[1] > 0


def test_it_is_six_operations_a_weight_and_token_for_a_large_model(llama: Make) -> None:
    """With a head at every token, and rows that are short next to the width."""
    model = llama(0, hidden_size=256, intermediate_size=512)
    sizes = ModelFlops.of(model)
    embedding = model.get_input_embeddings().weight.numel()
    weights = sum(p.numel() for p in model.parameters() if p.ndim == 2) - embedding
    assert sizes.weights + sizes.head == weights
    flops = sizes.of_pass(torch.arange(8), 8, learns=True)
    assert 1 < flops / (6 * 8 * weights) < 1.01
