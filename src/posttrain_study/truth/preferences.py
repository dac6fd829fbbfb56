"""Rows on preferences: where DPO and IPO have their minimum, how they come there, and from whose pairs.

Two answers are drawn and compared by a judge who prefers i to j with a known probability, so the expected
loss is a sum over all ordered pairs. Each is a group of two rows, and goes through the method's own prepare,
weight and loss; its chance stands where the share of a group in its step stood.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from jaxtyping import Float

from posttrain.math import reduce
from posttrain.methods.preference import Preference
from posttrain.methods.table import DPO, IPO, RDPO
from posttrain.types import Batch, Method, Outputs
from posttrain_study.truth import exact
from posttrain_study.truth.row import TruthRow, error
from posttrain_study.truth.soft import Free
from posttrain_study.truth.world import World

BETA = 0.5
"""Of the KL to the reference, here."""
HARDLY = (0.001, 0.333, 0.333, 0.333)
"""How likely the four answers are for a sampler that hardly ever draws the best one."""
Judge = Float[torch.Tensor, "N N"]
"""How often i is preferred to j."""
Chances = Float[torch.Tensor, "P"]
"""Of each ordered pair of answers, in the order of `ordered`."""


def ordered(world: World) -> list[tuple[int, int]]:
    """Every pair of different answers, the preferred one first."""
    return list(itertools.permutations(range(len(world.answers)), 2))


def compared(world: World) -> Batch:
    """Two rows a pair, as a group, with a reward of 1 on the preferred one's last token."""
    pairs = ordered(world)
    rows = tuple(itertools.chain(*pairs))
    made = world.batch(rows)
    worth = torch.tensor([1.0, 0.0]).double().repeat(len(pairs))
    return replace(
        made,
        group=torch.arange(len(pairs)).repeat_interleave(2),
        reward=torch.zeros_like(made.reward).scatter(1, made.length[:, None] - 1, worth[:, None]),
        logp_ref=world.column(world.known_logp(world.reference), rows),
    )


def bradley_terry(reward: exact.Answers) -> Judge:
    """σ(R_i - R_j): the judge whose preferences have a reward behind them."""
    return (reward[:, None] - reward[None, :]).sigmoid()


def by_order(reward: exact.Answers, wrong: float = 0.0) -> Judge:
    """Who prefers the higher reward, and is wrong this often."""
    return 0.5 + (0.5 - wrong) * (reward[:, None] - reward[None, :]).sign()


def chances(world: World, drawn: exact.Answers, judge: Judge) -> Chances:
    """How likely each ordered pair is, of two different answers that are drawn apart and then judged."""
    found = torch.stack([drawn[i] * drawn[j] * judge[i, j] for i, j in ordered(world)])
    return found / found.sum()


def expected(method: Method, batch: Batch, out: Outputs, pairs: Chances) -> torch.Tensor:
    """Σ chance · loss over the pairs, by the method's own prepare, weight and loss."""
    batch = method.prepare(replace(batch, state=method.start))
    own = method.weight(batch)
    share = own.view(len(pairs), -1).sum(1)
    weight = own * (pairs / share).repeat_interleave(2)[:, None]
    return reduce.weighted_sum(method.loss(out, batch), weight, batch.mask)


def policy_loss(free: Free, method: Preference, batch: Batch, pairs: Chances) -> torch.Tensor:
    """The expected loss of a policy with logits of its own in each state."""
    rows = tuple(itertools.chain(*ordered(free.world)))
    logp = free.world.column(free.logp(), rows)
    return expected(method, batch, Outputs(logp=logp, entropy=torch.zeros_like(logp)), pairs)


def gradient(free: Free, method: Preference, pairs: Chances) -> torch.Tensor:
    """E[∇loss] by the logits."""
    logits = free.logits.clone().requires_grad_()
    loss = policy_loss(replace(free, logits=logits), method, compared(free.world), pairs)
    return torch.autograd.grad(loss, logits)[0].flatten()


def minimised(free: Free, method: Preference, pairs: Chances) -> Free:
    """The policy in which descent from here ends."""
    batch = compared(free.world)
    found = lowest(lambda x: policy_loss(replace(free, logits=x), method, batch, pairs), free.logits)
    return replace(free, logits=found)


