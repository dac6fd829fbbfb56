"""Learned models: what they count, how wrong a plan in them can be, and that enough data makes it right."""

import numpy as np
import pytest

from posttrain_study.classic import mdp as exact
from posttrain_study.classic.maze import HORIZON, maze
from posttrain_study.classic.planner import certainty_error, imagined_returns, learned_model, planned_action
from posttrain_study.classic.simulate import Experience, experience


def random_steps(mdp: exact.Mdp, steps: int, seed: int) -> Experience:
    uniform = np.full(mdp.reward.shape, 1 / mdp.actions)
    return experience(mdp, uniform, steps=steps, horizon=30, seed=seed)


def test_a_model_is_the_shares_that_were_counted():
    data = Experience(
        state=np.array([0, 0, 0, 1]),
        action=np.array([0, 0, 0, 1]),
        reward=np.array([1.0, 2.0, 6.0, 5.0]),
        after=np.array([1, 1, 0, 2]),
        terminal=np.array([False, False, False, True]),
    )
    model = learned_model(data, 3, 2, gamma=0.5, unseen=-7.0)
    np.testing.assert_allclose(model.transition[0, 0], [1 / 3, 2 / 3, 0])
    np.testing.assert_allclose(model.reward, [[3.0, -7.0], [-7.0, 5.0], [0.0, 0.0]])
    np.testing.assert_allclose(model.transition[0, 1], [1, 0, 0])
    assert model.terminal.tolist() == [False, False, True]
    np.testing.assert_allclose(model.start, [0.5, 0.5, 0])


def test_where_nothing_is_random_a_look_at_everything_is_the_world():
    world = maze()
    model = learned_model(random_steps(world, 1000, 0), 6, 4, gamma=0.9, start=world.start)
    np.testing.assert_array_equal(model.transition, world.transition)
    np.testing.assert_array_equal(model.reward, world.reward)
    np.testing.assert_array_equal(model.terminal, world.terminal)


@pytest.mark.parametrize("steps", [30, 300, 3000])
@pytest.mark.parametrize("seed", range(5))
def test_a_plan_is_as_wrong_as_its_bound_at_most(steps, seed):
    world = exact.random_mdp(5, 2, seed=seed, branching=3, ends=seed % 2)
    model = learned_model(random_steps(world, steps, seed), 5, 2, gamma=0.9)
    wrong = exact.value_iteration(world).action_value - exact.value_iteration(model).action_value
    assert np.abs(wrong)[~world.terminal].max() <= certainty_error(world, model) + 1e-9


def test_with_enough_data_the_plan_is_the_optimal_policy():
    """Guaranteed, not lucky: the bound is under half the least gap between two actions."""
    world = exact.random_mdp(4, 2, seed=3, gamma=0.7, branching=2)
    truth = exact.policy_iteration(world)
    model = learned_model(random_steps(world, 60_000, 0), 4, 2, gamma=0.7)
    gap = np.abs(np.diff(truth.action_value, axis=1)).min()
    assert certainty_error(world, model) < gap / 2
    assert (exact.value_iteration(model).action == truth.action).all()


def test_the_reward_of_the_unknown_decides_whether_it_is_tried():
    """Action 1 was never taken in state 0: a plan that thinks well of it goes to find out."""
    data = Experience(*(np.array(c) for c in ([0], [0], [1.0], [0], [False])))
    curious, timid = (learned_model(data, 1, 2, gamma=0.9, unseen=u) for u in (2.0, 0.0))
    assert exact.value_iteration(curious).action.tolist() == [1]
    assert exact.value_iteration(timid).action.tolist() == [0]


def test_what_is_imagined_has_the_mean_of_the_model():
    model = exact.random_mdp(4, 2, seed=2)
    plan = np.array([0, 1, 1, 0, 1])
    at, expected = np.eye(4)[2], 0.0
    for t, a in enumerate(plan):
        expected += 0.9**t * float(at @ model.reward[:, a])
        at = at @ model.transition[:, a]
    rng = np.random.default_rng(0)
    single = np.array([imagined_returns(model, 2, plan[None], samples=1, rng=rng)[0] for _ in range(300)])
    mean = imagined_returns(model, 2, np.stack([plan, plan]), samples=20_000, rng=rng)
    assert mean == pytest.approx(expected, abs=5 * single.std() / np.sqrt(20_000))


def test_planning_by_rollouts_in_the_learned_maze_is_optimal_everywhere():
    world, optimum = maze(), exact.policy_iteration(maze())
    model = learned_model(random_steps(world, 1000, 0), 6, 4, gamma=0.9)
    rng = np.random.default_rng(0)
    for s in np.flatnonzero(~world.terminal):
        # 4 moves have 256 plans; 3000 draws miss the best of them once in 10⁵.
        chosen = planned_action(model, int(s), horizon=4, plans=3000, samples=1, rng=rng)
        assert optimum.action_value[s, chosen] == pytest.approx(optimum.value[s])
    state, total = 0, 0.0
    for t in range(HORIZON):
        action = planned_action(model, state, horizon=4, plans=3000, samples=1, rng=rng)
        total += 0.9**t * world.reward[state, action]
        state = int(world.transition[state, action].argmax())
    assert total == pytest.approx(8.1)


def test_beyond_the_horizon_nothing_is_seen():
    """Two moves from the start reach neither goal nor trap; three do."""
    plans = np.array([[3, 3, 1], [3, 1, 0], [1, 3, 0]])
    rng = np.random.default_rng(0)
    assert imagined_returns(maze(), 0, plans[:, :1], samples=1, rng=rng).tolist() == [0, 0, 0]
    full = imagined_returns(maze(), 0, plans, samples=1, rng=rng)
    assert full == pytest.approx([8.1, -9.0, -9.0])


def test_a_model_without_discount_has_no_bound():
    world = exact.random_mdp(3, 2, seed=0, gamma=1.0, ends=1)
    with pytest.raises(ValueError, match="not bounded"):
        certainty_error(world, world)
