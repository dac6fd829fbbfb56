"""Policy gradients with a critic: Ψ_t from its values, and its own loss beside the policy's.

`estimator` takes the place of `returns`: a function of math/returns.py that gives advantages and the critic's
targets. `credit` then runs over the advantages of all tokens: raw leaves them, batch_normalised
whitens them as PPO's code does.
"""

from collections.abc import Callable
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

    V is that of the state before the token. Where the critic is a model of its own the two parts
    have no parameter in common, and value_weight only scales the critic's gradient.
    """

    estimator: Estimator = returns.gae
    value_loss: ValueLoss = value.squared
    value_weight: float = 0.5
    """How much the critic's loss counts beside the policy's."""

    unread: ClassVar[frozenset[str]] = frozenset({"returns", "baseline", "running_baseline"})

    @property
    def needs(self) -> frozenset[str]:
        """Those of the policy gradient, the values, and the anchor for vtrace, which weighs against it."""
        return super().needs | {"value"} | ({"logp_old"} if self.off_policy else set())

    @property
    def corrects(self) -> bool:
        """Whether a correction or estimator weighs what an older policy drew."""
        return self.off_policy or super().corrects

    @property
    def off_policy(self) -> bool:
        """Whether estimator weighs for itself what an older policy drew."""
        return function_of(self.estimator) is returns.vtrace

    def prepare(self, batch: Batch) -> Batch:
        """The batch with advantages and the critic's targets."""
        self._check(batch)
        assert batch.value is not None
        path = self.path(batch)._replace(value=batch.value)
        if self.off_policy:
            assert batch.logp_old is not None
            path = path._replace(log_weight=batch.logp_old - batch.logp_gen)
        advantage, target = self.estimator(path)
        advantage = self._advantages(advantage, batch, whole=False)
        return replace(batch, advantage=advantage, target=target.to(advantage))

    def weight(self, batch: Batch) -> PerToken:
        """The reduction of the step's mask: a token without an advantage still teaches the critic."""
        return self.weight_of_any_loss(batch)

    def loss(self, out: Outputs, batch: Batch) -> PerToken:
        """The policy's loss and the critic's, token by token."""
        return super().loss(out, batch) + self.value_weight * self._value_loss(out, batch)

    def watch(self, out: Outputs, batch: Batch) -> dict[str, PerToken]:
        """What the policy gradient watches, the critic's loss and its value."""
        assert out.value is not None
        seen = super().watch(out, batch)
        return seen | {
            "value/loss": self._value_loss(out, batch).detach(),
            "value/mean": masked.fill(out.value.detach(), batch.mask),
        }

    def _value_loss(self, out: Outputs, batch: Batch) -> PerToken:
        assert out.value is not None
        assert batch.value is not None
        assert batch.target is not None
        columns = (masked.fill(x, batch.mask) for x in (out.value, batch.target, batch.value))
        return self.value_loss(*columns)
