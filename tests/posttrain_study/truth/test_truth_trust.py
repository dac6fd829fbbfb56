"""Steps away from the policy that drew: clipping by its range, the natural step, what is sure to be won."""

import math
from dataclasses import replace

import pytest
import torch

from posttrain.learner.trust_region import Trust
from posttrain.math import surrogate
from posttrain.methods.table import LEARNED, TRPO
from posttrain_study.truth import TruthRow, exact, soft, trust
from posttrain_study.truth.comparison import error, sine
from posttrain_study.truth.other_policies import match_chances, step_along_gradient
from posttrain_study.truth.world import World

EXACT = 1e-10


@pytest.fixture(scope="module")
def table(short: World) -> list[TruthRow]:
    """The sections of this file's questions; the whole table takes as long as all of these tests."""
    return [*trust.clipping(short), *trust.region(short)]


@pytest.fixture(scope="module")
def whole(short: World) -> World:
    """A world of which sixteen answers are the whole truth."""
    return trust.exact_sample_world(short)


def a_token(world: World) -> float:
    """Tokens in an answer, on average."""
    return float(exact.chances(world) @ world.mask.double().sum(1))


# ---------------------------------------------------------------------- other policies


@pytest.mark.parametrize("nats", [1e-3, 0.02, 0.2])
def test_a_policy_is_moved_by_as_many_nats_as_asked(short: World, nats: float) -> None:
    after = step_along_gradient(short, nats)
    assert float(exact.divergence(after, after.old, after.policy).detach()) == pytest.approx(nats, rel=1e-5)
    assert after.old is short.policy
    assert float(exact.objective(after).detach()) > float(exact.objective(short).detach())


def test_a_policy_that_was_asked_for_draws_so(short: World) -> None:
    for chances in ((0.25, 0.25, 0.25, 0.25), (0.7, 0.1, 0.1, 0.1)):
        found = exact.chances(match_chances(short, chances))
        torch.testing.assert_close(found, torch.tensor(chances, dtype=torch.float64), rtol=1e-12, atol=0)


# ---------------------------------------------------------------------- the natural step


def test_sixteen_answers_are_the_expectation(whole: World) -> None:
    """So that an update of the learner has no noise: with each of them left out once, it is 16/15 ∇J."""
    found = -whole.group_gradients(TRPO, [trust.SIXTEEN])[0]
    assert error(found, exact.gradient(whole) * 16 / 15) < EXACT


@pytest.mark.parametrize("damping", [0.0, 0.1])
@pytest.mark.parametrize("max_kl", [1e-6, 1e-4, 1e-2, 1.0])
def test_the_learners_step_is_that_of_the_full_fisher_matrix(
    whole: World, max_kl: float, damping: float
) -> None:
    config = Trust(max_kl=max_kl, damping=damping, iterations=50)
    done = trust.run_trpo(whole, config)
    # The solver stops where its residual is 1e-5 of the gradient.
    assert error(done.step / done.share, trust.natural_step(whole, config)) < (EXACT if not damping else 1e-4)
    assert sine(done.step, exact.gradient(whole)) > 0.1, "it would be plain gradient ascent"


@pytest.mark.parametrize("max_kl", [1e-6, 1e-4, 1e-2, 0.1, 1.0])
def test_the_exact_kl_keeps_to_its_bound(whole: World, max_kl: float) -> None:
    after = whole.with_policy(trust.run_trpo(whole, Trust(max_kl=max_kl, damping=0.0)).after)
    nats = float(exact.divergence(after, after.old, after.policy).detach()) / a_token(whole)
    assert 0 < nats <= max_kl
    if max_kl < 1e-3:  # where the quadratic model holds, all of the bound is used
        assert nats == pytest.approx(max_kl, rel=0.05)


def test_the_natural_step_does_not_depend_on_how_the_policy_is_written(whole: World) -> None:
    """With every parameter in another unit F⁻¹g moves the probabilities alike, and g does not."""
    J, F = exact.gradient(whole), exact.fisher(whole)
    scale = torch.rand(len(J), generator=torch.Generator().manual_seed(0)).double() + 0.5
    step, rescaled = (
        torch.linalg.pinv(M, rtol=1e-9, hermitian=True) @ g
        for M, g in ((F, J), (scale[:, None] * F * scale, scale * J))
    )
    scores = exact.answer_scores(whole)
    torch.testing.assert_close(scores @ step, scores @ (scale * rescaled), rtol=1e-6, atol=1e-9)
    assert sine(scores @ (scale * scale * J), scores @ J) > 0.01


# ---------------------------------------------------------------------- the bound


def far(world: World, seed: int, size: float) -> World:
    """The world after a random step of this length."""
    g = torch.Generator().manual_seed(seed)
    count = sum(p.numel() for p in world.policy.parameters)
    return world.with_policy(world.policy.shifted(torch.randn(count, generator=g).double() * size))


@pytest.mark.parametrize("size", [1e-3, 0.02, 0.1, 0.5])
def test_no_step_gains_less_than_what_is_sure(either: World, size: float) -> None:
    before = float(exact.objective(either).detach())
    for seed in range(4):
        after = far(either, seed, size)
        gain = float(exact.objective(after).detach()) - before
        assert gain >= exact.guaranteed_gain(either, after.policy) - 1e-12


