"""DPO, IPO and reward models, enumerated: minima, weights of pairs, likelihoods; the best of n answers."""

import itertools
import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from posttrain.math import preference
from posttrain.methods.preference import Preference
from posttrain.methods.table import CDPO, DPO, F_DPO, IPO, METHODS, RDPO, SLIC
from posttrain_study import truth
from posttrain_study.truth import TruthRow, exact, preferences, rewards
from posttrain_study.truth.comparison import error, sine
from posttrain_study.truth.preferences import (
    bradley_terry,
    by_order,
    chances,
    comparison_batch,
    descend,
    find_minimum,
    gradient,
    ipo_optimal,
    margin,
    minimise,
    ordered_pairs,
)
from posttrain_study.truth.soft import TabularPolicy
from posttrain_study.truth.table import target
from posttrain_study.truth.world import World

EXACT = 1e-10
BETA = 0.4


@pytest.fixture(scope="module")
def table(short: World) -> list[TruthRow]:
    """The sections of this file's questions; the whole table takes as long as all of these tests."""
    asked = (preferences.pulls, preferences.shift, rewards.likelihood, rewards.choosing)
    return [row for section in asked for row in section(short)]


def method(line: Preference, beta: float = BETA) -> Preference:
    return replace(line, beta=beta)


def drawers(world: World) -> list[torch.Tensor]:
    """The reference, the policy, and somebody who hardly draws the best answer."""
    return [
        exact.chances(world, world.reference),
        exact.chances(world),
        torch.tensor(preferences.HARDLY, dtype=torch.float64),
    ]


def found(table: list[TruthRow], section: str) -> dict[tuple[str, str], float]:
    return {(r.name, r.quantity): r.number for r in table if r.section.startswith(section)}


# ---------------------------------------------------------------------- the pairs


def test_the_pairs_are_whole(short: World) -> None:
    pairs, batch = ordered_pairs(short), comparison_batch(short)
    assert len(pairs) == len(set(pairs)) == 12
    total = (batch.reward * batch.mask).sum(1).view(-1, 2)
    assert total.tolist() == [[1.0, 0.0]] * 12
    for (i, j), rows in zip(pairs, batch.tokens.view(12, 2, -1), strict=True):
        for answer, row in ((i, rows[0]), (j, rows[1])):
            said = short.answers[answer]
            assert row[len(short.prompt) :][: len(said)].tolist() == said


def test_chances_are_those_of_two_draws_and_a_judge(short: World) -> None:
    drawn, judge = exact.chances(short), bradley_terry(short.returns)
    p = chances(short, drawn, judge)
    assert float(p.sum()) == pytest.approx(1, abs=1e-14)
    alike = float(drawn.square().sum())
    for (i, j), chance in zip(ordered_pairs(short), p.tolist(), strict=True):
        label = 1 / (1 + math.exp(float(short.returns[j] - short.returns[i])))
        assert chance == pytest.approx(float(2 * drawn[i] * drawn[j]) * label / (1 - alike), rel=1e-12)


def test_judges_are_of_one_mind_with_themselves(short: World) -> None:
    """P(i over j) + P(j over i) = 1, the diagonal included."""
    for judge in (bradley_terry(short.returns), by_order(short.returns), by_order(short.returns, 0.2)):
        torch.testing.assert_close(judge + judge.T, torch.ones_like(judge))
    sure = by_order(short.returns, 0.2)
    assert sorted(set(sure.flatten().tolist())) == pytest.approx([0.2, 0.5, 0.8])


# ---------------------------------------------------------------------- minima


