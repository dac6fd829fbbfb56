"""Imitation: make the marked tokens likely. Given answers are imitated, or the policy's own best ones."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch.nn.functional import pad

from posttrain.math import masked, reduce, returns, selection
from posttrain.math.choice import Signed
from posttrain.math.episodes import Episodes
from posttrain.types import Batch, Method, Outputs, PerToken

_END = -1
"""Stands behind each conversation where episodes are compared; no token has this number."""


@dataclass(frozen=True)
class Imitation(Method):
    """Σ weight · (-log π(y_t)): the cross-entropy of the marked tokens.

    Source: notes C, eq. 2.2, with reduce.per_sequence; with reduce.per_token, the mean over
    tokens that most code bases compute.
    """

    reduction: Callable[..., PerToken]

    def weight(self, batch: Batch) -> PerToken:
        """The reduction of the step's mask."""
        return reduce.of_step(self.reduction, batch.mask, batch.group, batch.episode, batch.everywhere)

    def loss(self, out: Outputs, batch: Batch) -> PerToken:
        """-log π(y_t), token by token."""
        return -out.logp


@dataclass(frozen=True)
class ExpertIteration(Imitation):
    """Σ weight · (-log π(y_t)) over the policy's own answers that were kept: sample, choose, imitate, repeat.

    Accepted are answers whose return is at least `accept`; `repeats` says what becomes of equal ones of a
    task, and `keep` chooses among the rest. The advantage says which: 1 for a kept answer, 0 for any other.
    An agent's episode is one answer: all its conversations are imitated or none, and two episodes are equal
    if all their conversations are, in their order.
    Rejection sampling is a single update of it, with a large rollout.groups and several epochs.

    The reduction is per_row: then a kept answer counts as a whole, and the minimum of the loss is the
    distribution of the kept answers. Under per_sequence a token of a short answer weighs more, and round
    after round the policy comes nearer to its shortest right answer (`posttrain truth`).

    Source: Anthony et al. 2017, arXiv:1705.08439; for language models STaR, arXiv:2203.14465, and ReST,
    arXiv:2308.08998; notes C.
    """

    keep: Callable[..., selection.Rows]
    """Which of the accepted answers are imitated."""
    balance: Callable[..., PerToken]
    """What tasks weigh against one another."""
    accept: Signed = 1.0
    """The least return of an answer that is imitated."""
    repeats: Callable[..., selection.Rows] = selection.distinct
    """Whether equal answers to a task are imitated once or as often as they were given."""

    corrects: ClassVar[bool] = True

    def prepare(self, batch: Batch) -> Batch:
        """The batch with an advantage of 1 on the answers that are kept and 0 on the others.

        Raises ValueError where no row has a trained token.
        """
        if not batch.everywhere.sum(batch.mask.sum()):
            raise ValueError("nothing to train on: no token of this update was sampled by the policy")
        episodes = Episodes.of(batch.episode, batch.mask)
        R = episodes.first(returns.worth(batch.reward, batch.mask, like=batch.logp_gen))
        group, tokens, mask = episodes.first(batch.group), batch.tokens, batch.mask
        if batch.episode is not None:  # [1, 2] and [3] are other conversations than [1] and [2, 3]
            tokens, mask = pad(tokens, (0, 1), value=_END), pad(mask, (0, 1), value=True)
        tokens, mask = episodes.join(tokens), episodes.join(mask)
        accepted = episodes.first(batch.mask.any(-1)) & selection.accepted(R, self.accept)
        # Best first: of equal answers the one that stands for them is the one of the highest return.
        order, candidates = R.argsort(descending=True, stable=True), torch.zeros_like(accepted)
        candidates[order] = self.repeats(tokens[order], mask[order], group[order], accepted[order])
        kept = episodes.to_rows(self.keep(R, group, candidates)).to(batch.logp_gen)
        return replace(batch, advantage=masked.fill(kept[:, None].expand_as(batch.mask), batch.mask))

    def weight(self, batch: Batch) -> PerToken:
        """The balanced reduction of the kept answers; 0 throughout where the step has none.

        A step of none leaves the weights alone: that nobody was right is no error.
        """
        assert batch.advantage is not None
        kept = batch.mask & (batch.advantage > 0)
        if not batch.everywhere.sum(kept.sum()):
            return torch.zeros_like(kept, dtype=torch.float64)
        weight = reduce.of_step(self.reduction, kept, batch.group, batch.episode, batch.everywhere)
        episodes = Episodes.of(batch.episode, batch.mask)
        answers = self.balance(episodes.join(weight), episodes.first(batch.group), batch.everywhere)
        return episodes.part(answers)
