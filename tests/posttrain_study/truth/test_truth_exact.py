"""The oracle against itself: what must hold between J, ∇J, V, Q, A, KL, Fisher matrix and π*."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from posttrain_study.truth import exact
from posttrain_study.truth.comparison import error
from posttrain_study.truth.world import World

EXACT = 1e-10
BETA = 0.3


@pytest.fixture(params=["uneven", "short"])
def paid(request: pytest.FixtureRequest) -> World:
    """A world that pays for each token what its prefix says, the same in every answer with it."""
    world: World = request.getfixturevalue(request.param)
    return world.with_rewards(world.reward + of_states(world, seed=11, behind=True))


def of_states(world: World, seed: int, *, behind: bool = False) -> torch.Tensor:
    """[N, L]: a random number of each state, or of the state behind each token."""
    before, after = exact.shared_prefixes(world)
    same = after if behind else before
    drawn = torch.randn(world.mask.shape, generator=torch.Generator().manual_seed(seed)).double()
    first = same.double().argmax(1)  # the first answer that runs through it lends its number
    return torch.where(world.mask, drawn.gather(0, first), 0.0)


def next_values(world: World, V: torch.Tensor) -> torch.Tensor:
    """V of the state behind each token, 0 at the end."""
    return torch.cat([V[:, 1:], torch.zeros_like(V[:, :1])], 1)


@pytest.mark.parametrize("discount", [1.0, 0.7])
def test_bellmans_equations_hold(paid: World, discount: float) -> None:
    V, Q = exact.state_values(paid, discount), exact.action_values(paid, discount)
    torch.testing.assert_close(Q, paid.reward + discount * next_values(paid, V), rtol=0, atol=1e-12)
    assert float((V[:, 0] - exact.objective(paid, discount).detach()).abs().max()) < 1e-12
    # V(s) = Σ_a π(a | s) Q(s, a): a state's tokens are met as often as the policy draws them.
    before, _ = exact.shared_prefixes(paid)
    p = exact.chances(paid)[None, :, None] * before
    mean = (p * Q[None]).sum(1) / p.sum(1).clamp(min=1e-300)
    torch.testing.assert_close(mean, V, rtol=0, atol=1e-12)


def test_the_gradient_is_the_scores_weighed_by_any_psi(paid: World) -> None:
    """Total return, reward to go, Q, A, and G less any number of the state: notes E's forms of Ψ."""
    truth, G = exact.gradient(paid), exact.returns_to_go(paid)
    total = G[:, :1].expand_as(G)
    forms = (total, G, exact.action_values(paid), exact.advantages(paid), G - of_states(paid, seed=3))
    for psi in forms:
        assert error(exact.score(paid, psi * paid.mask), truth) < EXACT
    # A number of the token itself is no baseline.
    assert error(exact.score(paid, G - of_states(paid, seed=3, behind=True)), truth) > 0.05


def test_less_that_cannot_matter_is_less_variance(paid: World) -> None:
    G = exact.returns_to_go(paid)
    best, V = exact.token_baselines(paid), exact.state_values(paid)
    assert exact.trace_of_covariance(paid, G - best) < exact.trace_of_covariance(paid, G)
    # E[(G - V)² | s, a] = A² + Var(G | s, a) at each token. Tokens of an answer correlate, so that their
    # sum can vary less with G - V than with A all the same.
    weight = exact.visits(paid) * exact.token_scores(paid).square().sum(-1)
    assert float((weight * exact.advantages(paid).square()).sum()) < float((weight * (G - V).square()).sum())


def test_the_best_constant_is_the_best(paid: World) -> None:
    R = paid.returns[:, None]
    b = exact.constant_baseline(paid)
    least = exact.trace_of_covariance(paid, (R - b) * paid.mask)
    for other in (0.0, float(exact.objective(paid).detach()), b - 0.01, b + 0.01):
        assert least < exact.trace_of_covariance(paid, (R - other) * paid.mask)


