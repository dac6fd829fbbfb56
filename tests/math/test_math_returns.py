"""returns: each Ψ_t against its paper's sum or recursion in plain Python, over episodes with holes."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from posttrain.math import returns
from posttrain.math.returns import Path
from posttrain.types import worth

Column = list[float]
SEEDS = range(3)
GAMMAS = [0.0, 0.7, 1.0]
CRITICS: dict[str, Callable[..., returns.Credited]] = {
    "monte_carlo": returns.monte_carlo,
    "td": returns.td,
    "n_step": returns.n_step,
    "gae": returns.gae,
    "decoupled_gae": returns.decoupled_gae,
    "vtrace": returns.vtrace,
}


def make(seed: int, B: int = 6, T: int = 9, off_policy: float = 0.8) -> Path:
    """Episodes whose sampled tokens have others between them; row 0 has none, row 1 one, row 2 all."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(B, T, generator=g) < 0.6
    mask[0], mask[1], mask[2] = False, False, True
    mask[1, 4] = True

    def normal() -> torch.Tensor:
        return torch.randn(B, T, generator=g, dtype=torch.float64)

    return Path(normal(), mask, normal(), off_policy * normal())


def steps(path: Path, row: int, column: torch.Tensor | None) -> Column:
    """The entries of the sampled tokens of a row, as the paper numbers them."""
    assert column is not None
    return [float(x) for x, on in zip(column[row], path.mask[row], strict=True) if on]


def compare(path: Path, got: torch.Tensor, formula: Callable[[int], Column]) -> None:
    """Equal to the formula at the sampled tokens of each row, and exactly 0 elsewhere."""
    for row in range(len(path.mask)):
        assert steps(path, row, got) == pytest.approx(formula(row), rel=1e-9, abs=1e-9)
    assert not got[~path.mask].any()
    assert path.mask.any(-1).tolist() == [False] + [True] * (len(path.mask) - 1)


def at(x: Column, t: int) -> float:
    return x[t] if t < len(x) else 0.0


def deltas(r: Column, V: Column, gamma: float) -> Column:
    """δ_t = r_t + γ V_{t+1} - V_t, and nothing is worth anything behind the last token."""
    return [r[t] + gamma * at(V, t + 1) - V[t] for t in range(len(r))]


# ---------------------------------------------------------------- sums of rewards


@pytest.mark.parametrize("seed", SEEDS)
def test_total_is_the_sum_and_to_go_the_discounted_sum_of_what_is_left(seed: int) -> None:
    path = make(seed)

    def whole(row: int) -> Column:
        r = steps(path, row, path.reward)
        return [math.fsum(r)] * len(r)

    for function in (returns.total, returns.total_by_token):
        compare(path, function(path), whole)
    for gamma in GAMMAS:

        def left(row: int, gamma: float = gamma) -> Column:
            r = steps(path, row, path.reward)
            return [math.fsum(gamma**k * x for k, x in enumerate(r[t:])) for t in range(len(r))]

        compare(path, returns.to_go(path, gamma), left)


PARTS = st.lists(st.floats(-3, 3), max_size=8)


@given(total=st.one_of(st.just(0.0), st.floats(-3, 3)), ways=st.lists(PARTS, min_size=1, max_size=4))
@settings(max_examples=200, deadline=None)
def test_potentials_cancel_whatever_they_were(total: float, ways: list[Column]) -> None:
    """An answer that is judged by steps is worth its score, to the bit, in a batch and in an episode."""
    assume(all(abs(x) > 1e-3 or x == 0 for x in (total, *itertools.chain(*ways))))
    T = 1 + max(map(len, ways))
    paid = [[b - a for a, b in itertools.pairwise([0.0, *way, total])] for way in ways]
    reward = torch.tensor([row + [math.nan] * (T - len(row)) for row in paid], dtype=torch.float64)
    R = returns.worth(reward, ~reward.isnan(), like=torch.zeros(1))
    assert R.tolist() == [float(torch.tensor(total))] * len(ways)
    assert torch.equal(R, torch.tensor([worth(row) for row in paid]))
    wanted = worth([total])
    assert {worth(row) for row in paid} == {wanted}
    assert returns.to_go(Path(reward, ~reward.isnan())).float()[:, 0].tolist() == R.tolist()


