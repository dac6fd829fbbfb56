"""Q-learning on tokens, with a penalty on the KL to a reference.

A language model is a Q-function: for rewards minus β KL(π ‖ π_ref) the optimal policy is
π* = π_ref exp((Q* - V*)/β), so that any π and V *define* a Q whose optimal policy is π:

    Q(s, y) = β log π(y | s)/π_ref(y | s) + V(s),      V(s) = β log Σ_y π_ref(y | s) exp(Q(s, y)/β)

The second line holds by construction, because π sums to 1. The loss is the error in Bellman's equation.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from posttrain.math import kl, masked, reduce, returns
from posttrain.math.choice import AtLeast, Share
from posttrain.math.episodes import Episodes
from posttrain.types import Batch, Mask, Method, Outputs, PerToken


@dataclass(frozen=True)
class SoftQ(Method):
    """Σ weight · ½ (Q(s_t, y_t) - G_t)², G_t the λ-return of returns.soft_lambda.

    With λ = 0 the target is unbiased for tokens from any policy, with λ > 0 only for tokens that the policy
    itself drew.

    Source: KLQ, arXiv:2508.17000; path consistency learning, arXiv:1702.08892.
    """

    reduction: Callable[..., PerToken]
    beta: Annotated[float, AtLeast(1e-6)] = 0.1
    """Weight of the KL, in units of the reward: small trusts the reward, large the reference."""
    gamma: Share = 1.0
    lam: Share = 0.95
    shaped: Callable[[PerToken, Mask], PerToken] | None = None
    """Adapts rewards that are gains in a potential to γ, as in PolicyGradient."""

    needs: ClassVar[frozenset[str]] = frozenset({"logp_old", "logp_ref", "value"})

    @property
    def corrects(self) -> bool:
        """True for λ = 0: a target of one step is unbiased for tokens from any policy."""
        return self.lam == 0

    def prepare(self, batch: Batch) -> Batch:
        """Return the batch with targets for V; `advantage` is G - Q of each token."""
        if not batch.everywhere.sum(batch.mask.sum()):
            raise ValueError("nothing to train on: no token of this update was sampled")
        assert batch.logp_old is not None
        assert batch.logp_ref is not None
        assert batch.value is not None
        gap = self.beta * masked.fill(kl.k1(batch.logp_old, batch.logp_ref), batch.mask)
        reward = batch.reward if self.shaped is None else self.shaped(batch.reward, batch.mask)
        path = returns.Path(reward, batch.mask, batch.value)
        if batch.episode is not None:
            others = Episodes.of(batch.episode, batch.mask).others(gap.sum(-1).to(reward))
            path = path._replace(beyond=-others)
        # The V for which Q = β log π/π_ref + V is G, with the present π.
        target = (returns.soft_lambda(path, gap, self.gamma, self.lam) - gap).to(batch.logp_old)
        advantage = masked.fill(target - batch.value, batch.mask)
        return replace(batch, target=target, advantage=advantage)

    def weight(self, batch: Batch) -> PerToken:
        """Return the reduction of the step's mask."""
        return reduce.of_step(self.reduction, batch.mask, batch.group, batch.episode, batch.everywhere)

    def loss(self, out: Outputs, batch: Batch) -> PerToken:
        """Return ½ (β log π/π_ref + V - G)² = ½ (β log π/π_old + V - target)², token by token."""
        assert batch.target is not None
        assert batch.logp_old is not None
        assert out.value is not None
        moved = kl.k1(masked.fill(out.logp, batch.mask), masked.fill(batch.logp_old, batch.mask))
        V = masked.fill(out.value, batch.mask)
        return (self.beta * moved + V - masked.fill(batch.target, batch.mask)).square() / 2

    def watch(self, out: Outputs, batch: Batch) -> dict[str, PerToken]:
        """Return the value and the KL to the reference."""
        assert out.value is not None
        assert batch.logp_ref is not None
        gap = masked.fill(batch.logp_ref, batch.mask)
        return {
            "value/mean": masked.fill(out.value.detach(), batch.mask),
            "kl/ref": kl.k3(masked.fill(out.logp.detach(), batch.mask), gap),
        }
