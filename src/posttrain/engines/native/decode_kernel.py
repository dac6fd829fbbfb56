"""Attention and matrix products of decoding steps on a CPU, by kernels that are compiled at their first use.

PyTorch's attention takes several times as long as reading the cache, since it multiplies matrices of one to
eight rows and reads the padding of short rows. The kernel (decode.cpp) reads each row up to its length and
keeps scores and sums in float32. Its products of a few rows with a packed weight are closer to the peak of a
CPU than oneDNN's. The kernels need Linux and g++; elsewhere PyTorch computes the same.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch

from posttrain.models.attention import Heads, Sinks, is_fusible, masked_attention
from posttrain.models.compiled import Library, library

_SOURCE = Path(__file__).with_name("decode.cpp")
Attention = Callable[..., Heads]


def kernel_for(
    query: Heads, value: Heads, softcap: float | None, sinks: Sinks | None = None
) -> Attention | None:
    """Return the kernel for heads of this shape, [B, H, 1, D] and [B, K, 1, D], or None if none fits."""
    H, D = query.shape[1], query.shape[3]
    if query.device.type != "cpu" or not is_fusible(softcap, sinks) or value.shape[3] != D or D % 8:
        return None
    kernels = load(query.dtype, D, H // value.shape[1])
    return None if kernels is None else kernels.attention


@cache
def load(dtype: torch.dtype, size: int, queries: int) -> "Kernels | None":
    """Return the kernels for heads of this size, of which `queries` share a key head; build them if need be.

    Return None if they cannot be built, or if their results differ from PyTorch's.
    """
    dll = library(_SOURCE, dtype, SIZE=size, QUERIES=queries)
    kernels = None if dll is None else Kernels(dll, dtype)
    agrees = kernels and _attends(kernels, dtype, size, queries) and _multiplies(kernels, dtype)
    return kernels if agrees else None


class PackedWeight(ctypes.Structure):
    """A packed weight as the kernels read it."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
    )


class Norm(ctypes.Structure):
    """The weight of a norm; null for no norm."""

    _fields_ = (("weight", ctypes.c_void_p), ("epsilon", ctypes.c_float))


