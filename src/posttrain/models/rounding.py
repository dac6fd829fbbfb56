"""Dithered float32 numbers behind bfloat16 weights, so that rounding does not lose small steps.

A model that computes in bfloat16 is trained through float32 masters, and its weights are rounded copies.
If a master starts in the middle of the interval that rounds to its weight, a weight of 0.1 does not change
until its master has moved by 0.00025: at a rate of 1e-5 the policy hardly learns for 25 steps. If masters
are spread over the intervals, one weight in 49 moves in the first step, by 49 times as much, so the weights
move by the right amount on average.
"""

import hashlib

import torch


def dither(name: str, weight: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Return float32 numbers that round to a bfloat16 weight, at pseudorandom places in its intervals.

    The places depend only on the name and the index in the tensor, on any device. 0 stays 0. Numbers of other
    dtypes do not change, and float64 stays float64. first: index of the first number if these are a slice.

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
    # Small pieces stay in a core's cache; on a GPU they would cost launches.
    size = 1 << (17 if bits.device.type == "cpu" else 24)
    for start in range(0, len(bits), size):
        part = bits[start : start + size]
        offset = _hash(torch.arange(len(part), dtype=torch.int32, device=part.device), key + first + start)
        # A float32 has 16 bits more than a bfloat16: less than half of their range away it rounds back.
        offset.bitwise_right_shift_(16).clamp_(min=1 - 2**15)
        part += offset.masked_fill_(part & 0x7FFFFFFF == 0, 0)
    return out


def _hash(x: torch.Tensor, key: int) -> torch.Tensor:
    """Return 32 pseudorandom bits from each number and the key, in place; torch's int32 wraps around.

    Multiplications by odd numbers and xors with shifted numbers, as in MurmurHash3's finaliser
    (Appleby), which has two of the three factors; the first is the golden ratio's.
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
