"""The policy-gradient family: eight choices; every member is a line of table.py.

    returns     rewards -> return of each token     of the episode, or the reward to go
    credit      returns of an update -> advantages  centred, normalised ...
    ratio       the scope of π/π_old                token, sequence or trajectory
    surrogate   ratio and advantage -> loss         score, clipped, truncated ...
    correction  weights for a sampler that differs  none, or truncated weights π_old/π_gen
    reduction   the scope of the mean               tokens, sequences, a fixed horizon
    kl          estimator of the KL to the reference in the loss
    control     how a penalty's β follows a target

A choice is a function of math/; functools.partial fixes a number.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, ClassVar

import torch

from posttrain.math import (
    advantages,
    control,
    corrections,
    diagnose,
    kl,
    masked,
    ratios,
    reduce,
    returns,
)
from posttrain.math.choice import Between, Signed, function_of, takes
from posttrain.math.episodes import Episodes
from posttrain.math.returns import Path
from posttrain.types import Batch, Mask, Method, Outputs, PerToken

Returns = Callable[..., PerToken]
Ratio = Callable[..., PerToken]
Surrogate = Callable[..., PerToken]
Correction = Callable[..., PerToken]
Reduction = Callable[..., PerToken]
Estimator = Callable[[PerToken, PerToken], PerToken]
Control = Callable[..., float]
Shaped = Callable[[PerToken, Mask], PerToken]
Decay = Annotated[float, Between(0, 0.9999)]
"""Decay of a running average; with 1 the average would never change."""


@dataclass(frozen=True)
class PolicyGradient(Method):
    """Σ weight · (correction · surrogate(log-ratio, advantage) + β kl + β_old KL(π_old ‖ π) - α entropy).

    With observation_weight the loss of an observation token is -log π.

    The reward of a token is r_t = w · reward_t - β_reward (log π_old - log π_ref)_t, w = 1 by default. With
    returns.total every token of a row has the advantage credit(R) of the row; with any other `returns` each
    token is credited by itself.
    """

    credit: advantages.Credit
    ratio: Ratio
    surrogate: Surrogate
    reduction: Reduction
    returns: Returns = returns.total
    correction: Correction = corrections.uncorrected
    kl: Estimator = kl.k3
    """Estimator of the penalty in the loss."""
    control: Control = control.proportional
    """Function that adapts β to kl_target."""
    kl_in_loss: float = 0.0
    """β of the reference's penalty in the loss; 0 leaves it out."""
    kl_in_reward: float = 0.0
    """β of the reference's penalty in the reward, with k1, token by token; 0 leaves it out."""
    reward_weight: float = 1.0
    """w: factor of the rewards; with 0 the method learns from the reference alone, a teacher."""
    kl_from_old: float = 0.0
    """β of a penalty on KL(π_old ‖ π), with k3, in the loss; 0 leaves it out."""
    kl_target: float = 0.0
    """KL that `control` steers towards by changing β, in nats: an answer's for kl_in_reward, a token's for
    kl_from_old. 0 keeps β fixed."""
    entropy_bonus: Signed = 0.0
    """α: factor of each token's entropy, which is subtracted from its loss."""
    baseline: Signed = 0.0
    """Constant that is subtracted from every return."""
    running_baseline: Decay = 0.0
    """Decay of a running average of the mean return, which is then subtracted too; 0 keeps none."""
    running_scale: Decay = 0.0
    """Decay of a running average of the returns' variance; rewards are divided by its root. 0 keeps none."""
    off_policy_mask: float = 0.0
    """δ: an answer with A < 0 has no policy loss if the mean of log π_gen/π over its tokens is above δ: the
    policy no longer gives that answer. 0 leaves that out."""
    observation_weight: float = 0.0
    """λ of ECHO: the loss has in addition λ times the mean of -log π over the step's observation tokens:
    those after the first sampled one that were not sampled, which are results of tools, messages of an
    environment, and the template around both. Rows without an advantage learn theirs too. ECHO takes 0.05;
    0 leaves that out."""
    overlong_buffer: float = 0.0
    """Tokens before the longest answer over which the reward falls by up to 1; 0 leaves that out."""
    horizon: int = 0
    """The most tokens of an answer, for overlong_buffer; set by methods/build.py: build."""
    shaped: Shaped | None = None
    """Adapts rewards that are gains in a potential to the discount of the credit (math/returns.py: shaped);
    set by methods/build.py: build. None leaves rewards as they are."""

    unread: ClassVar[frozenset[str]] = frozenset()
    """Fields that a subclass has and does not read."""
    anchored: ClassVar[bool] = True
    measures_kl: ClassVar[bool] = True

    @property
    def needs(self) -> frozenset[str]:
        """logp_ref if there is a penalty on the KL to the reference; logp_old too if it is in the reward."""
        reference = {"logp_ref"} if self.kl_in_loss or self.kl_in_reward else set()
        return frozenset(reference | ({"logp_old"} if self.kl_in_reward else set()))

    @property
    def asks(self) -> frozenset[str]:
        """A teacher if reward_weight is 0."""
        return frozenset() if self.reward_weight else frozenset({"teacher"})

    @property
    def corrects(self) -> bool:
        """True if a correction weighs the tokens of an older policy."""
        return self.correction is not corrections.uncorrected

    @property
    def start(self) -> Mapping[str, float]:
        """β if it follows a target, and empty running averages."""
        beta = {"beta": self.kl_in_reward or self.kl_from_old} if self.kl_target else {}
        mean = {"mean": 0.0, "mean_weight": 0.0} if self.running_baseline else {}
        return beta | mean | ({"variance": 0.0, "variance_weight": 0.0} if self.running_scale else {})

    def prepare(self, batch: Batch) -> Batch:
        """Return the batch with its advantages, credited over all rows of the update."""
        self._check(batch)
        G = self.returns(self.path(batch)) - self._baseline(batch)
        advantage = self._advantages(G, batch, by_row=self.returns is returns.total)
        return replace(batch, advantage=advantage, observed=self._observed(batch))

    def path(self, batch: Batch) -> Path:
        """Return the episodes with each token's reward: scaled, minus the penalty on the KL to the reference.

        The penalties of an episode's other conversations are in `Path.beyond`.
        """
        episodes = Episodes.of(batch.episode, batch.mask)
        reward = masked.fill(batch.reward, batch.mask)
        if self.shaped is not None:
            reward = self.shaped(reward, batch.mask)
        if self.running_scale and batch.state["variance"] > 0:
            reward = reward / _mean_of(batch.state, "variance") ** 0.5
        if self.overlong_buffer:
            length = batch.mask.sum(-1)
            last = (batch.mask.cumsum(-1) == length[:, None]) & batch.mask
            length = episodes.to_rows(episodes.sum(length))
            penalty = returns.overlong(length, self.horizon, self.overlong_buffer).to(reward)
            reward = reward + masked.fill(penalty[:, None].expand_as(reward), last)
        if self.reward_weight != 1:
            reward = self.reward_weight * reward
        if self.kl_in_reward:
            assert batch.logp_old is not None
            assert batch.logp_ref is not None
            beta = self._beta(batch, self.kl_in_reward)
            penalty = beta * masked.fill(kl.k1(batch.logp_old, batch.logp_ref), batch.mask)
            reward = reward - penalty
            if batch.episode is not None:
                return Path(reward, batch.mask, beyond=-episodes.others(penalty.sum(-1).to(reward)))
        return Path(reward, batch.mask)

    def weight(self, batch: Batch) -> PerToken:
        """Return the reduction of the step's mask; 0 where the advantage is 0 and the loss has no other term.

        Such a token has neither loss nor gradient, and a row of such tokens need not be computed: in a group
        whose answers are all right or all wrong, that is every row.
        """
        assert batch.advantage is not None
        weight = self.weight_of_any_loss(batch)
        if not (self.kl_in_loss or self.entropy_bonus or self.kl_from_old):
            weight = torch.where(batch.advantage != 0, weight, torch.zeros_like(weight))
        return self._with_observations(weight, batch)

    def weight_of_any_loss(self, batch: Batch) -> PerToken:
        """Return the reduction of the step's mask, for a loss that need not be 0 where the advantage is."""
        return reduce.of_step(self.reduction, batch.mask, batch.group, batch.episode, batch.everywhere)

    def loss(self, out: Outputs, batch: Batch) -> PerToken:
        """Return correction · surrogate + β kl + β_old KL(π_old ‖ π) - α entropy, token by token."""
        assert batch.advantage is not None
        log_ratio = self._log_ratio(out, batch)
        loss = self._surrogate_of(out, batch)(log_ratio, batch.advantage)
        if self.correction is not corrections.uncorrected:
            loss = self._correction(out, batch) * loss
        if self.off_policy_mask:
            loss = torch.where(self._off_policy_rows(out, batch), torch.zeros_like(loss), loss)
        if self.kl_from_old:
            loss = loss + self._beta(batch, self.kl_from_old) * self._kl_from_old(out, batch)
        if self.kl_in_loss:
            assert batch.logp_ref is not None
            logp, logp_ref = masked.fill(out.logp, batch.mask), masked.fill(batch.logp_ref, batch.mask)
            loss = loss + self.kl_in_loss * self.kl(logp, logp_ref)
        if self.entropy_bonus:
            loss = loss - self.entropy_bonus * out.entropy
        return loss if batch.observed is None else torch.where(batch.observed, -out.logp, loss)

    def watch(self, out: Outputs, batch: Batch) -> dict[str, PerToken]:
        """Return per-token quantities, to be averaged over the step's trained tokens."""
        assert batch.advantage is not None
        log_ratio = self._log_ratio(out, batch).detach()
        c = diagnose.coefficient(self._surrogate_of(out, batch), log_ratio, batch.advantage)
        quantities = {
            "clip/fraction": diagnose.stopped(c, batch.advantage),
            "kl/old": self._kl_from_old(out, batch).detach(),
        }
        if self.correction is not corrections.uncorrected:
            quantities["correction/weight"] = self._correction(out, batch)
        if self.off_policy_mask:
            quantities["correction/masked"] = self._off_policy_rows(out, batch).to(c)
        if batch.logp_ref is not None:
            quantities["kl/ref"] = kl.k3(out.logp.detach(), masked.fill(batch.logp_ref, batch.mask))
        return quantities

    def update_state(self, batch: Batch, last: Mapping[str, float]) -> Mapping[str, float]:
        """Return β after control, and the running averages with this update's returns."""
        state, episodes = dict(batch.state), Episodes.of(batch.episode, batch.mask)
        answers = episodes.first(batch.mask.any(-1))
        if self.kl_target:
            if self.kl_in_reward:
                assert batch.logp_old is not None
                assert batch.logp_ref is not None
                gap = masked.row_sum(kl.k1(batch.logp_old, batch.logp_ref), batch.mask)
                measured = float(masked.mean(episodes.sum(gap), answers, batch.everywhere))
            else:
                # Measured in the last step before the weights moved, so without that step's own KL.
                measured = last["kl/old"]
            state["beta"] = self.control(state["beta"], measured, self.kl_target)
        if (keep := self.running_baseline) > 0:
            path = self.path(batch)
            total = masked.row_sum(path.reward, batch.mask) + (0.0 if path.beyond is None else path.beyond)
            mean = masked.mean(episodes.first(total), answers, batch.everywhere)
            state |= _average(state, "mean", float(mean), keep)
        if (keep := self.running_scale) > 0:
            # Of returns rounded by worth: a variance of rounding errors would be a divisor near 0.
            R = episodes.first(returns.worth(batch.reward, batch.mask, like=batch.logp_gen))
            variance = masked.variance(R, answers, batch.everywhere)
            state |= _average(state, "variance", float(variance), keep)
        return state

    def _check(self, batch: Batch) -> None:
        if not batch.everywhere.sum(batch.mask.sum()):
            raise ValueError("nothing to train on: no token of this update was sampled by the policy")

    def _observed(self, batch: Batch) -> Mask | None:
        return masked.observations(batch.mask, batch.length) if self.observation_weight else None

    def _with_observations(self, weight: PerToken, batch: Batch) -> PerToken:
        """Return the weights, λ / (number of observation tokens in the step) at each such token.

        Source: ECHO, arXiv:2605.24517, with the mean over all tokens of the step.
        """
        if batch.observed is None or not batch.everywhere.sum(batch.observed.sum()):
            return weight
        return weight + self.observation_weight * reduce.per_token(batch.observed, None, batch.everywhere)

    def _baseline(self, batch: Batch) -> float:
        has_mean = self.running_baseline and batch.state["mean_weight"]
        return self.baseline + (_mean_of(batch.state, "mean") if has_mean else 0.0)

    def _beta(self, batch: Batch, fixed: float) -> float:
        return batch.state["beta"] if self.kl_target else fixed

    def _advantages(self, x: PerToken, batch: Batch, *, by_row: bool) -> PerToken:
        """Return credit(x) over rows or over tokens (math/advantages.py).

        x is first rounded to the type of the losses, so that returns that differ only by the rounding of
        their sums are equal (math/returns.py: worth).
        """
        x = x.to(batch.logp_gen)
        if by_row:
            rows = batch.mask, batch.group, batch.episode
            return advantages.credit_rows(self.credit, x, *rows, batch.everywhere)
        return advantages.credit_tokens(self.credit, x, batch.mask, batch.group, batch.everywhere)

    def _old(self, out: Outputs, batch: Batch) -> PerToken:
        # In the first and only pass π_old is π itself, so no forward pass is needed for it.
        return out.logp.detach() if batch.logp_old is None else batch.logp_old

    def _kl_from_old(self, out: Outputs, batch: Batch) -> PerToken:
        """Return KL(π_old ‖ π) token by token, whatever the ratio: unbiased on tokens that π_old drew."""
        log_ratio = ratios.by_token(out.logp, self._old(out, batch), batch.mask)
        return kl.k3(torch.zeros_like(log_ratio), log_ratio)

    def _log_ratio(self, out: Outputs, batch: Batch) -> PerToken:
        return self.ratio(out.logp, self._old(out, batch), batch.mask, batch.advantage)

    def _surrogate_of(self, out: Outputs, batch: Batch) -> Surrogate:
        """Return the surrogate as a function of log-ratio and advantage alone."""
        if not takes(function_of(self.surrogate), "logp_old"):
            return self.surrogate
        return partial(self.surrogate, logp_old=masked.fill(self._old(out, batch), batch.mask))

    def _off_policy_rows(self, out: Outputs, batch: Batch) -> Mask:
        """Return True on tokens of answers with A < 0 that the policy no longer gives.

        Source: off-policy sequence masking, DeepSeek-V3.2, arXiv:2512.02556, eq. 9 of section 3.1, whose
        π_old is the probability that the sampler itself gave: π_gen.
        """
        assert batch.advantage is not None
        gap = masked.row_mean(batch.logp_gen - out.logp.detach(), batch.mask)
        return (batch.advantage < 0) & (gap > self.off_policy_mask)[:, None]

    def _correction(self, out: Outputs, batch: Batch) -> PerToken:
        gap = masked.fill(self._old(out, batch), batch.mask) - masked.fill(batch.logp_gen, batch.mask)
        return self.correction(gap, batch.mask)


def _average(state: Mapping[str, float], name: str, value: float, keep: float) -> dict[str, float]:
    """Return a running average after one more value, and the sum of its weights."""
    weight = f"{name}_weight"
    return {
        name: keep * state[name] + (1 - keep) * value,
        weight: keep * state[weight] + (1 - keep),
    }


def _mean_of(state: Mapping[str, float], name: str) -> float:
    """Return a running average over the sum of its weights, so that early ones are not biased towards 0."""
    return state[name] / state[f"{name}_weight"]
