"""Muon against torch's own, a singular value decomposition, and a table of the weights that it moves."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GptOssConfig, MixtralConfig, PreTrainedConfig

from posttrain.learner.critic import CriticModel
from posttrain.learner.learner import Learner, Steps
from posttrain.learner.lora import Lora, add_adapter
from posttrain.learner.optim import Optim, OptimizedWeights, hidden_matrices
from posttrain.methods.table import SFT
from posttrain.models.rounding import dither
from posttrain.plan.companions import optimizer_sizes
from posttrain.plan.memory import Shape, estimate

Make = Callable[..., Any]
MUON = Optim(name="muon", lr=0.02, weight_decay=0.1, momentum=0.9, max_grad_norm=0.0)


def by_muon(*named: tuple[str, nn.Parameter], **numbers: Any) -> OptimizedWeights:
    """Weights that Muon moves, all of them matrices."""
    return OptimizedWeights(named, replace(MUON, **numbers), matrices=frozenset(p for _, p in named))


def gradients(shape: tuple[int, ...], count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6), (3, 6, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_has_the_bits_of_torchs_muon(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """On float32 masters, also of a transposed weight; a stack moves as each of its matrices alone."""
    weight = nn.Parameter(gradients(shape, 1, seed=1)[0].to(dtype).mT.contiguous().mT)
    start = dither("w", weight) if dtype == torch.bfloat16 else weight.detach().clone()
    theirs = [nn.Parameter(x.clone().contiguous()) for x in start.view(-1, *shape[-2:])]
    muon = torch.optim.Muon(theirs, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    weights = by_muon(("w", weight))
    [master] = weights.masters.masters
    for grad, rate in zip(gradients(shape, 3), (0.02, 0.01, 0.03), strict=True):
        master.grad = grad.clone()
        for p, g in zip(theirs, grad.view(-1, *shape[-2:]), strict=True):
            p.grad = g.clone()
        muon.param_groups[0]["lr"] = rate
        muon.step()
        weights.step(rate)
    expected = torch.stack([*theirs]).view(shape)
    assert torch.equal(master.numbers(), expected)
    assert torch.equal(weight, expected.to(dtype))
    assert [*weights.tensors()[1]] == ["w/momentum_buffer"]


@pytest.mark.parametrize("shape", [(24, 64), (64, 24), (24, 96)], ids=str)
def test_a_step_is_orthogonal_and_as_large_as_adamws(shape: tuple[int, int]) -> None:
    """The singular vectors of the gradient with values near 1, times 0.2 √(longer side); any scale of it."""
    grad = gradients(shape, 1)[0]
    steps = []
    for scale in (1.0, 2.0**-10):
        weight = nn.Parameter(torch.zeros(shape))
        weights = by_muon(("w", weight))
        weight.grad = scale * grad
        weights.step(1.0)
        steps.append(-weight.detach())
    direction = steps[0] / (0.2 * max(shape) ** 0.5)
    values = torch.linalg.svdvals(direction)
    assert 0.65 < float(values.min()) < float(values.max()) < 1.25
    u, _, vh = torch.linalg.svd(grad, full_matrices=False)
    along = torch.einsum("ir,ij,rj->r", u, direction, vh)
    torch.testing.assert_close(along, torch.ones_like(along), rtol=0, atol=0.35)
    assert float(direction.norm() ** 2 - along.norm() ** 2) < 0.02 * float(along.norm() ** 2)
    assert float(steps[0].square().mean().sqrt()) == pytest.approx(0.2, rel=0.2)
    assert torch.equal(steps[1], steps[0])


def model_of(config: PreTrainedConfig) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


SMALL = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
EXPERTS = MixtralConfig(**SMALL, intermediate_size=8, num_key_value_heads=2, num_local_experts=2)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
GATED = ("gate_proj", "up_proj", "down_proj")
TABLE: dict[str, tuple[Callable[[Make], nn.Module], set[str], set[str]]] = {
    "Llama": (
        lambda llama: llama(0),
        {f"{x}.weight" for x in (*ATTENTION, *GATED)},
        {"embed_tokens.weight", "lm_head.weight", "input_layernorm.weight", "norm.weight"}
        | {"post_attention_layernorm.weight"},
    ),
    "tied": (
        lambda llama: llama(0, tie_word_embeddings=True, attention_bias=True),
        {f"{x}.weight" for x in (*ATTENTION, *GATED)},
        {"embed_tokens.weight", "input_layernorm.weight", "norm.weight", "post_attention_layernorm.weight"}
        | {f"{x}.bias" for x in ATTENTION},
    ),
    "GPT-2": (  # its linear layers are transposed, and its positions are embedded
        lambda llama: model_of(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=8)),
        {"c_attn.weight", "c_proj.weight", "c_fc.weight"},
        {"wte.weight", "wpe.weight", "c_attn.bias", "c_proj.bias", "c_fc.bias"}
        | {f"ln_{x}.{kind}" for x in ("1", "2", "f") for kind in ("weight", "bias")},
    ),
    "experts": (
        lambda llama: model_of(EXPERTS),
        {f"{x}.weight" for x in ATTENTION} | {"gate.weight", "experts.gate_up_proj", "experts.down_proj"},
        {"embed_tokens.weight", "lm_head.weight", "input_layernorm.weight", "norm.weight"}
        | {"post_attention_layernorm.weight"},
    ),
    "an adapter": (
        lambda llama: add_adapter(llama(0), Lora(rank=2, targets=("q_proj", "lm_head"), dora=True), 0),
        {"q_proj.lora_A.default.weight", "q_proj.lora_B.default.weight"},
        {"lm_head.lora_A.default.weight", "lm_head.lora_B.default.weight"}
        | {f"{x}.lora_magnitude_vector.default.weight" for x in ("q_proj", "lm_head")},
    ),
    "a critic": (
        lambda llama: CriticModel(llama(0), llama(1)),
        {f"{x}.weight" for x in (*ATTENTION, *GATED)},
        {"embed_tokens.weight", "input_layernorm.weight", "norm.weight", "post_attention_layernorm.weight"}
        | {"head.weight", "head.bias"},
    ),
}
"""A model, the ends of the names of its trained weights that Muon moves, and of those that AdamW does."""


@pytest.mark.parametrize("kind", list(TABLE))
def test_muon_moves_the_matrices_of_layers(kind: str, llama: Make) -> None:
    make, moved, others = TABLE[kind]
    model = make(llama)
    matrices = hidden_matrices(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def ends(names: list[str]) -> set[str]:
        known = moved | others
        return {next((end for end in known if f".{name}".endswith(f".{end}")), name) for name in names}

    assert ends([name for name, p in trained.items() if p in matrices]) == moved
    assert ends([name for name, p in trained.items() if p not in matrices]) == others


@pytest.mark.usefixtures("float64")
def test_a_run_is_torchs_muon_and_adamw_on_gradients_taken_by_hand(
    llama: Make, rows_of: Make, by_hand: Make
) -> None:
    """Three updates: schedule, decay of the embeddings too and of no vector. (torch clips to 1 - 1e-6 of the
    bound, of which Muon's bfloat16 would make more.)"""
    config = Optim(name="muon", lr=0.05, weight_decay=0.3, max_grad_norm=0.0, schedule="linear")
    plain = llama(0).double().eval()
    learner = Learner(
        copy.deepcopy(plain), SFT, optim=config, total_steps=4, steps=Steps(microbatch_tokens=9)
    )
    matrices = [p for n, p in plain.named_parameters() if "proj" in n]
    tables = [p for n, p in plain.named_parameters() if "embed" in n or "head" in n]
    vectors = [p for p in plain.parameters() if p.ndim == 1]
    groups = [{"params": tables, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    muon = torch.optim.Muon(matrices, weight_decay=0.3, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    theirs = (muon, torch.optim.AdamW(groups))
    for step in range(3):
        batch = rows_of(seed=step)
        logp, _ = by_hand(plain, batch, 1.0)
        plain.zero_grad()
        (-logp.sum() / batch.mask.sum()).backward()
        for optimizer in theirs:
            for group in optimizer.param_groups:
                group["lr"] = 0.05 * (1 - step / 4)
            optimizer.step()
        learner.update(batch)
        for ours, wanted in zip(learner.model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("adapter", [Lora(), Lora(rank=2)], ids=["all weights", "an adapter"])
def test_the_estimate_counts_one_moment_for_a_matrix(adapter: Lora, llama: Make, rows_of: Make) -> None:
    learner = Learner(llama(0), SFT, optim=MUON, lora=adapter)
    learner.update(rows_of(seed=0, dtype=torch.float32))
    moments = {n: x for n, x in learner.tensors()["optimizer"].items() if not n.endswith("/step")}
    momentum = sum(x.numel() for n, x in moments.items() if n.endswith("/momentum_buffer"))
    config = llama(0).config
    optimizer = optimizer_sizes(config, MUON, adapter)
    assert optimizer == {"matrices": momentum}
    assert momentum > 0
    trained = sum(p.numel() for p in learner.model.parameters() if p.requires_grad)
    shape = Shape.of(llama(0), trained, **optimizer)
    parts = estimate(shape, dtype=torch.float32, microbatch_tokens=1).parts
    assert parts["Muon momentum"] == 4 * momentum
    assert parts["Muon momentum"] + parts["AdamW moments"] == 4 * sum(x.numel() for x in moments.values())


def test_the_state_of_adamw_is_refused(llama: Make, rows_of: Make) -> None:
    muon, adamw = Learner(llama(0), SFT, optim=MUON), Learner(llama(0), SFT)
    for learner in (muon, adamw):
        learner.update(rows_of(seed=0, dtype=torch.float32))
    saved = [(learner.tensors(), learner.state()) for learner in (adamw, muon)]
    for learner, checkpoint in zip((muon, adamw), saved, strict=True):
        with pytest.raises(KeyError, match="unknown parameter"):
            learner.restore(*checkpoint)


def test_biases_of_experts_are_left_to_adamw() -> None:
    """One row for each expert: a matrix in shape alone."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 30}
    config = GptOssConfig(
        **sizes, head_dim=4, num_attention_heads=4, num_key_value_heads=2, num_local_experts=3
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = {name for name, p in model.named_parameters() if p in hidden_matrices(model)}
    kinds = {name.removeprefix("model.layers.0.") for name in names}
    attention = {f"self_attn.{name}_proj.weight" for name in "qkvo"}
    assert kinds == attention | {"mlp.router.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
