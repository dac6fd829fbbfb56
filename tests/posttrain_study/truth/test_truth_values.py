"""V-trace on another policy's answers, and potentials in the reward, against the oracle."""

import copy
import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from posttrain.learner.critic import CriticModel
from posttrain.learner.learner import Learner
from posttrain.learner.optim import Optim
from posttrain.math import returns
from posttrain.methods.table import IMPALA, LEARNED, PPO, TO_GO
from posttrain_study.truth import TruthRow, exact, trust, values
from posttrain_study.truth.comparison import error, verdict
from posttrain_study.truth.world import World

EXACT = 1e-10
CAPS = (0.7, 1.0, 2.0, math.inf)


@pytest.fixture(scope="module")
def table(short: World) -> list[TruthRow]:
    """The sections of this file's questions; the whole table takes as long as all of these tests."""
    return [*values.older(short), *values.shaping(short)]


@pytest.fixture(params=["short", "uneven"])
def paid(request: pytest.FixtureRequest) -> World:
    """A world that pays along the way too."""
    world: World = request.getfixturevalue(request.param)
    early = torch.tensor([0.3, -0.4, 0.6]).double()
    return world.with_rewards(world.reward + world.mask * early)


def weights(world: World) -> torch.Tensor:
    """π/μ of each token, μ being the old policy."""
    return (world.cached_logp(world.policy) - world.cached_logp(world.old)).exp() * world.mask


# ---------------------------------------------------------------------- a critic that warms up


def test_v_nears_its_exact_value_before_the_policy_moves(short: World) -> None:
    """On answers that are an exact sample, by the learner itself; the policy's gradient then follows it."""
    sample, warmup = trust.exact_sample_world(short), 30
    V, everything = exact.state_values(sample), sample.batch(tuple(range(len(sample.answers))))
    model = copy.deepcopy(sample.policy.model)
    learner = Learner(
        model,
        PPO,
        critic=CriticModel(model, copy.deepcopy(sample.old.model)),
        critic_optim=Optim(lr=0.02),
        critic_warmup=warmup,
        optim=Optim(lr=0.01),
        temperature=sample.temperature,
    )
    weights = [p.detach().clone() for p in model.parameters()]

    def off() -> float:
        return error(learner.read(everything)[:, len(sample.prompt) :] * sample.mask, V)

    start, steps = off(), 0
    while all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True)):
        last, steps = off(), steps + 1
        learner.update(sample.batch(trust.SIXTEEN))
    assert steps == warmup + 1
    assert start == pytest.approx(1.0), "a head that starts at 0 foresees nothing"
    assert last < start / 10


# ---------------------------------------------------------------------- V-trace


@pytest.mark.parametrize("c_cap", [0.0, 1.0, math.inf])
def test_without_a_cap_and_with_the_exact_v_the_advantages_are_right(paid: World, c_cap: float) -> None:
    """E_μ[A_t | s, a] = π/μ A, and E_μ[v_t | s] = V of π, however far c lets the trace reach."""
    V = exact.state_values(paid)
    advantages, targets = values.advantages_and_targets(paid, values.vtrace(math.inf, c_cap), paid.old, V)
    mean = exact.mean_given_token(paid, advantages, paid.old)
    assert error(mean, weights(paid) * exact.advantages(paid)) < EXACT
    assert error(exact.mean_given_state(paid, targets, paid.old) * paid.mask, V) < EXACT


def test_a_cap_bends_them_and_a_wrong_v_does(paid: World) -> None:
    V, true = exact.state_values(paid), weights(paid) * exact.advantages(paid)
    wrong = exact.state_values(paid.with_policy(paid.old))
    for cap, value in ((1.0, V), (math.inf, wrong)):
        advantages, _ = values.advantages_and_targets(paid, values.vtrace(cap), paid.old, value)
        assert error(exact.mean_given_token(paid, advantages, paid.old), true) > 0.01


@pytest.mark.parametrize("c_cap", [0.0, 1.0])
@pytest.mark.parametrize("cap", CAPS)
def test_the_fixed_point_is_the_value_of_the_clipped_policy(paid: World, cap: float, c_cap: float) -> None:
    """π_ρ̄ ∝ min(ρ̄ μ, π), IMPALA 4.1: where the critic's own targets leave it, whatever c is."""
    wanted = exact.clipped_values(paid, paid.old, cap)
    _, targets = values.advantages_and_targets(paid, values.vtrace(cap, c_cap), paid.old, wanted)
    assert error(exact.mean_given_state(paid, targets, paid.old) * paid.mask, wanted) < EXACT
    assert error(values.fixed_point(paid, values.vtrace(cap, c_cap), paid.old), wanted) < EXACT


def test_the_clipped_policy_lies_between_the_sampler_and_the_policy(paid: World) -> None:
    ours, theirs = exact.state_values(paid), exact.state_values(paid.with_policy(paid.old))
    assert error(exact.clipped_values(paid, paid.old, math.inf), ours) < EXACT
    assert error(exact.clipped_values(paid, paid.old, 1e-9), theirs) < 1e-6
    for cap in (0.7, 1.0):
        between = exact.clipped_values(paid, paid.old, cap)
        assert min(error(between, ours), error(between, theirs)) > 0.01


