"""Attention of the tokens of a pack, all of its prompt groups in one call (train.cpp).

    P = softmax(scale · q kᵀ) of what each token sees       o = P v
    dv = Pᵀ do      dS = P ∘ (do vᵀ - Σ do ∘ o)      dq = scale · dS k      dk = scale · dSᵀ q

PyTorch takes several times as long for a few hundred tokens, above all going back, and computes what is
masked. Here 8 queries and 32 keys of which none sees any are passed over. What is kept is q, k, v, o and
log Σ e^score. Scores and sums are float32.
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
from posttrain.models.attention import Heads, masked_attention

_TILE = 32
_MOST_PAIRS = 1 << 26
"""Of tokens of one prompt group, for each of which there is a bit."""


@dataclass(frozen=True)
class TokenSpan:
    """Tokens of a pack that attend among themselves, [start, stop), and to its first `seen` tokens."""

    start: int
    stop: int
    seen: int = 0
    sees: Bool[torch.Tensor, "N M"] | None = None
    """Who sees whom of the tokens seen and the own; None: all that stand before it, and itself."""


class SpanTable:
    """Who sees whom in a pack, as the kernels read it: for each span its place, and a bit for each pair."""

    def __init__(self, spans: Sequence[TokenSpan]) -> None:
        rows, words, at = [], [], 0
        for span in spans:
            rows.append([span.start, span.stop - span.start, span.seen, -1 if span.sees is None else at])
            if span.sees is not None:
                words.append(_words(span.sees))
                at += words[-1].numel()
        self.spans = torch.tensor(rows, dtype=torch.int64)
        self.words = torch.cat(words) if words else torch.zeros(0, dtype=torch.int32)

    @staticmethod
    def of(
        groups: Sequence[PromptGroup], positions: torch.Tensor, seen: int, window: int | None
    ) -> "SpanTable":
        """That of these prompt groups behind a shared prefix of `seen` tokens."""
        spans = [TokenSpan(0, seen)]
        for group in groups:
            position = positions[group.start : group.stop]
            mask = None if group.is_causal else sees(group, seen, position, window)
            spans.append(TokenSpan(group.start, group.stop, seen, mask))
        return SpanTable([span for span in spans if span.start < span.stop])


def _words(sees: torch.Tensor) -> torch.Tensor:
    """A bit for each pair, the columns of a row from the lowest on, in words of 32."""
    whole = torch.nn.functional.pad(sees, (0, -sees.shape[1] % _TILE))
    return torch.from_numpy(np.packbits(whole.numpy(), axis=-1, bitorder="little").view(np.int32)).flatten()


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
    """The same with each head's numbers one behind the other."""
    return x if x.stride(-1) == 1 else x.contiguous()


def suits(
    query: Heads, value: Heads, softcap: float | None, groups: Sequence[PromptGroup], seen: int
) -> bool:
    """Whether these heads of such a pack can be attended to here."""
    D, sizes = query.shape[3], [g.stop - g.start for g in groups if not g.is_causal]
    fits = query.shape[0] == 1 and softcap is None and value.shape[3] == D and D % _TILE == 0
    small = all(n * (n + seen) <= _MOST_PAIRS for n in sizes)
    return fits and small and kernels.suits(query) and _matches_pytorch(query.dtype)


def attention(
    query: Heads, key: Heads, value: Heads, table: SpanTable, scale: float, window: int | None
) -> Heads:
    """softmax(q kᵀ · scale) v over what each token sees; 0 for tokens of no span.

    query: [1, H, N, D]; key, value: [1, K, N, D], H a multiple of K; window: the latest positions that are
    seen, in spans without `sees`.
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
        out = query.new_zeros(1, N, H, D).transpose(1, 2)  # as transformers wants it next
        lse = torch.zeros(H, N, dtype=torch.float32)  # whatever the default is
        ctx.how = table, scale, window or 0
        ctx.save_for_backward(query, key, value, out, lse)
        kernels.call(
            "attention_forward", query, _task(query, key, value, *ctx.how), ctypes.byref(_heads(out)), lse, N
        )
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
            _task(query, key, value, *ctx.how),
            *(ctypes.byref(each) for each in (back, k, v)),
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
    """On a small example, to rounding."""
    g = torch.Generator().manual_seed(0)
    shapes = ((1, 4, 45, _TILE), *[(1, 2, 45, _TILE)] * 2)
    query, key, value = (torch.randn(shape, generator=g).to(dtype) for shape in shapes)
    seen = (torch.rand(45, 45, generator=g) < 0.5).fill_diagonal_(True)
    out = attention(query, key, value, SpanTable([TokenSpan(0, 45, 0, seen)]), 0.2, None)
    mask = torch.zeros(45, 45).masked_fill(~seen, -torch.inf)
    wanted = masked_attention(query.float(), key.float(), value.float(), mask, scale=0.2, softcap=None)
    near = kernels.ROUNDING[dtype]
    return torch.allclose(out.float(), wanted, rtol=near, atol=near)
