"""Log-probabilities and entropies of single tokens, from hidden states.

The policy at temperature τ is softmax(logits / τ); that is the one definition of a
log-probability here, for the sampler and for the trainer. The logits of a batch,
[N, V], never exist at once: the output head runs in chunks, each of which is discarded after the
forward pass and computed again in the backward pass.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from posttrain.math.masked import PerToken

PerPick = Float[torch.Tensor, "N"]

CHUNK_BYTES = 24 << 20
"""Size of one chunk of fp32 logits on a CPU. Larger ones do not fit its cache and are no faster."""
CHUNK_BYTES_ELSEWHERE = 256 << 20
"""Size of one chunk on other devices: hundreds of rows even of the largest vocabularies, for a product that
fills a GPU, and few launches."""


def chunk_bytes(device: str) -> int:
    """Return the size of one chunk of fp32 logits on a type of device.

    >>> chunk_bytes("cpu") < chunk_bytes("cuda")
    True
    """
    return CHUNK_BYTES if device == "cpu" else CHUNK_BYTES_ELSEWHERE


class _Pick(torch.autograd.Function):
    """(log softmax(z/τ)[y], entropy of softmax(z/τ)) with gradients in closed form.

    ∂logp/∂z = (1_y - p)/τ and ∂H/∂z = -p (log p + H)/τ. A second derivative is an error: the tensors
    saved for the backward pass have no graph, so it would be silently wrong.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        z = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True).div_(temperature)
        picked = z.gather(-1, targets[:, None]).squeeze(-1)
        highest = z.amax(-1, keepdim=True)
        z -= highest
        z.clamp_(min=torch.finfo(z.dtype).min)  # p is 0 there, and 0 · -inf would be no number
        p = z.exp()
        total = p.sum(-1, keepdim=True)
        p /= total
        log_total = total.log().squeeze(-1)
        entropy = log_total - torch.linalg.vecdot(p, z)
        logp = picked - highest.squeeze(-1) - log_total
        ctx.save_for_backward(p, z, targets, log_total, entropy)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        # Zeros in place of missing gradients would have to be checked for in the backward pass.
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor, None, None]:
        p, z, targets, log_total, entropy = ctx.saved_tensors
        d_logp = torch.zeros_like(entropy)[:, None] if grads[0] is None else grads[0][:, None]
        d_entropy = None if grads[1] is None or not bool(grads[1].any()) else grads[1][:, None]
        # z holds logits minus their maximum, so log p = z - log_total. p log p comes before the weight: where
        # p is 0, z is the lowest float, a weight above 1 makes that infinite, and 0 · inf is NaN.
        if d_entropy is None:
            out = p * -d_logp
        else:
            out = (z - (log_total - entropy)[:, None]).mul_(p).mul_(-d_entropy).addcmul_(p, d_logp, value=-1)
        out.scatter_add_(-1, targets[:, None], d_logp)
        return out.div_(ctx.temperature).to(ctx.dtype), None, None


def pick(
    logits: Float[torch.Tensor, "N V"], targets: Int[torch.Tensor, "N"], temperature: float = 1.0
) -> tuple[PerPick, PerPick]:
    """(log p(y), entropy of p) in nats for p = softmax(logits / τ); in float64 for float64, else in float32.

    >>> logp, entropy = pick(torch.zeros(1, 4), torch.tensor([2]))
    >>> logp, entropy
    (tensor([-1.3863]), tensor([1.3863]))
    """
    logp, entropy = _Pick.apply(logits, targets, temperature)  # type: ignore[no-untyped-call]
    return logp, entropy