def test_a_small_return_is_no_rounding() -> None:
    """Only what its own parts may have left by rounding is 0."""
    reward = torch.tensor([[1e-30, 0.0], [1.0, 1e-12 - 1.0]], dtype=torch.float64)
    R = returns.worth(reward, torch.ones(2, 2, dtype=torch.bool), like=reward)
    assert R.tolist() == pytest.approx([1e-30, 1e-12], rel=1e-3)
    assert [worth(row) for row in reward.tolist()] == pytest.approx(R.tolist(), rel=1e-6)


def potentials(seed: int) -> tuple[Path, torch.Tensor, torch.Tensor]:
    """Episodes that are paid what a potential gains; their scores, and Φ of the state before each token."""
    path = make(seed)
    score, before = torch.randn(len(path.mask)).double(), torch.zeros_like(path.reward)
    reward = torch.full_like(path.reward, math.nan)
    for row, mask in enumerate(path.mask):
        places = mask.nonzero().flatten().tolist()
        before[row, places[1:]] = path.reward[row, places[1:]]
        for t, after in itertools.zip_longest(places, places[1:]):
            reward[row, t] = (score[row] if after is None else before[row, after]) - before[row, t]
    return path._replace(reward=reward), score, before


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("gamma", GAMMAS)
def test_a_discount_within_the_potentials_leaves_the_score_less_that_of_the_state(
    seed: int, gamma: float
) -> None:
    """G_t = γ^{T-t} score - Φ(s_t): of two ways on from a state, that of the higher score is better."""
    torch.manual_seed(seed)
    path, score, before = potentials(seed)
    made = path._replace(reward=returns.shaped(path.reward, path.mask, gamma))

    def wanted(row: int) -> Column:
        phi = steps(path, row, before)
        return [gamma ** (len(phi) - 1 - t) * float(score[row]) - phi[t] for t in range(len(phi))]

    compare(made, returns.to_go(made, gamma), wanted)
    # A critic learns V - Φ, and with it advantages are those of the score alone and V.
    last = path.mask & (path.mask.cumsum(1) == path.mask.sum(1, keepdim=True))
    plain = path._replace(reward=last * score[:, None])
    assert path.value is not None
    taught = made._replace(value=path.value - before)
    for credit in (returns.monte_carlo, returns.td, returns.gae):
        torch.testing.assert_close(credit(taught, gamma)[0], credit(plain, gamma)[0])
    assert torch.equal(returns.shaped(plain.reward, path.mask, gamma), plain.reward)


def test_discounted_differences_of_a_potential_prefer_another_answer() -> None:
    """The worse of two equally long answers wins by standing high, unless its pay knows the discount."""
    paid = torch.tensor([[0.9, 0.0, -0.1], [0.0, 0.0, 1.0]]).double()  # scores 0.8 and 1
    mask = torch.ones(2, 3, dtype=torch.bool)
    bent = returns.to_go(Path(paid, mask), 0.5)[:, 0]
    right = returns.to_go(Path(returns.shaped(paid, mask, 0.5), mask), 0.5)[:, 0]
    assert bent[0] > bent[1]
    assert right.tolist() == pytest.approx([0.2, 0.25])


def test_what_a_user_says_between_two_tokens_takes_no_time() -> None:
    """Four tokens are as far apart with others between them as without."""
    close = Path(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.ones(1, 4, dtype=torch.bool))
    apart = Path(
        torch.tensor([[9.0, 1.0, 9.0, 9.0, 2.0, 3.0, 9.0, 4.0, 9.0]]),
        torch.tensor([[False, True, False, False, True, True, False, True, False]]),
    )
    assert torch.equal(returns.to_go(apart, 0.5)[apart.mask], returns.to_go(close, 0.5)[0])


# ---------------------------------------------------------------- with a critic


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("lam", [0.0, 0.4, 0.95, 1.0])
def test_gae_is_the_papers_sum(seed: int, gamma: float, lam: float) -> None:
    """Σ_l (γλ)^l δ_{t+l}, and as the average of the k-step advantages of which eq. 16 is the limit."""
    path = make(seed)

    def formula(row: int) -> Column:
        delta = deltas(steps(path, row, path.reward), steps(path, row, path.value), gamma)
        return [
            math.fsum((gamma * lam) ** l * delta[t + l] for l in range(len(delta) - t))  # noqa: E741
            for t in range(len(delta))
        ]

    def averaged(row: int) -> Column:
        """(1 - λ)(A¹ + λ A² + ...), A^k = Σ_{l<k} γ^l δ_{t+l}; behind the end all A^k are the last one."""
        delta = deltas(steps(path, row, path.reward), steps(path, row, path.value), gamma)
        out = []
        for t in range(len(delta)):
            n = len(delta) - t
            k_step = [math.fsum(gamma**l * delta[t + l] for l in range(k)) for k in range(1, n + 1)]  # noqa: E741
            weights = [(1 - lam) * lam ** (k - 1) for k in range(1, n)] + [lam ** (n - 1)]
            out.append(math.fsum(w * A for w, A in zip(weights, k_step, strict=True)))
        return out

    advantage, target = returns.gae(path, gamma, lam)
    compare(path, advantage, formula)
    compare(path, advantage, averaged)
    assert path.value is not None
    torch.testing.assert_close(target, torch.where(path.mask, advantage + path.value, 0.0))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("gamma", GAMMAS)
