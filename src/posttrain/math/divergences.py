"""Divergences of a policy from a reference over the whole vocabulary, exact at each state.

Each is a function of two tables of log-probabilities, [..., V], and returns one number a state. Estimates in
kl.py read the drawn token alone; these sum over all tokens, without the variance of the draw.

| function | value | gradient by log π(v) | pulls π to |
|---|---|---|---|
| reverse_kl | KL(π ‖ π_ref) | π (log π/π_ref + 1) | a part of π_ref that it can cover |
| forward_kl | KL(π_ref ‖ π) | -π_ref | cover all of π_ref |
| jensen_shannon | β KL(π_ref ‖ m) + (1 - β) KL(π ‖ m) | (1 - β) π log π/m | between them |

Each is 0, with gradient 0 by the logits, where the two are equal. `top_and_rest` makes the tables smaller.
"""

from collections.abc import Callable
from typing import Annotated

import torch
from jaxtyping import Float

from posttrain.math import kl
from posttrain.math.choice import Between

LogProbs = Float[torch.Tensor, "*S V"]
Outcomes = Float[torch.Tensor, "*S W"]
PerState = Float[torch.Tensor, "*S"]
Mixture = Annotated[float, Between(0.001, 0.999)]
"""A weight in a mixture of two distributions; at 0 and 1 it would be no mixture, and the divergence 0."""


def reverse_kl(log_probs: LogProbs, log_probs_ref: LogProbs) -> PerState:
    """Σ_v π(v) (log π(v) - log π_ref(v)): the policy leaves out what the reference finds unlikely.

    Source: on-policy distillation as in MiniLLM, arXiv:2306.08543, eq. 1, at each state.

    >>> p = torch.tensor([[0.5, 0.5]]).log()
    >>> reverse_kl(p, torch.tensor([[0.25, 0.75]]).log())
    tensor([0.1438])
    """
    return kl.exact(log_probs, log_probs_ref)


def forward_kl(log_probs: LogProbs, log_probs_ref: LogProbs) -> PerState:
    """Σ_v π_ref(v) (log π_ref(v) - log π(v)): the policy gives a chance to all that the reference does.

    Source: knowledge distillation, arXiv:1503.02531, at each state.

    >>> p = torch.tensor([[0.5, 0.5]]).log()
    >>> forward_kl(p, torch.tensor([[0.25, 0.75]]).log())
    tensor([0.1308])
    """
    return kl.exact(log_probs_ref, log_probs)


def jensen_shannon(log_probs: LogProbs, log_probs_ref: LogProbs, mix: Mixture = 0.5) -> PerState:
    """β KL(π_ref ‖ m) + (1 - β) KL(π ‖ m), m = β π_ref + (1 - β) π, β = mix; at most ln 2.

    Over β it tends to forward_kl as β goes to 0; over 1 - β to reverse_kl as β goes to 1.

    Source: GKD, arXiv:2306.13649, eq. 1.

    >>> p = torch.tensor([[0.5, 0.5]]).log()
    >>> jensen_shannon(p, torch.tensor([[0.25, 0.75]]).log())
    tensor([0.0338])
    """
    beta = log_probs.new_tensor(mix)
    mixture = torch.logaddexp(log_probs_ref + beta.log(), log_probs + torch.log1p(-beta))
    return mix * kl.exact(log_probs_ref, mixture) + (1 - mix) * kl.exact(log_probs, mixture)


def top_and_rest(log_probs: LogProbs, log_probs_ref: LogProbs, k: int) -> tuple[Outcomes, Outcomes]:
    """Return both distributions over the reference's k likeliest tokens and one outcome for the rest.

    A divergence of the results is at most that of the whole tables, since it cannot see how the rest is
    divided (the data processing inequality), and equal to it where each divides its rest alike, as with one
    token. With k = 0, or no token left, the tables stay as they are.

    >>> p = torch.tensor([[0.5, 0.3, 0.2]]).log()
    >>> q = torch.tensor([[0.6, 0.1, 0.3]]).log()
    >>> [x.exp() for x in top_and_rest(p, q, 1)]
    [tensor([[0.5000, 0.5000]]), tensor([[0.6000, 0.4000]])]
    >>> forward_kl(*top_and_rest(p, q, 1)) < forward_kl(p, q)
    tensor([True])
    """
    if not 0 < k < log_probs_ref.shape[-1]:
        return log_probs, log_probs_ref
    top = log_probs_ref.topk(k, dim=-1).indices

    def merge(table: torch.Tensor) -> torch.Tensor:
        rest = table.scatter(-1, top, torch.finfo(table.dtype).min).logsumexp(-1, keepdim=True)
        return torch.cat([table.gather(-1, top), rest], dim=-1)

    return merge(log_probs), merge(log_probs_ref)


def of_top(divergence: Callable[[LogProbs, LogProbs], PerState], k: int) -> Callable[..., PerState]:
    """Return the divergence of `top_and_rest`; the divergence itself for k = 0."""
    if not k:
        return divergence
    return lambda log_probs, log_probs_ref: divergence(*top_and_rest(log_probs, log_probs_ref, k))
