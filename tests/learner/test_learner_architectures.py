"""Packed rows against transformers' own forward pass, for the architectures people train."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from posttrain.learner import pack
from posttrain.learner.forward import Net, forward
from posttrain.learner.prompt_group import PromptGroup
from posttrain.learner.recompute import compute_again
from posttrain.models.attention import context_of, hidden_states, use_layouts
from posttrain.models.loading import quiet
from posttrain.types import Batch

SHAPE: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
NARROW: dict[str, Any] = {"sliding_window": 4, "layer_types": MIXED}
MODELS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama, tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen2, window": (Qwen2Config, Qwen2ForCausalLM, NARROW | {"use_sliding_window": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 8}),
    "gemma2": (
        Gemma2Config,
        Gemma2ForCausalLM,
        NARROW | {"head_dim": 8, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
    ),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, NARROW | {"head_dim": 8, "query_pre_attn_scalar": 5}),
    "mistral, window": (MistralConfig, MistralForCausalLM, {"sliding_window": 4}),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM, {"no_rope_layers": [1, 0, 1]}),
    "gpt_neox": (GPTNeoXConfig, GPTNeoXForCausalLM, {"num_key_value_heads": None}),
    "gpt_oss": (
        GptOssConfig,
        GptOssForCausalLM,
        NARROW | {"head_dim": 8, "num_local_experts": 3, "num_experts_per_tok": 2},
    ),
    "qwen3_5": (
        Qwen3_5TextConfig,
        Qwen3_5ForCausalLM,
        {
            "head_dim": 8,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 6,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
    ),
    "phi3": (Phi3Config, Phi3ForCausalLM, {"sliding_window": 4, "pad_token_id": 0}),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, {}),
    "cohere": (CohereConfig, CohereForCausalLM, {"logit_scale": 0.25}),
    "granite": (
        GraniteConfig,
        GraniteForCausalLM,
        {
            "logits_scaling": 3.0,
            "attention_multiplier": 0.7,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 2.0,
        },
    ),
}


def build(name: str) -> Any:
    """The same random weights twice: one for transformers' eager attention, one for ours."""
    config, model, special = MODELS[name]
    sizes = {k: v for k, v in (SHAPE | special).items() if v is not None or k.endswith("token_id")}
    torch.manual_seed(0)
    plain = model(config(**sizes)).double().eval()
    with torch.no_grad():
        for p in plain.parameters():
            p += 0.1 * torch.randn_like(p)
    plain.set_attn_implementation("eager")
    with quiet():
        plain.set_experts_implementation("eager")  # the other kernels know no float64
    ours = copy.deepcopy(plain)
    use_layouts(ours)
    return plain, ours


