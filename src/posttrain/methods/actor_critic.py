"""Policy gradients with a critic: Ψ_t from the critic's values, and the critic's loss added to the policy's.

`estimator` replaces `returns`: a function of math/returns.py that returns advantages and the critic's
targets. `credit` is then applied to the advantages of all tokens: raw leaves them, batch_normalised
whitens them as PPO's code does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from posttrain.math import masked, returns, value
from posttrain.math.choice import function_of
from posttrain.methods.policy_gradient import PolicyGradient
from posttrain.types import Batch, Outputs, PerToken

Estimator = Callable[[returns.Path], returns.Credited]
ValueLoss = Callable[..., PerToken]


@dataclass(frozen=True)
class ActorCritic(PolicyGradient):
    """The policy gradient's loss + value_weight · value_loss(V, target, V_old), token by token.

    V is the value of the state before the token. If the critic is a model of its own, or in a trust region,
    the two losses share no parameter, and value_weight only scales the critic's gradient.
    """

    estimator: Estimator = returns.gae
    value_loss: ValueLoss = value.squared
    value_weight: float = 0.5
    """Weight of the critic's loss; the policy's has 1."""

    unread: ClassVar[frozenset[str]] = frozenset(
        {"returns", "baseline", "running_baseline", "turn_weight", "turn_gamma"}
    )

    @property
    def needs(self) -> frozenset[str]:
        """The policy gradient's columns and values; also logp_old for vtrace, which takes ratios to it."""
        return super().needs | {"value"} | ({"logp_old"} if self.off_policy else set())

    @property
    def corrects(self) -> bool:
        """True if the correction or the estimator corrects for an older policy."""
        return self.off_policy or super().corrects

    @property
    def off_policy(self) -> bool:
        """True if the estimator itself corrects for an older policy."""
        return function_of(self.estimator) is returns.vtrace

    def prepare(self, batch: Batch) -> Batch:
        """Return the batch with advantages and the critic's targets."""
        self._check(batch)
        assert batch.value is not None
        path = self.path(batch)._replace(value=batch.value)
        if self.off_policy:
            assert batch.logp_old is not None
            path = path._replace(log_weight=batch.logp_old - batch.logp_gen)
        advantage, target = self.estimator(path)
        advantage = self._advantages(advantage, batch, by_row=False)
        target, observed = target.to(advantage), self._observed(batch)
        return self._select_tokens(replace(batch, advantage=advantage, target=target, observed=observed))

    def weight(self, batch: Batch) -> PerToken:
        """Return the reduction of the step's mask: the critic also learns where the advantage is 0."""
        return self._with_observations(self.weight_of_any_loss(batch), batch)

    def loss(self, out: Outputs, batch: Batch) -> PerToken:
        """Return the sum of the policy's and the critic's loss, token by token; the policy's without V."""
        loss = super().loss(out, batch)
        return loss if out.value is None else loss + self.value_weight * self._value_loss(out, batch)

    def watch(self, out: Outputs, batch: Batch) -> dict[str, PerToken]:
        """Return the policy gradient's quantities, the critic's loss and its value."""
        assert out.value is not None
        return super().watch(out, batch) | {
            "value/loss": self._value_loss(out, batch).detach(),
            "value/mean": masked.fill(out.value.detach(), batch.mask),
        }

    def update_state(self, batch: Batch, last: Mapping[str, float]) -> Mapping[str, float]:
        """Return the policy gradient's state, with the same β and α while the critic warms up."""
        state = super().update_state(batch, last)
        # A policy that stands still is no evidence on the coefficients that are to move it.
        same = {"beta", "alpha"} & batch.state.keys() if last.get("value/warmup") else set()
        return {**state, **{name: batch.state[name] for name in same}}

    def _value_loss(self, out: Outputs, batch: Batch) -> PerToken:
        assert out.value is not None
        assert batch.value is not None
        assert batch.target is not None
        columns = (masked.fill(x, batch.mask) for x in (out.value, batch.target, batch.value))
        return self.value_loss(*columns)
