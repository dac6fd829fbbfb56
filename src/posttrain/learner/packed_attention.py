"""Attention of a pack's tokens, all prompt groups in one call (train.cpp).

    P = softmax(scale · q kᵀ) over the tokens seen          o = P v
    dv = Pᵀ do      dS = P ∘ (do vᵀ - Σ do ∘ o)      dq = scale · dS k      dk = scale · dSᵀ q

PyTorch takes several times as long for a few hundred tokens, above all in the backward pass, and computes
masked scores. Here tiles of 8 queries and 32 keys that are fully masked are skipped. The backward pass gets
q, k, v, o and log Σ e^score. Scores and sums are float32.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from torch.autograd.function import once_differentiable

from posttrain.learner import kernels
from posttrain.learner.prompt_group import PromptGroup, sees
from posttrain.models.attention import Heads, Sinks, is_fusible, masked_attention

_TILE = 32
_MOST_PAIRS = 1 << 26
"""The most pairs of tokens of one prompt group; each takes a bit of its mask."""


@dataclass(frozen=True)
class TokenSpan:
    """Tokens [start, stop) of a pack, which attend to each other and to its first `prefix` tokens."""

    start: int
    stop: int
    prefix: int = 0
    sees: Bool[torch.Tensor, "N M"] | None = None
    """Mask over the prefix and the span's own tokens; None: each token sees those before it, and itself."""


class SpanTable:
    """The attention mask of a pack for the kernels: the place of each span, and a bit for each pair."""

    def __init__(self, spans: Sequence[TokenSpan]) -> None:
        rows, words, offset = [], [], 0
        for span in spans:
            mask_at = -1 if span.sees is None else offset
            rows.append([span.start, span.stop - span.start, span.prefix, mask_at])
            if span.sees is not None:
                words.append(_words(span.sees))
                offset += words[-1].numel()
        self.spans = torch.tensor(rows, dtype=torch.int64)
        self.words = torch.cat(words) if words else torch.zeros(0, dtype=torch.int32)

    @staticmethod
    def of(
        groups: Sequence[PromptGroup], positions: torch.Tensor, prefix: int, window: int | None
    ) -> "SpanTable":
        """Return the table of these prompt groups after a shared prefix of `prefix` tokens."""
        spans = [TokenSpan(0, prefix)]
        for group in groups:
            position = positions[group.start : group.stop]
            mask = None if group.is_causal else sees(group, prefix, position, window)
            spans.append(TokenSpan(group.start, group.stop, prefix, mask))
        return SpanTable([span for span in spans if span.start < span.stop])


def _words(sees: torch.Tensor) -> torch.Tensor:
    """Return a mask as words of 32 bits, the columns of a row from the lowest bit on."""
    padded = torch.nn.functional.pad(sees, (0, -sees.shape[1] % _TILE))
    return torch.from_numpy(np.packbits(padded.numpy(), axis=-1, bitorder="little").view(np.int32)).flatten()


class _Heads(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), ("head", ctypes.c_int64), ("token", ctypes.c_int64))


class _Task(ctypes.Structure):
    _fields_ = (
        *((name, _Heads) for name in ("query", "key", "value")),
        *((name, ctypes.c_void_p) for name in ("groups", "words")),
        *((name, ctypes.c_int64) for name in ("count", "heads", "shared", "size", "window")),
        ("scale", ctypes.c_float),
    )


class _Backward(ctypes.Structure):
    _fields_ = (*((name, _Heads) for name in ("out", "grad", "query")), ("lse", ctypes.c_void_p))


def _heads(x: Heads) -> _Heads:
    return _Heads(x.data_ptr(), x.stride(1), x.stride(2))


def _plain(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor with the numbers of each head contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def suits(
    query: Heads,
    value: Heads,
    softcap: float | None,
    sinks: Sinks | None,
    groups: Sequence[PromptGroup],
    prefix: int,
) -> bool:
    """Return whether the kernels can compute the attention of these heads in a pack of these groups."""
    D, sizes = query.shape[3], [g.stop - g.start for g in groups if not g.is_causal]
    fits = query.shape[0] == 1 and is_fusible(softcap, sinks) and value.shape[3] == D and D % _TILE == 0
    small = all(n * (n + prefix) <= _MOST_PAIRS for n in sizes)
    return fits and small and kernels.suits(query) and _matches_pytorch(query.dtype)


def attention(
    query: Heads, key: Heads, value: Heads, table: SpanTable, scale: float, window: int | None
) -> Heads:
    """softmax(q kᵀ · scale) v over the tokens that each token sees; 0 for tokens outside all spans.

    query: [1, H, N, D]; key, value: [1, K, N, D], H a multiple of K; window: the number of latest positions
    that a token sees, in spans without `sees`.
    """
    out: Heads = _Attention.apply(query, key, value, table, scale, window)  # type: ignore[no-untyped-call]
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Heads, key: Heads, value: Heads, table: SpanTable, scale: float, window: int | None
    ) -> torch.Tensor:
        query, key, value = (_plain(x) for x in (query, key, value))
        _, H, N, D = query.shape
        out = query.new_zeros(1, N, H, D).transpose(1, 2)  # contiguous once transformers transposes it back
        lse = torch.zeros(H, N, dtype=torch.float32)  # explicit: torch's default dtype may differ
        ctx.mask_and_scale = table, scale, window or 0
        ctx.save_for_backward(query, key, value, out, lse)
        task = _task(query, key, value, *ctx.mask_and_scale)
        kernels.call("attention_forward", query, task, ctypes.byref(_heads(out)), lse, N)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        grad, N = _plain(grad), query.shape[2]
        grads = [x.new_zeros(1, N, x.shape[1], x.shape[3]).transpose(1, 2) for x in (query, key, value)]
        q, k, v = map(_heads, grads)
        back = _Backward(_heads(out), _heads(grad), q, lse.data_ptr())
        kernels.call(
            "attention_backward",
            query,
            _task(query, key, value, *ctx.mask_and_scale),
            *(ctypes.byref(struct) for struct in (back, k, v)),
            N,
        )
        return *grads, None, None, None


def _task(query: Heads, key: Heads, value: Heads, table: SpanTable, scale: float, window: int) -> Any:
    H, K, D = query.shape[1], key.shape[1], query.shape[3]
    places = (table.spans.data_ptr(), table.words.data_ptr())
    sizes = (len(table.spans), H, H // K, D, window)
    return ctypes.byref(_Task(_heads(query), _heads(key), _heads(value), *places, *sizes, scale))


@cache
def _matches_pytorch(dtype: torch.dtype) -> bool:
    """Return whether the kernels agree with PyTorch on a small example, up to rounding."""
    g = torch.Generator().manual_seed(0)
    shapes = ((1, 4, 45, _TILE), *[(1, 2, 45, _TILE)] * 2)
    query, key, value = (torch.randn(shape, generator=g).to(dtype) for shape in shapes)
    visible = (torch.rand(45, 45, generator=g) < 0.5).fill_diagonal_(True)
    out = attention(query, key, value, SpanTable([TokenSpan(0, 45, 0, visible)]), 0.2, None)
    mask = torch.zeros(45, 45).masked_fill(~visible, -torch.inf)
    expected = masked_attention(query.float(), key.float(), value.float(), mask, scale=0.2, softcap=None)
    near = kernels.ROUNDING[dtype]
    return torch.allclose(out.float(), expected, rtol=near, atol=near)
