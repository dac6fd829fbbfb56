"""AdamW's two moments in 8 bits each: block-wise dynamic quantisation.

A row of a matrix is cut into equal blocks of at most 256 numbers. Of each, the size of the largest number is
stored in float32, and a byte a number: which of 256 values, times that size, is nearest. The values are dense
near 0: those of a decade are the middles of equal intervals, and each decade towards 1 has twice as many.
A row is one of the first dimension, as FSDP2 cuts a tensor, so a rank's blocks are those of a single process.

Values and sizes are those of bitsandbytes' 8-bit optimisers, except that a mean of squares above 0 is never
stored as 0: the next step would divide a mean of gradients by eps.

Source: Dettmers et al. 2021, arXiv:2110.02861, sections 2.1 and 2.2.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float, UInt8

BLOCK = 256
"""The most numbers that share one size."""
LEAST = 4096
"""Numbers of a tensor below which its moments stay in float32; those of vectors always do."""
ABSMAX = "absmax"
"""Ends the names of the sizes of a moment's blocks."""
DECADES = 7


@dataclass(frozen=True)
class Codebook:
    """The 256 values of a moment, in rising order."""

    values: Float[torch.Tensor, "256"]
    bounds: Float[torch.Tensor, "256"]
    """The largest number that is stored as each value."""
    first: UInt8[torch.Tensor, "65536"]
    """The code of the least number with these upper 16 bits, which are in rising order as signed integers.
    Other numbers with these bits have this code or the next. A binary search takes ten times as long."""

    @staticmethod
    @cache
    def of(signed: bool, device: torch.device) -> "Codebook":
        """Return the values between -1 and 1, or from 0 to 1."""
        count = [2**n if signed else 2 ** (n + 1) for n in range(DECADES)]
        places = [(torch.arange(n, dtype=torch.float64) + 0.5) / n for n in count]
        sizes = torch.cat([10.0 ** (n + 1 - DECADES) * (0.1 + 0.9 * x) for n, x in enumerate(places)])
        ends = torch.tensor([0.0, 1.0, math.inf], dtype=torch.float64)
        exact = torch.cat([*([-sizes] if signed else []), sizes, ends]).sort().values
        bounds = ((exact[1:] + exact[:-1]) / 2).float()
        if not signed:
            bounds[0] = 0.0
        upper = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
        least = torch.where(upper < 0, upper | 0xFFFF, upper).view(torch.float32)
        first = torch.bucketize(least.nan_to_num(), bounds).to(torch.uint8)
        return Codebook(*(x.to(device) for x in (exact[:-1].float(), bounds, first)))


def is_quantised(shape: tuple[int, ...]) -> bool:
    """Return whether the moments of a parameter of this shape are stored in 8 bits."""
    return len(shape) > 1 and math.prod(shape) >= LEAST


def blocks(shape: tuple[int, ...]) -> int:
    """Return the number of blocks in each row of a tensor of this shape.

    >>> blocks((4, 576)), blocks((4, 256)), blocks((4, 2, 129))
    (3, 1, 2)
    """
    return -(-math.prod(shape[1:]) // BLOCK)


def stored_bytes(shape: tuple[int, ...]) -> int:
    """Return the bytes of both moments of such a parameter.

    >>> stored_bytes((64, 256)), stored_bytes((64,))
    (33280, 512)
    """
    count = math.prod(shape)
    return 2 * (count + 4 * shape[0] * blocks(shape)) if is_quantised(shape) else 8 * count


def quantise(
    moment: Float[torch.Tensor, "n ..."], *, signed: bool
) -> tuple[UInt8[torch.Tensor, "n ..."], Float[torch.Tensor, "n b"]]:
    """Return the code of each number, and the size of each block.

    >>> codes, absmax = quantise(torch.tensor([[-2.0, 1.0, 0.0]]), signed=True)
    >>> codes.tolist(), absmax.tolist()
    ([[0, 219, 127]], [[2.0]])
    """
    book, numbers = Codebook.of(signed, moment.device), _blocked(moment.float())
    absmax = numbers.abs().amax(-1)
    numbers = numbers / absmax.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    flat = numbers.flatten()
    codes = book.first.index_select(0, (flat.view(torch.int32) >> 16) + (1 << 15))
    codes += flat > book.bounds.index_select(0, codes.int())
    return _rows(codes.view_as(numbers), moment.shape), absmax


def dequantise(
    codes: UInt8[torch.Tensor, "n ..."],
    absmax: Float[torch.Tensor, "n b"],
    dtype: torch.dtype,
    *,
    signed: bool,
) -> Float[torch.Tensor, "n ..."]:
    """Return the numbers that `quantise` stored: value times size.

    >>> dequantise(*quantise(torch.tensor([[-2.0, 1.0, 0.0]]), signed=True), torch.float32, signed=True)
    tensor([[-1.9859,  1.0016,  0.0000]])
    """
    blocked = _blocked(codes)
    values = Codebook.of(signed, codes.device).values.index_select(0, blocked.flatten().int())
    return _rows(values.view(blocked.shape).mul_(absmax[..., None]).to(dtype), codes.shape)


def _blocked(x: torch.Tensor) -> torch.Tensor:
    """Return the rows cut into blocks, [n, b, numbers of a block]; what lacks to whole blocks is 0."""
    rows, count = x.flatten(1), blocks(x.shape)
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % count)).view(len(x), count, -1)


def _rows(blocked: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return blocks as rows of this shape."""
    return blocked.flatten(1)[:, : shape[1:].numel()].reshape(shape)
