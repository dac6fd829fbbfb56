"""Rows on KLQ: Bellman's equation of π* ∝ π_ref exp(R/β), where it holds and how descent comes there."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int

from posttrain.math import reduce
from posttrain.methods.q_learning import SoftQ
from posttrain.types import Outputs
from posttrain_study.truth import exact
from posttrain_study.truth.row import TruthRow, error
from posttrain_study.truth.world import World

BETA = 0.5
"""Of the KL to the reference, here."""


@dataclass(frozen=True)
class Free:
    """A policy and a critic with numbers of their own for each state: what a model of any size could be."""

    world: World
    state: Int[torch.Tensor, "N L"]
    """The number of the state before each token; answers that begin alike share it."""
    logits: Float[torch.Tensor, "S V"]
    values: Float[torch.Tensor, "S"]

    @staticmethod
    def drawn(world: World, seed: int) -> "Free":
        """Random logits and values."""
        state = numbered(world)
        generator = torch.Generator().manual_seed(seed)
        count, size = int(state.max()) + 1, world.step_log_probs(world.policy).shape[-1]
        found = torch.randn(count, size + 1, generator=generator, dtype=torch.float64)
        return Free(world, state, found[:, :-1], found[:, -1])

    @staticmethod
    def with_answers(world: World, p: exact.Answers) -> "Free":
        """The policy that draws the answers so, and random values."""
        free, there = Free.drawn(world, 0), world.spoken
        free.logits[free.state[there], world.tokens[there]] = exact.conditionals(world, p)[there]
        return free

    @staticmethod
    def best(world: World, beta: float) -> "Free":
        """π* and V*."""
        free, there = Free.with_answers(world, exact.optimal(world, beta)), world.spoken
        free.values[free.state[there]] = exact.soft_values(world, beta)[there]
        return free

    def logp(self) -> exact.Places:
        """log π of each answer's tokens."""
        return self.world.taken(self.logits.log_softmax(-1)[self.state])

    def value(self) -> exact.Places:
        """V before each token."""
        return self.values[self.state] * self.world.spoken

    def apart(self, p: exact.Answers) -> float:
        """KL(π ‖ p) over whole answers."""
        logp = self.logp().sum(1)
        return float(logp.exp() @ (logp - p.log()))


def numbered(world: World) -> Int[torch.Tensor, "N L"]:
    """The number of the state before each token, and 0 where there is none."""
    first = exact.together(world)[0].long().argmax(1)
    place = (first * world.length + torch.arange(world.length)).masked_fill(~world.spoken, 0)
    number: torch.Tensor = torch.unique(place, return_inverse=True)[1]
    return number


def expected_update(
    free: Free, method: SoftQ, drawn: exact.Answers | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """E[∇loss] in logits and values by the method's own code, over the policy's answers or these chances."""
    world, everything = free.world, tuple(range(len(free.world.answers)))
    logits, values = free.logits.clone().requires_grad_(), free.values.clone().requires_grad_()
    leaf = replace(free, logits=logits, values=values)
    logp, value = world.column(leaf.logp(), everything), world.column(leaf.value(), everything)
    reference = world.column(world.known_logp(world.reference), everything)
    fresh = replace(world.batch(everything), logp_old=logp.detach(), logp_ref=reference, value=value.detach())
    batch = method.prepare(fresh)
    out = Outputs(logp=logp, entropy=torch.zeros_like(reference), value=value)
    p = free.logp().sum(1).exp() if drawn is None else drawn
    # A row's weight in a batch of all N is 1/N, and its chance is p.
    weight = method.weight(batch).double() * (p * len(p))[:, None]
    total = reduce.weighted_sum(method.loss(out, batch), weight, batch.mask)
    by_logits, by_values = torch.autograd.grad(total, (logits, values))
    return by_logits, by_values


def descended(
    free: Free, method: SoftQ, steps: int, *, rate: float = 1.5, drawn: exact.Answers | None = None
) -> Free:
    """Plain gradient descent on the exact expectation, with targets again at each step."""
    for _ in range(steps):
        by_logits, by_values = expected_update(free, method, drawn)
        free = replace(free, logits=free.logits - rate * by_logits, values=free.values - rate * by_values)
    return free


def bellman(world: World) -> Iterator[TruthRow]:
    """Whether π* and V* stay where they are, and whether descent from elsewhere comes there."""
    section, best = "KLQ: π* ∝ π_ref exp(R/β) and its soft V, β = 0.5", Free.best(world, BETA)
    start, soft = Free.drawn(world, seed=3), exact.soft_values(world, BETA)
    for lam in (0.0, 0.5, 0.95, 1.0):
        method = SoftQ(reduce.per_row, beta=BETA, lam=lam)
        still, far = (torch.cat([x.flatten() for x in expected_update(f, method)]) for f in (best, start))
        why = "Bellman's equation holds token by token there, so that no λ and no sampler moves it"
        yield TruthRow(
            section, f"at π* and V*, λ = {lam:g}", "update", float(still.norm() / far.norm()), "-", why
        )
    for lam in (0.0, 0.95):
        method, free, done = SoftQ(reduce.per_row, beta=BETA, lam=lam), start, 0
        for steps in (0, 100, 200):
            free, done = descended(free, method, steps - done), steps
            why = "descent on the exact loss from random numbers, the targets again at each step"
            name = f"λ = {lam:g}, {steps} steps"
            yield TruthRow(section, name, "KL(π ‖ π*)", free.apart(exact.optimal(world, BETA)), "-", why)
            yield TruthRow(section, name, "off", error(free.value(), soft), "-", why)