@pytest.mark.parametrize("beta", [0.1, 0.4, 2.0])
def test_dpos_minimum_is_the_regularised_optimum_whoever_draws_the_pairs(short: World, beta: float) -> None:
    """E[∇loss] at π* ∝ π_ref exp(R/β), where every pair has the chance of Bradley and Terry's model, is 0."""
    best, judge = exact.optimal_policy(short, beta), bradley_terry(short.returns)
    far = TabularPolicy.random(short, 1)
    for drawn in drawers(short):
        pairs = chances(short, drawn, judge)
        still = gradient(TabularPolicy.with_answers(short, best), method(DPO, beta), pairs)
        assert float(still.norm()) < EXACT
        assert float(gradient(far, method(DPO, beta), pairs).norm()) > 1e-3


@pytest.mark.parametrize("seed", [1, 2])
def test_descent_on_dpos_loss_ends_at_the_optimum(short: World, seed: int) -> None:
    best, start = exact.optimal_policy(short, BETA), TabularPolicy.random(short, seed)
    assert start.kl_to(best) > 0.05
    for drawn in drawers(short):
        least = minimise(start, method(DPO), chances(short, drawn, bradley_terry(short.returns)))
        torch.testing.assert_close(least.logp().sum(1).exp(), best, rtol=1e-8, atol=1e-12)


def test_the_optimum_is_that_of_the_penalised_reward(short: World) -> None:
    """J - β KL of no policy is above that of DPO's minimum, and of that one it is β log Z."""
    theirs = short.cached_logp(short.reference).sum(1)

    def value(p: torch.Tensor) -> float:
        return float(p @ short.returns - BETA * p @ (p.log() - theirs))

    pairs = chances(short, exact.chances(short), bradley_terry(short.returns))
    least = minimise(TabularPolicy.random(short, 1), method(DPO), pairs).logp().sum(1).exp()
    assert value(least) == pytest.approx(float(exact.optimal_value(short, BETA)), abs=1e-12)
    for seed in range(20):
        other = torch.randn(4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).softmax(0)
        assert value(other) < value(least)


def test_another_beta_has_another_minimum(short: World) -> None:
    pairs = chances(short, exact.chances(short), bradley_terry(short.returns))
    there = TabularPolicy.with_answers(short, exact.optimal_policy(short, BETA))
    assert float(gradient(there, method(DPO, 2 * BETA), pairs).norm()) > 1e-3


@pytest.mark.parametrize("beta", [0.1, 0.4, 2.0])
@pytest.mark.parametrize("sure", [False, True])
def test_ipos_minimum_is_its_own_closed_form(short: World, beta: float, sure: bool) -> None:
    judge = by_order(short.returns) if sure else bradley_terry(short.returns)
    for drawn in drawers(short):
        closed, pairs = ipo_optimal(short, drawn, judge, beta), chances(short, drawn, judge)
        still = gradient(TabularPolicy.with_answers(short, closed), method(IPO, beta), pairs)
        assert float(still.norm()) < EXACT / beta**2
        least = minimise(TabularPolicy.random(short, 1), method(IPO, beta), pairs)
        torch.testing.assert_close(least.logp().sum(1).exp(), closed, rtol=1e-8, atol=1e-12)


def test_of_two_answers_ipo_wants_the_margin_of_their_preference(short: World) -> None:
    """h = (p - ½)/β: the regression of the paper's eq. 10, whatever the other answers."""
    drawn = torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=torch.float64)
    for p in (0.5, 0.7, 0.99, 1.0):
        judge = torch.full((4, 4), 0.5, dtype=torch.float64)
        judge[0, 1], judge[1, 0] = p, 1 - p
        least = minimise(TabularPolicy.random(short, 1), method(IPO), chances(short, drawn, judge))
        u = (least.logp() - short.cached_logp(short.reference)).sum(1)
        assert float(u[0] - u[1]) == pytest.approx((p - 0.5) / BETA, abs=1e-9)
        if p == 1.0:
            continue
        least = minimise(TabularPolicy.random(short, 1), method(DPO), chances(short, drawn, judge))
        u = (least.logp() - short.cached_logp(short.reference)).sum(1)
        assert float(u[0] - u[1]) == pytest.approx(math.log(p / (1 - p)) / BETA, abs=1e-6)


