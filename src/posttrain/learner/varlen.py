"""Attention of a pack's tokens on a GPU: one call of flash attention, whatever the number of groups and rows.

A *span* is a run of a pack's tokens which are consecutive in a row: a prompt, a branch, or a chain of a tree.
Its keys are all tokens of its row from the first to the span's last, so flash attention's causal mask,
aligned to the last query and the last key, is the one that a row has by itself, and so are windows.

    P = softmax(scale · q kᵀ) over the tokens seen, and a sink if there is one          o = P v
    With a sink s: lse' = log(e^lse + e^s), o' = o · e^(lse - lse').  Flash attention's backward pass of o'
    and lse' gives dq, dk and dv, and ds = - Σ over queries of e^(s - lse') Σ do' ∘ o'.

Only queries, keys, values, o and lse are saved: keys and values are gathered again in the backward pass, and
the gradients of those that several spans see are summed in float32.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.attention.varlen  # registers flash attention's operations
from jaxtyping import Float, Int
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from posttrain.learner.prompt_group import PromptGroup, branches, is_half, sees
from posttrain.models.attention import Heads, Sinks, masked_attention
from posttrain.models.masks import additive

_MOST_HEAD = 256
"""The largest head size of flash attention."""
MOST_KEYS = 8
"""The most keys for each token of a pack, on average, since each layer gathers them. Many short answers to a
long prompt have more, and attend by branch."""


@dataclass(frozen=True)
class SpanKeys:
    """The spans of a pack, in its order, and the keys of each."""

    keys: Int[torch.Tensor, "M"] | None
    """The packed index of each key, span after span; None if each token is a key of its own span alone."""
    query_ends: Int[torch.Tensor, "S+1"]
    """Where each span begins in the pack, and where the last one ends; int32."""
    key_ends: Int[torch.Tensor, "S+1"]
    """Where the keys of each span begin in `keys`, and where the last ones end; int32."""
    most_queries: int
    most_keys: int

    def are_few(self, count: int) -> bool:
        """Return whether a pack of `count` tokens may gather these keys."""
        return self.keys is None or len(self.keys) <= MOST_KEYS * count

    @staticmethod
    def of(
        groups: Sequence[PromptGroup], prefix: int, count: int, device: torch.device | None = None
    ) -> "SpanKeys":
        """Return the spans of a pack of `count` tokens with a shared prefix of `prefix` tokens.

        Filling tokens at the end are a span of their own, so that every token has a finite output.

        >>> spans = SpanKeys.of([PromptGroup(1, 1, (1, 2))], 1, 6)
        >>> spans.query_ends.tolist(), spans.key_ends.tolist()
        ([0, 1, 2, 3, 5, 6], [0, 1, 3, 6, 10, 11])
        >>> spans.keys.tolist()
        [0, 0, 1, 0, 1, 2, 0, 1, 3, 4, 5]
        """
        runs = [(0, prefix, torch.arange(prefix))] if prefix else []
        runs += (run for group in groups for run in _runs(group, prefix))
        end = runs[-1][1]
        if end < count:
            runs.append((end, count, torch.arange(end, count)))
        lengths = torch.tensor([[stop - start for start, stop, _ in runs], [len(keys) for *_, keys in runs]])
        ends = torch.nn.functional.pad(lengths.cumsum(1), (1, 0)).to(torch.int32)
        keys = torch.cat([keys for *_, keys in runs])
        return SpanKeys(
            None if len(keys) == count else keys.to(device),
            *(x.to(device) for x in ends),
            *lengths.amax(1).tolist(),
        )


def _runs(group: PromptGroup, prefix: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield (start, stop, packed indices of the keys) of each span of a group, in order."""
    shared = torch.arange(prefix)
    if not group.parents:
        first = group.start - prefix  # branches() counts from a shared prefix right before the group
        for visible, start, stop in branches(group, prefix):
            ranges = torch.arange(group.start, first + visible), torch.arange(first + start, first + stop)
            yield first + start, first + stop, torch.cat([shared, *ranges])
        return
    parents = group.parents
    chains = [0, *(i for i in range(1, len(parents)) if parents[i] != i - 1), len(parents)]
    for start, stop in pairwise(chains):
        path, node = list[int](), parents[start]
        while node >= 0:
            path.append(node)
            node = parents[node]
        chain = torch.tensor([*reversed(path), *range(start, stop)])
        yield group.start + start, group.start + stop, torch.cat([shared, group.start + chain])


