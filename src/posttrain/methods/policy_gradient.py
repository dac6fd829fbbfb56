"""The policy-gradient family: five choices, and every member is a line of table.py.

    credit      who deserves what          returns of an update -> one advantage a row
    ratio       over what π/π_old is taken  by token, sequence or trajectory
    surrogate   what the ratio may do       score, clipped, truncated ...
    reduction   what the mean is over       tokens, sequences, a fixed horizon
    kl          where the reference enters  a penalty in the loss, or in the reward

A choice is a function of math/; functools.partial fixes a number of it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from posttrain.math import diagnose, kl, masked
from posttrain.types import Batch, Outputs, PerRow, PerToken

Credit = Callable[..., PerRow]
Ratio = Callable[..., PerToken]
Surrogate = Callable[..., PerToken]
Reduction = Callable[..., PerToken]
Estimator = Callable[[PerToken, PerToken], PerToken]


@dataclass(frozen=True)
class PolicyGradient:
    """Σ weight · (surrogate(log-ratio, advantage) + β_loss kl - α entropy).

    Every trained token of a row carries the row's advantage, credit(R) with
    R = Σ_t reward_t - β_reward Σ_t (log π_old - log π_ref)_t.
    """

    credit: Credit
    ratio: Ratio
    surrogate: Surrogate
    reduction: Reduction
    kl: Estimator = kl.k3
    """Estimator of the penalty in the loss."""
    kl_in_loss: float = 0.0
    """β of the penalty in the loss; 0 leaves the reference out."""
    kl_in_reward: float = 0.0
    """β of the penalty in the reward, with k1; 0 leaves the reference out."""
    entropy_bonus: float = 0.0
    """α: how much of each token's entropy is subtracted from its loss."""

    @property
    def needs(self) -> frozenset[str]:
        """The reference's log-probabilities if a KL enters; the anchor's if it enters the reward."""
        reference = {"logp_ref"} if self.kl_in_loss or self.kl_in_reward else set()
        return frozenset(reference | ({"logp_old"} if self.kl_in_reward else set()))

    def prepare(self, batch: Batch) -> Batch:
        """The batch with its advantages, credited over every row that was sampled for it."""
        rows = batch.mask.any(-1)
        if not bool(rows.any()):
            raise ValueError("nothing to train on: no token of this update was sampled by the policy")
        returns = masked.row_sum(batch.reward, batch.mask)
        if self.kl_in_reward:
            assert batch.logp_old is not None
            assert batch.logp_ref is not None
            returns = returns - self.kl_in_reward * masked.row_sum(
                kl.k1(batch.logp_old, batch.logp_ref), batch.mask
            )
        # A row without a trained token (its verifier failed) has no return: a 0 would be a wrong answer
        # in the baseline of its group.
        advantage = torch.zeros_like(returns)
        advantage[rows] = self.credit(returns[rows], batch.group[rows])
        return replace(batch, advantage=masked.fill(advantage[:, None].expand_as(batch.reward), batch.mask))

    def weight(self, batch: Batch) -> PerToken:
        """The reduction of the step's mask; 0 for a token whose loss is its advantage's alone, and that is 0.

        Such a token has neither loss nor gradient, and a row of them need not be computed: in a group
        whose answers are all right or all wrong, that is every row.
        """
        assert batch.advantage is not None
        weight = self.reduction(batch.mask)
        if self.kl_in_loss or self.entropy_bonus:
            return weight
        return torch.where(batch.advantage != 0, weight, torch.zeros_like(weight))

    def loss(self, out: Outputs, batch: Batch) -> PerToken:
        """surrogate + β kl - α entropy, token by token."""
        assert batch.advantage is not None
        loss = self.surrogate(self._log_ratio(out, batch), batch.advantage)
        if self.kl_in_loss:
            assert batch.logp_ref is not None
            logp, logp_ref = masked.fill(out.logp, batch.mask), masked.fill(batch.logp_ref, batch.mask)
            loss = loss + self.kl_in_loss * self.kl(logp, logp_ref)
        if self.entropy_bonus:
            loss = loss - self.entropy_bonus * out.entropy
        return loss

    def watch(self, out: Outputs, batch: Batch) -> dict[str, PerToken]:
        """Per-token quantities to average over the step's trained tokens."""
        assert batch.advantage is not None
        log_ratio = self._log_ratio(out, batch).detach()
        c = diagnose.coefficient(self.surrogate, log_ratio, batch.advantage)
        seen = {
            "clip/fraction": diagnose.stopped(c, batch.advantage),
            # On tokens that π_old drew, this way round is the unbiased one: KL(π_old ‖ π).
            "kl/old": kl.k3(torch.zeros_like(log_ratio), log_ratio),
        }
        if batch.logp_ref is not None:
            seen["kl/ref"] = kl.k3(out.logp.detach(), masked.fill(batch.logp_ref, batch.mask))
        return seen

    def _log_ratio(self, out: Outputs, batch: Batch) -> PerToken:
        # In a first and only pass π_old is π itself: no second forward pass is spent on it.
        old = out.logp.detach() if batch.logp_old is None else batch.logp_old
        return self.ratio(out.logp, old, batch.mask)