def test_ipos_minimum_is_that_of_total_preference_less_the_kl(short: World) -> None:
    """E[p(y ≻ μ)] - β KL(π ‖ π_ref) of no policy is above that of its closed form."""
    drawn, judge = exact.chances(short), bradley_terry(short.returns)
    theirs, preferred = short.cached_logp(short.reference).sum(1), judge @ drawn

    def value(p: torch.Tensor) -> float:
        return float(p @ preferred - BETA * p @ (p.log() - theirs))

    closed = ipo_optimal(short, drawn, judge, BETA)
    for seed in range(20):
        other = torch.randn(4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).softmax(0)
        assert value(other) < value(closed)


@pytest.mark.parametrize("flips", [0.05, 0.2])
def test_under_flipped_labels_the_robust_loss_has_the_clean_minimum(short: World, flips: float) -> None:
    """And the smoothed loss has, of clean labels, the minimum that DPO has of flipped ones."""
    drawn, clean = exact.chances(short), bradley_terry(short.returns)
    flipped = (1 - flips) * clean + flips * clean.T
    best = TabularPolicy.with_answers(short, exact.optimal_policy(short, BETA))
    robust = replace(method(RDPO), pair_loss=partial(preference.robust, flipped=flips))
    smooth = replace(method(CDPO), pair_loss=partial(preference.smoothed, flipped=flips))
    assert float(gradient(best, robust, chances(short, drawn, flipped)).norm()) < EXACT
    assert float(gradient(best, method(DPO), chances(short, drawn, flipped)).norm()) > 1e-3
    less = minimise(best, method(DPO), chances(short, drawn, flipped)).logp()
    torch.testing.assert_close(minimise(best, smooth, chances(short, drawn, clean)).logp(), less)


def test_under_another_divergence_the_minimum_is_that_divergences_optimum(short: World) -> None:
    """f'(π/π_ref) of two answers differs by (R - R')/β, as the maximiser of J - β D_f wants it."""
    pairs = chances(short, exact.chances(short), bradley_terry(short.returns))
    theirs = short.cached_logp(short.reference).sum(1)
    for divergence in (
        preference.jensen_shannon,
        preference.forward_kl,
        partial(preference.alpha_divergence, alpha=0.4),
    ):
        line = replace(method(F_DPO, 1.0), divergence=divergence)
        start = TabularPolicy.with_answers(short, exact.chances(short, short.reference))
        p = minimise(start, line, pairs).logp().sum(1).exp()
        u = divergence(p.log() - theirs)
        torch.testing.assert_close(u - u[0], short.returns - short.returns[0], rtol=1e-6, atol=1e-7)


# ---------------------------------------------------------------------- a judge who is sure


def test_of_a_sure_judge_dpo_has_no_minimum(short: World) -> None:
    """At no margin is the gradient 0, and from each the loss falls as the answers come further apart."""
    pairs = chances(short, exact.chances(short), by_order(short.returns))
    norms = []
    for scale in (1.0, 4.0, 16.0, 40.0):
        free = TabularPolicy.with_answers(short, exact.optimal_policy(short, BETA / scale))
        slope = gradient(free, method(DPO), pairs)
        norms.append(float(slope.norm()))
        further = TabularPolicy.with_answers(short, exact.optimal_policy(short, BETA / (scale + 1)))
        direction = (further.logits - free.logits).flatten()
        assert float(slope @ direction) < 0
    assert norms == sorted(norms, reverse=True)
    assert norms[-1] > 0


