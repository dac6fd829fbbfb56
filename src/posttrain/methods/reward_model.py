"""Reward models: a score for an answer, or for each of its steps, from comparisons or labels.

The score is the output of a head on the model's backbone, at the trained tokens of a row: the last one of an
answer, or of each step. The rewards of a row are its labels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float

from posttrain.math import masked, preference, reduce, returns, reward
from posttrain.methods.preference import PairLoss, at_tokens, better, by_group, compared_means
from posttrain.types import Batch, Method, Outputs, PerRow, PerToken

HEAD = frozenset({"head"})


@dataclass(frozen=True)
class GroupReward(Method):
    """Base of losses that compare the scores of answers to one question: one loss a group."""

    unit: ClassVar[str] = "group"
    needs: ClassVar[frozenset[str]] = HEAD

    def weight(self, batch: Batch) -> PerToken:
        """Return 1/(groups · trained tokens of the group) on answers that are in a pair."""
        return by_group(batch)

    def watch(self, out: Outputs, batch: Batch) -> dict[str, PerToken]:
        """Return the scores of both sides of each pair, and the share of pairs in order."""
        return compared_means(_score(out, batch).detach(), batch, "score")


@dataclass(frozen=True)
class PairwiseReward(GroupReward):
    """mean over groups and their pairs of pair_loss(s_w - s_l - m (R_w - R_l), 1) + centre (s_w + s_l)².

    Bradley and Terry's model with the logistic loss: P(w preferred to l) = σ(s_w - s_l).

    Source: arXiv:2203.02155, eq. 1; margins as in Llama 2, arXiv:2307.09288, eq. 2; centring as in
    arXiv:2312.09244, section 4.1.
    """

    pair_loss: PairLoss
    margin: float = 0.0
    """m: factor of the judge's difference R_w - R_l, by which the scores are to differ."""
    centre: float = 0.0
    """Weight of (s_w + s_l)²: comparisons leave a constant open, and this centres the scores at 0."""

    @property
    def asks(self) -> frozenset[str]:
        """Margins between answers, if `margin` is not 0."""
        return frozenset({"margins"} if self.margin else ())

    def loss(self, out: Outputs, batch: Batch) -> PerToken:
        """Return the group's loss at each of its trained tokens."""
        score = _score(out, batch)
        worth = returns.worth(batch.reward, batch.mask, like=score)
        h = score[:, None] - score[None, :] - self.margin * (worth[:, None] - worth[None, :])
        losses: Float[torch.Tensor, "B B"] = self.pair_loss(h, 1.0)
        if self.centre:
            losses = losses + self.centre * (score[:, None] + score[None, :]).square()
        return at_tokens(preference.over_pairs(losses, better(batch), batch.group), batch)


@dataclass(frozen=True)
class ListwiseReward(GroupReward):
    """mean over groups of plackett_luce(s): the likelihood of the judge's ranking of the answers.

    Source: Plackett 1975; arXiv:2305.18290, eq. 18.
    """

    def loss(self, out: Outputs, batch: Batch) -> PerToken:
        """Return the group's loss at each of its trained tokens."""
        rows = batch.mask.any(-1)
        together = (batch.group[:, None] == batch.group[None, :]) & rows[:, None] & rows[None, :]
        worth = returns.worth(batch.reward, batch.mask, like=batch.logp_gen)
        return at_tokens(reward.plackett_luce(_score(out, batch), worth, together), batch)


@dataclass(frozen=True)
class PointwiseReward(Method):
    """Σ weight · item_loss(s, R): the score at each trained token against its own label.

    With one trained token an answer it is an outcome model; with one a step a process model.
    """

    item_loss: Callable[[PerToken, PerToken], PerToken]
    reduction: Callable[..., PerToken]
    needs: ClassVar[frozenset[str]] = HEAD

    @property
    def asks(self) -> frozenset[str]:
        """Labels from 0 to 1, if the loss is `classification`."""
        return frozenset({"probabilities"} if self._classifies else ())

    @property
    def _classifies(self) -> bool:
        return self.item_loss is reward.classification

    def weight(self, batch: Batch) -> PerToken:
        """Return the reduction of the step's mask."""
        return reduce.of_step(self.reduction, batch.mask, batch.group, batch.episode, batch.everywhere)

    def loss(self, out: Outputs, batch: Batch) -> PerToken:
        """Return item_loss(s, R), token by token."""
        assert out.value is not None
        score, label = masked.fill(out.value, batch.mask), masked.fill(batch.reward, batch.mask)
        return self.item_loss(score, label.to(score))

    def watch(self, out: Outputs, batch: Batch) -> dict[str, PerToken]:
        """Return the score, and its accuracy or its absolute error."""
        assert out.value is not None
        score = masked.fill(out.value.detach(), batch.mask)
        label = masked.fill(batch.reward, batch.mask).to(score)
        if self._classifies:
            return {"score/mean": score, "score/accuracy": ((score > 0) == (label > 0.5)).to(score)}
        return {"score/mean": score, "score/error": (score - label).abs()}


def _score(out: Outputs, batch: Batch) -> PerRow:
    assert out.value is not None
    return masked.row_sum(out.value, batch.mask)