def test_the_expected_step_counts_the_states_of_the_sampler(short: World) -> None:
    V, free = exact.state_values(short), values.vtrace(math.inf)
    g = short.estimate(free, 1, sampler=short.reference, anchor=short.policy, value=V).mean
    ratio = (short.cached_logp(short.policy) - short.cached_logp(short.reference)).exp()
    assert error(g, exact.score(short, ratio * exact.advantages(short), short.reference)) < EXACT
    assert error(g, exact.gradient(short)) > 0.01


def test_on_fresh_answers_it_is_unbiased_with_any_critic(short: World) -> None:
    """λ = 1 and π = μ: monte_carlo, which is what the line of the table starts from."""
    wrong = exact.state_values(short.with_policy(short.old))
    impala = replace(LEARNED, estimator=IMPALA.estimator)
    assert error(short.estimate(impala, 1, value=wrong).mean, exact.gradient(short)) < EXACT
    shorter = replace(LEARNED, estimator=partial(returns.vtrace, lam=0.5))
    assert error(short.estimate(shorter, 1, value=wrong).mean, exact.gradient(short)) > 0.01


def test_the_bias_falls_as_the_cap_rises(table: list[TruthRow]) -> None:
    rows = {r.name: r for r in table if r.section.startswith("V-trace")}
    for what in ("advantages", "the critic, against V of π", "step at μ's states"):
        found = [rows[f"ρ̄ = {cap}: {what}"] for cap in ("1", "2", "inf")]
        numbers = [r.number for r in found]
        assert numbers == sorted(numbers, reverse=True)
        assert [r.verdict for r in found] == ["biased", "biased", "unbiased"]
    for cap in ("1", "2", "inf"):
        assert rows[f"ρ̄ = {cap}: the critic, against that policy's V"].verdict == "unbiased"
        assert rows[f"ρ̄ = {cap}: step against ∇J"].verdict == "biased"


# ---------------------------------------------------------------------- shaping


def random_potential(world: World, seed: int) -> torch.Tensor:
    """A number of each state."""
    drawn = torch.randn(world.mask.shape, generator=torch.Generator().manual_seed(seed)).double()
    first = exact.shared_prefixes(world)[0].double().argmax(1)
    return torch.where(world.mask, drawn.gather(0, first), 0.0)


@pytest.mark.parametrize("seed", range(3))
def test_a_potential_that_ends_at_0_leaves_the_order_of_the_answers(paid: World, seed: int) -> None:
    zero = torch.zeros(len(paid.answers)).double()
    other = paid.with_rewards(values.shaped_rewards(paid, random_potential(paid, seed), zero))
    shift = other.returns - paid.returns
    assert float(shift.std()) < 1e-12 < float(shift.abs().max())
    assert int(other.returns.argmax()) == int(paid.returns.argmax())
    for beta in (0.1, 1.0):
        torch.testing.assert_close(exact.optimal_policy(other, beta), exact.optimal_policy(paid, beta))
    assert error(exact.gradient(other), exact.gradient(paid)) < EXACT


def test_a_potential_that_does_not_makes_another_answer_the_best(paid: World) -> None:
    """Erratum 12: what is paid for a finished answer is R + Φ, and any answer can be made the best."""
    potential = random_potential(paid, 1)
    for wanted in range(len(paid.answers)):
        at_end = torch.zeros(len(paid.answers)).double()
        at_end[wanted] = float(paid.returns.max() - paid.returns[wanted]) + 0.1
        other = paid.with_rewards(values.shaped_rewards(paid, potential, at_end))
        assert int(other.returns.argmax()) == wanted
        torch.testing.assert_close(other.returns, paid.returns + at_end - potential[:, 0])


def test_to_shape_by_v_is_to_subtract_it(short: World) -> None:
    """The reward to go of r + V(s') - V(s) is G - V: the same gradient answer by answer."""
    V, zero = exact.state_values(short), torch.zeros(len(short.answers)).double()
    shaped = short.with_rewards(values.shaped_rewards(short, V, zero))
    one = shaped.group_gradients(TO_GO, shaped.groups(1))
    other = short.group_gradients(LEARNED, short.groups(1), value=V)
    assert error(one, other) < EXACT


def test_a_process_model_that_knows_the_truth_still_halves_beta(paid: World) -> None:
    """Φ(end) = R pays R twice: π* is that of β/2, though the best answer is the same."""
    other = paid.with_rewards(values.shaped_rewards(paid, random_potential(paid, 2), paid.returns))
    torch.testing.assert_close(exact.optimal_policy(other, 0.6), exact.optimal_policy(paid, 0.3))
    assert verdict(exact.gradient(other), exact.gradient(paid)) == "scaled"


def test_the_rows_on_shaping(table: list[TruthRow]) -> None:
    rows = {(r.name, r.quantity): r for r in table if r.section.startswith("Shaping")}
    for name in ("no shaping", "Φ = V, 0 at the end", "Φ = a wrong V, 0 at the end"):
        assert rows[name, "error"].verdict == "unbiased"
        assert rows[name, "lost"].number == 0
        assert abs(rows[name, "π* moved"].number) < EXACT
    assert rows["Φ = a wrong V, and at the end", "lost"].number > 0.1
    assert rows["Φ = a wrong V, R at the end", "lost"].number == 0
    assert rows["Φ = a wrong V, R at the end", "π* moved"].number > 0.1
