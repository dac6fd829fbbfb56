"""Rows on preferences: the minima of DPO and IPO, descent to them, and the effect of the pairs' sampler.

Two answers are drawn and compared by a judge who prefers i to j with a known probability, so the expected
loss is a sum over all ordered pairs. Each is a group of two rows, and goes through the method's own prepare,
weight and loss; its probability replaces the share of a group in its step.
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
from posttrain_study.truth.comparison import TruthRow, error
from posttrain_study.truth.soft import TabularPolicy
from posttrain_study.truth.world import World

BETA = 0.5
"""Weight of the KL to the reference in these rows."""
HARDLY = (0.001, 0.333, 0.333, 0.333)
"""Probabilities of the four answers for a sampler that rarely draws the best one."""
Judge = Float[torch.Tensor, "N N"]
"""Probability that i is preferred to j."""
Chances = Float[torch.Tensor, "P"]
"""Probability of each ordered pair of answers, in the order of `ordered`."""


def ordered_pairs(world: World) -> list[tuple[int, int]]:
    """Return every pair of different answers, the preferred one first."""
    return list(itertools.permutations(range(len(world.answers)), 2))


def comparison_batch(world: World) -> Batch:
    """Return a batch of two rows a pair, as a group, with a reward of 1 on the preferred one's last token."""
    pairs = ordered_pairs(world)
    rows = tuple(itertools.chain(*pairs))
    batch = world.batch(rows)
    worth = torch.tensor([1.0, 0.0]).double().repeat(len(pairs))
    return replace(
        batch,
        group=torch.arange(len(pairs)).repeat_interleave(2),
        reward=torch.zeros_like(batch.reward).scatter(1, batch.length[:, None] - 1, worth[:, None]),
        logp_ref=world.column(world.cached_logp(world.reference), rows),
    )


def bradley_terry(reward: exact.Answers) -> Judge:
    """σ(R_i - R_j): a judge whose preferences follow a reward."""
    return (reward[:, None] - reward[None, :]).sigmoid()


def by_order(reward: exact.Answers, wrong: float = 0.0) -> Judge:
    """A judge who prefers the higher reward, with this probability of a mistake."""
    return 0.5 + (0.5 - wrong) * (reward[:, None] - reward[None, :]).sign()


def chances(world: World, sampler: exact.Answers, judge: Judge) -> Chances:
    """Probability of each ordered pair of different answers, drawn independently and then judged."""
    products = torch.stack([sampler[i] * sampler[j] * judge[i, j] for i, j in ordered_pairs(world)])
    return products / products.sum()


def expected_loss(method: Method, batch: Batch, out: Outputs, pairs: Chances) -> torch.Tensor:
    """Σ chance · loss over the pairs, by the method's own prepare, weight and loss."""
    batch = method.prepare(replace(batch, state=method.start))
    weights = method.weight(batch)
    share = weights.view(len(pairs), -1).sum(1)
    weight = weights * (pairs / share).repeat_interleave(2)[:, None]
    return reduce.weighted_sum(method.loss(out, batch), weight, batch.mask)


def policy_loss(policy: TabularPolicy, method: Preference, batch: Batch, pairs: Chances) -> torch.Tensor:
    """The expected loss of a policy with separate logits in each state."""
    rows = tuple(itertools.chain(*ordered_pairs(policy.world)))
    logp = policy.world.column(policy.logp(), rows)
    return expected_loss(method, batch, Outputs(logp=logp, entropy=torch.zeros_like(logp)), pairs)


def gradient(policy: TabularPolicy, method: Preference, pairs: Chances) -> torch.Tensor:
    """E[∇loss] with respect to the logits."""
    logits = policy.logits.clone().requires_grad_()
    loss = policy_loss(replace(policy, logits=logits), method, comparison_batch(policy.world), pairs)
    return torch.autograd.grad(loss, logits)[0].flatten()


def minimise(policy: TabularPolicy, method: Preference, pairs: Chances) -> TabularPolicy:
    """Return the policy at which descent from `policy` ends."""
    batch = comparison_batch(policy.world)
    logits = find_minimum(
        lambda x: policy_loss(replace(policy, logits=x), method, batch, pairs), policy.logits
    )
    return replace(policy, logits=logits)