def test_the_ends_of_gae_and_of_n_step(seed: int, gamma: float) -> None:
    path = make(seed)
    td, monte_carlo = returns.td(path, gamma), returns.monte_carlo(path, gamma)
    for one, other in (
        (returns.gae(path, gamma, 0.0), td),
        (returns.gae(path, gamma, 1.0), monte_carlo),
        (returns.n_step(path, gamma, 1), td),
        (returns.n_step(path, gamma, 9), monte_carlo),
        (returns.n_step(path, gamma, 50), monte_carlo),
    ):
        torch.testing.assert_close(one, other)
    if gamma:
        assert not torch.allclose(td[0], monte_carlo[0])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("gamma", GAMMAS)
def test_decoupled_gae_has_a_lambda_for_each(seed: int, gamma: float) -> None:
    """Of one λ it is gae to the bit; the critic's target of λ = 1 is the return, whatever V is."""
    path = make(seed)
    for lam in (0.0, 0.6, 1.0):
        for one, other in zip(
            returns.decoupled_gae(path, gamma, lam, lam), returns.gae(path, gamma, lam), strict=True
        ):
            assert torch.equal(one, other)
    advantage, target = returns.decoupled_gae(path, gamma, 0.6)
    assert torch.equal(advantage, returns.gae(path, gamma, 0.6)[0])
    torch.testing.assert_close(target, returns.to_go(path, gamma))
    share = 0.9
    _, nearer = returns.decoupled_gae(path, gamma, 0.6, share)

    def weighed(row: int) -> Column:
        """V_t + Σ_k (γ λ)^k δ_{t+k}."""
        V = steps(path, row, path.value)
        delta = deltas(steps(path, row, path.reward), V, gamma)
        return [
            V[t] + math.fsum((gamma * share) ** k * delta[t + k] for k in range(len(V) - t))
            for t in range(len(V))
        ]

    compare(path, nearer, weighed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_n_step_looks_n_ahead(seed: int, gamma: float, n: int) -> None:
    path = make(seed)

    def target(row: int) -> Column:
        r, V = steps(path, row, path.reward), steps(path, row, path.value)
        return [
            math.fsum(gamma**k * at(r, t + k) for k in range(n)) + gamma**n * at(V, t + n)
            for t in range(len(r))
        ]

    def advantage(row: int) -> Column:
        return [G - V for G, V in zip(target(row), steps(path, row, path.value), strict=True)]

    got = returns.n_step(path, gamma, n)
    compare(path, got[0], advantage)
    compare(path, got[1], target)


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("name", CRITICS)
def test_the_values_of_the_rewards_themselves_leave_no_advantage(name: str, gamma: float) -> None:
    """V_t = G_t of the very path: every δ is 0, and every target is V itself."""
    path = make(7, off_policy=0.0)
    path = path._replace(value=returns.to_go(path, gamma))
    advantage, target = CRITICS[name](path, gamma)
    torch.testing.assert_close(advantage, torch.zeros_like(advantage), atol=1e-12, rtol=0)
    torch.testing.assert_close(target, path.value)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("gamma", [0.7, 1.0])
def test_potential_shaping_telescopes(seed: int, gamma: float) -> None:
    """r_t + γ Φ(s_{t+1}) - Φ(s_t), Φ = 0 behind the end, changes every G_t by -Φ(s_t) and no advantage.

    The last holds for a critic that knows of it: V - Φ.
    """
    path = make(seed)
    assert path.value is not None
    potential = torch.randn(path.mask.shape, generator=torch.Generator().manual_seed(seed)).double()
    shaped = path.reward.clone()
    for row in range(len(path.mask)):
        places = path.mask[row].nonzero().flatten().tolist()
        for n, t in enumerate(places):
            ahead = potential[row, places[n + 1]] if n + 1 < len(places) else 0.0
            shaped[row, t] += gamma * ahead - potential[row, t]
    change = returns.to_go(path._replace(reward=shaped), gamma) - returns.to_go(path, gamma)
    torch.testing.assert_close(change, torch.where(path.mask, -potential, 0.0))
    knows = path._replace(reward=shaped, value=path.value - potential)
    for function in CRITICS.values():
        torch.testing.assert_close(function(knows, gamma)[0], function(path, gamma)[0])


# ---------------------------------------------------------------- drawn by another policy


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("gamma", [0.7, 1.0])
@pytest.mark.parametrize(
    ("lam", "rho_cap", "c_cap"), [(1.0, 1.0, 1.0), (0.9, 2.0, 0.5), (0.0, 1.0, 1.0), (1.0, math.inf, 3.0)]
)
def test_vtrace_is_its_recursive_definition(
    seed: int, gamma: float, lam: float, rho_cap: float, c_cap: float
) -> None:
    """v_s = V_s + δ_s + γ c_s (v_{s+1} - V_{s+1}), IMPALA, remark 1; and the sum of eq. 1 itself."""
    path = make(seed)

    def weights(row: int) -> tuple[Column, Column]:
        w = [math.exp(x) for x in steps(path, row, path.log_weight)]
        return [min(rho_cap, x) for x in w], [lam * min(c_cap, x) for x in w]

    def recursive(row: int) -> Column:
        r, V = steps(path, row, path.reward), steps(path, row, path.value)
        (rho, c), v = weights(row), [0.0] * len(r)
        for s in reversed(range(len(r))):
            delta = rho[s] * (r[s] + gamma * at(V, s + 1) - V[s])
            v[s] = V[s] + delta + gamma * c[s] * (at(v, s + 1) - at(V, s + 1))
        return v

    def summed(row: int) -> Column:
        r, V = steps(path, row, path.reward), steps(path, row, path.value)
        (rho, c), n = weights(row), len(r)
        delta = [rho[t] * (r[t] + gamma * at(V, t + 1) - V[t]) for t in range(n)]
        return [
            V[s] + math.fsum(gamma ** (t - s) * math.prod(c[s:t]) * delta[t] for t in range(s, n))
            for s in range(n)
        ]

    def advantage(row: int) -> Column:
        r, V, v = steps(path, row, path.reward), steps(path, row, path.value), recursive(row)
        rho, _ = weights(row)
        return [rho[t] * (r[t] + gamma * at(v, t + 1) - V[t]) for t in range(len(r))]

    got = returns.vtrace(path, gamma, lam, rho_cap=rho_cap, c_cap=c_cap)
    compare(path, got[1], recursive)
    compare(path, got[1], summed)
    compare(path, got[0], advantage)


@pytest.mark.parametrize("gamma", [0.7, 1.0])
def test_vtrace_of_the_policy_itself(gamma: float) -> None:
    """Without a λ it is monte_carlo, and its targets with one are the λ-returns of gae."""
    path = make(3, off_policy=0.0)
    torch.testing.assert_close(returns.vtrace(path, gamma), returns.monte_carlo(path, gamma))
    torch.testing.assert_close(returns.vtrace(path, gamma, 0.6)[1], returns.gae(path, gamma, 0.6)[1])


def test_vtrace_caps_are_absolute_and_bound_above_alone() -> None:
    path = make(4)
    assert path.log_weight is not None
    above = path._replace(log_weight=path.log_weight.abs() + 1.0)
    as_itself = path._replace(log_weight=torch.zeros_like(path.reward))
    torch.testing.assert_close(returns.vtrace(above, 0.9), returns.vtrace(as_itself, 0.9))
    never = path._replace(log_weight=torch.full_like(path.reward, -torch.inf))
    advantage, target = returns.vtrace(never, 0.9)
    assert not advantage.any()
    assert path.value is not None
    torch.testing.assert_close(target, torch.where(path.mask, path.value, 0.0))
    # Unbounded, one token that π takes twice as often as μ counts twice.
    one = Path(torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1), torch.ones(1, 1))
    assert returns.vtrace(one, rho_cap=99.0)[1].item() == pytest.approx(math.e)


