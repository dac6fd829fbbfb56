"""Divergences of a policy from a reference over the whole vocabulary, exact at each state.

Each is a function of two tables of log-probabilities, [..., V], and returns one number a state. Estimates in
kl.py read the drawn token alone; these sum over all tokens, without the variance of the draw.

| function | value | gradient by log π(v) | pulls π to |
|---|---|---|---|
| reverse_kl | KL(π ‖ π_ref) | π (log π/π_ref + 1) | a part of π_ref that it can cover |
| forward_kl | KL(π_ref ‖ π) | -π_ref | cover all of π_ref |
| jensen_shannon | β KL(π_ref ‖ m) + (1 - β) KL(π ‖ m) | (1 - β) π log π/m | between them |

Each is 0, with gradient 0 by the logits, where the two are equal.
"""

from typing import Annotated

import torch
from jaxtyping import Float

from posttrain.math import kl
from posttrain.math.choice import Between

LogProbs = Float[torch.Tensor, "*S V"]
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
