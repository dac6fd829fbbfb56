"""The numbers and statements of the seeds that docs/errata.md corrects, computed."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from posttrain.math import advantages, kl, reduce, returns, surrogate, value
from posttrain.methods.table import GRPO, LEARNED, REINFORCE, RLOO
from posttrain_study.truth import exact
from posttrain_study.truth.comparison import error, sine
from posttrain_study.truth.world import World

EXACT = 1e-10
ONE_GROUP = torch.zeros(4, dtype=torch.long)


def critic(world: World, size: float) -> torch.Tensor:
    """V + size · (V of another policy - V): wrong by so much."""
    V, other = exact.state_values(world), exact.state_values(world.with_policy(world.old))
    return V + size * (other - V)


def test_002_the_worked_example_of_grpo() -> None:
    R = torch.tensor([0.2, 0.8, 0.5, 0.1], dtype=torch.float64)
    assert float(R.mean()) == pytest.approx(0.4)
    assert float(R.std(correction=0)) == pytest.approx(0.2739, abs=5e-5)
    assert float(R.std(correction=1)) == pytest.approx(0.3162, abs=5e-5)
    expected = (R - 0.4) / R.std(correction=0)
    torch.testing.assert_close(advantages.normalised(R, ONE_GROUP), expected, rtol=1e-5, atol=0)


def test_000_k3_has_the_reference_above() -> None:
    gaps = torch.tensor([[0.1, -0.5, 0.1, 1.2]], dtype=torch.float64)
    right = kl.k3(gaps, torch.zeros_like(gaps))
    torch.testing.assert_close(
        right, torch.tensor([[0.0048, 0.1487, 0.0048, 0.5012]]).double(), atol=5e-5, rtol=0
    )
    upside_down = gaps.exp() - 1 - gaps
    printed = torch.tensor([[0.005, 0.132, 0.005, 0.515]]).double()
    for other in (right, upside_down):
        assert float((other - printed).abs().max()) > 0.01


def test_000_upside_down_k3_is_biased(uneven: World) -> None:
    p, q = (exact.chances(uneven, policy) for policy in (uneven.policy, uneven.reference))
    whole = float((p * (p / q).log()).sum())
    assert float((p * (q / p - 1 - (q / p).log())).sum()) == pytest.approx(whole, abs=1e-12)
    assert abs(float((p * (p / q - 1 - (p / q).log())).sum()) / whole - 1) > 0.5


def test_000_clipping_bounds_a_gradient_and_no_ratio() -> None:
    logp = torch.tensor([[0.0]], dtype=torch.float64, requires_grad=True)
    for step in range(3):  # one token's weight moves others: the ratio has left the range all the same
        far = logp + 0.5 + step
        [g] = torch.autograd.grad(surrogate.clipped(far, torch.ones(1, 1).double()).sum(), logp)
        assert float(g) == 0
        assert float(far.detach().exp()) > 1.2


def test_000_the_second_clip_case() -> None:
    logp = torch.tensor([[math.log(0.4)]], dtype=torch.float64, requires_grad=True)
    loss = surrogate.clipped(logp, torch.tensor([[-0.8]], dtype=torch.float64))
    assert float(-loss.detach()) == pytest.approx(-0.64)
    assert float(torch.autograd.grad(loss.sum(), logp)[0]) == 0


def test_002_and_003_the_sum_of_gae(uneven: World) -> None:
    """With (γλ)^l, l up to T - 1 - t, it telescopes to G - V at λ = 1; with γ^l alone λ has no say."""
    V, gamma = critic(uneven, 1.0), 0.9
    after = torch.cat([V[:, 1:], torch.zeros_like(V[:, :1])], 1)
    path = returns.Path(uneven.reward, uneven.mask, V)
    delta = (uneven.reward + gamma * after - V) * uneven.mask
    for lam in (0.0, 0.5, 1.0):
        summed = torch.zeros_like(delta)
        for t in range(uneven.length):
            for k in range(uneven.length - t):
                summed[:, t] += (gamma * lam) ** k * delta[:, t + k]
        torch.testing.assert_close(returns.gae(path, gamma, lam)[0], summed)
    full = returns.gae(path, gamma, 1.0)[0]
    torch.testing.assert_close(full, (exact.returns_to_go(uneven, gamma) - V) * uneven.mask)
    without_gamma = (uneven.reward + after - V) * uneven.mask  # 002's δ̃
    assert float((without_gamma - delta).abs().max()) > 0.01


def test_003_reward_to_go_starts_at_t(uneven: World) -> None:
    """From t' = 1 it is the whole return: also unbiased, and noisier."""
    early = uneven.mask * torch.tensor([1.0, 0.5, 0.2], dtype=torch.float64)
    paid = uneven.with_rewards(uneven.reward + early)
    to_go, J = exact.returns_to_go(paid), exact.gradient(paid)
    whole = to_go[:, :1] * paid.mask
    assert error(exact.score(paid, to_go), J) < EXACT
    assert error(exact.score(paid, whole), J) < EXACT
    assert exact.trace_of_covariance(paid, to_go) < exact.trace_of_covariance(paid, whole)