def test_of_a_sure_judge_the_margin_of_dpo_grows_with_the_steps_and_ipos_stays(short: World) -> None:
    drawn, judge = exact.chances(short), by_order(short.returns)
    start = TabularPolicy.with_answers(short, exact.chances(short, short.reference))
    closed = margin(TabularPolicy.with_answers(short, ipo_optimal(short, drawn, judge, BETA)), BETA)
    for line, rate in ((DPO, 20.0), (IPO, 0.3)):
        free, seen = start, []
        for _ in range(4):
            free = descend(free, method(line), judge, 60, rate=rate, sampler=drawn)
            seen.append(margin(free, BETA))
        if line is DPO:
            assert all(b > a + 0.2 for a, b in itertools.pairwise(seen))
        else:
            assert seen[1:] == pytest.approx([closed] * 3, abs=1e-4)
    assert 0 < closed <= 1


def test_the_hinge_too_stops_where_it_has_what_it_asked_for(short: World) -> None:
    pairs = chances(short, exact.chances(short), by_order(short.returns))
    apart_enough = TabularPolicy.with_answers(short, exact.optimal_policy(short, BETA / 20))
    assert margin(apart_enough, BETA) > 1
    assert not gradient(apart_enough, method(SLIC), pairs).any()
    assert gradient(apart_enough, method(DPO), pairs).any()


# ---------------------------------------------------------------------- through the model


def test_each_pair_is_pulled_by_sigma_of_its_implicit_reward(either: World) -> None:
    """∇L = -β σ(-β h) (∇log π(w) - ∇log π(l)), over all parameters of the Llama."""
    u = (either.cached_logp(either.policy) - either.cached_logp(either.reference)).sum(1)
    g, spread = exact.answer_scores(either), set()
    for w, o in [(0, 7), (7, 0), (3, 11), (14, 2), (5, 6)]:
        judged = either.with_rewards(torch.zeros(len(either.answers)).index_fill(0, torch.tensor([w]), 1.0))
        for beta in (0.1, 1.0):
            r = beta * float(u[w] - u[o])
            wanted = -beta / (1 + math.exp(r)) * (g[w] - g[o])
            (got,) = judged.group_gradients(method(DPO, beta), [(w, o)])
            assert sine(got, wanted) < EXACT
            assert error(got, wanted) < EXACT
            spread.add(round(r, 1))
    assert len(spread) > 5


def test_the_free_policy_gets_the_gradient_that_the_model_gets_through_its_logits(short: World) -> None:
    """So that what is found of free policies is found of the method itself."""
    line, pairs = method(DPO), chances(short, exact.chances(short), by_order(short.returns))
    groups = [(i, j) for i, j in ordered_pairs(short) if short.returns[i] > short.returns[j]]
    chance = torch.tensor(
        [float(p) for p, (i, j) in zip(pairs, ordered_pairs(short), strict=True) if (i, j) in groups],
        dtype=torch.float64,
    )
    model = chance @ short.group_gradients(line, groups)
    free, step = TabularPolicy.random(short, 0), short.step_log_probs(short.policy)
    free.logits[free.state[short.mask]] = step.detach()[short.mask]
    by_logits = gradient(free, line, pairs).view(free.logits.shape)
    through, seen = torch.zeros_like(step), set[int]()
    for n, t in short.mask.nonzero().tolist():
        if int(free.state[n, t]) not in seen:
            seen.add(int(free.state[n, t]))
            through[n, t] = by_logits[free.state[n, t]]
    assert error(short.policy.gradient((step * through).sum()), model) < EXACT


@pytest.mark.full
def test_online_dpo_is_after_the_penalised_reward_and_estimates_another_gradient(short: World) -> None:
    line = METHODS["online_dpo"].method
    assert isinstance(line, Preference)
    wanted = exact.regularised_gradient(short, line.beta)
    assert error(target(short, line), wanted) < EXACT
    rows = {r.quantity: r for r in truth.rows("online_dpo") if r.name == "online_dpo"}
    assert rows["error"].verdict == "biased"
    assert "not by how much" in rows["error"].sentence


# ---------------------------------------------------------------------- rewards


