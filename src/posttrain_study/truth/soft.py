"""Rows on π* ∝ exp(R/β): Bellman's equation in KLQ, where it holds and how descent reaches it; and DRO."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int

from posttrain.math import reduce
from posttrain.methods.q_learning import SoftQ
from posttrain.types import Outputs
from posttrain_study.truth import exact
from posttrain_study.truth.comparison import TruthRow, error
from posttrain_study.truth.world import World

BETA = 0.5
"""Weight of the KL in these rows."""


@dataclass(frozen=True)
class TabularPolicy:
    """A policy and a critic with separate numbers for each state: all that a model of any size could be."""

    world: World
    state: Int[torch.Tensor, "N L"]
    """The index of the state before each token; answers that begin alike share it."""
    logits: Float[torch.Tensor, "S V"]
    values: Float[torch.Tensor, "S"]

    @staticmethod
    def random(world: World, seed: int) -> "TabularPolicy":
        """Draw random logits and values."""
        state = state_indices(world)
        generator = torch.Generator().manual_seed(seed)
        count, size = int(state.max()) + 1, world.step_log_probs(world.policy).shape[-1]
        numbers = torch.randn(count, size + 1, generator=generator, dtype=torch.float64)
        return TabularPolicy(world, state, numbers[:, :-1], numbers[:, -1])

    @staticmethod
    def with_answers(world: World, p: exact.Answers) -> "TabularPolicy":
        """Return the policy with these answer probabilities, and random values."""
        policy, there = TabularPolicy.random(world, 0), world.mask
        policy.logits[policy.state[there], world.tokens[there]] = exact.conditionals(world, p)[there]
        return policy

    @staticmethod
    def best(world: World, beta: float) -> "TabularPolicy":
        """Return π* and V* of the world."""
        policy, there = TabularPolicy.with_answers(world, exact.optimal_policy(world, beta)), world.mask
        policy.values[policy.state[there]] = exact.soft_values(world, beta)[there]
        return policy

    def logp(self) -> exact.Places:
        """log π of each answer's tokens."""
        return self.world.pick_tokens(self.logits.log_softmax(-1)[self.state])

    def value(self) -> exact.Places:
        """V before each token."""
        return self.values[self.state] * self.world.mask

    def kl_to(self, p: exact.Answers) -> float:
        """KL(π ‖ p) over whole answers."""
        logp = self.logp().sum(1)
        return float(logp.exp() @ (logp - p.log()))


def state_indices(world: World) -> Int[torch.Tensor, "N L"]:
    """Return the index of the state before each token; 0 after the answer's end."""
    first = exact.shared_prefixes(world)[0].long().argmax(1)
    place = (first * world.length + torch.arange(world.length)).masked_fill(~world.mask, 0)
    number: torch.Tensor = torch.unique(place, return_inverse=True)[1]
    return number