def test_001_one_over_length_favours_length_among_wrong_answers_only() -> None:
    weight = reduce.per_sequence(torch.tensor([[True, True, True, True], [True, False, False, False]]))
    for A in (1.0, -1.0):
        push = A * weight  # on each token's log-probability
        long, short = push[0, 0], push[1, 0]
        assert bool(short > long) == (A > 0)


def test_002_the_divergence_is_the_cross_entropy_less_the_entropy(uneven: World) -> None:
    p, log_q = exact.chances(uneven, uneven.reference), uneven.cached_logp(uneven.policy).sum(1)
    cross_entropy, entropy = float(-(p * log_q).sum()), float(-(p * p.log()).sum())
    whole = float(exact.divergence(uneven, uneven.reference, uneven.policy).detach())
    assert whole == pytest.approx(cross_entropy - entropy, abs=1e-12)
    assert abs(whole - (cross_entropy + entropy)) > 1


def test_002_the_bias_of_gae_falls_with_lambda(short: World) -> None:
    """O((1 - λ) ‖V_φ - V‖): in proportion to what V is off by, largest at λ = 0, none at λ = 1."""
    J = exact.gradient(short)

    def bias(lam: float, size: float) -> torch.Tensor:
        method = replace(LEARNED, estimator=partial(returns.gae, lam=lam))
        return short.estimate(method, 1, value=critic(short, size)).mean - J

    sizes = [float(bias(lam, 1.0).norm()) for lam in (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < EXACT < sizes[-2]
    for lam in (0.0, 0.5):
        torch.testing.assert_close(bias(lam, 2.0), 2 * bias(lam, 1.0), rtol=1e-9, atol=1e-12)
    assert sizes[0] > 0.1  # where O(λ ‖V_φ - V‖) would be 0


def test_002_shaping_needs_a_potential_that_ends_at_0(uneven: World) -> None:
    """Σ γ^t r'_t is shifted by γ^T Φ(s_T) - Φ(s_0): a number of the answer, unless Φ is 0 at its end."""
    before, _ = exact.shared_prefixes(uneven)
    drawn = torch.randn(uneven.mask.shape, generator=torch.Generator().manual_seed(2)).double()
    potential = torch.where(uneven.mask, drawn.gather(0, before.double().argmax(1)), 0.0)
    at_end = torch.randn(len(uneven.answers), generator=torch.Generator().manual_seed(3)).double()
    gamma, last = 0.9, uneven.mask.sum(1) - 1

    def shaped(end: torch.Tensor, discount: float) -> World:
        after = torch.cat([potential[:, 1:], torch.zeros_like(potential[:, :1])], 1)
        after = after.scatter(1, last[:, None], end[:, None])
        return uneven.with_rewards((uneven.reward + discount * after - potential) * uneven.mask)

    plain, left = exact.returns_to_go(uneven, gamma)[:, 0], potential[0, 0]
    shift = exact.returns_to_go(shaped(at_end, gamma), gamma)[:, 0] - plain
    torch.testing.assert_close(shift, gamma ** (last + 1).double() * at_end - left)
    kept, bent = shaped(torch.zeros_like(at_end), 1.0), shaped(at_end, 1.0)
    best = exact.optimal_policy(uneven, 0.3)
    torch.testing.assert_close(exact.optimal_policy(kept, 0.3), best)
    assert float((exact.optimal_policy(bent, 0.3) - best).abs().max()) > 0.05
    assert error(exact.gradient(kept), exact.gradient(uneven)) < EXACT


def test_002_the_memory_of_lora() -> None:
    layers, rank, width = 80, 16, 8192
    parameters = 12 * layers * rank * width
    assert parameters == 125_829_120
    assert 2 * 4 * parameters / 1e9 == pytest.approx(1.0, abs=0.01)  # two float32 numbers each, not 4 GB


def test_004_both_directions_of_the_divergence_have_one_curvature(short: World) -> None:
    """TRPO's bound is on KL(π_old ‖ π). To second order the other is the same, and not beyond."""
    direction = exact.gradient(short)
    direction = direction / direction.norm()

    def both(size: float) -> tuple[float, float]:
        after = short.with_policy(short.policy.shifted(direction * size))
        one = exact.divergence(after, after.old, after.policy)
        other = exact.divergence(after, after.policy, after.old)
        return float(one.detach()), float(other.detach())

    curve = float(direction @ exact.fisher(short) @ direction)
    near, far = both(1e-4), both(0.2)
    assert near[0] == pytest.approx(curve * 1e-8 / 2, rel=0.01)
    assert near[1] == pytest.approx(near[0], rel=0.01)
    assert abs(far[1] / far[0] - 1) > 0.02


def test_000_and_002_what_is_maximised_is_no_loss(short: World) -> None:
    """The loss that the learner descends has the other sign: its descent raises J."""
    for method in (GRPO, RLOO):
        g = -short.group_gradients(method, short.groups(4))
        assert float(short.probabilities(4) @ g @ exact.gradient(short)) > 0


def test_000_reinforce_pp_tends_to_the_gradient_over_the_deviation(short: World) -> None:
    p, R, J = exact.chances(short), short.returns, exact.gradient(short)
    sigma = float((p @ R.square() - (p @ R) ** 2).sqrt())
    off = []
    for size in (2, 4, 8, 12):
        mean = short.estimate(replace(REINFORCE, credit=advantages.batch_normalised), size).mean
        off.append((error(mean, J / sigma), error(mean, J)))
    assert [a for a, _ in off] == sorted((a for a, _ in off), reverse=True)
    assert off[-1][0] < 0.1
    assert off[-1][1] > 1


def test_000_a_monotonic_transformation_is_another_reward(uneven: World) -> None:
    R = uneven.returns

    def preferences(x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x[:, None] - x)  # Bradley-Terry

    best = exact.optimal_policy(uneven, 0.5)
    for transformed, same in ((R + 3.0, True), (R**3, False), (2 * R, False), (R.exp(), False)):
        assert bool((transformed.argsort() == R.argsort()).all())  # each keeps every ranking
        assert torch.allclose(preferences(transformed), preferences(R)) == same
        assert torch.allclose(exact.optimal_policy(uneven.with_rewards(transformed), 0.5), best) == same


def test_000_k3_is_unbiased_on_samples_of_the_policy_only(uneven: World) -> None:
    ours, theirs = (uneven.cached_logp(p) for p in (uneven.policy, uneven.reference))
    whole = float(exact.divergence(uneven).detach())
    for estimator in (kl.k1, kl.k3):
        terms = (estimator(ours, theirs) * uneven.mask).sum(1)
        assert float(exact.chances(uneven) @ terms) == pytest.approx(whole, abs=1e-12)
        assert abs(float(exact.chances(uneven, uneven.old) @ terms) / whole - 1) > 0.1


def test_000_k3_varies_less_than_k1_near_the_reference_only() -> None:
    def spread(p: torch.Tensor, q: torch.Tensor) -> float:
        """Var k3 / Var k1 over tokens of p."""
        found = [f(p.log()[None], q.log()[None])[0] for f in (kl.k3, kl.k1)]
        k3, k1 = (float(p @ x.square() - (p @ x) ** 2) for x in found)
        return k3 / k1

    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    assert spread(p, torch.tensor([0.49, 0.31, 0.2], dtype=torch.float64)) < 0.01
    rare = torch.tensor([0.001, 0.499, 0.5], dtype=torch.float64)
    assert spread(rare, torch.tensor([0.9, 0.05, 0.05], dtype=torch.float64)) > 10


def test_000_discounted_returns_need_the_power_of_gamma(uneven: World) -> None:
    """∇J_γ = E[Σ γ^t G_t ∇log π]; Σ G_t ∇log π without γ^t is the gradient of nothing here."""
    gamma = 0.5
    early = uneven.mask * torch.tensor([0.3, -0.4, 0.6], dtype=torch.float64)
    paid = uneven.with_rewards(uneven.reward + early)
    G, J = exact.returns_to_go(paid, gamma), exact.gradient(paid, gamma)
    powers = gamma ** torch.arange(paid.length, dtype=torch.float64)
    assert error(exact.score(paid, powers * G), J) < EXACT
    assert sine(exact.score(paid, G), J) > 0.05


def test_002_the_group_mean_takes_its_share(short: World) -> None:
    for size in (2, 3, 5):
        mean = short.estimate(replace(REINFORCE, credit=advantages.centred), size).mean
        assert error(mean, exact.gradient(short) * (size - 1) / size) < EXACT


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_002_expert_iteration_is_no_limit_of_grpo(p: float) -> None:
    """Expert iteration gives a success weight 1 whatever the task; GRPO's tends to √((1 - p)/p)."""
    R = (torch.arange(1000) < 1000 * p).double()
    A = advantages.normalised(R, torch.zeros(1000, dtype=torch.long))
    assert float(A[0]) == pytest.approx(math.sqrt((1 - p) / p), rel=1e-3)
    assert (abs(float(A[0]) - 1) < 0.01) == (p == 0.5)


def test_000_and_002_three_means_of_supervised_fine_tuning() -> None:
    """A sum, a mean over tokens, a mean of answers' means: no two are multiples of one another."""
    mask = torch.tensor([[True, True, True], [True, False, False]])
    tokens, answers, total = reduce.per_token(mask), reduce.per_sequence(mask), mask.double()
    torch.testing.assert_close(tokens * mask.sum(), total)
    assert float(answers[1, 0] / answers[0, 0]) == pytest.approx(3)
    assert float(tokens[1, 0] / tokens[0, 0]) == pytest.approx(1)


def test_001_the_value_loss_has_a_half() -> None:
    V = torch.tensor([[1.0]], requires_grad=True)
    loss = value.squared(V, torch.tensor([[3.0]]), torch.zeros(1, 1))
    assert float(loss.detach()) == 2.0
    assert float(torch.autograd.grad(loss.sum(), V)[0]) == -2.0  # V - target, without a factor 2
