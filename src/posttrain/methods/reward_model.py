"""Reward models: a number for an answer, from comparisons or labels; or one for each step of it.

The number is that of a head on the model's backbone, read where a row is marked: at the end of an answer,
or of each step. What a row was judged to be worth is its reward.
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
    """Answers to one question whose scores are held against one another: one loss a group."""

    unit: ClassVar[str] = "group"
    needs: ClassVar[frozenset[str]] = HEAD

    def weight(self, batch: Batch) -> PerToken:
        """1/(groups · marks of the group) on answers that are in a pair."""
        return by_group(batch)

    def watch(self, out: Outputs, batch: Batch) -> dict[str, PerToken]:
        """Scores of both sides of each pair, and how often their order is right."""
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
    """m: how much of the difference that the judge saw the scores must show to count as right."""
    centre: float = 0.0
    """How much (s_w + s_l)² counts: comparisons do not say where 0 is, and this puts it at the mean."""

    @property
    def asks(self) -> frozenset[str]:
        """By how much an answer is better, where the margin counts."""
        return frozenset({"margins"} if self.margin else ())

    def loss(self, out: Outputs, batch: Batch) -> PerToken:
        """The group's loss, at each of its marks."""
        score = _score(out, batch)
        worth = returns.worth(batch.reward, batch.mask, like=score)
        h = score[:, None] - score[None, :] - self.margin * (worth[:, None] - worth[None, :])
        each: Float[torch.Tensor, "B B"] = self.pair_loss(h, 1.0)
        if self.centre:
            each = each + self.centre * (score[:, None] + score[None, :]).square()
        return at_tokens(preference.over_pairs(each, better(batch), batch.group), batch)


@dataclass(frozen=True)
class ListwiseReward(GroupReward):
    """mean over groups of plackett_luce(s): the likelihood of the order in which a judge put the answers.

    Source: Plackett 1975; arXiv:2305.18290, eq. 18.
    """

    def loss(self, out: Outputs, batch: Batch) -> PerToken:
        """The group's loss, at each of its marks."""
        rows = batch.mask.any(-1)
        together = (batch.group[:, None] == batch.group[None, :]) & rows[:, None] & rows[None, :]
        worth = returns.worth(batch.reward, batch.mask, like=batch.logp_gen)
        return at_tokens(reward.plackett_luce(_score(out, batch), worth, together), batch)


@dataclass(frozen=True)
class PointwiseReward(Method):
    """Σ weight · item_loss(s, R): each mark's number against its own label.

    With one mark an answer an outcome model; with one a step a process model.
    """

    item_loss: Callable[[PerToken, PerToken], PerToken]
    reduction: Callable[..., PerToken]
    needs: ClassVar[frozenset[str]] = HEAD

    @property
    def asks(self) -> frozenset[str]:
        """Labels from 0 to 1, where they are classes."""
        return frozenset({"probabilities"} if self._classifies else ())

    @property
    def _classifies(self) -> bool:
        return self.item_loss is reward.classification

    def weight(self, batch: Batch) -> PerToken:
        """The reduction of the step's marks."""
        return reduce.of_step(self.reduction, batch.mask, batch.group, batch.episode, batch.everywhere)

    def loss(self, out: Outputs, batch: Batch) -> PerToken:
        """item_loss, mark by mark."""
        assert out.value is not None
        score, label = masked.fill(out.value, batch.mask), masked.fill(batch.reward, batch.mask)
        return self.item_loss(score, label.to(score))

    def watch(self, out: Outputs, batch: Batch) -> dict[str, PerToken]:
        """The number, and how often it is on its label's side."""
        assert out.value is not None
        score = masked.fill(out.value.detach(), batch.mask)
        label = masked.fill(batch.reward, batch.mask).to(score)
        sided = ((score > 0) == (label > 0.5)).to(score) if self._classifies else (score - label).abs()
        return {"score/mean": score, "score/accuracy" if self._classifies else "score/error": sided}


def _score(out: Outputs, batch: Batch) -> PerRow:
    assert out.value is not None
    return masked.row_sum(out.value, batch.mask)
