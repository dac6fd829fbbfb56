"""Drawing one token a row, by inverting the cumulative distribution at a uniform number.

The uniform number is a pure function of (seed, task, sample, position), so an answer does not depend on the
rest of the batch. One number and one search a row is also several times cheaper than the exponential race of
torch.multinomial over a large vocabulary.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray

from posttrain.engines.native.cuda_graphs import Record, Recordings
from posttrain.engines.native.decode_kernel import Kernels
from posttrain.models.loading import on_device
from posttrain.types import RunError, Sampling

BLOCK = 256
"""Probabilities are summed in blocks: only the block that contains the target is searched token by token."""

CANDIDATES = 256
"""Number of likeliest tokens that top-p tries first: sorting a vocabulary takes longer than a step."""


ROUNDING = 1e-5
"""A remainder of at most this share of a token's probability is treated as zero."""


def stream_key(seed: int, task: str, sample: int) -> int:
    """Return the 64-bit key of a sample's draws.

    >>> stream_key(0, "add-3-4", 0) == stream_key(0, "add-3-4", 0) != stream_key(0, "add-3-4", 1)
    True
    """
    key = hashlib.blake2b(f"{seed}\x00{sample}\x00{task}".encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(key.digest(), "little")


def uniforms(keys: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """The position-th number in [0, 1) of each stream: splitmix64 as a counter-based generator, 53 bits.

    Source: Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators".

    >>> one, other = uniforms([1, 1], [0, 1]).tolist()
    >>> 0 <= one < 1 and one != other
    True
    """
    z = np.array(keys, np.uint64) + (np.array(positions, np.uint64) + 1) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    numbers: NDArray[np.float64] = ((z ^ (z >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53
    return numbers


def draw(
    logits: Float[torch.Tensor, "R V"],
    sampling: Sequence[Sampling],
    uniforms: Sequence[float],
    excluded: Mapping[int, Mapping[int, float]] = MappingProxyType({}),
    kernels: Kernels | None = None,
    rows: Sequence[int] | None = None,
    captured: "CapturedDraws | None" = None,
) -> tuple[list[int], list[float], list[float]]:
    """(tokens, logp_gen, logp_policy), one of each a draw.

    excluded: by draw and token, the share of its row's probability that must not be drawn; kernels: used in
    one pass for the draws without filters; rows: for each draw its row of logits, in ascending order; None:
    row n for draw n; captured: used if all draws are without filters.

    logp_policy is log softmax(logits / τ)[token]. logp_gen is that of the distribution drawn from: the same
    where nothing is filtered; after top-k, top-p and min-p renormalised; 0 for a greedy row, whose
    logp_policy is taken at τ = 1.

    A GPU is synchronised once, for all three; with top-p once more, to see whether the nucleus is complete.

    Raises RunError where logits are NaN or infinite.

    >>> draw(torch.tensor([[0.0, 5.0]]), [Sampling(temperature=0.0)], [0.5])[0]
    [1]
    """
    # Below the smallest normal float32 a temperature would become 0, and 0 / 0 NaN.
    taus = [max(float(s.temperature) or 1.0, 1e-37) for s in sampling]
    if kernels is not None and kernels.dtype == logits.dtype:
        plain = [n for n, s in enumerate(sampling) if not (s.filtered or n in excluded)]
        if plain:
            rows = range(len(sampling)) if rows is None else rows
            return _draw_with_kernels(logits, sampling, uniforms, excluded, kernels, taus, plain, rows)
    kinds = {id(s): s for s in sampling}.values()
    is_filtered, any_greedy = any(s.filtered for s in kinds), any(s.greedy for s in kinds)
    u_or_greedy = [-1.0 if s.greedy else u for s, u in zip(sampling, uniforms, strict=True)]
    if captured is not None and not (is_filtered or excluded):
        numbers = captured(logits, rows, taus, u_or_greedy)
    else:
        logits = logits if rows is None else logits[on_device([*rows], logits.device)]
        temperature, u = on_device([taus, u_or_greedy], logits.device)
        filters = sampling if is_filtered else ()
        numbers = draw_rows(logits, temperature, u, any_greedy, filters, excluded)
    numbers = numbers.cpu()
    tokens: list[int] = numbers[0].long().tolist()
    gen, policy = numbers[1:].tolist()
    _check_finite(policy)
    return tokens, gen, policy


def draw_rows(
    logits: Float[torch.Tensor, "R V"],
    temperature: Float[torch.Tensor, "R"],
    u: Float[torch.Tensor, "R"],
    any_greedy: bool,
    filters: Sequence[Sampling] = (),
    excluded: Mapping[int, Mapping[int, float]] = MappingProxyType({}),
) -> Float[torch.Tensor, "3 R"]:
    """(token, logp_gen, logp_policy) of each row in float64, which holds all three exactly (see `draw`).

    temperature, u: float64; u < 0: the row is greedy; any_greedy: True if any row is; filters: (), or the
    rows' sampling. Nothing waits for the device, unless tokens are filtered by top-p or excluded.
    """
    # The maximum is subtracted first: large logits over a low temperature would lose small differences.
    z = (logits.float() - logits.amax(-1, keepdim=True).float()).div_(temperature.float()[:, None])
    weight = z.exp()
    choices = filtered(weight, filters) if filters else weight
    remaining = subtracted(choices, excluded) if excluded else choices
    token = _invert(remaining, u)
    if any_greedy:
        token = torch.where(u < 0, z.argmax(-1), token)

    picked = z.gather(-1, token[:, None])[:, 0]
    logp_policy = picked - weight.sum(-1).log()
    logp_gen = logp_policy.clone() if choices is weight else picked - choices.sum(-1).log()
    if excluded:
        changed = _row_index([*excluded], len(logits), logits.device)
        renormalised = remaining.gather(-1, token[:, None])[:, 0].log() - remaining.sum(-1).log()
        logp_gen[changed] = renormalised[changed]
    if any_greedy:
        logp_gen = logp_gen.masked_fill(u < 0, 0.0)
    return torch.stack([token.double(), logp_gen.double(), logp_policy.double()])


class CapturedDraws:
    """Draws without filters, captured as a CUDA graph for each power of two that their number is rounded to.

    One launch replaces about thirty. The graphs share these inputs and outputs; rows that no draw needs hold
    what an earlier call left.
    """

    def __init__(self, most: int, device: torch.device, record: Record) -> None:
        """most: number of draws in a call."""
        self.inputs = torch.ones(2, most, dtype=torch.float64, device=device)
        self.numbers = torch.zeros(3, most, dtype=torch.float64, device=device)
        self.logits: torch.Tensor | None = None
        self._recordings = Recordings(record)

    def __call__(
        self,
        logits: Float[torch.Tensor, "R V"],
        rows: Sequence[int] | None,
        temperatures: Sequence[float],
        u: Sequence[float],
    ) -> Float[torch.Tensor, "3 D"]:
        """Return what `draw_rows` returns for these rows of logits; the next call overwrites it."""
        count, most = len(u), self.inputs.shape[1]
        size, any_greedy = min(1 << (count - 1).bit_length(), most), min(u) < 0
        if self.logits is None:
            self.logits = logits.new_zeros(most, logits.shape[1])
        self.logits[:count] = logits if rows is None else logits[on_device([*rows], logits.device)]
        self.inputs[:, :count] = on_device([temperatures, u], logits.device)
        some, (temperature, numbers) = self.logits[:size], self.inputs[:, :size]

        def step() -> None:
            self.numbers[:, :size] = draw_rows(some, temperature, numbers, any_greedy)

        self._recordings.replay((size, any_greedy), step)()
        return self.numbers[:, :count]


def likeliest(logits: Float[torch.Tensor, "V"], temperature: float, count: int) -> list[tuple[int, float]]:
    """Return the `count` likeliest tokens with log softmax(logits / τ), the likeliest first; τ = 1 for 0.

    >>> [(token, round(logp, 2)) for token, logp in likeliest(torch.tensor([0.0, 1.0]), 0.5, 1)]
    [(1, -0.13)]
    """
    logp, tokens = (logits.float() / (temperature or 1.0)).log_softmax(-1).topk(min(count, len(logits)))
    return list(zip(tokens.tolist(), logp.tolist(), strict=True))


def _draw_with_kernels(
    logits: Float[torch.Tensor, "B V"],
    sampling: Sequence[Sampling],
    uniforms: Sequence[float],
    excluded: Mapping[int, Mapping[int, float]],
    kernels: Kernels,
    taus: list[float],
    plain: list[int],
    rows: Sequence[int],
) -> tuple[list[int], list[float], list[float]]:
    """Like `draw`: by the kernels for the draws `plain`, by PyTorch for all others."""
    tokens, gen, policy = [0] * len(sampling), [0.0] * len(sampling), [0.0] * len(sampling)
    numbers = [-1.0 if sampling[n].greedy else uniforms[n] for n in plain]
    kernel_draws = kernels.draw(logits, [rows[n] for n in plain], [taus[n] for n in plain], numbers)
    for n, token, logp in zip(plain, *kernel_draws, strict=True):
        tokens[n], gen[n], policy[n] = token, 0.0 if sampling[n].greedy else logp, logp
    _check_finite(policy)
    others = sorted(set(range(len(sampling))) - set(plain))
    if others:
        shares = {row: excluded[n] for row, n in enumerate(others) if n in excluded}
        other_logits = logits[[rows[n] for n in others]]
        other_draws = draw(other_logits, [sampling[n] for n in others], [uniforms[n] for n in others], shares)
        for n, token, logp_gen, logp_policy in zip(others, *other_draws, strict=True):
            tokens[n], gen[n], policy[n] = token, logp_gen, logp_policy
    return tokens, gen, policy


def _check_finite(logps: Sequence[float]) -> None:
    if any(map(math.isnan, logps)):
        raise RunError("sample", "the model's logits hold NaN or infinity: its weights are broken")


def filtered(weight: Float[torch.Tensor, "B V"], sampling: Sequence[Sampling]) -> Float[torch.Tensor, "B V"]:
    """Weights after top-k, then top-p, then min-p in each row; all others become 0.

    Equal weights stay or go together, so the result does not depend on an order among them.

    >>> row = torch.tensor([[1.0, 4.0, 3.0, 2.0]])
    >>> filtered(row, [Sampling(top_k=2)]), filtered(row, [Sampling(top_p=0.5)])
    (tensor([[0., 4., 3., 0.]]), tensor([[0., 4., 3., 0.]]))
    >>> filtered(row, [Sampling(min_p=0.5)])
    tensor([[0., 4., 3., 2.]])
    """
    B, V = weight.shape
    floor = weight.new_zeros(B, 1)
    top_k = [s.top_k for s in sampling if 0 < s.top_k < V]
    if top_k:
        index = _row_index([i for i, s in enumerate(sampling) if 0 < s.top_k < V], B, weight.device)
        k = on_device(top_k, weight.device)[:, None]
        floor[index] = weight[index].topk(max(top_k)).values.gather(-1, k - 1)
    top_p = [s.top_p for s in sampling if s.top_p < 1]
    if top_p:
        index = _row_index([i for i, s in enumerate(sampling) if s.top_p < 1], B, weight.device)
        p = on_device(top_p, weight.device)[:, None]
        remaining = weight.masked_fill(weight < floor, 0) if top_k else weight
        floor[index] = torch.maximum(floor[index], _nucleus_floor(remaining[index], p, CANDIDATES))
    min_p = on_device([float(s.min_p) for s in sampling], weight.device).float()[:, None]
    floor = torch.maximum(floor, min_p * weight.amax(-1, keepdim=True))
    return weight.masked_fill(weight < floor, 0)


def subtracted(
    weight: Float[torch.Tensor, "B V"], excluded: Mapping[int, Mapping[int, float]]
) -> Float[torch.Tensor, "B V"]:
    """Weights minus the excluded shares of their row's total; a row without a remainder stays unchanged.

    >>> subtracted(torch.tensor([[2.0, 1.0, 1.0]]), {0: {0: 0.25, 2: 0.25}})
    tensor([[1., 1., 0.]])
    """
    remaining = weight.clone()
    for row, excluded_shares in excluded.items():
        if not excluded_shares:
            continue
        tokens = on_device([*excluded_shares], weight.device)
        shares = on_device([*excluded_shares.values()], weight.device)
        before = weight[row, tokens].double()
        after = before - shares * weight[row].sum(dtype=torch.float64)
        remaining[row, tokens] = after.where(after > ROUNDING * before, 0.0).to(weight)
        if not bool((remaining[row] > 0).any()):
            remaining[row] = weight[row]
    return remaining


def _row_index(rows: list[int], count: int, device: torch.device) -> slice | Int[torch.Tensor, "N"]:
    """Return an index of these rows among `count`; for all rows a slice, which copies nothing."""
    return slice(None) if len(rows) == count else on_device(rows, device)


def _nucleus_floor(
    weight: Float[torch.Tensor, "B V"], p: Float[torch.Tensor, "B 1"], candidates: int
) -> Float[torch.Tensor, "B 1"]:
    """Smallest of the largest weights that together first reach the share p of their row's total."""
    V = weight.shape[-1]
    value = weight.topk(min(candidates, V)).values
    before = value.cumsum(-1, dtype=torch.float64) - value
    inside = before < p * weight.sum(-1, keepdim=True, dtype=torch.float64)
    least = value.gather(-1, inside.sum(-1, keepdim=True) - 1)
    wider = inside.all(-1)
    if candidates < V and bool(wider.any()):
        least[wider] = _nucleus_floor(weight[wider], p[wider], 8 * candidates)
    return least


def _invert(weight: Float[torch.Tensor, "B V"], u: Float[torch.Tensor, "B"]) -> Int[torch.Tensor, "B"]:
    """First token at which the running sum of weights exceeds u times their total."""
    B, V = weight.shape
    if V % BLOCK:
        weight = torch.nn.functional.pad(weight, (0, BLOCK - V % BLOCK))
    blocks = weight.view(B, -1, BLOCK)
    sums = blocks.sum(-1).double()
    running = sums.cumsum(-1)
    rest = u * running[:, -1]
    block = torch.searchsorted(running, rest[:, None], right=True)[:, 0]
    block = torch.minimum(block, _last_positive(sums))
    rows = torch.arange(B, device=weight.device)
    inside = blocks[rows, block].double()
    # Rounding may put the target a little before the block, or after its last positive weight: both
    # would select a token of weight 0. NaN stays within the vocabulary, and the caller checks for it.
    rest = (rest - (running[rows, block] - sums[rows, block])).clamp_(min=0)
    place = torch.searchsorted(inside.cumsum(-1), rest[:, None], right=True)[:, 0]
    return (block * BLOCK + torch.minimum(place, _last_positive(inside))).clamp_(max=V - 1)


def _last_positive(weight: Float[torch.Tensor, "B N"]) -> Int[torch.Tensor, "B"]:
    return weight.shape[-1] - 1 - (weight > 0).flip(-1).int().argmax(-1)
