"""Several heads on one backbone: an ensemble of reward models for hardly more than the price of one.

    loss = 1/H Σ_k c_k(g) loss(the number of head k),        c_k(g) ~ Poisson(1)

c_k(g) is how often group g is in the bootstrap of head k: of n draws from n records with replacement one is
taken Binomial(n, 1/n) times, and Poisson(1) is the limit. It is a pure function of (seed, k, tokens of the
group), the same in every epoch and however a step is cut.

The heads share what the backbone has learnt, so they differ far less than models that are trained apart: 0.06
deviations against 0.40 in docs/findings/goodhart.md.

Source: Zhang et al. 2024, arXiv:2401.16635 (heads for reward models); the bootstrap of heads on one backbone
Osband et al. 2016, arXiv:1602.04621.
"""

import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

import torch
from jaxtyping import Float

from posttrain.types import Batch, Method, Outputs, PerToken, RunError

Loss = Callable[[Outputs, Batch], PerToken]
"""What a method's `loss` is: of the rows of a microbatch one number a token, not reduced."""
_BELOW = list(accumulate(math.exp(-1) / math.factorial(count) for count in range(20)))
"""P(c ≤ 0), P(c ≤ 1) ... of Poisson(1)."""


def each_head(method: Method, out: Outputs, batch: Batch, seed: int) -> PerToken:
    """The method's losses; of an ensemble the mean over heads, each on its own bootstrap."""
    if out.heads is None:
        return method.loss(out, batch)
    counts = bootstraps(batch, len(out.heads), seed, whole=method.unit == "group")
    losses = [method.loss(replace(out, value=number), batch) for number in out.heads]
    return (counts.to(out.heads)[:, :, None] * torch.stack(losses)).mean(0)


def losses_of(own: Loss | None, method: Method, out: Outputs, batch: Batch, seed: int | None) -> PerToken:
    """What a program's own loss says, or else the method's; with a seed that of each head of an ensemble.

    RunError for what is not one number a token, as a mean over a microbatch would hang on how a step is cut,
    and for what has no gradient.
    """
    if own is None and seed is not None:
        losses = each_head(method, out, batch, seed)
    else:
        losses = (own or method.loss)(out, batch)
    shape = getattr(losses, "shape", None)
    if shape != batch.mask.shape:
        what = type(losses).__name__ if shape is None else f"a tensor of shape {list(shape)}"
        raise RunError(
            "loss",
            f"a loss is one number a token, {list(batch.mask.shape)}, "
            f"and not {what}: leave the mean to the method's reduction",
        )
    if out.logp.requires_grad and not losses.requires_grad:
        raise RunError("loss", "it does not depend on the model: compute it from out.logp or out.entropy")
    return losses


def bootstraps(batch: Batch, heads: int, seed: int, *, whole: bool) -> Float[torch.Tensor, "H B"]:
    """c of each head and row; rows of a group have the same one if groups are `whole`, and their own if not.

    >>> from posttrain.types import Trajectory
    >>> row = Trajectory(tokens=[7, 3], sampled=[False, True], logp_gen=[0, 0], logp_policy=[0, 0],
    ...                  version=[0, 0], reward=[0, 0])
    >>> bootstraps(Batch.of([row, row], group=[0, 1]), 3, 0, whole=True)
    tensor([[0., 0.],
            [1., 1.],
            [1., 1.]])
    """
    lengths = batch.length.tolist()
    rows = [_number(batch.tokens[i, :n].cpu().numpy().tobytes()) for i, n in enumerate(lengths)]
    names = batch.group.tolist() if whole else list(range(len(rows)))
    keys = dict.fromkeys(names, 0)
    for name, row in zip(names, rows, strict=True):
        keys[name] += row
    drawn = {
        name: [_draw(f"heads/{seed}/{head}/{key % 2**64}") for head in range(heads)]
        for name, key in keys.items()
    }
    return torch.tensor([drawn[name] for name in names], dtype=torch.float32).T


def _draw(key: str) -> int:
    """A count of Poisson(1), by the inverse of its distribution."""
    return bisect_right(_BELOW, _number(key.encode()) / 2**64)


def _number(key: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
