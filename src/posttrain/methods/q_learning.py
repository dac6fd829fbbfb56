"""Q-learning on tokens, with the KL to a reference built in.

A language model is a Q-function: for rewards less β KL(π ‖ π_ref) the optimal policy is
π* = π_ref exp((Q* - V*)/β), so that any π and V *define* a Q whose own optimal policy is π:

    Q(s, y) = β log π(y | s)/π_ref(y | s) + V(s),      V(s) = β log Σ_y π_ref(y | s) exp(Q(s, y)/β)

The second line holds by construction, because π sums to 1. What is left to learn is Bellman's equation.
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

    Nothing in it asks who drew the tokens: with λ = 0 it is right for any data, and with λ > 0 for what
    the policy itself drew.

    Source: KLQ, arXiv:2508.17000; path consistency learning, arXiv:1702.08892.
    """

    reduction: Callable[..., PerToken]
    beta: Annotated[float, AtLeast(1e-6)] = 0.1
    """Of the KL, in units of the reward: small trusts the reward, large the reference."""
    gamma: Share = 1.0
    lam: Share = 0.95
    shaped: Callable[[PerToken, Mask], PerToken] | None = None
    """As in PolicyGradient: rewards that a potential gains, made to fit γ."""

    needs: ClassVar[frozenset[str]] = frozenset({"logp_old", "logp_ref", "value"})

    @property
    def corrects(self) -> bool:
        """A Q learns from anybody's tokens as long as its targets look one step ahead only."""
        return self.lam == 0

    def prepare(self, batch: Batch) -> Batch:
        """The batch with V's targets; `advantage` is how far each token's Q falls short of its own."""
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
        # What V should be for Q = β log π/π_ref + V to meet G, with π as it is now.
        target = (returns.soft_lambda(path, gap, self.gamma, self.lam) - gap).to(batch.logp_old)
        short = masked.fill(target - batch.value, batch.mask)
        return replace(batch, target=target, advantage=short)

    def weight(self, batch: Batch) -> PerToken:
        """The reduction of the step's mask."""
        return reduce.of_step(self.reduction, batch.mask, batch.group, batch.episode, batch.everywhere)

    def loss(self, out: Outputs, batch: Batch) -> PerToken:
        """½ (β log π/π_ref + V - G)² = ½ (β log π/π_old + V - target)², token by token."""
        assert batch.target is not None
        assert batch.logp_old is not None
        assert out.value is not None
        moved = kl.k1(masked.fill(out.logp, batch.mask), masked.fill(batch.logp_old, batch.mask))
        V = masked.fill(out.value, batch.mask)
        return (self.beta * moved + V - masked.fill(batch.target, batch.mask)).square() / 2

    def watch(self, out: Outputs, batch: Batch) -> dict[str, PerToken]:
        """The value, and how far the policy is from the reference."""
        assert out.value is not None
        assert batch.logp_ref is not None
        gap = masked.fill(batch.logp_ref, batch.mask)
        return {
            "value/mean": masked.fill(out.value.detach(), batch.mask),
            "kl/ref": kl.k3(masked.fill(out.logp.detach(), batch.mask), gap),
        }