# ---------------------------------------------------------------- soft Q


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_soft_lambda_is_its_recursion(seed: int, gamma: float, lam: float) -> None:
    path, gap = make(seed), make(seed + 50).reward

    def formula(row: int) -> Column:
        r, V, g = (steps(path, row, x) for x in (path.reward, path.value, gap))
        G = [0.0] * len(r)
        for t in reversed(range(len(r))):
            ahead = (1 - lam) * at(V, t + 1) + lam * (at(G, t + 1) - at(g, t + 1))
            G[t] = r[t] + gamma * ahead
        return G

    compare(path, returns.soft_lambda(path, gap, gamma, lam), formula)


def test_soft_lambda_at_its_ends() -> None:
    path, gap = make(1), make(51).reward

    def one_ahead(row: int) -> Column:
        r, V = steps(path, row, path.reward), steps(path, row, path.value)
        return [r[t] + 0.9 * at(V, t + 1) for t in range(len(r))]

    def really_paid(row: int) -> Column:
        """The rewards to come, less the gaps of the tokens to come: this one's own is not in Q."""
        r, g = steps(path, row, path.reward), steps(path, row, gap)
        return [
            math.fsum(0.9**k * (r[t + k] - (g[t + k] if k else 0.0)) for k in range(len(r) - t))
            for t in range(len(r))
        ]

    compare(path, returns.soft_lambda(path, gap, 0.9, 0.0), one_ahead)
    compare(path, returns.soft_lambda(path, gap, 0.9, 1.0), really_paid)


