"""Weights on their way from a learner to a sampler: named tensors and their digest."""

import hashlib
from collections.abc import Iterable

import torch

Named = Iterable[tuple[str, torch.Tensor]]

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(named: Named) -> str:
    """64 bits, in hexadecimal, that change with any bit, shape, place or name of the tensors.

    >>> x = torch.tensor([1.0, 2.0])
    >>> digest([("x", x)]) == digest([("x", x.flip(0))])
    False
    """
    return combined(fingerprint(name, tensor) for name, tensor in named)


def fingerprint(name: str, tensor: torch.Tensor) -> str:
    """One tensor's part in a digest: its name, shape, type and sums of its bit patterns.

    The sums, modulo 2^64, are plain and weighted by row and by column with odd numbers: one pass
    over the memory, and values that changed places are seen.
    """
    flat = tensor.detach().contiguous().view(-1)
    words = flat.view(_WORDS[flat.element_size()])
    table = words.view(-1, tensor.shape[-1]) if tensor.ndim > 1 and tensor.numel() else words.view(-1, 1)
    sums = [_weighed(table.sum(axis, dtype=torch.int64)) for axis in (0, 1)]
    return f"{name} {tuple(tensor.shape)} {tensor.dtype} {sums}"


def combined(fingerprints: Iterable[str]) -> str:
    """The digest of tensors whose fingerprints these are, in any order."""
    return hashlib.blake2b("\n".join(sorted(fingerprints)).encode(), digest_size=8).hexdigest()


def _weighed(sums: torch.Tensor) -> tuple[int, int]:
    odd = 2 * torch.arange(len(sums), device=sums.device) + 1
    return int(sums.sum()), int((sums * odd * 0x5851F42D4C957F2D).sum())