def test_two_answers_score_the_logarithm_of_their_odds(short: World) -> None:
    for wins, losses in ((7.0, 3.0), (1.0, 9.0), (5.0, 5.0)):
        graph = torch.zeros(4, 4, dtype=torch.float64)
        graph[2, 3], graph[3, 2] = wins, losses
        s = rewards.fit_scores(short, graph)
        assert float(s[2] - s[3]) == pytest.approx(math.log(wins / losses), abs=1e-10)


def test_scores_of_a_tree_are_sums_along_its_edges_and_know_nothing_of_how_often(short: World) -> None:
    edges = {(0, 1): (3.0, 1.0), (1, 2): (20.0, 50.0), (1, 3): (0.5, 0.2)}
    graph = torch.zeros(4, 4, dtype=torch.float64)
    for (i, j), (wins, losses) in edges.items():
        graph[i, j], graph[j, i] = wins, losses
    s = rewards.fit_scores(short, graph)
    for (i, j), (wins, losses) in edges.items():
        assert float(s[i] - s[j]) == pytest.approx(math.log(wins / losses), abs=1e-10)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_scores_of_a_graph_with_cycles_are_zermelos(short: World, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    wins = torch.randint(1, 12, (4, 4), generator=g).double().fill_diagonal_(0)
    torch.testing.assert_close(rewards.fit_scores(short, wins), rewards.zermelo(wins), rtol=0, atol=1e-10)


def test_scores_of_the_true_chances_are_the_rewards(short: World) -> None:
    """With infinitely many labels the reward model is the reward, up to a constant."""
    s = rewards.fit_scores(short, bradley_terry(short.returns).fill_diagonal_(0))
    torch.testing.assert_close(s, short.returns - short.returns[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_best_of_n_is_what_all_groups_of_n_say(short: World, n: int) -> None:
    """Enumerated: the answer of highest reward in each group, with the chance of the group."""
    slowly = torch.zeros(4, dtype=torch.float64)
    for group, chance in zip(short.groups(n), short.probabilities(n), strict=True):
        slowly[max(group, key=lambda i: float(short.returns[i]))] += chance
    found = rewards.best_of(exact.chances(short), short.returns, n)
    torch.testing.assert_close(found, slowly, rtol=1e-12, atol=1e-14)


def test_equal_rewards_share_what_either_would_have(short: World) -> None:
    p, tied = exact.chances(short), torch.tensor([1.0, 0.2, 1.0, 0.0]).double()
    found, merged = rewards.best_of(p, tied, 3), torch.stack([p[0] + p[2], p[1], p[3]])
    apart = rewards.best_of(merged, torch.tensor([1.0, 0.2, 0.0]).double(), 3)
    assert float(found[0] + found[2]) == pytest.approx(float(apart[0]), abs=1e-14)
    assert float(found.sum()) == pytest.approx(1, abs=1e-14)


@pytest.mark.parametrize("n", [1, 2, 3, 8, 64])
def test_the_kl_of_the_best_of_n_is_below_its_formula_and_reaches_it_without_ties(
    short: World, n: int
) -> None:
    """KL ≤ log n - (n - 1)/n; the mean of the best of n draws from 0 to 1 is n/(n + 1)."""
    bound = math.log(n) - (n - 1) / n
    p = exact.chances(short)
    assert rewards.divergence(rewards.best_of(p, short.returns, n), p) <= bound + 1e-14
    size = 20_000
    level = torch.full((size,), 1 / size, dtype=torch.float64)
    ranks = torch.arange(1, size + 1, dtype=torch.float64) / size
    q = rewards.best_of(level, ranks, n)
    assert rewards.divergence(q, level) == pytest.approx(bound, abs=1e-5)
    assert rewards.divergence(q, level) <= bound + 1e-12
    assert float(q @ ranks) == pytest.approx(n / (n + 1), abs=1e-4)


@pytest.mark.parametrize("n", [2, 16])
def test_no_policy_as_near_earns_more_than_the_tilted_one(short: World, n: int) -> None:
    p, R = exact.chances(short), short.returns
    q = rewards.best_of(p, R, n)
    nats = rewards.divergence(q, p)
    most = rewards.tilted_policy(p, R, nats)
    assert rewards.divergence(most, p) == pytest.approx(nats, abs=1e-10)
    assert float(most @ R) > float(q @ R)


# ---------------------------------------------------------------------- the search and the rows


def test_the_lowest_point_of_a_bowl_with_a_flat_direction() -> None:
    at = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)

    def bowl(x: torch.Tensor) -> torch.Tensor:
        return (x.diff() - at.diff()).square().sum() + (x[0] - x[2] - 0.5).pow(4)

    x = find_minimum(bowl, torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(x.diff(), at.diff(), rtol=0, atol=1e-12)


@pytest.mark.full
def test_the_rows_on_minima(short: World) -> None:
    rows = found(list(preferences.minima(short)), "Pairs of Bradley")
    for name in ("DPO, pairs of π_ref", "DPO, pairs of another policy", "rDPO, one label in ten flipped"):
        assert rows[name, "update"] < EXACT
        assert abs(rows[name, "KL(π ‖ π*)"]) < EXACT
    assert rows["DPO, one label in ten flipped", "KL(π ‖ π*)"] > 0.01
    for drawn in ("π_ref", "another policy"):
        name = f"IPO, pairs of {drawn}"
        assert rows[name, "update"] < EXACT
        assert abs(rows[name, "KL(π ‖ π_IPO)"]) < EXACT
        assert rows[name, "KL(π ‖ π*)"] > 0.1


def test_the_rows_on_pulls_are_the_logistic_function(table: list[TruthRow]) -> None:
    rows = found(table, "DPO's gradient")
    for r in (-4, -1, 1, 4):
        assert rows[f"β h = {r}", "pull"] == pytest.approx(1 / (1 + math.exp(r)), rel=EXACT)


@pytest.mark.full
def test_the_rows_on_a_sure_judge(short: World) -> None:
    rows = {name: number for (name, _), number in found(list(preferences.certain(short)), "A judge").items()}
    for line, unbounded in (("DPO", True), ("IPO", False)):
        minima = [number for name, number in rows.items() if name.startswith(f"{line}, wrong")]
        steps = [number for name, number in rows.items() if name.startswith(f"{line}, never")]
        assert len(minima) == len(steps) == 3
        assert minima == sorted(minima)
        assert (minima[-1] > 4 * minima[0]) == unbounded
        assert (steps[-1] > steps[0] + 3) == unbounded
        assert (max(minima + steps) < 1) == (not unbounded)


def test_the_rows_on_who_draws_the_pairs(table: list[TruthRow]) -> None:
    rows = {name: number for (name, _), number in found(table, "DPO, by who").items()}
    ends = {name.partition(":")[0]: n for name, n in rows.items() if name.endswith(" 200 steps")}
    online, offline, seldom, never = ends.values()
    assert online > offline
    assert abs(offline) < EXACT < 1e-2 < seldom < never
    assert rows["offline, pairs without the best answer: 50 steps"] == pytest.approx(never, rel=1e-3)
    assert list(rows.values())[-1] > 0.1


def test_the_rows_on_rewards(table: list[TruthRow]) -> None:
    assert all(number < EXACT for number in found(table, "Bradley and Terry's likelihood").values())
    rows = found(table, "The best of n")
    for n in (2, 4, 16):
        assert rows[f"n = {n}", "KL"] < rows[f"n = {n}", "bound"]
        assert rows[f"n = {n}", "gain"] < rows[f"n = {n}", "most"]
    for n in (4, 16):
        name = f"n = {n}, of 4096 answers"
        assert rows[name, "KL"] == pytest.approx(rows[name, "bound"], abs=1e-4)
