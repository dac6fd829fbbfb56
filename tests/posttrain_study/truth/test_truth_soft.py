"""KLQ: where its update is 0, and where descent ends, against π* and the soft value."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from posttrain.math import advantages, reduce, surrogate
from posttrain.methods.q_learning import SoftQ
from posttrain.methods.table import DRO
from posttrain_study.truth import TruthRow, exact, soft
from posttrain_study.truth.comparison import error
from posttrain_study.truth.other_policies import match_chances
from posttrain_study.truth.world import World

EXACT = 1e-10
BETA = 0.4


@pytest.fixture(scope="module")
def table(short: World) -> list[TruthRow]:
    """The sections of this file's questions; the whole table takes as long as all of these tests."""
    return [*soft.bellman(short)]


@pytest.fixture(params=["short", "uneven"])
def paid(request: pytest.FixtureRequest) -> World:
    """A world that pays along the way too."""
    world: World = request.getfixturevalue(request.param)
    early = torch.tensor([0.3, -0.4, 0.6]).double()
    return world.with_rewards(world.reward + world.mask * early)


def method(lam: float, beta: float = BETA) -> SoftQ:
    return SoftQ(reduce.per_row, beta=beta, lam=lam)


def norm(update: tuple[torch.Tensor, torch.Tensor]) -> float:
    return max(float(x.abs().max()) for x in update)


def test_a_free_policy_is_one(paid: World) -> None:
    free = soft.TabularPolicy.random(paid, 1)
    assert float(free.logp().sum(1).exp().sum()) == pytest.approx(1, abs=1e-12)
    before, _ = exact.shared_prefixes(paid)
    n, m, t = before.nonzero(as_tuple=True)
    assert bool((free.state[n, t] == free.state[m, t]).all())
    places = {
        (tuple(a[:t]), int(free.state[n, t])) for n, a in enumerate(paid.answers) for t in range(len(a))
    }
    assert len(places) == len({s for s, _ in places}) == len({i for _, i in places})


def test_the_best_is_the_best(paid: World) -> None:
    """π* by enumeration, token by token; V* its soft value: β log Z at the start, and Bellman's equation."""
    best = soft.TabularPolicy.best(paid, BETA)
    torch.testing.assert_close(best.logp().sum(1).exp(), exact.optimal_policy(paid, BETA))
    assert best.kl_to(exact.optimal_policy(paid, BETA)) == pytest.approx(0, abs=1e-12)
    V = best.value()
    assert float(V[0, 0]) == pytest.approx(float(exact.optimal_value(paid, BETA)), abs=1e-12)
    after = torch.cat([V[:, 1:], torch.zeros_like(V[:, :1])], 1)
    gap = BETA * (best.logp() - paid.cached_logp(paid.reference))
    assert float(((gap + V - paid.reward - after) * paid.mask).abs().max()) < 1e-12


@pytest.mark.parametrize("lam", [0.0, 0.3, 0.95, 1.0])
def test_the_optimum_is_a_fixed_point_whoever_draws(paid: World, lam: float) -> None:
    best = soft.TabularPolicy.best(paid, BETA)
    for drawn in (None, exact.chances(paid), exact.chances(paid, paid.reference)):
        assert norm(soft.expected_update(best, method(lam), drawn)) < EXACT


@pytest.mark.parametrize("lam", [0.0, 0.3, 0.95, 1.0])
def test_nothing_near_it_is(paid: World, lam: float) -> None:
    """Another V of any one state, other logits there, or another β: the update is not 0."""
    best = soft.TabularPolicy.best(paid, BETA)
    evenly = torch.full_like(exact.chances(paid), 1 / len(paid.answers))  # π* hardly meets some states
    for s in range(len(best.values)):
        moved = torch.zeros_like(best.values).index_fill(0, torch.tensor([s]), 0.1)
        tilted = torch.zeros_like(best.logits)
        tilted[s, 0] = 0.1
        for other in (
            replace(best, values=best.values + moved),
            replace(best, logits=best.logits + tilted),
        ):
            assert norm(soft.expected_update(other, method(lam), evenly)) > 1e-6
    assert norm(soft.expected_update(best, method(lam, 2 * BETA))) > 1e-3


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
def test_descent_from_anywhere_ends_there(short: World, lam: float, seed: int) -> None:
    start = soft.TabularPolicy.random(short, seed)
    assert start.kl_to(exact.optimal_policy(short, BETA)) > 0.01
    found = soft.descend(start, method(lam), 400)
    assert found.kl_to(exact.optimal_policy(short, BETA)) < 1e-8
    torch.testing.assert_close(found.value(), exact.soft_values(short, BETA), rtol=0, atol=1e-4)


