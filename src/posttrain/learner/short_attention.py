"""Attention of few tokens by products of matrices, on a processor and in 16 bits.

    P = softmax(scale · q kᵀ + mask)        o = P v
    dv = Pᵀ do       dS = P ∘ (do vᵀ - Σ do ∘ o)       dq = scale · dS k       dk = scale · dSᵀ q

PyTorch's kernel for attention takes several times as long as these products where they are small, above all
going back (benchmarks/RESULTS.md). P is made again by the backward pass, so no more is kept than of
PyTorch's: q, k, v and o. Products are rounded to 16 bits as any are; what stands between them is in float32.
Query heads that share a key head are more rows of one product.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch.autograd.function import once_differentiable

from posttrain.models.attention import Heads

MOST = 512
"""Tokens that a query may see here; of more the scores no longer lie in the processor's cache."""


def suits(query: Heads, key: Heads, value: Heads, softcap: float | None) -> bool:
    """Whether these heads are attended to here."""
    return (
        query.device.type == "cpu"
        and query.dtype.itemsize == 2
        and query.shape[0] == 1
        and key.shape[2] <= MOST
        and softcap is None
    )


def short_attention(query: Heads, key: Heads, value: Heads, mask: torch.Tensor, scale: float) -> Heads:
    """softmax(q kᵀ · scale + mask) v.

    query: [1, H, N, D]; key, value: [1, K, M, ·], H a multiple of K; mask: [N, M], added to the
    scores of every head. Its gradient cannot be differentiated again.
    """
    out: Heads = _Products.apply(query, key, value, mask, scale)  # type: ignore[no-untyped-call]
    return out


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Heads, key: Heads, value: Heads, mask: torch.Tensor, scale: float
    ) -> torch.Tensor:
        q, k, v = _by_key_head(query, key, value)
        out = _weights(q, k, mask, scale).to(v.dtype) @ v
        ctx.save_for_backward(query, key, value, mask, out)
        ctx.scale = scale
        return out.view(*query.shape[:3], value.shape[3])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        query, key, value, mask, out = ctx.saved_tensors
        q, k, v = _by_key_head(query, key, value)
        do = grad.reshape(out.shape)
        weights = _weights(q, k, mask, ctx.scale)
        ds = (do @ v.mT).float().sub_((do.float() * out.float()).sum(-1, keepdim=True))
        ds = ds.mul_(weights).to(q.dtype)
        dq, dk = (ds @ k).mul_(ctx.scale), (ds.mT @ q).mul_(ctx.scale)
        dv = weights.to(v.dtype).mT @ do
        return dq.view(query.shape), dk.view(key.shape), dv.view(value.shape), None, None


Rows = Float[torch.Tensor, "K N D"]


def _by_key_head(query: Heads, key: Heads, value: Heads) -> tuple[Rows, Rows, Rows]:
    """[K, G · N, D], [K, M, D] and [K, M, D]: the queries of G heads that share a key head are its rows."""
    heads = key.shape[1]
    return query.reshape(heads, -1, query.shape[3]), key[0], value[0]


def _weights(q: Rows, k: Rows, mask: torch.Tensor, scale: float) -> Rows:
    """P, in float32: operations of two types at once are many times slower."""
    scores = (q @ k.mT).float()
    by_head = scores.view(len(k), -1, *mask.shape)
    torch.add(mask.float(), by_head, alpha=scale, out=by_head)
    return torch.softmax(scores, -1)
