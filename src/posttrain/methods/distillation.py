"""Distillation over the whole vocabulary: bring the policy's distributions close to a teacher's."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from posttrain.batch import Divergence
from posttrain.math import masked, reduce
from posttrain.types import Batch, Mask, Method, Outputs, PerToken


@dataclass(frozen=True)
class Distillation(Method):
    """Σ weight · D(π(· | s_t), π_T(· | s_t)): the divergence from the reference at the state of each token.

    The states are those of the policy's own answers, or of given ones; they are taken as they are, and the
    tokens in them are not read. With prompts of its own (`reference.hint`) the teacher may be the policy
    itself, which then reads more than the question; rows without such a prompt are not trained.

    Source: GKD, arXiv:2306.13649, eq. 3, by token where that takes the mean of sequences.
    """

    token_divergence: Divergence
    """Divergence of the policy from the teacher over the vocabulary."""
    reduction: Callable[..., PerToken]

    corrects: ClassVar[bool] = True
    """States that an older policy reached are as good as any."""

    @property
    def asks(self) -> frozenset[str]:
        """A teacher, which is what is learnt."""
        return frozenset({"teacher"})

    @property
    def compare(self) -> Divergence | None:
        """The divergence that is the loss."""
        return self.token_divergence

    def weight(self, batch: Batch) -> PerToken:
        """Return the reduction of the taught rows' mask; 0 everywhere if hints were missing for all."""
        mask = self._taught(batch)
        if batch.teacher_prompt_length is not None and not batch.everywhere.sum(mask.sum()):
            return torch.zeros_like(mask, dtype=torch.float64)
        return reduce.of_step(self.reduction, mask, batch.group, batch.episode, batch.everywhere)

    def loss(self, out: Outputs, batch: Batch) -> PerToken:
        """Return the divergence, token by token."""
        assert out.divergence is not None
        return masked.fill(out.divergence, batch.mask)

    def _taught(self, batch: Batch) -> Mask:
        if batch.teacher_prompt_length is None:
            return batch.mask
        return batch.mask & (batch.teacher_prompt_length > 0)[:, None]
