"""Attention in plain numbers, and the models that are refused."""

import math
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    DogeConfig,
    DogeForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedModel,
    RobertaConfig,
    RobertaForCausalLM,
)

from posttrain.models import attention
from posttrain.models.attention import (
    NAME,
    causal_attention,
    hidden_states,
    key_heads_of,
    masked_attention,
    output_head,
    use_layouts,
)
from posttrain.models.masks import Bands

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
        self.asked: list[tuple[float, int | None, float | None]] = []

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        assert sinks is None
        self.asked.append((scale, window, softcap))
        return masked_attention(query, key, value, None, scale=scale, softcap=softcap, causal=True)


def by_loops(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    cap: float | None,
    sinks: torch.Tensor | None,
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
                p = torch.tensor(scores, dtype=q.dtype).exp()
                p /= p.sum() + (0 if sinks is None else sinks[h].exp())
                out[r, h, t] = sum(w * v[r, h // share, j] for w, j in zip(p, seen, strict=True))
    return out


@pytest.mark.parametrize("sink", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("kind", ["causal", "bool", "float"])
def test_it_is_softmax_over_what_is_seen(kind: str, heads: int, cap: float | None, sink: bool) -> None:
    """In float64 to its own precision, with or without a soft cap, sinks and shared key heads."""
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
    sinks = torch.randn(4, generator=g, dtype=torch.float64) if sink else None
    got = masked_attention(q, k, v, mask, scale=0.7, softcap=cap, sinks=sinks, causal=kind == "causal")
    torch.testing.assert_close(got, by_loops(q, k, v, seen, 0.7, cap, sinks), rtol=1e-12, atol=1e-12)


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
    assert layout.asked == [(0.25, 7, 3.0), (0.25, None, 3.0)]


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
    "a mask of its own": (lambda: DogeForCausalLM(DogeConfig(**SHAPE)), "mask of its own"),
    "attention that is told of no layout": (
        lambda: NemotronForCausalLM(NemotronConfig(**SHAPE)),
        "does not pass the keywords of its forward",
    ),
    "a window in the mask alone": (
        lambda: PhimoeForCausalLM(
            PhimoeConfig(**SHAPE | {"sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1})
        ),
        "sliding windows",
    ),
    "sight of what comes later": (
        lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, head_dim=4, use_bidirectional_attention=True)),
        "attends to later tokens",
    ),
    "more between hidden states and logits": (
        lambda: RobertaForCausalLM(RobertaConfig(**SHAPE | {"pad_token_id": 0, "is_decoder": True})),
        "computes its logits in a way",
    ),
    "convolutions": (
        lambda: Lfm2ForCausalLM(Lfm2Config(**SHAPE | {"layer_types": ["conv", "full_attention"]})),
        "conv layers",
    ),
}


NUMBERS = {"a window in the mask alone", "more between hidden states and logits"}
"""What only a model with weights shows: which experts a token goes to, and what its logits are."""


@pytest.mark.parametrize(
    ("name", "weights"),
    [(name, True) for name in REFUSED] + [(name, False) for name in REFUSED if name not in NUMBERS],
)
def test_a_model_that_a_layout_does_not_describe_is_refused(name: str, weights: bool) -> None:
    """With its weights, and before there are any."""
    make, why = REFUSED[name]
    with torch.device("cpu" if weights else "meta"):
        model: PreTrainedModel = make()
    with pytest.raises(ValueError, match=why):
        use_layouts(model)
    assert model.config._attn_implementation != NAME


@pytest.mark.parametrize("flash", [False, True])
def test_blocks_under_bands_are_softmax_over_what_is_seen(
    monkeypatch: pytest.MonkeyPatch, flash: bool
) -> None:
    """Queries of a whole sequence and of its end, windows shorter and longer than a block; seed 0.

    flash: through the bias with which flash attention is called on a GPU; a processor turns it into a mask.
    """
    monkeypatch.setattr(attention, "BLOCK", 4)
    monkeypatch.setattr(attention, "_takes_flash", lambda query, key, value: flash)
    g, bands = torch.Generator().manual_seed(0), Bands()
    for total, n in ((11, 11), (11, 6), (3, 3), (12, 1), (9, 8)):
        q, k, v = (torch.randn(1, h, t, 3, generator=g).double() for h, t in ((4, n), (2, total), (2, total)))
        place = torch.arange(total)
        for window in (None, 1, 2, 3, 5, 20):
            ago = place[total - n :, None] - place
            seen = (ago >= 0) & (ago < (window or total))
            for cap in (None, 1.5):
                got = causal_attention(q, k, v, bands, scale=0.7, window=window, softcap=cap)
                torch.testing.assert_close(
                    got, by_loops(q, k, v, seen, 0.7, cap, None), rtol=1e-12, atol=1e-12
                )


def test_heads_of_their_own_are_not_copied_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoding step on a GPU folds the queries of a key head, and would copy the whole cache."""
    monkeypatch.setattr(attention, "_repeats", lambda query, mask: True)
    calls: list[str] = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    for heads, copies in ((1, False), (2, True)):
        calls.clear()
        q, k, v = (torch.zeros(2, h, n, 4) for h, n in ((2 * heads, 1), (2, 64), (2, 64)))
        with Calls():
            masked_attention(q, k, v, torch.ones(1, 64, dtype=torch.bool), scale=1.0, softcap=None)
        assert any("clone" in name or "repeat" in name for name in calls) == copies, calls


@pytest.mark.parametrize("window", [None, 100])
def test_no_mask_is_the_square_of_a_long_row(window: int | None) -> None:
    class Largest(TorchDispatchMode):
        found = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.found = max(self.found, out.untyped_storage().nbytes())
            return out

    q, k, v = (torch.zeros(1, 1, n, 4) for n in (4000, 5000, 5000))
    with Largest() as made:
        causal_attention(q, k, v, Bands(), scale=1.0, window=window, softcap=None)
    assert made.found <= 4 * attention.BLOCK * (5000 + attention.BLOCK)


@pytest.mark.parametrize(
    ("device", "dtype", "masked", "repeated"),
    [
        ("cuda", torch.bfloat16, True, True),
        ("cuda", torch.bfloat16, False, False),
        ("cuda", torch.float32, False, True),
        ("cpu", torch.float32, True, False),
    ],
)
def test_shared_key_heads_are_repeated_where_no_kernel_shares_them(
    device: str, dtype: torch.dtype, masked: bool, repeated: bool
) -> None:
    """On a GPU that pretends to be one: shapes without numbers."""
    asked: list[Any] = []

    class Asked(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.nn.functional.scaled_dot_product_attention:
                asked.append((args[1].shape[1], kwargs["enable_gqa"]))
                return args[0]
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(), Asked():
        q, k = (torch.empty(1, heads, 5, 8, dtype=dtype, device=device) for heads in (6, 2))
        mask = torch.empty(5, 5, dtype=dtype, device=device) if masked else None
        masked_attention(q, k, k, mask, scale=1.0, softcap=None, causal=not masked)
    assert asked == [(6, False) if repeated else (2, True)]


def test_learned_positions_work_too() -> None:
    """GPT-2 adds them to the embedding."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=8, n_layer=2, n_head=2, n_positions=16)).eval()
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        wanted = model(input_ids=tokens).logits
        use_layouts(model)
        hidden = hidden_states(model, tokens, torch.arange(3)[None], Causal())
        torch.testing.assert_close(output_head(model)(hidden), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 600])
def test_masks_are_what_a_kernel_of_a_gpu_can_read(window: int | None) -> None:
    """Views begin at a multiple of 8 numbers and have rows as far apart, whichever was made before them."""
    bands, like = Bands(), torch.zeros((), dtype=torch.bfloat16)
    for rows, before in ((100, 1000), (100, 900), (7, 37), (512, 511), (512, 1001), (3, 0)):
        mask = bands.mask(rows, before, window, like)
        assert mask.stride(0) % 8 == mask.storage_offset() % 8 == 0
        assert mask.shape == (rows, before + rows)
        assert mask.equal(Bands().mask(rows, before, window, like))


def test_key_heads_are_those_of_each_layer() -> None:
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "attention_k_eq_v": True}
    sizes = {"head_dim": 4, "global_head_dim": 16, "num_global_key_value_heads": 2}
    gemma = Gemma4TextConfig(**SHAPE, **kinds, **sizes)
    plain = GPT2Config(n_embd=8, n_head=2, n_layer=1)  # names neither
    for config, expected in ((gemma, [(1, 4), (2, 16)]), (plain, [(2, 4)])):
        assert [key_heads_of(layer) for layer in config.per_layer_config] == expected


def test_cudnn_s_attention_is_not_taken_where_it_would_come_first() -> None:
    """Its gradients under masks were NaN, and it plans again for every shape."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig(**SHAPE))
        use_layouts(model)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