def descended(
    free: Free, method: Preference, judge: Judge, steps: int, *, rate: float, drawn: exact.Answers | None
) -> Free:
    """Plain gradient descent on the expected loss, of pairs drawn so or, left out, by the policy as it is."""
    batch = compared(free.world)
    for _ in range(steps):
        p = free.logp().sum(1).exp() if drawn is None else drawn
        logits = free.logits.clone().requires_grad_()
        loss = policy_loss(replace(free, logits=logits), method, batch, chances(free.world, p, judge))
        free = replace(free, logits=free.logits - rate * torch.autograd.grad(loss, logits)[0])
    return free


def lowest(loss: Callable[[torch.Tensor], torch.Tensor], start: torch.Tensor) -> torch.Tensor:
    """Where descent ends: L-BFGS down to where values differ by rounding only, then Newton's method."""
    x = start.clone().requires_grad_()
    search = torch.optim.LBFGS(
        [x], max_iter=400, tolerance_grad=1e-12, tolerance_change=0.0, line_search_fn="strong_wolfe"
    )

    def evaluated() -> torch.Tensor:
        value = loss(x)
        (x.grad,) = torch.autograd.grad(value, x)
        return value

    search.step(evaluated)  # type: ignore[no-untyped-call]
    for _ in range(4):
        (slope,) = torch.autograd.grad(loss(x), x)
        curved = torch.autograd.functional.hessian(loss, x.detach()).view(x.numel(), x.numel())  # type: ignore[no-untyped-call]
        # Logits, and scores, may all be raised alike: the loss is flat that way, and no step goes there.
        step = torch.linalg.pinv(curved, rtol=1e-9, hermitian=True) @ slope.flatten()
        x = (x.detach() - step.view(x.shape)).requires_grad_()
    return x.detach()


def ipo_optimal(world: World, drawn: exact.Answers, judge: Judge, beta: float) -> exact.Answers:
    """π_ref(y) exp(p(y ≻ μ)/β) / Z, p(y ≻ μ) = Σ_y' μ(y') p(y ≻ y'): where IPO has its minimum.

    The loss asks for h(y, y') = (p(y ≻ y') - ½)/β of each pair, with the weight μ(y) μ(y'), and a policy can
    give differences u(y) - u(y') alone: the least squares are at u(y) = p(y ≻ μ)/β.

    Source: arXiv:2310.12036, eq. 7 with Ψ the identity.
    """
    preferred = (judge * drawn[None, :]).sum(1) / drawn.sum()
    return (world.known_logp(world.reference).sum(1) + preferred / beta).softmax(0)


def margin(free: Free, beta: float) -> float:
    """β h between the answers of the highest and of the lowest reward."""
    world = free.world
    u = (free.logp() - world.known_logp(world.reference)).sum(1)
    return beta * float(u[world.returns.argmax()] - u[world.returns.argmin()])


# ---------------------------------------------------------------------- the rows


def minima(world: World) -> Iterator[TruthRow]:
    """Where the expected losses have their minimum."""
    section = (
        "Pairs of Bradley and Terry's model, β = 0.5: E[∇loss] at the closed form, and where descent ends"
    )
    best, start = exact.optimal(world, BETA), Free.drawn(world, seed=3)
    theirs, far = exact.chances(world, world.reference), torch.tensor(HARDLY).double()
    judge = bradley_terry(world.returns)
    flipped = 0.9 * judge + 0.1 * judge.T
    dpo = "P(w preferred to l) = σ(β h) is the judge's own model at π*, and at no other policy"
    ipo = "it ends at π_IPO ∝ π_ref exp(E[p(y preferred to y')]/β), not at π*"
    cases = (
        ("DPO, pairs of π_ref", DPO, theirs, judge, dpo),
        ("DPO, pairs of another policy", DPO, far, judge, "π* is its minimum whoever drew the pairs"),
        ("DPO, one label in ten flipped", DPO, theirs, flipped, "it learns a judge who is less sure"),
        ("rDPO, one label in ten flipped", RDPO, theirs, flipped, "in expectation the flips cancel"),
        ("IPO, pairs of π_ref", IPO, theirs, judge, ipo),
        ("IPO, pairs of another policy", IPO, far, judge, "y' is who drew the pairs': π_IPO is another one"),
    )
    for name, line, drawn, says, why in cases:
        method, pairs = replace(line, beta=BETA), chances(world, drawn, says)
        closed = ipo_optimal(world, drawn, says, BETA) if line is IPO else best
        still = gradient(Free.with_answers(world, closed), method, pairs).norm()
        found = minimised(start, method, pairs)
        yield TruthRow(
            section, name, "update", float(still / gradient(start, method, pairs).norm()), "-", why
        )
        yield TruthRow(section, name, "KL(π ‖ π*)", found.apart(best), "-", why)
        if line is IPO:
            yield TruthRow(section, name, "KL(π ‖ π_IPO)", found.apart(closed), "-", why)


