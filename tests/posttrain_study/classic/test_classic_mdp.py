"""The oracle itself, against every deterministic policy, autograd, sampling and its own theorems."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain_study.classic import mdp as exact
from posttrain_study.classic.mdp import Mdp
from posttrain_study.classic.simulate import Simulator, experience, mean_return

problems = st.builds(
    exact.random_mdp,
    st.integers(2, 5),
    st.integers(1, 3),
    seed=st.integers(0, 10_000),
    gamma=st.floats(0.0, 0.99),
    ends=st.integers(0, 1),
)


def brute_force(mdp: Mdp) -> np.ndarray:
    """V* as the best of all deterministic policies, each evaluated."""
    policies = itertools.product(range(mdp.actions), repeat=mdp.states)
    return np.max([exact.value(mdp, exact.deterministic(np.array(p), mdp.actions)) for p in policies], axis=0)


@settings(max_examples=25, deadline=None)
@given(problems)
def test_both_iterations_find_the_best_of_all_policies(mdp):
    best = brute_force(mdp)
    for found in (exact.value_iteration(mdp), exact.policy_iteration(mdp)):
        np.testing.assert_allclose(found.value, best, atol=1e-10)
        np.testing.assert_allclose(found.action_value.max(axis=1), best, atol=1e-10)
        policy = exact.deterministic(found.action, mdp.actions)
        np.testing.assert_allclose(exact.value(mdp, policy), best, atol=1e-10)
        np.testing.assert_allclose(found.action_value, exact.action_values(mdp, best), atol=1e-10)


def test_a_problem_without_discount_ends_and_is_solved():
    mdp = exact.random_mdp(6, 3, seed=3, gamma=1.0, ends=1)
    np.testing.assert_allclose(exact.value_iteration(mdp).value, brute_force(mdp), rtol=1e-9)


def test_without_discount_a_policy_that_never_ends_has_no_value():
    mdp = exact.random_mdp(3, 2, seed=0, gamma=1.0)
    with pytest.raises(ValueError, match="for ever"):
        exact.value(mdp, np.full((3, 2), 0.5))
    with pytest.raises(ValueError, match="not converged"):
        exact.value_iteration(mdp, sweeps=50)
    with pytest.raises(ValueError, match="gamma < 1"):
        exact.explored_optimum(mdp, 0.1)


@settings(max_examples=50, deadline=None)
@given(problems, st.integers(0, 1000))
def test_the_backup_contracts_by_gamma(mdp, seed):
    one, other = np.random.default_rng(seed).normal(size=(2, mdp.states))
    after = exact.action_values(mdp, one).max(axis=1) - exact.action_values(mdp, other).max(axis=1)
    assert np.abs(after).max() <= mdp.gamma * np.abs(one - other).max() + 1e-12


def test_value_iteration_keeps_its_tolerance():
    mdp = exact.random_mdp(6, 3, seed=5, gamma=0.95)
    truth = exact.policy_iteration(mdp).value
    for tolerance in (1.0, 1e-2, 1e-6):
        assert np.abs(exact.value_iteration(mdp, tolerance=tolerance).value - truth).max() <= tolerance


@settings(max_examples=25, deadline=None)
@given(problems, st.integers(0, 1000))
def test_value_visits_and_advantages_agree(mdp, seed):
    policy = exact.softmax(np.random.default_rng(seed).normal(size=mdp.reward.shape))
    v = exact.value(mdp, policy)
    np.testing.assert_allclose(v, (policy * exact.action_values(mdp, v)).sum(axis=1), atol=1e-10)
    np.testing.assert_allclose((policy * exact.advantages(mdp, policy)).sum(axis=1), 0, atol=1e-10)
    # J counted from the start equals J counted by where the policy goes.
    d = exact.visits(mdp, policy)
    assert exact.objective(mdp, policy) == pytest.approx(float(d @ (policy * mdp.reward).sum(axis=1)))
    if not mdp.terminal.any():
        assert d.sum() == pytest.approx(1 / (1 - mdp.gamma))


@settings(max_examples=25, deadline=None)
@given(problems, st.integers(0, 1000))
def test_the_policy_gradient_theorem_is_what_autograd_says(mdp, seed):
    logits = np.random.default_rng(seed).normal(size=mdp.reward.shape)
    theta = torch.tensor(logits, requires_grad=True)
    policy = theta.softmax(dim=1)
    live = torch.tensor(~mdp.terminal)
    P = torch.einsum("sa,sat->st", policy, torch.tensor(mdp.transition))[live][:, live]
    R = (policy * torch.tensor(mdp.reward)).sum(dim=1)[live]
    J = torch.tensor(mdp.start)[live] @ torch.linalg.solve(torch.eye(len(P)) - mdp.gamma * P, R)
    J.backward()
    np.testing.assert_allclose(exact.objective_gradient(mdp, logits), theta.grad.numpy(), atol=1e-9)


def test_the_policy_gradient_is_the_slope_of_j():
    mdp = exact.random_mdp(4, 3, seed=2, ends=1)
    logits = np.random.default_rng(0).normal(size=(4, 3))
    slope, h = np.zeros((4, 3)), 1e-5
    for at in np.ndindex(4, 3):
        step = np.zeros((4, 3))
        step[at] = h
        up, down = (exact.objective(mdp, exact.softmax(logits + s)) for s in (step, -step))
        slope[at] = (up - down) / (2 * h)
    np.testing.assert_allclose(exact.objective_gradient(mdp, logits), slope, atol=1e-8)


def test_the_best_exploring_policy_is_the_best_of_all_exploring_ones():
    mdp, epsilon = exact.random_mdp(4, 2, seed=7), 0.3
    policies = [
        (1 - epsilon) * exact.deterministic(np.array(p), 2) + epsilon / 2
        for p in itertools.product(range(2), repeat=4)
    ]
    best = np.max([exact.value(mdp, p) for p in policies], axis=0)
    q = exact.explored_optimum(mdp, epsilon)
    np.testing.assert_allclose(q, exact.action_values(mdp, best), atol=1e-10)
    explored = epsilon / 2 + (1 - epsilon) * exact.deterministic(exact.best(q), 2)
    np.testing.assert_allclose(exact.value(mdp, explored), best, atol=1e-10)


def test_sampled_returns_have_the_mean_j():
    mdp = exact.random_mdp(5, 2, seed=4, gamma=0.8)
    policy = exact.softmax(np.random.default_rng(1).normal(size=(5, 2)))
    returns = [mean_return(mdp, policy, episodes=1, horizon=60, seed=s) for s in range(2000)]
    # 60 steps leave 0.8^60 / 0.2 < 1e-5; the rest is sampling, five standard errors of it.
    error = 5 * np.std(returns) / np.sqrt(len(returns)) + 1e-5
    assert abs(np.mean(returns) - exact.objective(mdp, policy)) < error


def test_steps_are_drawn_with_their_probabilities():
    mdp = exact.random_mdp(3, 2, seed=1)
    world = Simulator(mdp, seed=0)
    seen = np.bincount([world.step(1, 0)[1] for _ in range(20_000)], minlength=3) / 20_000
    p = mdp.transition[1, 0]
    assert (np.abs(seen - p) < 5 * np.sqrt(p * (1 - p) / 20_000)).all()


def test_experience_is_fixed_by_its_seed_and_never_leaves_a_terminal_state():
    mdp = exact.random_mdp(5, 2, seed=0, ends=1)
    policy = np.full((5, 2), 0.5)
    one, same, other = (experience(mdp, policy, steps=500, horizon=9, seed=s) for s in (0, 0, 1))
    assert (one.state == same.state).all()
    assert (one.action == same.action).all()
    assert (one.state != other.state).any()
    assert not mdp.terminal[one.state].any()
    assert (mdp.terminal[one.after] == one.terminal).all()
    assert one.terminal.any()


def test_an_episode_is_cut_at_its_horizon_and_begins_anew():
    """A chain that never ends: 0, 1, 2, 3, then from the start again."""
    chain = Mdp(
        transition=np.eye(9)[np.minimum(np.arange(9) + 1, 8)][:, None, :],
        reward=np.zeros((9, 1)),
        gamma=0.9,
        terminal=np.zeros(9),
        start=np.eye(9)[0],
    )
    data = experience(chain, np.ones((9, 1)), steps=10, horizon=4, seed=0)
    assert data.state.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert data.after.tolist() == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    assert not data.terminal.any()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"transition": np.full((2, 1, 2), 0.4)}, "transition is not a distribution"),
        ({"transition": [[[-1.0, 2.0]], [[0.0, 1.0]]]}, "transition is not a distribution"),
        ({"start": [0.5, 0.4]}, "start is not a distribution"),
        ({"gamma": 1.1}, "gamma"),
        ({"terminal": [True, True]}, "terminal state must stay"),
        ({"reward": [[2.0], [1.0]]}, "terminal state must stay"),
        ({"reward": [[2.0, 1.0], [0.0, 0.0]]}, "shapes"),
    ],
)
def test_what_is_no_problem_is_refused(change, says):
    good = {
        "transition": [[[0.0, 1.0]], [[0.0, 1.0]]],
        "reward": [[2.0], [0.0]],
        "gamma": 0.9,
        "terminal": [False, True],
        "start": [1.0, 0.0],
    }
    Mdp(**good)
    with pytest.raises(ValueError, match=says):
        Mdp(**(good | change))


def test_a_problem_cannot_be_changed_under_its_solution():
    mdp = exact.random_mdp(3, 2, seed=0)
    with pytest.raises(ValueError, match="read-only"):
        mdp.reward[0, 0] = 5