def descend(
    policy: TabularPolicy,
    method: Preference,
    judge: Judge,
    steps: int,
    *,
    rate: float,
    sampler: exact.Answers | None,
) -> TabularPolicy:
    """Descend the expected loss by plain gradient steps, on pairs of `sampler` (default: the policy)."""
    batch = comparison_batch(policy.world)
    for _ in range(steps):
        p = policy.logp().sum(1).exp() if sampler is None else sampler
        logits = policy.logits.clone().requires_grad_()
        loss = policy_loss(replace(policy, logits=logits), method, batch, chances(policy.world, p, judge))
        policy = replace(policy, logits=policy.logits - rate * torch.autograd.grad(loss, logits)[0])
    return policy


def find_minimum(loss: Callable[[torch.Tensor], torch.Tensor], start: torch.Tensor) -> torch.Tensor:
    """Return where descent ends: L-BFGS until values differ by rounding only, then Newton's method."""
    x = start.clone().requires_grad_()
    search = torch.optim.LBFGS(
        [x], max_iter=400, tolerance_grad=1e-12, tolerance_change=0.0, line_search_fn="strong_wolfe"
    )

    def evaluate() -> torch.Tensor:
        value = loss(x)
        (x.grad,) = torch.autograd.grad(value, x)
        return value

    search.step(evaluate)  # type: ignore[no-untyped-call]
    for _ in range(4):
        (slope,) = torch.autograd.grad(loss(x), x)
        curvature = torch.autograd.functional.hessian(loss, x.detach()).view(x.numel(), x.numel())  # type: ignore[no-untyped-call]
        # Adding a constant to all logits or scores leaves the loss flat, and no step goes there.
        step = torch.linalg.pinv(curvature, rtol=1e-9, hermitian=True) @ slope.flatten()
        x = (x.detach() - step.view(x.shape)).requires_grad_()
    return x.detach()


def ipo_optimal(world: World, sampler: exact.Answers, judge: Judge, beta: float) -> exact.Answers:
    """π_ref(y) exp(p(y ≻ μ)/β) / Z, p(y ≻ μ) = Σ_y' μ(y') p(y ≻ y'): the minimum of IPO.

    The loss targets h(y, y') = (p(y ≻ y') - ½)/β for each pair, with the weight μ(y) μ(y'), and a policy can
    represent differences u(y) - u(y') alone: the least squares are at u(y) = p(y ≻ μ)/β.

    Source: arXiv:2310.12036, eq. 7 with Ψ the identity.
    """
    preferred = (judge * sampler[None, :]).sum(1) / sampler.sum()
    return (world.cached_logp(world.reference).sum(1) + preferred / beta).softmax(0)


def margin(policy: TabularPolicy, beta: float) -> float:
    """β h between the answers of the highest and of the lowest reward."""
    world = policy.world
    u = (policy.logp() - world.cached_logp(world.reference)).sum(1)
    return beta * float(u[world.returns.argmax()] - u[world.returns.argmin()])


# ---------------------------------------------------------------------- the rows


def minima(world: World) -> Iterator[TruthRow]:
    """Yield rows on the minima of the expected losses."""
    section = (
        "Pairs of Bradley and Terry's model, β = 0.5: E[∇loss] at the closed form, and where descent ends"
    )
    best, start = exact.optimal_policy(world, BETA), TabularPolicy.random(world, seed=3)
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
    for name, line, sampler, preferences, why in cases:
        method, pairs = replace(line, beta=BETA), chances(world, sampler, preferences)
        closed = ipo_optimal(world, sampler, preferences, BETA) if line is IPO else best
        still = gradient(TabularPolicy.with_answers(world, closed), method, pairs).norm()
        minimum = minimise(start, method, pairs)
        yield TruthRow(
            section, name, "update", float(still / gradient(start, method, pairs).norm()), "-", why
        )
        yield TruthRow(section, name, "KL(π ‖ π*)", minimum.kl_to(best), "-", why)
        if line is IPO:
            yield TruthRow(section, name, "KL(π ‖ π_IPO)", minimum.kl_to(closed), "-", why)


