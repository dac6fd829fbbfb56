"""A step of TRPO: the natural gradient within a bound of the KL, instead of AdamW.

    s = (F + damping I)⁻¹ g by conjugate gradients; length √(2δ / sᵀ F s); then a line search back until the
    surrogate gains and the KL, computed exactly over the vocabulary, is at most δ.

A product F v is Jᵀ M (J v): J v in forward mode and Jᵀ in reverse, through one pass of the model; neither
F nor J is stored. Everything is float32 or float64: in bfloat16 the products would be noise.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.autograd.forward_ad as forward_mode
from jaxtyping import Float
from torch import nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from posttrain.learner.forward import column
from posttrain.learner.pack import Pack, microbatches, pack, trained_states
from posttrain.learner.ranks import ALONE, Ranks
from posttrain.math import kl, reduce, trust
from posttrain.models.attention import output_head
from posttrain.types import Batch, Method, Outputs

Vector = Float[torch.Tensor, "P"]


@dataclass(frozen=True, kw_only=True)
class Trust:
    """The trust region and the search in it. The defaults are those of TRPO's own code."""

    max_kl: float = 0.01
    """δ: bound of the mean KL(π_old ‖ π) over the trained tokens, in nats a token."""
    iterations: int = 10
    """Products with the Fisher matrix in the conjugate-gradient solver."""
    damping: float = 0.1
    """Number added to the Fisher matrix's diagonal."""
    fisher_every: int = 4
    """n: the products use every n-th task of the step (in the paper's appendix C a tenth of the samples);
    the bound is checked on all tasks."""
    shrink: float = 0.5
    """Factor by which a step beyond the bound is shortened."""
    tries: int = 10
    """Lengths that are tried before the step is given up."""

    def __post_init__(self) -> None:
        if self.max_kl <= 0:
            raise ValueError(f"max_kl must be above 0, not {self.max_kl}")
        if self.damping < 0:
            raise ValueError(f"damping must be 0 or more, not {self.damping}")
        if not 0 < self.shrink < 1:
            raise ValueError(f"shrink must lie between 0 and 1, not {self.shrink}")
        for name in ("iterations", "fisher_every", "tries"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, not {getattr(self, name)}")


class _Logits(nn.Module):
    """The logits that predict a pack's trained tokens, divided by the temperature."""

    def __init__(self, model: PreTrainedModel, temperature: float) -> None:
        super().__init__()
        self.model, self.temperature = model, temperature

    def forward(self, packed: Pack) -> Float[torch.Tensor, "M V"]:
        return output_head(self.model)(trained_states(self.model, packed)) / self.temperature


class TrustRegion:
    """Fisher products and the line search's measurements, on the rows of one step."""

    def __init__(
        self,
        model: PreTrainedModel,
        batch: Batch,
        *,
        temperature: float,
        microbatch_tokens: int,
        fisher_every: int = 1,
        ranks: Ranks = ALONE,
    ) -> None:
        self.ranks = ranks
        self.net = _Logits(model, temperature)
        self.named = {n: p for n, p in self.net.named_parameters() if p.requires_grad}
        self.parameters = list(self.named.values())
        numbers = torch.unique(batch.group[batch.mask.any(-1)]).tolist()
        groups = torch.tensor(sorted(n for rank in ranks.gather(numbers) for n in rank)[::fisher_every])
        some = batch.rows(torch.isin(batch.group, groups).nonzero().flatten())
        self.parts = list(_parts(batch, microbatch_tokens))
        self.sample = [packed for *_, packed in _parts(some, microbatch_tokens)]
        counts = [
            sum(len(packed.target) for packed in packs)
            for packs in ([packed for *_, packed in self.parts], self.sample)
        ]
        self.count, self.sample_count = ranks.sum(torch.tensor(counts)).tolist()

    def fisher_product(self, v: Vector) -> Vector:
        """Return F v, F the mean Fisher matrix of the distributions of the sample's trained tokens."""
        total = torch.zeros_like(v)
        tangents = dict(zip(self.named, self._unflat(v), strict=True))
        for packed in self.sample:
            # The fused kernels of attention do not support forward mode.
            with forward_mode.dual_level(), sdpa_kernel(SDPBackend.MATH):
                duals = {
                    n: forward_mode.make_dual(p, tangents[n])  # type: ignore[no-untyped-call]
                    for n, p in self.named.items()
                }
                out = functional_call(self.net, duals, (packed,))
                logits, tangent = forward_mode.unpack_dual(out)  # type: ignore[no-untyped-call]
            image = trust.softmax_fisher(logits.detach().log_softmax(-1), tangent.detach())
            cotangent = image / self.sample_count
            grads = torch.autograd.grad(logits, self.parameters, cotangent, allow_unused=True)
            total += flat(grads, self.parameters)
        self.ranks.add([total])
        return total

    def judge(self, method: Method, weight: torch.Tensor, step: Vector) -> tuple[float, float]:
        """Return (decrease of the loss by this step, mean KL(π_old ‖ π) over the trained tokens)."""
        moved = {
            name: p.detach() + s for (name, p), s in zip(self.named.items(), self._unflat(step), strict=True)
        }
        gain = distance = 0.0
        with torch.no_grad():
            for rows, part, packed in self.parts:
                before = self.net(packed).log_softmax(-1)
                after = functional_call(self.net, moved, (packed,)).log_softmax(-1)
                distance += float(kl.exact(before, after).sum())
                losses = (self._loss(method, weight[rows], part, packed, x) for x in (before, after))
                gain += float(next(losses) - next(losses))
        gain, distance = self.ranks.sum(torch.tensor([gain, distance], dtype=torch.float64)).tolist()
        return gain, distance / self.count

    def _loss(
        self, method: Method, weight: torch.Tensor, part: Batch, packed: Pack, log_probs: torch.Tensor
    ) -> torch.Tensor:
        picked = log_probs.gather(-1, packed.target[:, None].to(log_probs.device))[:, 0]
        entropy = torch.special.entr(log_probs.exp()).sum(-1)
        out = Outputs(logp=column(packed, part, picked), entropy=column(packed, part, entropy))
        return reduce.weighted_sum(method.loss(out, part), weight.to(out.logp), part.mask)

    def move(self, step: Vector) -> None:
        """Add the step to the weights."""
        with torch.no_grad():
            for p, s in zip(self.parameters, self._unflat(step), strict=True):
                p.add_(s)

    def _unflat(self, v: Vector) -> Iterator[torch.Tensor]:
        start = 0
        for p in self.parameters:
            yield v[start : start + p.numel()].view_as(p)
            start += p.numel()


def _parts(batch: Batch, budget: int) -> Iterator[tuple[torch.Tensor, Batch, Pack]]:
    """Yield (row numbers, rows, packed rows) of each microbatch."""
    for rows in microbatches(batch, budget):
        part = batch.rows(torch.tensor(rows))
        yield torch.tensor(rows), part, pack(part, compiled=False)


def flat(grads: Sequence[torch.Tensor | None], parameters: Sequence[nn.Parameter]) -> Vector:
    """Return the gradients as one vector; 0 for a parameter without one."""
    return torch.cat(
        [(torch.zeros_like(p) if g is None else g).flatten() for g, p in zip(grads, parameters, strict=True)]
    )


def natural_step(
    region: TrustRegion, method: Method, weight: torch.Tensor, gradient: Vector, config: Trust
) -> dict[str, float]:
    """Move the weights by the natural step for this gradient of the loss; return its metrics.

    `weight` holds the weights of the step's losses, row by row as in the region's batch. If no share of the
    step gains within the bound, no weight moves.
    """
    if not bool(gradient.any()):
        return {"trust/kl": 0.0, "trust/gain": 0.0, "trust/share": 0.0}

    def damped(v: Vector) -> Vector:
        return region.fisher_product(v) + config.damping * v

    direction, image = trust.conjugate_gradient(damped, -gradient, iterations=config.iterations)
    length = trust.step_length(direction, image, config.max_kl)
    judge: Callable[[float], tuple[float, float]] = lambda share: region.judge(  # noqa: E731
        method, weight, share * length * direction
    )
    share, gain, distance = trust.line_search(
        judge, max_kl=config.max_kl, shrink=config.shrink, tries=config.tries
    )
    if share:
        region.move(share * length * direction)
    return {"trust/kl": distance, "trust/gain": gain, "trust/share": share}
