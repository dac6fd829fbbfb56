"""Drawing one token a row, by inverting the cumulative distribution at a given uniform number.

The uniform number is a pure function of (seed, task, sample, position), so an answer does not
depend on who shares its batch. One number and one search a row is also several times cheaper
than the exponential race of torch.multinomial over a large vocabulary.
"""

import hashlib

import torch
from jaxtyping import Float, Int

from posttrain.types import Sampling

BLOCK = 256
"""Probabilities are summed in blocks: only the block that is hit is searched token by token."""

_MASK = (1 << 64) - 1


def stream(seed: int, task: str, sample: int) -> int:
    """The 64-bit key of a sample's draws.

    >>> stream(0, "add-3-4", 0) == stream(0, "add-3-4", 0) != stream(0, "add-3-4", 1)
    True
    """
    key = hashlib.blake2b(f"{seed}\x00{sample}\x00{task}".encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(key.digest(), "little")


def uniform(key: int, position: int) -> float:
    """The position-th number in [0, 1) of a stream: splitmix64 as a counter-based generator, 53 bits.

    Source: Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators".

    >>> 0 <= uniform(1, 0) < 1 and uniform(1, 0) != uniform(1, 1)
    True
    """
    z = (key + (position + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((z ^ (z >> 31)) >> 11) * 2.0**-53


def draw(
    logits: Float[torch.Tensor, "B V"], sampling: list[Sampling], uniforms: list[float]
) -> tuple[list[int], list[float], list[float]]:
    """(tokens, logp_gen, logp_policy), one of each a row.

    logp_policy is log softmax(logits / τ)[token]. logp_gen is that of the distribution drawn from:
    the same where nothing is filtered; after top-k, top-p and min-p renormalised; 0 for a greedy
    row, whose logp_policy is taken at τ = 1.

    >>> draw(torch.tensor([[0.0, 5.0]]), [Sampling(temperature=0.0)], [0.5])[0]
    [1]
    """
    device = logits.device
    temperature = torch.tensor([s.temperature or 1.0 for s in sampling], device=device)
    z = logits.float() / temperature[:, None]
    highest = z.amax(-1, keepdim=True)
    weight = (z - highest).exp_()
    log_total = weight.sum(-1).log() + highest[:, 0]

    kept = weight
    filtered = [i for i, s in enumerate(sampling) if s.filtered and not s.greedy]
    if filtered:
        kept = weight.clone()
        for i in filtered:
            kept[i] = keep(weight[i], sampling[i])
    token = _invert(kept, torch.tensor(uniforms, dtype=torch.float64, device=device))
    greedy = [i for i, s in enumerate(sampling) if s.greedy]
    if greedy:
        token[greedy] = z[greedy].argmax(-1)

    picked = z.gather(-1, token[:, None])[:, 0]
    logp_policy = picked - log_total
    logp_gen = logp_policy.clone()
    if filtered:
        total = kept[filtered].sum(-1).log() + highest[filtered, 0]
        logp_gen[filtered] = picked[filtered] - total
    if greedy:
        logp_gen[greedy] = 0.0
    tokens: list[int] = token.tolist()
    return tokens, logp_gen.tolist(), logp_policy.tolist()


def keep(weight: Float[torch.Tensor, "V"], sampling: Sampling) -> Float[torch.Tensor, "V"]:
    """The weights that top-k, then top-p, then min-p leave, the others 0. Ties stay together under top-k.

    >>> keep(torch.tensor([1.0, 4.0, 3.0, 2.0]), Sampling(top_k=2))
    tensor([0., 4., 3., 0.])
    >>> keep(torch.tensor([1.0, 4.0, 3.0, 2.0]), Sampling(top_p=0.5))
    tensor([0., 4., 3., 0.])
    >>> keep(torch.tensor([1.0, 4.0, 3.0, 2.0]), Sampling(min_p=0.5))
    tensor([0., 4., 3., 2.])
    """
    out = weight.clone()
    if 0 < sampling.top_k < len(weight):
        out[weight < weight.topk(sampling.top_k).values[-1]] = 0
    if sampling.top_p < 1:
        value, order = out.sort(descending=True)
        before = (value.cumsum(0, dtype=torch.float64) - value) / value.sum(dtype=torch.float64)
        out[order[before >= sampling.top_p]] = 0
    if sampling.min_p > 0:
        out[out < sampling.min_p * weight.max()] = 0
    return out


def _invert(weight: Float[torch.Tensor, "B V"], u: Float[torch.Tensor, "B"]) -> Int[torch.Tensor, "B"]:
    """The first token at which the running sum of weights exceeds u times their total."""
    B, V = weight.shape
    if V % BLOCK:
        weight = torch.nn.functional.pad(weight, (0, BLOCK - V % BLOCK))
    blocks = weight.view(B, -1, BLOCK)
    running = blocks.sum(-1).double().cumsum(-1)
    rest = u * running[:, -1]
    block = torch.searchsorted(running, rest[:, None], right=True)[:, 0]
    block = torch.minimum(block, _last_positive(blocks.sum(-1)))
    rows = torch.arange(B, device=weight.device)
    inside = blocks[rows, block].double()
    rest = rest - (running[rows, block] - blocks.sum(-1).double()[rows, block])
    place = torch.searchsorted(inside.cumsum(-1), rest[:, None], right=True)[:, 0]
    # Rounding may push the target past the last positive weight; a token of weight 0 is never drawn.
    return block * BLOCK + torch.minimum(place, _last_positive(inside))


def _last_positive(weight: Float[torch.Tensor, "B N"]) -> Int[torch.Tensor, "B"]:
    return weight.shape[-1] - 1 - (weight > 0).flip(-1).int().argmax(-1)