def test_without_the_divergence_the_surrogate_is_no_bound(either: World) -> None:
    """Or the test above would hold for nothing: L alone is above the gain for some steps."""
    before = float(exact.objective(either).detach())
    steps = [far(either, seed, 0.3) for seed in range(8)]
    gains = [float(exact.objective(after).detach()) - before for after in steps]
    assert any(
        gain < exact.surrogate_gain(either, after.policy) - 1e-3
        for gain, after in zip(gains, steps, strict=True)
    )


def test_the_surrogate_is_the_gain_to_first_order(either: World) -> None:
    before, off = float(exact.objective(either).detach()), []
    for size in (1e-5, 1e-6):
        after = far(either, 1, size)
        gain = float(exact.objective(after).detach()) - before
        off.append(abs(exact.surrogate_gain(either, after.policy) - gain))
    assert off[1] == pytest.approx(off[0] / 100, rel=0.05)


def test_with_one_token_the_surrogate_is_the_gain(short: World) -> None:
    """T (T - 1) = 0: no state's chance depends on the policy."""
    one = World(
        [[0], [1]],
        prompt=short.prompt,
        temperature=short.temperature,
        rewards=torch.tensor([1.0, 0.3]),
        policies=(short.policy, short.old, short.reference),
    )
    gain = float((exact.chances(one, one.old) - exact.chances(one)) @ one.returns)
    assert exact.surrogate_gain(one, one.old) == pytest.approx(gain, abs=1e-12)
    assert exact.guaranteed_gain(one, one.old) == pytest.approx(gain, abs=1e-12)


def test_small_natural_steps_are_sure_to_gain(table: list[TruthRow]) -> None:
    rows = {(r.name, r.quantity): r.number for r in table if r.section.startswith("TRPO")}
    names = {name for name, _ in rows}
    assert len(names) == 5
    for name in names:
        assert rows[name, "off"] < EXACT
        assert rows[name, "KL / δ"] <= 1
        assert rows[name, "sure"] <= rows[name, "gain"]
    assert rows["δ = 1e-06", "sure"] > 0 > rows["δ = 0.1", "sure"]


# ---------------------------------------------------------------------- clipping


def test_002_a_clipped_surrogate_that_rises_is_no_guarantee(short: World) -> None:
    """L^CLIP ≤ L^CPI everywhere, and both may rise while J falls: neither knows which states follow."""
    chances = torch.tensor([[0.43, 0.57], [0.05, 0.95], [0.95, 0.05]]).double()
    other = replace(soft.TabularPolicy.random(short, 0), logits=chances.log()).logp()
    log_ratio, A, d = other - short.cached_logp(short.policy), exact.advantages(short), exact.visits(short)
    clip = float(-(d * surrogate.clipped(log_ratio, A)).sum())
    cpi = float((d * log_ratio.exp() * A).sum())
    gain = float(other.sum(1).exp() @ short.returns - exact.objective(short).detach())
    assert cpi > clip > 0 > gain
    assert float((d * A).sum()) == pytest.approx(0, abs=1e-12)  # what both are at the old policy


def test_the_clip_is_silent_until_a_ratio_leaves_its_range(table: list[TruthRow]) -> None:
    rows = {(r.name, r.quantity): r.number for r in table if r.section.startswith("PPO's second")}
    for nats in ("0.001", "0.01", "0.05", "0.2"):
        free = rows[f"{nats} nats, no clip", "error"]
        quiet = [rows[f"{nats} nats, ε = {e}", "silent"] for e in (0.1, 0.2, 0.3)]
        off = [rows[f"{nats} nats, ε = {e}", "error"] for e in (0.1, 0.2, 0.3)]
        assert quiet == sorted(quiet, reverse=True)
        assert off == sorted(off, reverse=True)
        assert all((q == 0) == (o == pytest.approx(free, rel=1e-12)) for q, o in zip(quiet, off, strict=True))
    assert rows["0.001 nats, ε = 0.1", "silent"] == 0.0
    drift = [rows[f"{nats} nats, no clip", "error"] for nats in ("0.001", "0.01", "0.05", "0.2")]
    assert drift == sorted(drift)
    assert rows["0.2 nats, ε = 0.2", "error"] > 5 * drift[-1]


def test_what_the_clip_leaves_is_the_surrogate_of_the_tokens_that_still_push(short: World) -> None:
    after, epsilon = step_along_gradient(short, 0.05), 0.3
    V, A = exact.state_values(short), exact.returns_to_go(short) - exact.state_values(short)
    ratio = (after.cached_logp(after.policy) - after.cached_logp(after.old)).exp()
    gone = ((A > 0) & (ratio > 1 + epsilon)) | ((A < 0) & (ratio < 1 - epsilon))
    method = replace(LEARNED, surrogate=trust.clip(epsilon))
    found = after.estimate(method, 1, sampler=after.old, value=V).mean
    assert error(found, exact.score(after, ~gone * ratio * A, after.old)) < EXACT
    p = exact.chances(after, after.old)
    share = float(p @ (gone & after.mask).double().sum(1)) / a_token(short)
    assert trust.silent_share(after, method) == pytest.approx(share, rel=1e-12)
    assert 0 < share < 1
    assert trust.silent_share(after, replace(LEARNED, surrogate=trust.clip(math.inf))) == 0.0