def test_the_best_number_of_a_state_is_the_best_for_a_token(short: World) -> None:
    best, g = exact.token_baselines(short), exact.token_scores(short).square().sum(-1)
    weight, G = exact.visits(short) * g, exact.returns_to_go(short)
    least = (weight * (G - best).square()).sum()
    sums = []
    for step in (-0.01, 0.01):
        for seed in range(3):
            moved = best + step * of_states(short, seed)
            assert float((weight * (G - moved).square()).sum()) > float(least)
            sums.append(exact.trace_of_covariance(short, G - moved))
    # The tokens of an answer correlate: for their sum there is something better.
    assert min(sums) < exact.trace_of_covariance(short, G - best)
    assert float((weight * (G - exact.state_values(short)).square()).sum()) > float(least)


def test_nothing_beats_the_optimal_policy(either: World) -> None:
    ref = exact.chances(either, either.reference)

    def objective(q: torch.Tensor) -> float:
        return float(q @ (either.returns - BETA * (q / ref).log()))

    best = exact.optimal_policy(either, BETA)
    assert float(best.sum()) == pytest.approx(1, abs=1e-12)
    assert objective(best) == pytest.approx(float(exact.optimal_value(either, BETA)), abs=1e-12)
    assert objective(best) > max(objective(ref), objective(exact.chances(either)))
    for seed in range(20):
        away = torch.randn(len(best), generator=torch.Generator().manual_seed(seed)).double()
        for size in (1e-3, 0.1, 1.0):
            assert objective((best.log() + size * away).softmax(0)) < objective(best)


def test_its_next_tokens_follow_from_soft_values(paid: World) -> None:
    """π*(a | s) = π_ref(a | s) exp((r + V*(s') - V*(s)) / β), and β log Z is V* of the start."""
    V = exact.soft_values(paid, BETA)
    steps = paid.cached_logp(paid.reference) + (paid.reward + next_values(paid, V) - V) / BETA
    conditionals = exact.conditionals(paid, exact.optimal_policy(paid, BETA))
    torch.testing.assert_close(steps * paid.mask, conditionals, rtol=0, atol=1e-10)
    torch.testing.assert_close(V[:, 0], exact.optimal_value(paid, BETA).expand(len(V)), rtol=0, atol=1e-12)


def test_conditionals_of_the_policy_are_the_policy(either: World) -> None:
    found = exact.conditionals(either, exact.chances(either))
    torch.testing.assert_close(found, either.cached_logp(either.policy), rtol=0, atol=1e-12)


def test_the_divergence_of_answers_is_that_of_the_states(either: World) -> None:
    ours, theirs = (either.step_log_probs(p) for p in (either.policy, either.reference))
    by_state = (exact.visits(either) * (ours.exp() * (ours - theirs)).sum(-1)).sum()
    torch.testing.assert_close(exact.divergence(either), by_state)
    assert float(exact.divergence(either, either.policy, either.policy).detach()) == 0


def test_fisher_is_the_hessian_of_the_divergence(short: World) -> None:
    """∇²_θ KL(π_old ‖ π_θ) at θ_old, and of KL(π_θ ‖ π_old) there: the whole matrix, 148 × 148."""
    F, old = exact.fisher(short), short.cached_logp(short.policy)
    with sdpa_kernel(SDPBackend.MATH):  # the only one that can be differentiated twice
        logp = short.logp(short.policy)
    for value in (
        -(old.sum(1).exp() * logp).sum(),  # KL(π_old ‖ π) less its constant
        (logp.exp() * (logp - old.sum(1))).sum(),
    ):
        first = torch.autograd.grad(value, short.policy.parameters, create_graph=True)
        flat = torch.cat([g.flatten() for g in first])
        hessian = torch.stack([short.policy.gradient(x, keep=True) for x in flat])
        assert error(hessian, F) < 1e-9


def test_fisher_is_the_sum_over_states(uneven: World) -> None:
    """E[s sᵀ] of the answer's score is Σ_t E[s_t s_tᵀ]: scores of different tokens do not correlate."""
    scores, weight = exact.token_scores(uneven), exact.visits(uneven)
    by_state = torch.einsum("nt,ntp,ntq->pq", weight, scores, scores)
    assert error(by_state, exact.fisher(uneven)) < EXACT


def test_the_scores_of_the_learner_are_those_of_transformers(uneven: World) -> None:
    by_learner, _ = uneven.scores()
    assert error(by_learner, exact.token_scores(uneven)) < EXACT
