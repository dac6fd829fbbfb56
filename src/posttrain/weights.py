"""Weights on their way from a learner to a sampler: named tensors and their digest."""

import hashlib
from collections.abc import Iterable

import torch
from torch import nn

Named = Iterable[tuple[str, torch.Tensor]]

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WIDTH = 1024
_CHUNK = 256 * _WIDTH
"""Words multiplied at a time: few enough to stay in the processor's cache."""


def digest(named: Named) -> str:
    """64 bits, in hexadecimal, that change with any bit, shape, place or name of the tensors.

    >>> x = torch.tensor([1.0, 2.0])
    >>> digest([("x", x)]) == digest([("x", x.flip(0))])
    False
    """
    return combined(fingerprint(name, tensor) for name, tensor in named)


def fingerprint(name: str, tensor: torch.Tensor) -> str:
    """One tensor's part in a digest: its name, shape, type and a weighted sum of its bit patterns.

    Every place has its own odd weight, modulo 2^64, so no single bit can change unseen. Sums along rows
    and columns alone would miss a rectangle whose opposite corners change places.
    """
    flat = tensor.detach().contiguous().view(-1)
    words = flat.view(_WORDS[flat.element_size()])
    column = _odd(_WIDTH, words.device)
    sums = [column.new_zeros(0)]
    for start in range(0, len(words), _CHUNK):
        part = words[start : start + _CHUNK].to(torch.int64)
        if len(part) % _WIDTH:
            part = nn.functional.pad(part, (0, -len(part) % _WIDTH))
        sums.append((part.view(-1, _WIDTH) * column).sum(1))
    rows = torch.cat(sums)
    return f"{name} {tuple(tensor.shape)} {tensor.dtype} {int((rows * _odd(len(rows), rows.device)).sum())}"


def combined(fingerprints: Iterable[str]) -> str:
    """The digest of tensors whose fingerprints these are, in any order."""
    return hashlib.blake2b("\n".join(sorted(fingerprints)).encode(), digest_size=8).hexdigest()


def _odd(n: int, device: torch.device) -> torch.Tensor:
    """n odd numbers of 64 bits without a pattern, the same on every machine."""
    x = torch.arange(1, n + 1, device=device) * 0x1E3779B97F4A7C15
    x = (x ^ (x >> 31)) * 0x3F58476D1CE4E5B9
    return 2 * (x ^ (x >> 29)) + 1