def test_with_lambda_0_another_policys_answers_do(short: World) -> None:
    """The targets look one step ahead, so that nobody asks who drew the step."""
    found = soft.descend(
        soft.TabularPolicy.random(short, 1), method(0.0), 600, sampler=exact.chances(short, short.reference)
    )
    assert found.kl_to(exact.optimal_policy(short, BETA)) < 1e-6


def test_it_is_the_update_of_the_method_itself(short: World) -> None:
    """The free policy with the model's numbers gets the gradient that the model gets, through its logits."""
    V = exact.state_values(short)
    model = short.group_gradients(method(0.95), short.groups(1), value=V)
    p = exact.chances(short)
    free = soft.TabularPolicy.random(short, 0)
    step = short.step_log_probs(short.policy)
    logits, values = free.logits.clone(), free.values.clone()
    logits[free.state[short.mask]] = step.detach()[short.mask]
    values[free.state[short.mask]] = V[short.mask]
    by_logits, _ = soft.expected_update(replace(free, logits=logits, values=values), method(0.95))
    through = torch.zeros_like(step)
    seen: set[int] = set()
    for n, t in short.mask.nonzero().tolist():
        if int(free.state[n, t]) not in seen:
            seen.add(int(free.state[n, t]))
            through[n, t] = by_logits[free.state[n, t]]
    assert error(short.policy.gradient((step * through).sum()), p @ model) < EXACT


def test_the_rows_on_klq(table: list[TruthRow]) -> None:
    rows = {(r.name, r.quantity): r.number for r in table if r.section.startswith("KLQ")}
    still = [number for (_, quantity), number in rows.items() if quantity == "update"]
    assert len(still) == 4
    assert max(still) < EXACT
    for lam in ("0", "0.95"):
        far = [rows[f"λ = {lam}, {steps} steps", "KL(π ‖ π*)"] for steps in (0, 100, 200)]
        assert far == sorted(far, reverse=True)
        assert far[-1] < 1e-6
        assert rows[f"λ = {lam}, 200 steps", "off"] < 1e-5


@pytest.mark.parametrize("baseline", ["soft", "mean", 2, 4])
def test_dro_stands_still_where_it_is_said_to_settle(baseline: str | int, short: World) -> None:
    """By the method's own code, on all groups of answers of π_old; from π_old itself it moves."""
    p, R = exact.chances(short), short.returns
    size = baseline if isinstance(baseline, int) else 1
    method = replace(DRO, surrogate=partial(surrogate.regressed, pull=BETA))
    if baseline == "soft":
        end = (p.log() + R / BETA).softmax(0)
        method = replace(method, credit=advantages.raw, baseline=float(BETA * (p @ (R / BETA).exp()).log()))
    else:
        end = soft.settle(p, R - p @ R, BETA * (size / (size - 1) if size > 1 else 1.0))
    if baseline == "mean":
        method = replace(method, credit=advantages.raw, baseline=float(p @ R))
    settled = match_chances(short, end.tolist())
    start = float(short.estimate(method, size).mean.norm())
    assert float(settled.estimate(method, size, sampler=short.policy).mean.norm()) < 1e-10 * start


def test_with_the_mean_as_baseline_dro_gains_less_than_it_could(short: World) -> None:
    rows = {(row.name, row.quantity): row.number for row in soft.regression(short)}
    names = ["β log E[exp(R/β)]", "E[R]", "mean of 4 answers", "mean of 2 answers"]
    reached, distance = ([rows[name, q] for name in names] for q in ("reached", "KL(π ‖ π*)"))
    assert reached[0] == pytest.approx(1, abs=1e-12)
    assert reached == sorted(reached, reverse=True)
    assert distance == sorted(distance)
    assert distance[0] < EXACT < 0.01 < distance[1]
