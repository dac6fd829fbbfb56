"""Imitation: raise the likelihood of given answers, or of the policy's own best answers."""

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
"""Mark after each conversation when episodes are compared; no token has this number."""


@dataclass(frozen=True)
class Imitation(Method):
    """Σ weight · (-log π(y_t)): the cross-entropy of the trained tokens.

    Source: notes C, eq. 2.2, with reduce.per_sequence; reduce.per_token is the mean over
    tokens that most code bases compute.
    """

    reduction: Callable[..., PerToken]

    def weight(self, batch: Batch) -> PerToken:
        """Return the reduction of the step's mask."""
        return reduce.of_step(self.reduction, batch.mask, batch.group, batch.episode, batch.everywhere)

    def loss(self, out: Outputs, batch: Batch) -> PerToken:
        """Return -log π(y_t), token by token."""
        return -out.logp


@dataclass(frozen=True)
class WeightedImitation(Imitation):
    """Σ weight · (-sg(π(y_t)) log π(y_t)): the cross-entropy, each token times its own probability.

    The gradient is -∇π(y_t): that of REINFORCE whose reward is 1 for the given token and 0 for any other,
    at each position. Tokens that the model finds unlikely, which dominate plain fine-tuning, weigh little.

    Source: dynamic fine-tuning (DFT), arXiv:2508.05629.
    """

    def loss(self, out: Outputs, batch: Batch) -> PerToken:
        """Return -sg(π(y_t)) log π(y_t), token by token."""
        logp = masked.fill(out.logp, batch.mask)
        return -logp.detach().exp() * logp


@dataclass(frozen=True)
class ExpertIteration(Imitation):
    """Σ weight · (-log π(y_t)) over the policy's own selected answers: sample, select, imitate, repeat.

    Answers with a return of at least `accept` are accepted; `repeats` treats equal answers to a task, and
    `keep` selects among the rest. The advantage is 1 for a selected answer and 0 for any other.
    An agent's episode is one answer: all its conversations are imitated or none, and two episodes are equal
    if all their conversations are equal, in their order.
    Rejection sampling is a single update of this method, with a large rollout.groups and several epochs.

    With the default reduction, per_row, the minimum of the loss is the distribution of the selected answers.
    With per_sequence a token of a short answer weighs more, and over updates the policy tends to
    its shortest right answer (`posttrain truth`).

    Source: Anthony et al. 2017, arXiv:1705.08439; for language models STaR, arXiv:2203.14465, and ReST,
    arXiv:2308.08998; notes C.
    """

    keep: Callable[..., selection.Rows]
    """Selects the accepted answers to imitate."""
    balance: Callable[..., PerToken]
    """Weights of tasks relative to one another."""
    accept: Signed = 1.0
    """The least return of an answer that is imitated."""
    repeats: Callable[..., selection.Rows] = selection.distinct
    """Imitates equal answers to a task once, or as often as they were sampled."""

    corrects: ClassVar[bool] = True

    def prepare(self, batch: Batch) -> Batch:
        """Return the batch with an advantage of 1 on selected answers and 0 on the others.

        Raises ValueError if no row has a trained token.
        """
        if not batch.everywhere.sum(batch.mask.sum()):
            raise ValueError("nothing to train on: no token of this update was sampled by the policy")
        episodes = Episodes.of(batch.episode, batch.mask)
        R = episodes.first(returns.worth(batch.reward, batch.mask, like=batch.logp_gen))
        group, tokens, mask = episodes.first(batch.group), batch.tokens, batch.mask
        if batch.episode is not None:  # the end mark tells [1, 2], [3] from [1], [2, 3]
            tokens, mask = pad(tokens, (0, 1), value=_END), pad(mask, (0, 1), value=True)
        tokens, mask = episodes.join(tokens), episodes.join(mask)
        accepted = episodes.first(batch.mask.any(-1)) & selection.accepted(R, self.accept)
        # Sorted by return, so that of equal answers one of the highest return is kept.
        order, candidates = R.argsort(descending=True, stable=True), torch.zeros_like(accepted)
        candidates[order] = self.repeats(tokens[order], mask[order], group[order], accepted[order])
        selected = episodes.to_rows(self.keep(R, group, candidates)).to(batch.logp_gen)
        return replace(batch, advantage=masked.fill(selected[:, None].expand_as(batch.mask), batch.mask))

    def weight(self, batch: Batch) -> PerToken:
        """Return the balanced reduction of the selected answers; 0 everywhere if the step has none.

        A step without a selected answer is not an error; it leaves the model's weights alone.
        """
        assert batch.advantage is not None
        selected = batch.mask & (batch.advantage > 0)
        if not batch.everywhere.sum(selected.sum()):
            return torch.zeros_like(selected, dtype=torch.float64)
        weight = reduce.of_step(self.reduction, selected, batch.group, batch.episode, batch.everywhere)
        episodes = Episodes.of(batch.episode, batch.mask)
        answers = self.balance(episodes.join(weight), episodes.first(batch.group), batch.everywhere)
        return episodes.part(answers)