def pulls(world: World) -> Iterator[TruthRow]:
    """By what DPO multiplies the gradient of a pair's margin, through the model itself."""
    section, g = "DPO's gradient: each pair by how wrong it is", exact.answer_scores(world)
    u = (world.known_logp(world.policy) - world.known_logp(world.reference)).sum(1)
    high, low = int(u.argmax()), int(u.argmin())
    for r in (-4.0, -1.0, 1.0, 4.0):
        i, j = (high, low) if r > 0 else (low, high)
        method = replace(DPO, beta=r / float(u[i] - u[j]))
        judged = world.rewarded(torch.zeros_like(u).index_fill(0, torch.tensor([i]), 1.0))
        found, along = -judged.group_gradients(method, [(i, j)])[0], method.beta * (g[i] - g[j])
        pull = float(found @ along / (along @ along))
        why = "in the right order it is let go, and never wholly"
        why = "in the wrong order it is pulled with nearly all its force" if r < 0 else why
        yield TruthRow(section, f"β h = {r:g}", "pull", pull, "-", f"σ(-β h): {why}")


def certain(world: World) -> Iterator[TruthRow]:
    """A judge who is nearly, or wholly, sure: how far apart the best and the worst answer come."""
    section = "A judge who is sure of the order: how far apart the best and the worst answer come"
    theirs = exact.chances(world, world.reference)
    start = Free.with_answers(world, theirs)
    cases = (
        ("DPO", DPO, 20.0, "without bound: nothing holds the policy", "it never stops, and slows down alone"),
        ("IPO", IPO, 0.5, "never above 1, however sure the judge is", "there is a minimum to stop at"),
    )
    for label, line, rate, bound, told in cases:
        method, found, done = replace(line, beta=BETA), start, 0
        for wrong in (0.1, 0.01, 1e-4):
            least = minimised(start, method, chances(world, theirs, by_order(world.returns, wrong)))
            name = f"{label}, wrong {wrong:g} of the time: its minimum"
            yield TruthRow(section, name, "margin", margin(least, BETA), "-", bound)
        for steps in (50, 200, 800):
            judge = by_order(world.returns)
            found = descended(found, method, judge, steps - done, rate=rate, drawn=theirs)
            done = steps
            name = f"{label}, never wrong: after {steps} steps"
            yield TruthRow(section, name, "margin", margin(found, BETA), "-", told)


def shift(world: World) -> Iterator[TruthRow]:
    """DPO on pairs of the reference, of the policy as it is, and of a sampler that misses the best answer."""
    section = "DPO, by who draws the pairs: descent from π_ref to π*, β = 0.5"
    theirs, best = exact.chances(world, world.reference), exact.optimal(world, BETA)
    judge, method = bradley_terry(world.returns), replace(DPO, beta=BETA)
    never = torch.tensor((0.0, *HARDLY[1:])).double()
    cases = (
        ("offline, pairs of π_ref", theirs, "π_ref draws every answer, the good ones seldom"),
        ("online, pairs of the policy", None, "the better it is, the more its pairs are about good answers"),
        ("offline, pairs with the best answer 1 in 1000", torch.tensor(HARDLY).double(), "it comes, slowly"),
        ("offline, pairs without the best answer", never, "nothing says what an answer in no pair is worth"),
    )
    for name, drawn, why in cases:
        found, done = Free.with_answers(world, theirs), 0
        for steps in (50, 200):
            found = descended(found, method, judge, steps - done, rate=5.0, drawn=drawn)
            done = steps
            yield TruthRow(section, f"{name}: {steps} steps", "KL(π ‖ π*)", found.apart(best), "-", why)
    ours = exact.chances(world)
    here = Free.with_answers(world, ours)
    own, other = (gradient(here, method, chances(world, p, judge)) for p in (ours, theirs))
    why = "away from the minimum, whose pairs they are decides which way it goes"
    yield TruthRow(
        section, "one step away from π_ref, with its pairs for one's own", "off", error(other, own), "-", why
    )
