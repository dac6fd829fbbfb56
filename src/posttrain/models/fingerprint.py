"""Checks and digests of named tensors, for weight sync from a learner to samplers."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

import torch
from torch import nn

NamedTensors = Iterable[tuple[str, torch.Tensor]]

_WIDTH = 1024
"""Number of words in a row of a weighted sum."""
_ROWS = 1 << 14
"""Rows multiplied at a time on a GPU: few launches, and products of 128 MiB."""


def checked(
    weights: NamedTensors,
    shapes: Mapping[str, torch.Size],
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each weight in this dtype and on this device.

    Raises KeyError for a name that is unknown, repeated or missing, ValueError for a wrong shape.
    """
    missing = set(shapes)
    for name, tensor in weights:
        if name not in missing:
            raise KeyError(f"the weights handed over hold {name}, unknown to the sampler or given twice")
        if tensor.shape != shapes[name]:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not {tuple(shapes[name])}")
        missing.remove(name)
        yield name, tensor.detach().to(device=device, dtype=dtype)
    if missing:
        raise KeyError(f"the weights handed over lack {min(missing)}")


def digest(weights: NamedTensors) -> str:
    """Return 64 bits, in hexadecimal, that change with any bit, shape, place or name of the tensors.

    >>> x = torch.tensor([1.0, 2.0])
    >>> digest([("x", x)]) == digest([("x", x.flip(0))])
    False
    """
    return combined(fingerprint(name, tensor) for name, tensor in weights)


def fingerprint(name: str, tensor: torch.Tensor) -> str:
    """Return one tensor's part of a digest: its name, shape, dtype and a weighted sum of its 8-byte words.

    Every word has its own odd weight, modulo 2^64, so any change of a single bit changes the sum. Sums along
    rows and columns alone would not change if opposite corners of a rectangle swapped places. The sum is
    exact, so all devices return the same.
    """
    flat = tensor.detach().contiguous().view(-1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()  # words must be aligned to 8 bytes
    full_rows = flat.numel() * flat.element_size() // (8 * _WIDTH)
    body = flat[: full_rows * 8 * _WIDTH // flat.element_size()]
    rest = flat[len(body) :].view(torch.uint8)
    rest = nn.functional.pad(rest, (0, -len(rest) % (8 * _WIDTH)))
    sums = torch.cat([_row_sums(part.view(torch.int64).view(-1, _WIDTH)) for part in (body, rest)])
    return f"{name} {tuple(tensor.shape)} {tensor.dtype} {int((sums * _odd(len(sums), sums.device)).sum())}"


def location(name: str, tensor: torch.Tensor) -> str:
    """Return a tensor's part of a digest where both sides read the same memory: its place, and no number.

    >>> x = torch.zeros(2)
    >>> location("x", x) == location("x", x.detach()), location("x", x) == location("x", x.clone())
    (True, False)
    """
    place = f"{tensor.device} {tensor.data_ptr()} {tensor.stride()}"
    return f"{name} {tuple(tensor.shape)} {tensor.dtype} at {place}"


def _row_sums(words: torch.Tensor) -> torch.Tensor:
    """Return Σ weight · word of every row, modulo 2^64."""
    weight = _odd(_WIDTH, words.device)
    if words.device.type == "cpu":
        return torch.mv(words, weight)
    # PyTorch does not guarantee products of integer matrices on GPUs.
    return torch.cat([(part * weight).sum(1) for part in torch.split(words, _ROWS)])


def combined(fingerprints: Iterable[str]) -> str:
    """Return the digest of tensors from their fingerprints, in any order."""
    return hashlib.blake2b("\n".join(sorted(fingerprints)).encode(), digest_size=8).hexdigest()


@lru_cache(maxsize=64)
def _odd(n: int, device: torch.device) -> torch.Tensor:
    """Return n pseudorandom odd numbers of 64 bits, the same on every machine."""
    x = torch.arange(1, n + 1, device=device) * 0x1E3779B97F4A7C15
    x = (x ^ (x >> 31)) * 0x3F58476D1CE4E5B9
    return 2 * (x ^ (x >> 29)) + 1


def finite(tensor: torch.Tensor) -> bool:
    """Return whether no number of the tensor is NaN or infinite.

    It checks the minimum and maximum alone: infinities are extremes, and both are NaN if any number is. That
    takes a tenth of the time of checking each number.

    >>> finite(torch.tensor([1.0, -2.0])), finite(torch.tensor([1.0, torch.nan])), finite(torch.zeros(0))
    (True, False, True)
    """
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return bool(torch.stack(values.detach().aminmax()).isfinite().all())
