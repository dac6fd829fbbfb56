"""Which baseline leaves how much variance: the order that the seeds claim, and where it is another."""

import pytest
import torch

from posttrain_study.truth import TruthRow, baselines, exact, trust
from posttrain_study.truth.comparison import error
from posttrain_study.truth.world import World

EXACT = 1e-10


@pytest.fixture(scope="module")
def table(short: World) -> list[TruthRow]:
    """The sections of this file's questions; the whole table takes as long as all of these tests."""
    return [*baselines.baselines(short), *baselines.certain(short)]


@pytest.fixture(params=["short", "uneven"])
def both(request: pytest.FixtureRequest) -> World:
    """A world of four answers and one of fifteen."""
    world: World = request.getfixturevalue(request.param)
    return world


def variances(table: list[TruthRow], section: str) -> dict[str, float]:
    return {r.name: r.number for r in table if r.section.startswith(section)}


def left(world: World, baseline: torch.Tensor) -> float:
    """The variance that this baseline of each state leaves."""
    return exact.trace_of_covariance(world, (exact.returns_to_go(world) - baseline) * world.mask)


def test_no_baseline_of_a_state_is_better_than_the_best(both: World) -> None:
    """Moved any way, in one state or in all, it leaves more; and so does every baseline that has a name."""
    best = exact.sum_baselines(both)
    least = left(both, best)
    V, mean = exact.state_values(both), float(exact.objective(both).detach())
    named = [torch.zeros_like(V), torch.full_like(V, mean), V, exact.token_baselines(both)]
    before, _ = exact.shared_prefixes(both)
    first = before.double().argmax(1)
    for seed in range(5):
        drawn = torch.randn(V.shape, generator=torch.Generator().manual_seed(seed)).double()
        named.append(best + 1e-3 * drawn.gather(0, first))  # a number of the state
    assert all(left(both, b) > least for b in named)
    assert error(exact.score(both, exact.returns_to_go(both) - best), exact.gradient(both)) < EXACT


def test_the_best_for_each_token_is_not_the_best_for_their_sum(short: World) -> None:
    """002 minimises E[|g_t|² (G - b)²] token by token. The tokens of an answer covary: here V leaves less."""
    evenly = trust.exact_sample_world(short)
    by_token = exact.token_baselines(evenly)
    one_by_one = exact.token_scores(evenly).square().sum(-1)

    def apart(b: torch.Tensor) -> float:
        """What the tokens vary by themselves, as if their sum had no products."""
        G = exact.returns_to_go(evenly)
        return float((exact.visits(evenly) * one_by_one * (G - b).square()).sum())

    V = exact.state_values(evenly)
    assert apart(by_token) < apart(V)
    assert left(evenly, by_token) > 2 * left(evenly, V)


def test_the_order_that_the_seeds_claim(table: list[TruthRow]) -> None:
    """Here it holds: less with E[R] than without, less with V, least with the best."""
    v = variances(table, "Baselines")
    claimed = ("optimal for each state", "V of each state", "constant E[R]", "none")
    assert sorted(claimed, key=lambda name: v[name]) == list(claimed)


def test_leaving_one_of_two_out_costs_more_than_it_saves(table: list[TruthRow]) -> None:
    v = variances(table, "Baselines")
    assert v["leave one out, K = 2"] > v["none"] > v["leave one out, K = 4"]


def test_where_a_policy_is_nearly_always_right_the_mean_is_worse_than_nothing(table: list[TruthRow]) -> None:
    v = variances(table, "A policy that is right")
    for name in ("constant E[R]", "V of each state", "leave one out, K = 4"):
        assert v[name] > 100 * v["none"]
    assert v["optimal for each state"] < v["constant, optimal"] < v["none"]


def test_with_one_of_two_answers_right_the_best_constant_is_the_chance_of_the_wrong_one(short: World) -> None:
    """A policy with one free number: |g|² is (1 - p)² and p², so that b* = 1 - p where E[R] = p."""
    sure = baselines.mostly_right(short)
    p = exact.chances(sure)
    assert float(p.max()) == pytest.approx(0.9, abs=1e-12)
    assert float(exact.objective(sure).detach()) == pytest.approx(0.9, abs=1e-12)
    # With three wrong answers whose gradients are longer still, it is lower yet.
    assert exact.constant_baseline(sure) < 0.1
    for chance in (0.5, 0.7, 0.9):
        scores = torch.tensor([1 - chance, -chance]).double()  # of the logit of the right answer
        weight = torch.tensor([chance, 1 - chance]).double() * scores.square()
        assert float(weight[0] / weight.sum()) == pytest.approx(1 - chance)
        variance = [float(weight @ (torch.tensor([1.0, 0.0]).double() - b).square()) for b in (0.0, chance)]
        assert (variance[1] > variance[0]) == (chance > 2 / 3)


def test_a_temporal_difference_varies_though_the_reward_does_not(short: World) -> None:
    """002's table gives δ_t the variance O(Var(r_t)): with a reward at the end, 0 for every token before."""
    V = exact.state_values(short)
    after = torch.cat([V[:, 1:], torch.zeros_like(V[:, :1])], 1)
    delta = (short.reward + after - V) * short.mask
    early = short.mask & torch.cat([short.mask[:, 1:], torch.zeros_like(short.mask[:, :1])], 1)
    assert bool((short.reward[early] == 0).all())
    spread = exact.mean_given_state(short, delta.square())
    assert float(exact.mean_given_state(short, delta)[short.mask].abs().max()) < 1e-12
    assert float(spread[early].min()) > 1e-3
    Q = exact.action_values(short)
    torch.testing.assert_close(
        spread, exact.mean_given_state(short, (Q - V).square())
    )  # Var(r + V(s')) given s


def test_reward_to_go_is_noisier_where_the_past_foretells_the_rest(short: World) -> None:
    """The last token takes back what was paid before: every return is 0, and no reward to go is."""
    V = exact.state_values(short)
    back = torch.cat([V[:, 1:] - V[:, :-1], torch.zeros_like(V[:, :1])], 1)
    last = short.mask.sum(1, keepdim=True) - 1
    r = torch.where(torch.arange(short.length) < last, back, 0.0)
    paid = short.with_rewards(r.scatter(1, last, -r.sum(1, keepdim=True)))
    G = exact.returns_to_go(paid)
    assert float(paid.returns.abs().max()) < 1e-12
    assert exact.trace_of_covariance(paid, G[:, :1] * paid.mask) < 1e-20
    assert exact.trace_of_covariance(paid, G) > 1e-3


def test_another_right_answer_is_another_world(short: World) -> None:
    """The chances are what was asked for, and the rewards still those of the answers."""
    sure = baselines.mostly_right(short)
    assert sure.returns.tolist() == [0.0, 0.0, 1.0, 0.0]
    torch.testing.assert_close(exact.chances(sure), torch.tensor(baselines.CERTAIN).double())