@pytest.mark.parametrize("system", [0, 9])
@pytest.mark.parametrize("whole", [512, 0, None], ids=["under a mask", "branch by branch", "in one call"])
@pytest.mark.parametrize("filled", [False, True], ids=["as it is", "filled up"])
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.usefixtures("float64")
@pytest.mark.sample(
    "llama-*",
    *(f"{name}-as it is-under a mask-9" for name in ("qwen2, window", "gemma3", "gpt_oss", "phi3")),
    "qwen3_5-as it is-branch by branch-9",
    *(f"{name}-filled up-branch by branch-0" for name in ("qwen2, window", "gemma3", "gpt_oss", "phi3")),
    *(f"{name}-filled up-in one call-9" for name in ("qwen2, window", "gpt_oss")),
    "gemma3-as it is-in one call-0",
)
def test_every_row_is_as_it_would_be_alone(
    name: str,
    whole: int | None,
    filled: bool,
    system: int,
    rows_of: Callable[..., Batch],
    by_hand: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    flat_gradient: Callable[..., torch.Tensor],
    attend_by_spans: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Log-probabilities, entropies and the gradients of both, at a temperature."""
    if whole is None:
        attend_by_spans()
    else:
        monkeypatch.setattr(pack, "WHOLE_PROMPT_GROUP", whole)
    monkeypatch.setattr(pack, "is_half", lambda x: filled)
    if name == "qwen3_5":  # float64 for its float32 states ends with the forward pass
        monkeypatch.setattr(pack, "_recomputed", lambda function, *inputs: function(*inputs))
    plain, ours = build(name)
    batch, temperature = rows_of(seed=2, turns=3, system=system), 0.8
    assert bool(pack.pack(batch).shared_prefix) == bool(system)
    g = torch.Generator().manual_seed(1)
    c, d = (torch.randn(batch.mask.shape, generator=g, dtype=torch.float64) for _ in range(2))
    seen = []
    for model, (logp, entropy) in (
        (plain, by_hand(plain, batch, temperature)),
        (ours, (lambda out: (out.logp, out.entropy))(forward(Net(ours), batch, temperature))),
    ):
        (c * logp + d * entropy).sum().backward()
        seen.append((logp.detach(), entropy.detach(), flat_gradient(model)))
    assert float(seen[0][0].abs().sum()) > 1
    assert float(seen[0][2].norm()) > 1
    for wanted, got in zip(*seen, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


def rotated(kind: str) -> LlamaForCausalLM:
    """A Llama for 16 tokens that is stretched to 64 by a rotation that changes with the longest position."""
    rope: dict[str, Any] = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 16}
    if kind == "longrope":
        rope |= {"short_factor": [1.0, 1.0], "long_factor": [2.0, 3.0]}
    torch.manual_seed(0)
    sizes = SHAPE | {"max_position_embeddings": 64 if kind == "longrope" else 16}
    model = LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters={"rope_theta": 10000.0, **rope})).double()
    use_layouts(model)
    return model


@pytest.mark.parametrize("name", list(MODELS))
def test_computing_a_layer_again_gives_the_same_gradient(
    name: str, rows_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, gradients = rows_of(seed=3, K=3), []
    for again in (False, True):
        _, model = build(name)
        with monkeypatch.context() as patch:
            if again:
                compute_again(model)
            else:
                patch.setattr(pack, "_recomputed", lambda function, *inputs: function(*inputs))
            out = forward(Net(model), batch, temperature=0.7)
            (out.logp.sum() + 0.3 * out.entropy.sum()).backward()
            gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_computing_again_turns_no_dropout_on(rows_of: Any) -> None:
    """OPT's layers apply it themselves."""
    torch.manual_seed(0)
    sizes = {k: v for k, v in SHAPE.items() if k not in ("intermediate_size", "num_key_value_heads")}
    sizes |= {"ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.5, "layerdrop": 0.5, "pad_token_id": 0}
    model = OPTForCausalLM(OPTConfig(**sizes)).eval()
    use_layouts(model)
    batch = rows_of(seed=3, dtype=torch.float32)
    wanted = forward(Net(model), batch, temperature=1.0).logp
    compute_again(model)
    assert torch.equal(forward(Net(model), batch, temperature=1.0).logp, wanted)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rotation_that_hangs_on_the_longest_row_bounds_the_context(kind: str) -> None:
    """Within the bound a row is what it would be alone; beyond it one long row changes the short ones."""
    assert context_of(rotated(kind).config) == 16
    for longest, same in ((16, True), (40, False)):
        one, both = states(rotated(kind), [5]), states(rotated(kind), [5, longest])
        assert torch.allclose(one, both[:5]) == same


def states(model: LlamaForCausalLM, sizes: list[int]) -> torch.Tensor:
    """Hidden states of documents of these sizes, end to end."""
    tokens = torch.arange(sum(sizes)) % SHAPE["vocab_size"]
    positions = torch.cat([torch.arange(n) for n in sizes])
    groups = [PromptGroup(sum(sizes[:i]), n, ()) for i, n in enumerate(sizes)]
    none = torch.empty(0, dtype=torch.long)
    layout = pack.Pack(tokens, positions, groups, none, none, none, none, none)
    with torch.no_grad():
        return hidden_states(model, tokens[None], positions[None], layout)[0]


@pytest.mark.parametrize("name", list(MODELS))
def test_other_models_may_use_all_their_positions(name: str) -> None:
    config, _, special = MODELS[name]
    assert context_of(config(**{k: v for k, v in (SHAPE | special).items() if v is not None})) == 64