def pulls(world: World) -> Iterator[TruthRow]:
    """Yield the factor by which DPO multiplies the gradient of a pair's margin, through the model itself."""
    section, g = "DPO's gradient: each pair by how wrong it is", exact.answer_scores(world)
    u = (world.cached_logp(world.policy) - world.cached_logp(world.reference)).sum(1)
    high, low = int(u.argmax()), int(u.argmin())
    for r in (-4.0, -1.0, 1.0, 4.0):
        i, j = (high, low) if r > 0 else (low, high)
        method = replace(DPO, beta=r / float(u[i] - u[j]))
        judged = world.with_rewards(torch.zeros_like(u).index_fill(0, torch.tensor([i]), 1.0))
        update, along = -judged.group_gradients(method, [(i, j)])[0], method.beta * (g[i] - g[j])
        pull = float(update @ along / (along @ along))
        why = "in the right order it is let go, and never wholly"
        why = "in the wrong order it is pulled with nearly all its force" if r < 0 else why
        yield TruthRow(section, f"β h = {r:g}", "pull", pull, "-", f"σ(-β h): {why}")


def certain(world: World) -> Iterator[TruthRow]:
    """Yield rows on a judge who is nearly, or fully, sure: the margin of the best over the worst answer."""
    section = "A judge who is sure of the order: how far apart the best and the worst answer come"
    theirs = exact.chances(world, world.reference)
    start = TabularPolicy.with_answers(world, theirs)
    cases = (
        ("DPO", DPO, 20.0, "without bound: nothing holds the policy", "it never stops, and slows down alone"),
        ("IPO", IPO, 0.5, "never above 1, however sure the judge is", "there is a minimum to stop at"),
    )
    for label, line, rate, bound, outcome in cases:
        method, policy, finished = replace(line, beta=BETA), start, 0
        for wrong in (0.1, 0.01, 1e-4):
            least = minimise(start, method, chances(world, theirs, by_order(world.returns, wrong)))
            name = f"{label}, wrong {wrong:g} of the time: its minimum"
            yield TruthRow(section, name, "margin", margin(least, BETA), "-", bound)
        for steps in (50, 200, 800):
            judge = by_order(world.returns)
            policy = descend(policy, method, judge, steps - finished, rate=rate, sampler=theirs)
            finished = steps
            name = f"{label}, never wrong: after {steps} steps"
            yield TruthRow(section, name, "margin", margin(policy, BETA), "-", outcome)


def shift(world: World) -> Iterator[TruthRow]:
    """Yield rows on DPO with pairs of the reference, of the policy, and of one without the best answer."""
    section = "DPO, by who draws the pairs: descent from π_ref to π*, β = 0.5"
    theirs, best = exact.chances(world, world.reference), exact.optimal_policy(world, BETA)
    judge, method = bradley_terry(world.returns), replace(DPO, beta=BETA)
    never = torch.tensor((0.0, *HARDLY[1:])).double()
    cases = (
        ("offline, pairs of π_ref", theirs, "π_ref draws every answer, the good ones seldom"),
        ("online, pairs of the policy", None, "the better it is, the more its pairs are about good answers"),
        ("offline, pairs with the best answer 1 in 1000", torch.tensor(HARDLY).double(), "it comes, slowly"),
        ("offline, pairs without the best answer", never, "nothing says what an answer in no pair is worth"),
    )
    for name, sampler, why in cases:
        policy, finished = TabularPolicy.with_answers(world, theirs), 0
        for steps in (50, 200):
            policy = descend(policy, method, judge, steps - finished, rate=5.0, sampler=sampler)
            finished = steps
            yield TruthRow(section, f"{name}: {steps} steps", "KL(π ‖ π*)", policy.kl_to(best), "-", why)
    ours = exact.chances(world)
    here = TabularPolicy.with_answers(world, ours)
    step_ours, step_theirs = (gradient(here, method, chances(world, p, judge)) for p in (ours, theirs))
    why = "away from the minimum, whose pairs they are decides which way it goes"
    yield TruthRow(
        section,
        "one step away from π_ref, with its pairs for one's own",
        "off",
        error(step_theirs, step_ours),
        "-",
        why,
    )
