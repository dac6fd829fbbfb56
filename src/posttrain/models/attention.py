"""Attention of any decoder-only transformers model, delegated to a layout.

transformers lets a library register its own attention function and passes it every keyword
of the model's forward. posttrain's function calls the keyword `layout`, so the learner (rows packed
end to end) and the sampling engine (a KV cache) run the same model code and differ only in which
tokens see which.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from jaxtyping import Float, Int
from torch import nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, PreTrainedModel

from posttrain.models.loading import computing
from posttrain.models.masks import BLOCK, Bands
from posttrain.models.recurrent import Reads, delegate, layers_with_state

NAME = "posttrain"
KINDS = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers that a layout can serve."""
RECURRENT = "linear_attention"
"""Kind of the layers with a state; a layout serves those that are gated delta nets (recurrent.py)."""

WORTH = 8
"""n: a beginning that several prompts share is computed once if that saves at least one in n tokens; the
prompts then attend under a mask, which is slower than causal attention."""

MASKED = "masked_tokens"
"""Name of a model's buffer that is True at ids without a token."""
IMPOSSIBLE = -1e9
"""Logit of an id without a token: its probability is 0 in float32, and 0 · logit is 0, unlike for -inf."""

Row = TypeVar("Row", list[int], tuple[int, ...])
Heads = Float[torch.Tensor, "R H T D"]
Sinks = Float[torch.Tensor, "H"]


class Layout(Protocol):
    """Which tokens see which in one forward pass."""

    def attend(
        self,
        query: Heads,
        key: Heads,
        value: Heads,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Sinks | None = None,
    ) -> Heads:
        """Return the attention's output: the query's shape, with the values' head size.

        key and value have fewer heads than query if the model shares them (grouped queries);
        window is the number of latest positions that a token sees (itself included), None for all.
        softcap, sinks: see masked_attention.
        Called once for each attention of the pass: some layers have several, some run several times.
        """
        ...

    def read(self, layer: Reads, hidden: Float[torch.Tensor, "R T D"]) -> Float[torch.Tensor, "R T D"]:
        """Return what a layer with a state makes of the tokens (see recurrent.py)."""
        ...


HARMLESS = frozenset(
    ["cache_position", "dropout", "output_attentions", "output_router_logits", "position_ids", "use_cache"]
)
"""Keywords of an attention function that do not change which tokens see which, or that layouts handle."""


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    layout: Layout | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    unknown = sorted(name for name, value in others.items() if value is not None and name not in HARMLESS)
    for condition, problem in (
        (layout is None, "does not pass the keywords of its forward to its attention"),
        (attention_mask is not None, "makes an attention mask of its own"),
        (not causal, "attends to later tokens"),
        (bool(unknown), f"passes {', '.join(unknown)} to its attention, which posttrain does not support"),
    ):
        if condition:
            raise ValueError(f"{type(module).__name__} {problem}")
    assert layout is not None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = layout.attend(query, key, value, scale=scale, window=sliding_window, softcap=softcap, sinks=s_aux)
    # Contiguous, as transformers' own functions return it: some architectures take views.
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attention)


def is_fusible(softcap: float | None, sinks: Sinks | None) -> bool:
    """Return whether fused kernels compute attention with this soft cap and these sinks: with neither."""
    return softcap is None and sinks is None


def masked_attention(
    query: Heads,
    key: Heads,
    value: Heads,
    mask: torch.Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    sinks: Sinks | None = None,
    causal: bool = False,
) -> Heads:
    """softmax(q kᵀ · scale + mask) v; `causal` replaces the mask if queries and keys are the same tokens.

    With a softcap c the scores are c·tanh(score/c) before the mask (Gemma 2). sinks: for each query head the
    score of a key that every token sees besides, whose value is 0 (gpt-oss). No fused kernel supports either.
    """
    groups = query.shape[1] // key.shape[1]
    if is_fusible(softcap, sinks):
        if groups > 1 and _repeats(query, mask):  # a repeat by 1 copies too
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
            groups = 1
        return nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=groups > 1
        )
    if causal:
        T = query.shape[-2]
        mask = torch.ones(T, T, dtype=torch.bool, device=query.device).tril()
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query @ key.transpose(-1, -2)
    scores = scores * scale if softcap is None else softcap * torch.tanh(scores * (scale / softcap))
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:3], 1)
        scores, value = torch.cat([scores, sink], dim=-1), nn.functional.pad(value, (0, 0, 0, 1))
    return scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype) @ value


def _repeats(query: Heads, mask: torch.Tensor | None) -> bool:
    """Return whether shared key heads must be repeated.

    On a GPU only flash attention shares them, in 16 bits and without a mask; the fallback is a kernel that
    keeps every score. The CPU's kernel always shares them, and is several times faster that way.
    """
    return query.device.type == "cuda" and (mask is not None or query.dtype.itemsize != 2)


