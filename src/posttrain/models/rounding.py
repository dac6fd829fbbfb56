"""Float32 numbers behind weights of bfloat16, so that no small step is lost in rounding them.

A model that computes in bfloat16 is trained through float32 masters, of which its weights are rounded copies.
Where a master begins in the middle of the interval that rounds to its weight, a weight of 0.1 stays as it is
until its master has moved by 0.00025: at a rate of 1e-5 the policy hardly learns for 25 steps. Where masters
are spread over the intervals, one weight in 49 moves with the first step, by 49 times as much, and together
they move as they should.
"""

import hashlib

import torch


def dither(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Float32 numbers that round to these of bfloat16, each anywhere in the interval that does.

    Where it is depends on the name and the place in the tensor alone, on any device. 0 stays 0, and what is
    of another dtype keeps its numbers; a float64 its dtype too.

    >>> weight = torch.tensor([1.0, 0.0, -3.0], dtype=torch.bfloat16)
    >>> dither("a", weight).to(torch.bfloat16).equal(weight), dither("a", weight).equal(weight.float())
    (True, False)
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    out = weight.detach().to(wide, copy=True, memory_format=torch.contiguous_format)
    if weight.dtype != torch.bfloat16:
        return out
    bits = out.view(-1).view(torch.int32)
    key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest())
    # So many numbers at once stay in a core's cache; a GPU is kept waiting by small pieces.
    size = 1 << (17 if bits.device.type == "cpu" else 24)
    for start in range(0, len(bits), size):
        part = bits[start : start + size]
        apart = _hashed(torch.arange(len(part), dtype=torch.int32, device=part.device), key + start)
        # A float32 is a bfloat16 with 16 bits more: up to half of their patterns away it rounds back.
        apart.bitwise_right_shift_(16).clamp_(min=1 - 2**15)
        part += apart.masked_fill_(part & 0x7FFFFFFF == 0, 0)
    return out


def _hashed(x: torch.Tensor, key: int) -> torch.Tensor:
    """32 bits as good as random of each number and the key; torch's int32 wraps around.

    Multiplications by odd numbers, and xors with the number shifted, in the manner of MurmurHash3's finaliser
    (Appleby), whose factors two of the three are; the first is the golden ratio's.
    """
    x += _signed(key)
    x *= _signed(0x9E3779B1)
    x ^= x >> 15
    x *= _signed(0x85EBCA6B)
    x ^= x >> 13
    x *= _signed(0xC2B2AE35)
    return x


def _signed(x: int) -> int:
    return (x + 2**31) % 2**32 - 2**31