def suits(query: Heads, value: Heads, softcap: float | None) -> bool:
    """Return whether one call can compute the attention of these heads: in 16 bits, on a GPU."""
    D = query.shape[3]
    fits = query.shape[0] == 1 and softcap is None and value.shape[3] == D <= _MOST_HEAD and D % 8 == 0
    if not fits or query.device.type != "cuda" or not is_half(query):
        return False
    return _matches(query.device, query.dtype, D, query.shape[1] // value.shape[1])


def attention(
    query: Heads,
    key: Heads,
    value: Heads,
    spans: SpanKeys,
    scale: float,
    window: int | None,
    sinks: Sinks | None = None,
) -> Heads:
    """softmax(q kᵀ · scale) v over the tokens that each token sees.

    query: [1, H, N, D]; key, value: [1, K, N, D], H a multiple of K; window: the number of latest positions
    that a token sees, None for all; sinks: see attention.masked_attention.
    """
    out: Heads = _SpanAttention.apply(query, key, value, sinks, spans, scale, window)  # type: ignore[no-untyped-call]
    return out


class _SpanAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Heads,
        key: Heads,
        value: Heads,
        sinks: Sinks | None,
        spans: SpanKeys,
        scale: float,
        window: int | None,
    ) -> Heads:
        ctx.spans_and_options = spans, scale, window
        q, k, v = _gathered(query, key, value, spans)
        out, lse, state = flash_forward(q, k, v, spans, scale, window)
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(lse)[:, None])
            out, lse = out * (lse - total).exp().T[:, :, None].to(out), total
        ctx.save_for_backward(query, key, value, sinks, out, lse, state)
        return out.transpose(0, 1)[None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Heads) -> Any:
        query, key, value, sinks, out, lse, state = ctx.saved_tensors
        spans, scale, window = ctx.spans_and_options
        grad = grad[0].transpose(0, 1).contiguous()
        tokens = _gathered(query, key, value, spans)
        grads = flash_backward(grad, (*tokens, out, lse, state), spans, scale, window)
        if spans.keys is not None:
            summed = [x.new_zeros(x.shape[2], x.shape[1], x.shape[3], dtype=lse.dtype) for x in (key, value)]
            for total, x in zip(summed, grads[1:], strict=True):
                total.index_add_(0, spans.keys, x.to(total))
            grads = grads[0], *summed
        of_heads = [x.to(query.dtype).transpose(0, 1)[None] for x in grads]
        of_sinks = None
        if sinks is not None:
            share = (sinks.to(lse)[:, None] - lse).exp()
            of_sinks = -(share * (grad.to(lse) * out).sum(-1).T).sum(1).to(sinks.dtype)
        return *of_heads, of_sinks, None, None, None


def _gathered(query: Heads, key: Heads, value: Heads, spans: SpanKeys) -> list[torch.Tensor]:
    """Return the query [N, H, D], and the key and value of every span's keys [M, K, D]."""
    tokens = [x[0].transpose(0, 1) for x in (query, key, value)]
    if spans.keys is not None:
        tokens[1:] = (x.index_select(0, spans.keys) for x in tokens[1:])
    return tokens


def flash_forward(
    query: Float[torch.Tensor, "N H D"],
    key: Float[torch.Tensor, "M K D"],
    value: Float[torch.Tensor, "M K D"],
    spans: SpanKeys,
    scale: float,
    window: int | None,
) -> tuple[Float[torch.Tensor, "N H D"], Float[torch.Tensor, "H N"], torch.Tensor]:
    """Return (o, lse, state of a random generator that nothing is drawn from)."""
    options = window is None, scale, [-1 if window is None else window - 1, 0], query.shape[1] > key.shape[1]
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.torch_attn._varlen_attn(
        query, key, value, *_places(spans), *options
    )
    return out


def flash_backward(
    grad: torch.Tensor, saved: Sequence[torch.Tensor], spans: SpanKeys, scale: float, window: int | None
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of query, key and value; saved: these, o, lse and the generator's state."""
    *tensors, state = saved
    options = window is None, state, scale, [-1 if window is None else window - 1, 0]
    grads: tuple[torch.Tensor, ...] = torch.ops.torch_attn._varlen_attn_backward(
        grad, *tensors, *_places(spans), *options
    )
    return grads


def _places(spans: SpanKeys) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    return spans.query_ends, spans.key_ends, spans.most_queries, spans.most_keys


@cache
def _matches(device: torch.device, dtype: torch.dtype, size: int, ratio: int) -> bool:
    """Return whether flash attention agrees with a masked softmax on a small example, forward and back.

    size: of a head; ratio: the number of query heads for each key head.
    """
    # The first pass may be without gradients, or in a checkpointed layer, whose hooks would compute it again.
    hooks = saved_tensors_hooks(lambda x: x, lambda x: x)
    with torch.inference_mode(False), torch.enable_grad(), hooks:
        return _agrees(device, dtype, size, ratio)


def _agrees(device: torch.device, dtype: torch.dtype, size: int, ratio: int) -> bool:
    prefix, group, g = 3, PromptGroup(3, 5, (4, 6)), torch.Generator().manual_seed(0)
    shapes = [(1, heads, 18, size) for heads in (2 * ratio, 2, 2)]
    numbers = [torch.randn(shape, generator=g).to(dtype) for shape in shapes]
    numbers.append(torch.linspace(-1, 1, 2 * ratio).to(dtype))
    query, key, value, sinks = inputs = [x.to(device).requires_grad_() for x in numbers]
    spans = SpanKeys.of([group], prefix, 18, device)
    position, near = torch.tensor([*range(3, 8), *range(8, 12), *range(8, 14)]), 2**-4
    for window, sink in ((None, None), (4, sinks)):
        mask = additive(sees(group, prefix, position, window), torch.float32).to(device)
        precise = query[:, :, prefix:].float(), key.float(), value.float()
        expected = masked_attention(*precise, mask, scale=0.2, softcap=None, sinks=sink)
        # A key's gradient sums over its query heads, whose rounding errors must stay below the tolerance.
        weights = torch.linspace(-1, 1, expected.numel()).view(expected.shape).to(device) / ratio**0.5
        trained = inputs[: 3 if sink is None else 4]
        try:
            out = attention(query, key, value, spans, 0.2, window, sink)[:, :, prefix:]
            gradients = (torch.autograd.grad((x.float() * weights).sum(), trained) for x in (out, expected))
            pairs = [(out, expected), *zip(*gradients, strict=True)]
        except torch.OutOfMemoryError:
            raise  # says nothing of the kernels
        except (RuntimeError, AttributeError):  # a GPU, or a PyTorch, without the kernels
            return False
        if not all(torch.allclose(a.float(), b.float(), rtol=near, atol=near) for a, b in pairs):
            text = "flash attention differs from a masked softmax here"
            warnings.warn(f"attention takes a call for each branch, and is slower: {text}", stacklevel=3)
            return False
    return True