def _takes_flash(query: Heads, key: Heads, value: Heads) -> bool:
    """Return whether flash attention on a GPU computes queries that end with the keys, without a mask."""
    if query.device.type != "cuda":
        return False
    shared = query.shape[1] > key.shape[1]
    return bool(can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, False, shared)))


def causal_attention(
    query: Heads,
    key: Heads,
    value: Heads,
    bands: Bands,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Sinks | None = None,
) -> Heads:
    """Attention of the last tokens of a sequence to all tokens before them.

    query: [R, H, n, D] of the last n tokens; key and value: those of the whole sequence. Without a mask if n
    is the whole sequence and lies within the window, or if flash attention takes the tensors. Otherwise
    computed block by block over the keys in the block's window, so that no mask is quadratic in the sequence.
    """
    n, total = query.shape[2], key.shape[2]
    start = total - n
    sees_all = window is None or window >= total
    fused = is_fusible(softcap, sinks)
    if not start and sees_all and (fused or n <= BLOCK):
        return masked_attention(
            query, key, value, None, scale=scale, softcap=softcap, sinks=sinks, causal=True
        )
    if sees_all and fused and _takes_flash(query, key, value):
        lower_right: torch.Tensor = causal_lower_right(n, total)
        return nn.functional.scaled_dot_product_attention(
            query, key, value, lower_right, scale=scale, enable_gqa=query.shape[1] > key.shape[1]
        )
    out = []
    for a in range(0, n, BLOCK):
        b = min(a + BLOCK, n)
        before = start + a if window is None else min(start + a, window - 1)
        span = slice(start + a - before, start + b)
        mask = bands.mask(b - a, before, window, query)
        part = query[:, :, a:b], key[:, :, span], value[:, :, span]
        out.append(masked_attention(*part, mask, scale=scale, softcap=softcap, sinks=sinks))
    return torch.cat(out, dim=2)


def common(sequences: Sequence[Row]) -> int:
    """Return the length of the longest common prefix.

    >>> common([(1, 2, 3), (1, 2, 4, 5)]), common([(1, 2)]), common([])
    (2, 2, 0)
    """
    # The prefix shared by the first and the last in lexicographic order is shared by all between them.
    if not sequences:
        return 0
    least, greatest = min(sequences), max(sequences)
    pairs = enumerate(zip(least, greatest, strict=False))
    return next((t for t, (a, b) in pairs if a != b), min(len(least), len(greatest)))


class _Alone:
    """The layout of a single token, which sees only itself: without sinks the output is its own value."""

    def __init__(self) -> None:
        self.windows: set[int | None] = set()
        self.has_sinks = False

    def attend(self, query: Heads, key: Heads, value: Heads, *, window: int | None, **how: Any) -> Heads:
        self.windows.add(window)
        self.has_sinks |= how["sinks"] is not None
        return masked_attention(query, key, value, None, causal=True, **how)

    def read(self, layer: Reads, hidden: torch.Tensor) -> torch.Tensor:
        return layer(hidden)[0]


@computing()
def use_layouts(model: PreTrainedModel) -> None:
    """Make the model attend through the `layout` that is passed to `hidden_states`.

    Raises ValueError for an architecture that does not take its attention from the registry; in
    which tokens see others through more than attention (recurrent and convolutional layers, chunks: packed
    rows would silently leak into one another); that passes its attention more than a layout supports;
    or whose logits differ from those of `output_head`.
    """
    model.eval()  # with dropout the trained policy would differ from the sampled one
    name = type(model).__name__
    if model.config._attn_implementation == NAME:
        return
    has_states = bool(layers_with_state(model))
    # transformers denies it of models with gated delta nets, whose attention is from the registry too.
    if not (has_states or getattr(model, "_supports_attention_backend", False)):
        raise ValueError(
            f"{name} does not take its attention from transformers' registry; "
            "every current decoder-only model of transformers does"
        )
    config = model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ())
    kinds = layers - (KINDS | {RECURRENT} if has_states else KINDS)
    if kinds or (getattr(model, "_is_stateful", False) and not has_states):
        raise ValueError(
            f"{name} has {', '.join(sorted(kinds)) or 'recurrent'} layers; "
            "only full and sliding attention and gated delta nets can be packed"
        )
    device = model.get_input_embeddings().weight.device
    if device.type != "cpu":
        # New GPUs prefer cuDNN's attention, which plans for every shape and gives NaN gradients under a mask
        # (pytorch issue 196678). Flash and memory-efficient attention suffice.
        torch.backends.cuda.enable_cudnn_sdp(False)
    token, place = (torch.full((1, 1), n, device=device) for n in (1, 0))
    before, alone = model.config._attn_implementation, _Alone()
    # Some architectures put their window only into the mask that transformers makes.
    windowed = "sliding_attention" in layers if layers else getattr(config, "sliding_window", None)
    windowed = windowed and hasattr(sys.modules[type(model).__module__], "create_sliding_window_causal_mask")
    with torch.no_grad():
        expected = None if device.type == "meta" else model(input_ids=token, use_cache=False).logits
        model.set_attn_implementation(NAME)
        delegate(model)
        try:
            got = _logits(model)(hidden_states(model, token, place, alone))
            if alone.has_sinks and got.dtype.itemsize == 2:
                # A lone token's share beside a sink is rounded, which may send it to another expert: both
                # sides take the same attention.
                expected = model(input_ids=token, use_cache=False, layout=alone).logits
            if windowed and alone.windows == {None}:
                raise ValueError(f"{name} has sliding windows, and does not pass them to its attention")
            if expected is not None and not torch.allclose(got, expected, rtol=0.02, atol=0.02):
                raise ValueError(f"{name} computes its logits in a way that posttrain does not support")
        except (ValueError, TypeError, RuntimeError, AttributeError) as error:
            # Without numbers some models cannot run, for example to route a token to an expert.
            if device.type == "meta" and not isinstance(error, ValueError):
                return
            model.set_attn_implementation(before)
            first = (str(error).splitlines() or [""])[0]
            raise ValueError(first if isinstance(error, ValueError) else f"{name}: {first}") from error