class Layer(ctypes.Structure):
    """A decoder layer; keys and values are those of all rows, window is 0 for full attention."""

    _fields_ = (
        *((name, Norm) for name in ("before_attention", "query_norm", "key_norm", "before_mlp")),
        *((name, PackedWeight) for name in ("query", "key", "value", "output", "gate", "up", "down")),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


class Kernels(Library):
    """The functions of the compiled library, called with tensors."""

    def __init__(self, dll: ctypes.CDLL, dtype: torch.dtype) -> None:
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        functions = {
            "decode_attention": (*[pointer] * 7, *[integer] * 4, ctypes.c_float),
            "draw_tokens": (pointer, integer, pointer, integer, *[pointer] * 4),
            "pack": (pointer, integer, integer, pointer),
            "linear": (pointer, pointer, pointer, integer),
            "decode_layers": (pointer, integer, *[pointer] * 5, *[integer] * 3),
        }
        super().__init__(dll, functions)
        self._packed_size, self.dtype = dll.packed_size, dtype
        self._packed_size.argtypes, self._packed_size.restype = (integer, integer), integer

    def attention(
        self,
        query: Heads,
        key: Heads,
        value: Heads,
        keys: Heads,
        values: Heads,
        lengths: torch.Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> Heads:
        """softmax(q kᵀ · scale) v over the keys and values of each row, after the new ones are written there.

        query: [B, H, 1, D]; key, value: [B, K, 1, D], H a multiple of K; keys, values: [rows, K, columns, D],
        contiguous, at least B rows; lengths: [B], int64, the column of the new token; window: number of
        latest columns to attend to.
        """
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        out = torch.empty_like(query)
        sizes = (len(query), key.shape[1], keys.shape[2])
        heads = (query, key, value, keys, values)
        self.call("decode_attention", *heads, out, lengths, *sizes, window or 0, scale)
        return out

    def draw(
        self,
        logits: torch.Tensor,
        rows: Sequence[int],
        temperature: Sequence[float],
        uniforms: Sequence[float],
    ) -> tuple[list[int], list[float]]:
        """(tokens, log softmax(logits / temperature)[token]) of each of these rows of logits, [B, V].

        rows: equal ones adjacent to each other, so that they are summed once. A token is the first one at
        which the running sum of probabilities exceeds the uniform number; where that is negative, the most
        likely.
        """
        logits, tau = logits.contiguous(), torch.tensor(temperature, dtype=torch.float32)
        index, u = torch.tensor(rows, dtype=torch.int64), torch.tensor(uniforms, dtype=torch.float64)
        tokens, logps = index.new_empty(len(index)), u.new_empty(len(index))
        self.call("draw_tokens", logits, logits.shape[1], index, len(index), tau, u, tokens, logps)
        return tokens.tolist(), logps.tolist()

    def multiplies(self, weight: torch.Tensor) -> bool:
        """Return True if there is a kernel for products with a weight of this shape."""
        return bool(self._packed_size(*weight.shape))

    def pack(self, weight: torch.Tensor, packed: torch.Tensor | None = None) -> torch.Tensor:
        """Pack a weight in the order that `linear` reads, into `packed` if that is set."""
        if packed is None:
            packed = weight.new_empty(self._packed_size(*weight.shape))
        self.call("pack", weight.contiguous(), *weight.shape, packed)
        return packed

    def linear(self, x: torch.Tensor, matrix: PackedWeight) -> torch.Tensor:
        """x wᵀ + b for x [..., in]."""
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], matrix.rows)
        self.call("linear", ctypes.byref(matrix), x, out, x.numel() // x.shape[-1])
        return out

    def layers(
        self,
        layers: "ctypes.Array[Layer]",
        hidden: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        lengths: torch.Tensor,
        keys: torch.Size,
        owners: torch.Tensor | None = None,
    ) -> None:
        """Pass hidden states of new tokens, [B, hidden], through these layers in place.

        rotation: cosines and sines, [B, D]; keys: shape of the keys of a layer, [rows, K, columns, D];
        owners: [B, 2], the range of cache rows that each token is written to, of which it attends to the
        first; None: row b for token b.
        """
        sizes = (len(hidden), keys[1], keys[2])
        self.call("decode_layers", layers, len(layers), *rotation, lengths, owners, hidden, *sizes)


def _attends(kernels: Kernels, dtype: torch.dtype, size: int, queries: int) -> bool:
    """Return True if attention equals PyTorch's on a small example, up to rounding."""
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, size, generator=g).to(dtype)

    query, key, value = normal(3, 2 * queries, 1), normal(3, 2, 1), normal(3, 2, 1)
    keys, values, lengths = normal(3, 2, 40), normal(3, 2, 40), torch.tensor([0, 17, 39])
    scale = size**-0.5
    out = kernels.attention(query, key, value, keys, values, lengths, scale=scale, window=None).float()
    mask = torch.zeros(3, 40).masked_fill(torch.arange(40) > lengths[:, None], -torch.inf)[:, None, None]
    shared = query.float().view(3, 2, queries, size)
    expected = masked_attention(shared, keys.float(), values.float(), mask, scale=scale, softcap=None)
    return torch.allclose(out.view(expected.shape), expected, rtol=_rounding(dtype), atol=1e-5)


def _multiplies(kernels: Kernels, dtype: torch.dtype) -> bool:
    """Return True if products, where available, equal PyTorch's on a small example, up to rounding."""
    g = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=g).to(dtype) for shape in ((37, 70), (100, 70), (100,)))
    if not kernels.multiplies(weight):
        return True
    packed = kernels.pack(weight)
    out = kernels.linear(x, packed_matrix(packed, weight, bias)).float()
    expected = x.float() @ weight.float().T + bias.float()
    return torch.allclose(out, expected, rtol=_rounding(dtype), atol=1e-4)


def packed_matrix(packed: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedWeight:
    """Return the struct of a packed weight; the tensors must outlive it."""
    return PackedWeight(packed.data_ptr(), None if bias is None else bias.data_ptr(), *weight.shape)


def _rounding(dtype: torch.dtype) -> float:
    return 8e-3 if dtype == torch.bfloat16 else 1e-4
