"""The policy-gradient family: nine choices; every member is a line of table.py.

    returns     rewards -> return of each token     of the episode, or the reward to go
    credit      returns of an update -> advantages  centred, normalised ...
    ratio       the scope of π/π_old                token, sequence or trajectory
    surrogate   ratio and advantage -> loss         score, clipped, truncated ...
    correction  weights for a sampler that differs  none, or truncated weights π_old/π_gen
    reduction   the scope of the mean               tokens, sequences, a fixed horizon
    kl          estimator of the KL to the reference in the loss
    control     how a penalty's β follows a target
    filter      the tokens that keep their advantage    every token, those of high entropy ...

A choice is a function of math/; functools.partial fixes a number.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Annotated, ClassVar, NamedTuple

import torch

from posttrain.batch import Divergence
from posttrain.math import (
    advantages,
    control,
    corrections,
    diagnose,
    filters,
    kl,
    masked,
    ratios,
    reduce,
    returns,
)
from posttrain.math.choice import COLUMNS, Between, Share, Signed, function_of, takes
from posttrain.math.episodes import Episodes
from posttrain.math.returns import Path
from posttrain.types import Batch, Mask, Method, Outputs, PerToken, RunError

PerTokenFunction = Callable[..., PerToken]
Returns = Callable[..., PerToken]
Ratio = Callable[..., PerToken]
Surrogate = Callable[..., PerToken]
Correction = Callable[..., PerToken]
Reduction = Callable[..., PerToken]
Estimator = Callable[..., PerToken]
Control = Callable[..., float]
Filter = Callable[..., Mask]
Shaped = Callable[[PerToken, Mask], PerToken]
Decay = Annotated[float, Between(0, 0.9999)]
"""Decay of a running average; with 1 the average would never change."""


class RewardPart(NamedTuple):
    """A part of the reward that a credit compares by itself: an addend of a combined verifier's score."""

    source: str
    """Name of the source of tasks whose answers have it."""
    name: str
    """Name of the part in `Verdict.parts`; "" is the whole reward, where a source has no parts."""
    weight: float


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
    """Estimator of the penalty in the loss. k1, k2 and k3 are for tokens of π itself; unbiased_ and forward_
    ones for tokens of π_old, as in later steps of an update; exact for any."""
    control: Control = control.proportional
    """Function that adapts β to kl_target."""
    filter: Filter = filters.every_token
    """Function of all rows of an update that returns the tokens whose advantage is kept; that of the others
    becomes 0, and penalties on them stay. An advantage that a program gives is not filtered."""
    kl_in_loss: float = 0.0
    """β of the reference's penalty in the loss; 0 leaves it out."""
    kl_in_reward: float = 0.0
    """β of the reference's penalty in the reward, with k1, token by token; 0 leaves it out."""
    reward_weight: float = 1.0
    """w: factor of the rewards; with 0 the method learns from the reference alone, a teacher."""
    kl_from_old: float = 0.0
    """β of a penalty on KL(π_old ‖ π), with k3, in the loss; 0 leaves it out."""
    kl_from_old_share: Share = 1.0
    """Share of an update's tokens that kl_from_old applies to: those with the largest (A - Ā)(log π_old - its
    mean), which lower the entropy most. 1: every token. KL-Cov, arXiv:2505.22617, is kl_from_old = 1 with a
    share of 0.0002 to 0.002; verl estimates its KL by |log π/π_old|."""
    kl_target: float = 0.0
    """KL that `control` steers towards by changing β, in nats: an answer's for kl_in_reward, a token's for
    kl_from_old. 0 keeps β fixed."""
    entropy_bonus: Signed = 0.0
    """α: factor of each token's entropy, which is subtracted from its loss."""
    entropy_target: float = 0.0
    """Nats a token: entropy_bonus is where α begins. After each update α rises by entropy_step if the entropy
    was below this, else it falls, down to 0; while the entropy is above this, no bonus is paid. 0 keeps α
    fixed. Skywork-OR1, arXiv:2505.22312."""
    entropy_step: float = 0.005
    """By how much α changes after an update, with entropy_target."""
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
    turn_weight: float = 0.0
    """ω: weight of a second advantage, of a turn over the other turns of its group that began in the same
    state, made by `credit` of their returns (math/advantages.py: credit_turns); 0 leaves it out."""
    turn_gamma: Share = 0.95
    """γ of a turn's return: what a reward one turn later is worth, with turn_weight."""
    horizon: int = 0
    """The most tokens of an answer, for overlong_buffer; set by methods/build.py: build."""
    shaped: Shaped | None = None
    """Adapts rewards that are gains in a potential to the discount of the credit (math/returns.py: shaped);
    set by methods/build.py: build. None leaves rewards as they are."""
    reward_parts: tuple[RewardPart, ...] = ()
    """Columns of `batch.parts`, if the credit asks for parts; set by methods/build.py: build. Empty: each
    column there weighs 1."""

    unread: ClassVar[frozenset[str]] = frozenset()
    """Fields that a subclass has and does not read."""
    anchored: ClassVar[bool] = True
    measures_kl: ClassVar[bool] = True

    @property
    def needs(self) -> frozenset[str]:
        """logp_ref if a KL to the reference is estimated; logp_old too if it is in the reward.

        Also the columns that the filter asks for, and logp_old for a penalty on a share of the tokens.
        """
        estimated = (self.kl_in_loss and not self.compare) or self.kl_in_reward
        reference = {"logp_ref"} if estimated else set()
        old = {"logp_old"} if self.kl_in_reward or self._penalises_share else set()
        filled = {"entropy", "logp_old", "uniform"}
        norm = {"score_norm"} if takes(function_of(self.credit), "score_norm") else set()
        return frozenset(reference | old | norm | (filled & self._filter_columns))

    @property
    def compare(self) -> Divergence | None:
        """The exact KL to the reference if it is the penalty in the loss."""
        return kl.exact if self.kl_in_loss and function_of(self.kl) is kl.exact else None

    @property
    def asks(self) -> frozenset[str]:
        """A teacher if reward_weight is 0, and the states of turns if turn_weight is not."""
        teacher = set() if self.reward_weight else {"teacher"}
        return frozenset(teacher | ({"states"} if self.turn_weight else set()))

    @property
    def asks_greedy(self) -> bool:
        """True if the credit compares with a greedy answer to each task, which is drawn, but not trained."""
        return takes(function_of(self.credit), "greedy")

    @property
    def corrects(self) -> bool:
        """True if a correction weighs the tokens of an older policy."""
        return self.correction is not corrections.uncorrected

    @property
    def start(self) -> Mapping[str, float]:
        """β and α if they follow a target, and empty running averages."""
        alpha = {"alpha": self.entropy_bonus, "entropy": 0.0} if self.entropy_target else {}
        beta = {"beta": self.kl_in_reward or self.kl_from_old} if self.kl_target else {}
        mean = {"mean": 0.0, "mean_weight": 0.0} if self.running_baseline else {}
        return alpha | beta | mean | ({"variance": 0.0, "variance_weight": 0.0} if self.running_scale else {})

    def prepare(self, batch: Batch) -> Batch:
        """Return the batch with its advantages, credited over all rows of the update."""
        self._check(batch)
        path = self.path(batch)
        G = self.returns(path) - self._baseline(batch)
        advantage = self._advantages(G, batch, by_row=self.returns is returns.total)
        if self.turn_weight:
            advantage = advantage + self.turn_weight * self._turn_advantages(path, batch)
        return self._select_tokens(replace(batch, advantage=advantage, observed=self._observed(batch)))

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
        any_loss = self.kl_in_loss or self.entropy_bonus or self.entropy_target or self.pulls
        if not (any_loss or (self.kl_from_old and batch.penalty_mask is None)):
            moved = batch.advantage != 0
            if batch.penalty_mask is not None:
                moved = moved | batch.penalty_mask
            weight = torch.where(moved, weight, torch.zeros_like(weight))
        return self._with_observations(weight, batch)

    @cached_property
    def pulls(self) -> bool:
        """True if the surrogate has a loss where the advantage is 0, once the ratio has left 1."""
        log_ratio = torch.tensor([[-1.0, 1.0]])
        surrogate = _with_old(self.surrogate, torch.full_like(log_ratio, -2.0))
        return bool(surrogate(log_ratio, torch.zeros_like(log_ratio)).any())

    def weight_of_any_loss(self, batch: Batch) -> PerToken:
        """Return the reduction of the step's mask, for a loss that need not be 0 where the advantage is."""
        return reduce.of_step(self.reduction, batch.mask, batch.group, batch.episode, batch.everywhere)

    def loss(self, out: Outputs, batch: Batch) -> PerToken:
        """Return correction · surrogate + β kl + β_old KL(π_old ‖ π) - α entropy, token by token."""
        assert batch.advantage is not None
        log_ratio = self._log_ratio(out, batch)
        loss = self._given_old(self.surrogate, out, batch)(log_ratio, batch.advantage)
        if self.correction is not corrections.uncorrected:
            loss = self._correction(out, batch) * loss
        if self.off_policy_mask:
            loss = torch.where(self._off_policy_rows(out, batch), torch.zeros_like(loss), loss)
        if self.kl_from_old:
            distance = self._kl_from_old(out, batch)
            if batch.penalty_mask is not None:
                distance = masked.fill(distance, batch.penalty_mask)
            loss = loss + self._beta(batch, self.kl_from_old) * distance
        if self.kl_in_loss:
            loss = loss + self.kl_in_loss * self._kl_to_reference(out, batch)
        if alpha := self._alpha(batch):
            loss = loss - alpha * out.entropy
        return loss if batch.observed is None else torch.where(batch.observed, -out.logp, loss)

    def watch(self, out: Outputs, batch: Batch) -> dict[str, PerToken]:
        """Return per-token quantities, to be averaged over the step's trained tokens."""
        assert batch.advantage is not None
        log_ratio = self._log_ratio(out, batch).detach()
        c = diagnose.coefficient(self._given_old(self.surrogate, out, batch), log_ratio, batch.advantage)
        quantities = {
            "clip/fraction": diagnose.stopped(c, batch.advantage),
            "kl/old": self._kl_from_old(out, batch).detach(),
        }
        if self.correction is not corrections.uncorrected:
            quantities["correction/weight"] = self._correction(out, batch)
        if self.off_policy_mask:
            quantities["correction/masked"] = self._off_policy_rows(out, batch).to(c)
        if self.compare:
            quantities["kl/ref"] = self._kl_to_reference(out, batch).detach()
        elif batch.logp_ref is not None:
            quantities["kl/ref"] = kl.k3(out.logp.detach(), masked.fill(batch.logp_ref, batch.mask))
        return quantities

    def update_state(self, batch: Batch, last: Mapping[str, float]) -> Mapping[str, float]:
        """Return β and α after control, and the running averages with this update's returns."""
        state, episodes = dict(batch.state), Episodes.of(batch.episode, batch.mask)
        answers = episodes.first(batch.mask.any(-1))
        if self.kl_target:
            if self.kl_in_reward:
                assert batch.logp_old is not None
                assert batch.logp_ref is not None
                gap = masked.row_sum(kl.k1(batch.logp_old, batch.logp_ref), batch.mask)
                measured: float | None = float(masked.mean(episodes.sum(gap), answers, batch.everywhere))
            else:
                # Measured in the last step before the weights moved, so without that step's own KL.
                # None if that step had no token with a loss.
                measured = last.get("kl/old")
            if measured is not None:
                state["beta"] = self.control(state["beta"], measured, self.kl_target)
        if self.entropy_target:
            entropy = last["entropy"]  # in the last step too
            alpha = control.stepwise(state["alpha"], entropy, self.entropy_target, self.entropy_step)
            state |= {"alpha": alpha, "entropy": entropy}
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
        if self.asks_greedy and batch.greedy is None:
            raise ValueError("the credit compares with greedy answers, and the batch has no column greedy")

    def _observed(self, batch: Batch) -> Mask | None:
        return masked.observations(batch.mask, batch.length) if self.observation_weight else None

    def _with_observations(self, weight: PerToken, batch: Batch) -> PerToken:
        """Return the weights, λ / (number of observation tokens in the step) at each such token.

        Source: ECHO, arXiv:2605.24517, with the mean over all tokens of the step.
        """
        if batch.observed is None:
            return weight
        count = batch.everywhere.sum(batch.observed.sum()).clamp(min=1)
        return weight + self.observation_weight * batch.observed.double() / count

    def _baseline(self, batch: Batch) -> float:
        has_mean = self.running_baseline and batch.state["mean_weight"]
        return self.baseline + (_mean_of(batch.state, "mean") if has_mean else 0.0)

    def _beta(self, batch: Batch, fixed: float) -> float:
        return batch.state["beta"] if self.kl_target else fixed

    def _alpha(self, batch: Batch) -> float:
        if not self.entropy_target:
            return self.entropy_bonus
        return batch.state["alpha"] if batch.state["entropy"] <= self.entropy_target else 0.0

    @property
    def _filter_columns(self) -> set[str]:
        return {name for name in COLUMNS if takes(function_of(self.filter), name)}

    @property
    def _penalises_share(self) -> bool:
        return self.kl_from_old > 0 and self.kl_from_old_share < 1

    def _select_tokens(self, batch: Batch) -> Batch:
        """Return the batch with the advantages that the filter keeps, and the tokens that kl_from_old pulls.

        Raises RunError for a filter that does not return one truth value a token.
        """
        advantage = batch.advantage
        assert advantage is not None
        if self._penalises_share:
            assert batch.logp_old is not None
            penalty_mask = filters.top_covariance(
                advantage, batch.logp_old, batch.mask, self.kl_from_old_share, batch.everywhere
            )
            batch = replace(batch, penalty_mask=penalty_mask)
        if self.filter is filters.every_token:
            return batch
        columns = {name: getattr(batch, name) for name in self._filter_columns}
        mask = self.filter(batch.mask, batch.everywhere, **columns)
        if getattr(mask, "dtype", None) != torch.bool or mask.shape != batch.mask.shape:
            shape = getattr(mask, "shape", None)
            kind = type(mask).__name__ if shape is None else f"{mask.dtype} of shape {list(shape)}"
            problem = f"a filter returns a tensor of {list(batch.mask.shape)} truth values, not {kind}"
            raise RunError("filter", problem)
        return replace(batch, filter_mask=mask, advantage=masked.fill(advantage, mask))

    def _advantages(self, x: PerToken, batch: Batch, *, by_row: bool) -> PerToken:
        """Return credit(x) over rows or over tokens (math/advantages.py).

        x is first rounded to the type of the losses, so that returns that differ only by the rounding of
        their sums are equal (math/returns.py: worth).
        """
        x = x.to(batch.logp_gen)
        if by_row:
            rows = batch.mask, batch.group, batch.episode
            facts = batch.everywhere, batch.parts, batch.greedy
            return advantages.credit_rows(self._row_credit(batch), x, *rows, *facts)
        columns = batch.mask, batch.group, batch.everywhere, batch.greedy, batch.score_norm
        return advantages.credit_tokens(self.credit, x, *columns)

    def _row_credit(self, batch: Batch) -> advantages.Credit:
        """Return the credit with the weights of the parts of the reward, if it asks for them."""
        if not takes(function_of(self.credit), "weights"):
            return self.credit
        count = 1 if batch.parts is None else batch.parts.shape[1]
        weights = [part.weight for part in self.reward_parts] or [1.0] * count
        if len(weights) != count:
            raise ValueError(f"the reward has {len(weights)} parts, and the batch scores of {count}")
        return partial(self.credit, weights=batch.logp_gen.new_tensor(weights))

    def _turn_advantages(self, path: Path, batch: Batch) -> PerToken:
        if batch.turn_state is None:
            raise ValueError("turn_weight compares turns by their states, and the rows have no turn_state")
        G = returns.turns_to_go(path, batch.turn_state != 0, self.turn_gamma).to(batch.logp_gen)
        rows = batch.turn_state, batch.mask, batch.group
        return advantages.credit_turns(self.credit, G, *rows, batch.everywhere)

    def _old(self, out: Outputs, batch: Batch) -> PerToken:
        # In the first and only pass π_old is π itself, so no forward pass is needed for it.
        return out.logp.detach() if batch.logp_old is None else batch.logp_old

    def _kl_to_reference(self, out: Outputs, batch: Batch) -> PerToken:
        if self.compare:
            assert out.divergence is not None
            return masked.fill(out.divergence, batch.mask)
        assert batch.logp_ref is not None
        logp, logp_ref = masked.fill(out.logp, batch.mask), masked.fill(batch.logp_ref, batch.mask)
        return self._given_old(self.kl, out, batch)(logp, logp_ref)

    def _kl_from_old(self, out: Outputs, batch: Batch) -> PerToken:
        """Return KL(π_old ‖ π) token by token, whatever the ratio: unbiased on tokens that π_old drew."""
        log_ratio = ratios.by_token(out.logp, self._old(out, batch), batch.mask)
        return kl.k3(torch.zeros_like(log_ratio), log_ratio)

    def _log_ratio(self, out: Outputs, batch: Batch) -> PerToken:
        return self.ratio(out.logp, self._old(out, batch), batch.mask, batch.advantage)

    def _given_old(self, function: PerTokenFunction, out: Outputs, batch: Batch) -> PerTokenFunction:
        return _with_old(function, masked.fill(self._old(out, batch), batch.mask))

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
        return self._given_old(self.correction, out, batch)(gap, batch.mask)


def _with_old(function: PerTokenFunction, logp_old: PerToken) -> PerTokenFunction:
    """Return the function with logp_old given, if it asks for it."""
    return partial(function, logp_old=logp_old) if takes(function_of(function), "logp_old") else function


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
