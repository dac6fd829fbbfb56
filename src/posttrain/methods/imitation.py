"""Imitation: make the marked tokens likely. Supervised fine-tuning is its first member."""

from collections.abc import Callable
from dataclasses import dataclass

from posttrain.types import Batch, Method, Outputs, PerToken


@dataclass(frozen=True)
class Imitation(Method):
    """Σ weight · (-log π(y_t)): the cross-entropy of the marked tokens.

    Source: seed 002, eq. 2.2, with reduce.per_sequence; with reduce.per_token, the mean over
    tokens that most code bases compute.
    """

    reduction: Callable[..., PerToken]

    def weight(self, batch: Batch) -> PerToken:
        """The reduction of the step's mask."""
        return self.reduction(batch.mask)

    def loss(self, out: Outputs, batch: Batch) -> PerToken:
        """-log π(y_t), token by token."""
        return -out.logp