@pytest.mark.parametrize("lam", [0.0, 0.3, 1.0])
def test_the_fixed_point_of_soft_lambda_is_a_consistent_path(lam: float) -> None:
    """Where g_t + V_t = r_t + γ V_{t+1} at every token, every target is the Q that is there already."""
    path = make(2)
    assert path.value is not None
    gap = torch.full_like(path.reward, torch.nan)
    for row in range(len(path.mask)):
        r, V = steps(path, row, path.reward), steps(path, row, path.value)
        gap[row, path.mask[row]] = torch.tensor(deltas(r, V, 0.9), dtype=torch.float64)
    target = returns.soft_lambda(path, gap, 0.9, lam)
    torch.testing.assert_close(target[path.mask], (gap + path.value)[path.mask])
    moved = returns.soft_lambda(path._replace(value=path.value + 1.0), gap, 0.9, lam)
    assert not torch.allclose(moved[path.mask], (gap + path.value + 1.0)[path.mask])


# ---------------------------------------------------------------- what is not read


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e300])
@pytest.mark.parametrize("name", [*CRITICS, "total", "total_by_token", "to_go", "soft_lambda"])
def test_what_lies_outside_the_mask_is_not_read(name: str, garbage: float) -> None:
    path, gap = make(5), make(55).reward

    def spoilt(x: torch.Tensor | None) -> torch.Tensor:
        assert x is not None
        return torch.where(path.mask, x, garbage)

    bad = Path(spoilt(path.reward), path.mask, spoilt(path.value), spoilt(path.log_weight))
    if name == "soft_lambda":
        clean, dirty = returns.soft_lambda(path, gap, 0.9), returns.soft_lambda(bad, spoilt(gap), 0.9)
    else:
        function: Callable[[Path], Any] = vars(returns)[name]
        clean, dirty = function(path), function(bad)
    pairs = [(clean, dirty)] if isinstance(clean, torch.Tensor) else zip(clean, dirty, strict=True)
    for one, other in pairs:
        assert torch.equal(one, other)
        assert not other[~path.mask].any()


def test_no_value_and_no_weight_is_an_error() -> None:
    path = make(0)
    for name, function in CRITICS.items():
        if name != "vtrace":
            with pytest.raises(ValueError, match="there are none"):
                function(path._replace(value=None))
    with pytest.raises(ValueError, match="π/μ"):
        returns.vtrace(path._replace(log_weight=None))


def test_a_column_given_is_not_changed() -> None:
    path = make(6)
    path = path._replace(beyond=path.reward.sum(-1))
    before = [x.clone() for x in path if x is not None]
    for function in CRITICS.values():
        for out in function(path):
            out.add_(1.0)
    for function in (returns.total, returns.total_by_token, returns.to_go):
        function(path).add_(1.0)
    assert all(torch.equal(x, y) for x, y in zip(path, before, strict=True) if x is not None)


def test_an_answer_pays_for_the_last_of_its_room() -> None:
    length = torch.tensor([1, 10, 12, 15, 20, 25])
    expected = [0, 0, -0.2, -0.5, -1, -1]
    assert returns.overlong(length, horizon=20, buffer=10.0).tolist() == pytest.approx(expected, rel=1e-15)