def expected_update(
    policy: TabularPolicy, method: SoftQ, sampler: exact.Answers | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """E[∇loss] in logits and values by the method's own code, over the policy's answers or the sampler's."""
    world, everything = policy.world, tuple(range(len(policy.world.answers)))
    logits, values = policy.logits.clone().requires_grad_(), policy.values.clone().requires_grad_()
    leaf = replace(policy, logits=logits, values=values)
    logp, value = world.column(leaf.logp(), everything), world.column(leaf.value(), everything)
    reference = world.column(world.cached_logp(world.reference), everything)
    fresh = replace(world.batch(everything), logp_old=logp.detach(), logp_ref=reference, value=value.detach())
    batch = method.prepare(fresh)
    out = Outputs(logp=logp, entropy=torch.zeros_like(reference), value=value)
    p = policy.logp().sum(1).exp() if sampler is None else sampler
    # A row's weight in a batch of all N is 1/N, and its chance is p.
    weight = method.weight(batch).double() * (p * len(p))[:, None]
    total = reduce.weighted_sum(method.loss(out, batch), weight, batch.mask)
    by_logits, by_values = torch.autograd.grad(total, (logits, values))
    return by_logits, by_values


def descend(
    policy: TabularPolicy,
    method: SoftQ,
    steps: int,
    *,
    rate: float = 1.5,
    sampler: exact.Answers | None = None,
) -> TabularPolicy:
    """Descend the exact expectation by plain gradient steps, with targets computed again at each step."""
    for _ in range(steps):
        by_logits, by_values = expected_update(policy, method, sampler)
        policy = replace(
            policy, logits=policy.logits - rate * by_logits, values=policy.values - rate * by_values
        )
    return policy


def bellman(world: World) -> Iterator[TruthRow]:
    """Yield rows on whether π* and V* are a fixed point, and whether descent from elsewhere reaches it."""
    section, best = "KLQ: π* ∝ π_ref exp(R/β) and its soft V, β = 0.5", TabularPolicy.best(world, BETA)
    start, soft = TabularPolicy.random(world, seed=3), exact.soft_values(world, BETA)
    optimum = exact.optimal_policy(world, BETA)
    for lam in (0.0, 0.5, 0.95, 1.0):
        method = SoftQ(reduce.per_row, beta=BETA, lam=lam)
        still, far = (torch.cat([x.flatten() for x in expected_update(f, method)]) for f in (best, start))
        why = "Bellman's equation holds token by token there, so that no λ and no sampler moves it"
        yield TruthRow(
            section, f"at π* and V*, λ = {lam:g}", "update", float(still.norm() / far.norm()), "-", why
        )
    for lam in (0.0, 0.95):
        method, policy, finished = SoftQ(reduce.per_row, beta=BETA, lam=lam), start, 0
        for steps in (0, 100, 200):
            policy, finished = descend(policy, method, steps - finished), steps
            why = "descent on the exact loss from random numbers, the targets again at each step"
            name = f"λ = {lam:g}, {steps} steps"
            yield TruthRow(section, name, "KL(π ‖ π*)", policy.kl_to(optimum), "-", why)
            yield TruthRow(section, name, "off", error(policy.value(), soft), "-", why)


def regression(world: World) -> Iterator[TruthRow]:
    """Yield rows on where DRO's regression has no gradient left, by what it takes for its baseline."""
    section = "DRO: where it settles"
    p, R = exact.chances(world), world.returns
    best = (p.log() + R / BETA).softmax(0)
    why = "λ = β KL(π_old ‖ π) is what the sum of all probabilities takes from the likely answers"
    cases = {
        "β log E[exp(R/β)]": (best, "A = β log π/π_old there, answer by answer"),
        "E[R]": (settle(p, R - p @ R, BETA), why),
        "mean of 4 answers": (settle(p, R - p @ R, BETA * 4 / 3), "and the answer's own share: β · 4/3"),
        "mean of 2 answers": (settle(p, R - p @ R, BETA * 2), "and the answer's own share: β · 2"),
    }

    def worth(q: exact.Answers) -> float:
        return float(q @ (R - BETA * (q / p).log()))

    for name, (q, sentence) in cases.items():
        reached = (worth(q) - worth(p)) / (worth(best) - worth(p))
        distance = float(q @ (q / best).log())
        for quantity, number in (("KL(π ‖ π*)", distance), ("reached", reached)):
            yield TruthRow(section, name, quantity, number, "-", sentence)


def settle(p_old: exact.Answers, A: exact.Answers, beta: float) -> exact.Answers:
    """Return the π = r π_old with A = β log r + λ r: there Σ π_old (A - β log r) ∇log π = λ Σ ∇π = 0."""

    def chances(log_lam: float) -> list[float]:
        return [
            p * math.exp(_root(lambda x, a=a: beta * x + math.exp(log_lam + x) - a))  # type: ignore[misc]
            for p, a in zip(p_old.tolist(), A.tolist(), strict=True)
        ]

    return torch.tensor(chances(_root(lambda x: 1 - math.fsum(chances(x)))), dtype=torch.float64)


def _root(rising: Callable[[float], float]) -> float:
    """Return where a function that rises is 0, between -50 and 50."""
    low, high = -50.0, 50.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return low
