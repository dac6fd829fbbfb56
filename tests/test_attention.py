"""Attention in plain numbers, and the models that are refused."""

import math
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
)

from posttrain.attention import NAME, hidden_states, masked_attention, output_head, use_layouts

SHAPE: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


class Causal:
    """A layout of one row, that remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, float, int | None, float | None]] = []

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        self.asked.append((layer, scale, window, softcap))
        return masked_attention(query, key, value, None, scale=scale, softcap=softcap, causal=True)


def by_loops(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float, cap: float | None
) -> torch.Tensor:
    out = torch.zeros_like(q)
    share = q.shape[1] // k.shape[1]
    for r in range(q.shape[0]):
        for h in range(q.shape[1]):
            for t in range(q.shape[2]):
                seen = [j for j in range(k.shape[2]) if mask[t, j]]
                scores = [float(q[r, h, t] @ k[r, h // share, j]) * scale for j in seen]
                if cap is not None:
                    scores = [cap * math.tanh(s / cap) for s in scores]
                p = torch.tensor(scores, dtype=q.dtype).softmax(0)
                out[r, h, t] = sum(w * v[r, h // share, j] for w, j in zip(p, seen, strict=True))
    return out


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("kind", ["causal", "bool", "float"])
def test_it_is_softmax_over_what_is_seen(kind: str, heads: int, cap: float | None) -> None:
    """In float64 to its own precision, soft-capped or not, with shared key heads or not."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 5, 3, generator=g, dtype=torch.float64) for n in (4, heads, heads))
    seen = torch.ones(5, 5, dtype=torch.bool).tril()
    if kind != "causal":
        seen &= torch.rand(5, 5, generator=g) < 0.6
        seen |= torch.eye(5, dtype=torch.bool)
    mask = {
        "causal": None,
        "bool": seen,
        "float": torch.zeros(5, 5, dtype=torch.float64).masked_fill(~seen, -torch.inf),
    }[kind]
    got = masked_attention(q, k, v, mask, scale=0.7, softcap=cap, causal=kind == "causal")
    torch.testing.assert_close(got, by_loops(q, k, v, seen, 0.7, cap), rtol=1e-12, atol=1e-12)


def test_each_layer_asks_with_its_own_window_scale_and_cap() -> None:
    config = Gemma2Config(
        **SHAPE
        | {
            "head_dim": 4,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 3.0,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
        }
    )
    model, layout = Gemma2ForCausalLM(config).eval(), Causal()
    use_layouts(model)
    hidden = hidden_states(model, torch.tensor([[1, 2, 3]]), torch.arange(3)[None], layout)
    assert hidden.shape == (1, 3, 8)
    assert layout.asked == [(0, 0.25, 7, 3.0), (1, 0.25, None, 3.0)]


def test_hidden_states_and_head_are_the_models_own_logits() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).double().eval()
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    with torch.no_grad():
        wanted = model(input_ids=tokens).logits
        use_layouts(model)
        hidden = hidden_states(model, tokens, torch.arange(4).expand(2, 4), Causal())
        torch.testing.assert_close(output_head(model)(hidden), wanted, rtol=1e-6, atol=1e-6)


def test_positions_are_those_that_are_given() -> None:
    """Two tokens five places apart are not two neighbours."""
    model = LlamaForCausalLM(LlamaConfig(**SHAPE | {"initializer_range": 0.5})).eval()
    use_layouts(model)
    tokens = torch.tensor([[1, 2]])
    with torch.no_grad():
        near, far, shifted = (
            hidden_states(model, tokens, torch.tensor([places]), Causal())
            for places in ([0, 1], [0, 6], [9, 10])
        )
    assert float((near - far).abs().max()) > 1e-3
    torch.testing.assert_close(near, shifted, rtol=1e-4, atol=1e-5)  # rotations are relative


REFUSED: dict[str, tuple[Any, str]] = {
    "recurrent": (
        lambda: MambaForCausalLM(MambaConfig(vocab_size=11, hidden_size=8, num_hidden_layers=1)),
        "registry|recurrent",
    ),
    "convolutions": (
        lambda: Lfm2ForCausalLM(Lfm2Config(**SHAPE | {"layer_types": ["conv", "full_attention"]})),
        "conv layers",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_model_in_which_rows_would_leak_into_one_another_is_refused(name: str) -> None:
    make, why = REFUSED[name]
    model: PreTrainedModel = make()
    with pytest.raises(ValueError, match=why):
        use_layouts(model)
    assert model.config._attn_implementation != NAME


def test_attention_sinks_are_refused_rather_than_left_out() -> None:
    sizes = SHAPE | {"head_dim": 4, "num_local_experts": 2, "num_experts_per_tok": 1}
    model = GptOssForCausalLM(GptOssConfig(**sizes)).eval()
    use_layouts(model)
    with pytest.raises(ValueError, match="sinks"):
        hidden_states(model, torch.tensor([[1, 2]]), torch.tensor([[0, 1]]), Causal())


def test_learned_positions_work_too() -> None:
    """GPT-2 adds them to the embedding."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=8, n_layer=2, n_head=2, n_positions=16)).eval()
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        wanted = model(input_ids=tokens).logits
        use_layouts(model)
        hidden = hidden_states(model, tokens, torch.arange(3)[None], Causal())
        torch.testing.assert_close(output_head(model)(hidden), wanted, rtol=1e-4, atol=1e-5)