def pick_from_hidden(
    hidden: Float[torch.Tensor, "N D"],
    head: Callable[[torch.Tensor], torch.Tensor],
    targets: Int[torch.Tensor, "N"],
    temperature: float = 1.0,
    vocabulary: int = 32_000,
    picks: Callable[[torch.Tensor, torch.Tensor, float], tuple[PerPick, PerPick]] = pick,
    more: int = 1,
    weights: Sequence[torch.Tensor] = (),
) -> tuple[PerPick, PerPick]:
    """picks(head(hidden), targets), in chunks of rows; `more` multiplies the rows of a chunk.

    Peak memory is about five chunks of fp32 logits (logits, probabilities, gradient and
    intermediate results), whatever N is. The result depends on the chunks only by float rounding.
    weights: those of the head whose gradients are summed over chunks in float32, and rounded once.

    Raises ValueError without targets.

    >>> uniform = lambda h: h @ torch.zeros(2, 4)
    >>> pick_from_hidden(torch.ones(3, 2), uniform, torch.tensor([0, 1, 2]))[0]
    tensor([-1.3863, -1.3863, -1.3863])
    """

    def chunk(h: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return picks(head(h), y, temperature)

    logp, entropy = _in_chunks(chunk, [hidden, targets], 4 * vocabulary / more, weights)
    return logp, entropy


@dataclass(frozen=True)
class Against:
    """A reference's distributions at the states of a policy, and the divergence from them."""

    hidden: Float[torch.Tensor, "N E"]
    """Its hidden states at the states of the policy, in their order, without gradient."""
    head: Callable[[torch.Tensor], torch.Tensor]
    """Map from its hidden states to logits."""
    divergence: Callable[[Float[torch.Tensor, "n V"], Float[torch.Tensor, "n V"]], Float[torch.Tensor, "n"]]
    """Function of the policy's and the reference's log-probabilities (math/divergences.py)."""
    places: Int[torch.Tensor, "N"] | None = None
    """Which states of the policy it has, where several references share them; None: all, in their order."""


def against_top(
    top: Int[torch.Tensor, "N k"],
    logp: Float[torch.Tensor, "N k"],
    divergence: Callable[[Float[torch.Tensor, "n V"], Float[torch.Tensor, "n V"]], Float[torch.Tensor, "n"]],
    vocabulary: int,
    device: torch.device,
) -> Against:
    """Return a reference that gives its likeliest tokens and their log-probabilities.

    Its other tokens share the rest alike, so that it is right for a divergence that does not see how the rest
    is divided (divergences.py: top_and_rest). A rest below the rounding of float32 counts as that.
    """
    least = torch.finfo(torch.float32).eps

    def head(pairs: torch.Tensor) -> torch.Tensor:
        ids, logs = pairs.chunk(2, dim=-1)
        others = max(vocabulary - ids.shape[-1], 1)
        rest = (1 - logs.exp().sum(-1, keepdim=True)).clamp(min=least).log() - math.log(others)
        return rest.expand(-1, vocabulary).scatter(-1, ids.long(), logs)

    # One table, cut into chunks of rows: float32 holds ids up to 2²⁴.
    return Against(torch.cat([top.to(logp), logp], dim=-1).to(device), head, divergence)


def compare_from_hidden(
    hidden: Float[torch.Tensor, "N D"],
    head: Callable[[torch.Tensor], torch.Tensor],
    targets: Int[torch.Tensor, "N"],
    against: Against,
    temperature: float = 1.0,
    vocabulary: int = 32_000,
    weights: Sequence[torch.Tensor] = (),
) -> tuple[PerPick, PerPick, PerPick]:
    """(log p(y), entropy of p, divergence of p from q), q the reference's distribution, in chunks of rows.

    All three have gradients by p, and none by q. If one vocabulary is larger, such as by padding, the
    divergence is between the two distributions over their common tokens. [N, V] never exists. weights: as for
    pick_from_hidden.

    >>> uniform = lambda h: h @ torch.zeros(2, 4)
    >>> against = Against(torch.ones(3, 2), uniform, lambda p, q: (p.exp() * (p - q)).sum(-1))
    >>> compare_from_hidden(torch.ones(3, 2), uniform, torch.tensor([0, 1, 2]), against)[2]
    tensor([0., 0., 0.])
    """

    def log_softmax(logits: torch.Tensor) -> torch.Tensor:
        exact = torch.promote_types(logits.dtype, torch.float32)
        return (logits.to(exact) / temperature).log_softmax(-1)

    def chunk(h: torch.Tensor, y: torch.Tensor, reference: torch.Tensor) -> tuple[torch.Tensor, ...]:
        log_p = log_softmax(head(h))
        with torch.no_grad():
            log_q = log_softmax(against.head(reference)).to(log_p)
        entropy = -(log_p.exp() * log_p).sum(-1)
        logp = log_p.gather(-1, y[:, None]).squeeze(-1)
        if log_p.shape != log_q.shape:
            common = min(log_p.shape[-1], log_q.shape[-1])
            log_p, log_q = (x[:, :common].log_softmax(-1) for x in (log_p, log_q))
        return logp, entropy, against.divergence(log_p, log_q)

    # Two tables of probabilities, and those that a divergence makes of them.
    columns = [hidden, targets, against.hidden]
    logp, entropy, divergence = _in_chunks(chunk, columns, 12.0 * vocabulary, weights)
    return logp, entropy, divergence


def compare_each(
    hidden: Float[torch.Tensor, "N D"],
    head: Callable[[torch.Tensor], torch.Tensor],
    targets: Int[torch.Tensor, "N"],
    references: Sequence[Against],
    temperature: float = 1.0,
    vocabulary: int = 32_000,
    weights: Sequence[torch.Tensor] = (),
) -> tuple[PerPick, PerPick, PerPick]:
    """Return compare_from_hidden of each state with the one of these references that has it."""
    if len(references) == 1:
        return compare_from_hidden(hidden, head, targets, references[0], temperature, vocabulary, weights)
    places = [p.to(hidden.device) for against in references if (p := against.places) is not None]
    parts = [
        compare_from_hidden(hidden[p], head, targets[p], against, temperature, vocabulary, weights)
        for p, against in zip(places, references, strict=True)
    ]
    order = torch.cat(places).argsort()
    logp, entropy, divergence = (torch.cat(column)[order] for column in zip(*parts, strict=True))
    return logp, entropy, divergence


class _WideSums(torch.autograd.Function):
    """Results of a function chunk by chunk, whose weights' gradients are summed over chunks in float32.

    Autograd would sum them in the dtype of the weights: bfloat16 loses 1 % of a sum of 40 terms.
    """

    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., tuple[torch.Tensor, ...]], rows: int, count: int, *tensors: Any
    ) -> tuple[torch.Tensor, ...]:
        columns = tensors[:count]
        ctx.function, ctx.rows, ctx.count = function, rows, count
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)  # as in _Pick
        parts = [function(*part) for part in _chunks(columns, rows)]
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *all_grads: torch.Tensor | None) -> tuple[Any, ...]:
        numbers = [n for n, grad in enumerate(all_grads) if grad is not None]
        grads = [grad for grad in all_grads if grad is not None]
        columns, weights = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        sums = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
        d_hidden = torch.empty_like(columns[0])
        chunks = zip(_chunks(columns, ctx.rows), _chunks([d_hidden, *grads], ctx.rows), strict=True)
        for (hidden, *others), (target, *part) in chunks:
            leaf = hidden.detach().requires_grad_()
            with torch.enable_grad():
                results = ctx.function(leaf, *others)
            gradient, *terms = torch.autograd.grad([results[n] for n in numbers], [leaf, *weights], part)
            target.copy_(gradient)
            for total, term in zip(sums, terms, strict=True):
                total.add_(term)
        out = [total.to(weight.dtype) for total, weight in zip(sums, weights, strict=True)]
        return None, None, None, d_hidden, *[None] * (ctx.count - 1), *out