def context_of(config: Any) -> int:
    """Return the most tokens of a sequence of this model.

    Rotations of the kinds dynamic and longrope change for *all* tokens of a pass once one token lies beyond
    the original length. A row's result would then depend on the lengths of other rows in the pass, so for
    such models the original length is the bound.
    """
    text = config.get_text_config()
    most = int(getattr(text, "max_position_embeddings", 1 << 20))
    rope = getattr(text, "rope_parameters", None) or {}
    # One rotation for the whole model, or one for each kind of layer.
    for kind in [rope, *(x for x in rope.values() if isinstance(x, dict))]:
        if kind.get("rope_type") in ("dynamic", "longrope"):
            most = min(most, int(kind.get("original_max_position_embeddings") or most))
    return most


def key_heads_of(layer: Any) -> tuple[int, int]:
    """Return (number of key heads, size of a head) of the configuration of a layer.

    Those of a model are in `config.get_text_config().per_layer_config`: Gemma 4 has layers of two kinds.
    """
    heads = int(layer.num_attention_heads)
    size = int(getattr(layer, "head_dim", None) or layer.hidden_size // heads)
    return int(getattr(layer, "num_key_value_heads", None) or heads), size


def hidden_states(
    model: PreTrainedModel,
    tokens: Int[torch.Tensor, "R T"],
    positions: Int[torch.Tensor, "R T"],
    layout: Layout,
) -> Float[torch.Tensor, "R T D"]:
    """Return the last layer's hidden states after the final norm, without running the output head."""
    out = model.get_decoder()(input_ids=tokens, position_ids=positions, use_cache=False, layout=layout)
    hidden: torch.Tensor = out.last_hidden_state
    return hidden


def mask_tokens(model: PreTrainedModel, tokens: Iterable[int]) -> None:
    """Remove all ids but those of `tokens` from the policy: `output_head` gives them probability 0.

    Embeddings are often padded beyond the last token. An id without a token has no text and was never
    trained.
    """
    mask = torch.ones(model.get_input_embeddings().num_embeddings, dtype=torch.bool)
    mask[[token for token in tokens if token < len(mask)]] = False
    if bool(mask.any()):
        device = model.get_input_embeddings().weight.device
        mask = mask if device.type == "meta" else mask.to(device)
        model.register_buffer(MASKED, mask, persistent=False)


def masked_tokens(model: PreTrainedModel) -> list[int]:
    """Return the ids that `mask_tokens` has removed."""
    mask = getattr(model, MASKED, None)
    return [] if mask is None else mask.nonzero().flatten().tolist()


def output_head(model: PreTrainedModel) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the map from hidden states to the policy's logits, in which masked tokens have probability 0."""
    logits_of, mask = _logits(model), getattr(model, MASKED, None)
    if mask is None:
        return logits_of
    return lambda hidden: logits_of(hidden).masked_fill_(mask, IMPOSSIBLE)


def _logits(model: PreTrainedModel) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the map from hidden states to logits, with the architecture's scaling and soft-capping."""
    linear = model.get_output_embeddings()
    config = model.config.get_text_config()
    cap = getattr(config, "final_logit_softcapping", None)
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
        getattr(config, "logits_scaling", None) or 1.0
    )

    def head(hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = linear(hidden)
        if scale != 1.0:
            logits = logits * scale
        return logits if cap is None else cap * torch.tanh(logits / cap)

    return head
