"""Attention of any decoder-only transformers model, handed to a layout.

transformers lets a library register its own attention function and passes it every keyword
that the model's forward was called with. Ours is registered here under one name and calls the
`layout` it finds there, so the learner (rows packed end to end) and the sampling engine (a
key-value cache) run the very same model code and differ only in who sees whom.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from jaxtyping import Float, Int
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

NAME = "posttrain"
KINDS = frozenset({"full_attention", "sliding_attention"})
"""Layers in which who sees whom is what the layout says."""

WORTH = 8
"""What several prompts begin with is set apart if that saves at least one in so many tokens: each of them
then attends under a mask, which is slower than plainly causal."""

Row = TypeVar("Row", list[int], tuple[int, ...])
Heads = Float[torch.Tensor, "R H T D"]


class Layout(Protocol):
    """Who sees whom among the tokens of one forward pass."""

    def attend(
        self,
        layer: int,
        query: Heads,
        key: Heads,
        value: Heads,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Heads:
        """Attention of every query, in the query's own shape.

        key and value have fewer heads than query where the model shares them (grouped queries);
        window is the number of latest positions a token sees (itself included), None for all.
        """
        ...


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    layout: Layout,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    if s_aux is not None:
        raise ValueError(
            "attention sinks (as in gpt-oss) are not supported: leaving them out is another model"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: int = module.layer_idx  # type: ignore[assignment]
    out = layout.attend(layer, query, key, value, scale=scale, window=sliding_window, softcap=softcap)
    return out.transpose(1, 2), None


AttentionInterface.register(NAME, _attention)


def masked_attention(
    query: Heads,
    key: Heads,
    value: Heads,
    mask: torch.Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    causal: bool = False,
) -> Heads:
    """softmax(q kᵀ · scale + mask) v; causal stands for the mask where queries and keys are the same tokens.

    With a softcap c the scores are c·tanh(score/c) before the mask (Gemma 2), which no fused kernel does.
    """
    groups = query.shape[1] // key.shape[1]
    if softcap is None:
        return nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=groups > 1
        )
    if causal:
        T = query.shape[-2]
        mask = torch.ones(T, T, dtype=torch.bool, device=query.device).tril()
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = softcap * torch.tanh((query @ key.transpose(-1, -2)) * (scale / softcap))
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    return scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype) @ value


def seen_by(start: int, stop: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """[stop - start, stop]: which tokens of a sequence those from `start` on see; None for plainly causal.

    >>> seen_by(1, 3, 2, torch.device("cpu"))
    tensor([[ True,  True, False],
            [False,  True,  True]])
    """
    if not start and (window is None or window >= stop):
        return None
    ago = torch.arange(start, stop, device=device)[:, None] - torch.arange(stop, device=device)
    return (ago >= 0) & (ago < (window or stop + 1))


def common(sequences: Sequence[Row]) -> int:
    """How many tokens all of these begin with.

    >>> common([(1, 2, 3), (1, 2, 4, 5)]), common([(1, 2)]), common([])
    (2, 2, 0)
    """
    # What the least and the greatest in dictionary order share, all between them share.
    if not sequences:
        return 0
    least, greatest = min(sequences), max(sequences)
    pairs = enumerate(zip(least, greatest, strict=False))
    return next((t for t, (a, b) in pairs if a != b), min(len(least), len(greatest)))


def use_layouts(model: PreTrainedModel) -> None:
    """Makes the model attend through the `layout` given to `hidden_states`.

    Raises ValueError for an architecture that does not take its attention from the registry, and for one
    in which a token sees others through more than attention (recurrent and convolutional layers, chunks):
    rows that lie end to end would leak into one another without a word.
    """
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(
            f"{type(model).__name__} does not take its attention from transformers' registry; "
            "every current decoder-only model of transformers does"
        )
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - KINDS
    if kinds or getattr(model, "_is_stateful", False):
        raise ValueError(
            f"{type(model).__name__} has {', '.join(sorted(kinds)) or 'recurrent'} layers; "
            "only full and sliding attention can be packed"
        )
    model.set_attn_implementation(NAME)


def context_of(config: Any) -> int:
    """The most tokens that a sequence of this model may come to.

    Rotations of the kinds dynamic and longrope change for *all* tokens once one of them lies beyond the
    length that they were made for. What a row says would then hang on how long the others of its pass are,
    so for such models that length is the bound.
    """
    text = config.get_text_config()
    most = int(getattr(text, "max_position_embeddings", 1 << 20))
    rope = getattr(text, "rope_parameters", None) or {}
    # One rotation for the whole model, or one for each kind of layer.
    for kind in [rope, *(x for x in rope.values() if isinstance(x, dict))]:
        if kind.get("rope_type") in ("dynamic", "longrope"):
            most = min(most, int(kind.get("original_max_position_embeddings") or most))
    return most


def hidden_states(
    model: PreTrainedModel,
    tokens: Int[torch.Tensor, "R T"],
    positions: Int[torch.Tensor, "R T"],
    layout: Layout,
) -> Float[torch.Tensor, "R T D"]:
    """The last layer's normed hidden states; the output head is not run."""
    out = model.get_decoder()(input_ids=tokens, position_ids=positions, use_cache=False, layout=layout)
    hidden: torch.Tensor = out.last_hidden_state
    return hidden


def output_head(model: PreTrainedModel) -> Callable[[torch.Tensor], torch.Tensor]:
    """hidden states -> logits, with the scaling and soft-capping that the architecture puts on them."""
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