def _chunks(columns: Sequence[torch.Tensor], rows: int) -> Iterator[list[torch.Tensor]]:
    """Yield the columns some rows at a time."""
    for start in range(0, len(columns[0]), rows):
        yield [column[start : start + rows] for column in columns]


def _in_chunks(
    function: Callable[..., tuple[torch.Tensor, ...]],
    columns: Sequence[torch.Tensor],
    row_bytes: float,
    weights: Sequence[torch.Tensor] = (),
) -> list[torch.Tensor]:
    """Return the results of a function for all rows, chunk by chunk, each computed again for its gradient.

    weights: those whose gradients are summed over chunks in float32. Raises ValueError without rows.
    """
    rows = max(1, int(chunk_bytes(columns[0].device.type) // row_bytes))
    if weights and torch.is_grad_enabled() and len(columns[0]) > rows:
        results: Sequence[torch.Tensor] = _WideSums.apply(  # type: ignore[no-untyped-call]
            function, rows, len(columns), *columns, *weights
        )
        return list(results)
    parts = []
    for part in _chunks(columns, rows):
        if torch.is_grad_enabled():
            parts.append(checkpoint(function, *part, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(function(*part))
    if not parts:
        raise ValueError("no position to score")
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def score_norm(logp: PerToken, logp_at_half: PerToken) -> PerToken:
    """‖∇ log π(y)‖² = 1 - 2π(y) + Σ_v π(v)², the gradient in the logits over the temperature τ.

    logp_at_half: log π(y) at the temperature τ/2, where y has the probability π(y)²/Σ_v π(v)².

    >>> probabilities = torch.tensor([[0.5, 0.3, 0.2]])
    >>> sharper = probabilities.square() / probabilities.square().sum()
    >>> score_norm(probabilities.log(), sharper.log())  # 1.38 - 2π
    tensor([[0.3800, 0.7800, 0.9800]])
    """
    # As a sum of two squares: 1 - 2π + Σπ² would be rounding errors where π is near 1.
    return torch.expm1(logp).square() + torch.exp(2 * logp) * torch.expm1(-logp_at_half)
