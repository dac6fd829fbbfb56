"""NEFTune: uniform noise on the input embeddings, in the forward passes that learn and in no other.

    x_t + α/√(L d) · u_t,        u_t uniform in [-1, 1]^d

Rows are packed and a shared prompt is computed once, so the noise of a token may not depend on where
it lies, nor on who shares its microbatch. Here u_t is a pure function of (seed, optimiser step,
group, the row's tokens up to and including t). Rows of a group therefore have the same noise as far
as they are the same, which is what lets their prompt be computed once; rows of different groups have
independent noise. L is the length of the group's longest row in the step.

Source: Jain et al. 2023, arXiv:2310.05914, algorithm 1. Deviations: in the paper every row has noise
of its own and L is its own length. The two agree for groups of one row, which supervised
fine-tuning has. The noise is put on what the embedding layer returns; an architecture that scales
its embeddings afterwards (Gemma) scales the noise with them.
"""

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import nn
from transformers import PreTrainedModel

from posttrain.learner.pack import Pack
from posttrain.learner.prompt_group import PromptGroup
from posttrain.learner.ranks import ALONE, Ranks
from posttrain.types import Batch

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
FIRST, SECOND = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)
"""The constants of splitmix64, as the signed numbers that torch has."""
CHUNK = 1 << 18
"""Numbers drawn at a time: the bits of each take eight bytes, several times over."""


@dataclass(frozen=True)
class Noise:
    """The noise of one optimiser step."""

    alpha: float
    key: int
    """64 bits, of the seed and the step."""
    longest: dict[int, int]
    """Tokens of the longest row of each group."""


def of_step(batch: Batch, alpha: float, *, seed: int, step: int, ranks: Ranks = ALONE) -> Noise | None:
    """The noise for these rows, all of one optimiser step's; None for alpha = 0, which is no noise at all.

    >>> from posttrain.types import Trajectory
    >>> row = Trajectory(tokens=[7, 3], sampled=[False, True], logp_gen=[0, 0], logp_policy=[0, 0],
    ...                  version=[0, 0], reward=[0, 0])
    >>> noise = of_step(Batch.of([row], group=[4]), 5.0, seed=0, step=9)
    >>> noise.longest
    {4: 2}
    """
    if not alpha:
        return None
    digest = hashlib.blake2b(f"neftune/{seed}/{step}".encode(), digest_size=8).digest()
    longest: dict[int, int] = {}
    for group, length in zip(batch.group.tolist(), batch.length.tolist(), strict=True):
        longest[group] = max(longest.get(group, 0), length)
    # A row may be computed on another rank than the one that knows its group.
    longest = {group: length for each in ranks.gather(longest) for group, length in each.items()}
    return Noise(alpha, int.from_bytes(digest, "little", signed=True), longest)


@contextmanager
def noisy(model: PreTrainedModel, packed: Pack, batch: Batch, noise: Noise | None) -> Iterator[None]:
    """Within it the model's embeddings of this pack of this batch's rows have the noise; None has none."""
    if noise is None:
        yield
        return

    def add(_: nn.Module, __: Any, embedded: torch.Tensor) -> torch.Tensor:
        added = drawn(noise, packed, batch, embedded.shape[-1], embedded.device).to(embedded.dtype)
        spare = embedded.shape[-2] - len(added)
        return embedded + nn.functional.pad(added, (0, 0, 0, spare))

    handle = model.get_input_embeddings().register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


def drawn(
    noise: Noise, packed: Pack, batch: Batch, d: int, device: torch.device | str = "cpu"
) -> Float[torch.Tensor, "N d"]:
    """The noise of every token of the pack, in float32; the same numbers on every device."""
    streams, scales = [], []
    for prompt_group, group in zip(packed.prompt_groups, _groups(packed, batch), strict=True):
        streams.append(_streams(noise.key, packed, prompt_group, group))
        scale = noise.alpha / math.sqrt(noise.longest[group] * d)
        scales.append(torch.full((prompt_group.stop - prompt_group.start, 1), scale))
    chunks = torch.split(torch.cat(streams).to(device), max(1, CHUNK // d))
    return torch.cat([_uniform(chunk, d) for chunk in chunks]) * torch.cat(scales).to(device)


def _groups(packed: Pack, batch: Batch) -> list[int]:
    """The group of each prompt group: that of any of its trained tokens."""
    starts = torch.tensor([f.start for f in packed.prompt_groups])
    prompt_group = torch.bucketize(packed.source, starts, right=True) - 1
    group = torch.empty(len(starts), dtype=torch.long)
    group[prompt_group] = batch.group[packed.row]
    found: list[int] = group.tolist()
    return found


def _streams(key: int, packed: Pack, prompt_group: PromptGroup, group: int) -> Int[torch.Tensor, "n"]:
    """A 64-bit number for each token of a prompt group: a hash of the group, and of its row up to there.

    A row's hash is a sum over its tokens and their positions, modulo 2^64, so that every branch goes on
    from the sum of the prefix, and a row that is cut off from its siblings finds the same.
    """
    span = slice(prompt_group.start, prompt_group.stop)
    each = _mixed(_mixed(packed.tokens[span] + key) + packed.positions[span])
    prefix, *branches = torch.split(each, [prompt_group.prefix, *prompt_group.branches])
    upto = torch.cat([prefix.cumsum(0), *(prefix.sum() + branch.cumsum(0) for branch in branches)])
    return _mixed(upto + _mixed(torch.tensor(key) + group))


def _uniform(stream: Int[torch.Tensor, "n"], d: int) -> Float[torch.Tensor, "n d"]:
    """d numbers in (-1, 1) of each stream: splitmix64, with the place as its counter.

    Source: Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators".
    """
    bits = _mixed(stream[:, None] + torch.arange(1, d + 1, device=stream.device) * GOLDEN)
    # Odd multiples of 2^-23: float32 holds each exactly, and they lie evenly around 0.
    return (2 * _shifted(bits, 41) + 1 - (1 << 23)).to(torch.float32) * 2.0**-23


def _mixed(x: Int[torch.Tensor, "..."]) -> Int[torch.Tensor, "..."]:
    """A permutation of the 64-bit numbers in which every bit depends on every bit."""
    x = (x ^ _shifted(x, 30)) * FIRST
    x = (x ^ _shifted(x, 27)) * SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Int[torch.Tensor, "..."], k: int) -> Int[torch.Tensor, "..."]:
    """x >> k with zeros from the left: torch's own shift copies the sign."""
    return (x >> k) & ((1 << (64 - k)) - 1)
