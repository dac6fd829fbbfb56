"""DQN: its targets, its parts, and the oracle's values on the maze and on a random problem."""

from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.types import UserError
from posttrain_study.classic import mdp as exact
from posttrain_study.classic.dqn import (
    Copy,
    DqnSettings,
    Polyak,
    Replay,
    double_td_target,
    network,
    td_target,
    train,
    update,
)
from posttrain_study.classic.environment import MdpEnv
from posttrain_study.classic.maze import NAME, maze
from posttrain_study.classic.planner import certainty_error, learned_model
from posttrain_study.classic.simulate import experience


def table(trained: torch.nn.Module, states: int) -> np.ndarray:
    """Q of each one-hot state."""
    return trained(torch.eye(states)).detach().double().numpy()


@pytest.mark.parametrize(("target", "frozen"), [(td_target, Copy()), (double_td_target, Polyak())])
def test_dqn_reaches_the_values_of_the_maze(target, frozen):
    """Nothing is random but the exploring, so only optimisation is left: an eighth of the least gap."""
    truth = exact.policy_iteration(maze())
    levels = np.unique(truth.action_value.round(9))
    tolerance = np.diff(levels).min() / 8
    trained = train(gymnasium.make(NAME), replace(DqnSettings(), target=target, frozen=frozen), seed=0)
    q = table(trained.network, 6)[:4]
    assert np.abs(q - truth.action_value[:4]).max() < tolerance
    assert (q.argmax(axis=1) == truth.action[:4]).all()
    assert max(trained.returns) == 10
    assert np.mean(trained.losses[-50:]) < np.mean(trained.losses[:50]) / 100


def test_dqn_reaches_the_values_of_a_random_problem_that_is_cut_off():
    """As near as the model that as many uniform steps would count, though cut after 10 steps of no end."""
    world = exact.random_mdp(4, 2, seed=1, gamma=0.8, branching=3)
    truth, steps = exact.policy_iteration(world).action_value, 2000
    counted = experience(world, np.full((4, 2), 0.5), steps=steps, horizon=10, seed=0)
    tolerance = certainty_error(world, learned_model(counted, 4, 2, gamma=0.8))
    assert tolerance < 0.1 * truth.min()
    env = gymnasium.wrappers.TimeLimit(MdpEnv(world), 10)
    settings = DqnSettings(steps=steps, gamma=0.8, frozen=Polyak())
    assert np.abs(table(train(env, settings, seed=0).network, 4) - truth).max() < tolerance


def test_dqn_is_fixed_by_its_seed_and_leaves_the_global_one_alone():
    settings = DqnSettings(steps=200)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one = train(gymnasium.make(NAME), settings, seed=0)
    assert (torch.get_rng_state() == before).all()
    torch.manual_seed(6)
    same, other = (train(gymnasium.make(NAME), settings, seed=s) for s in (0, 1))
    assert (one.returns, one.losses) == (same.returns, same.losses)
    assert (table(one.network, 6) == table(same.network, 6)).all()
    assert (table(one.network, 6) != table(other.network, 6)).any()


floats = st.floats(-10, 10, width=32)
rows = st.lists(st.tuples(floats, st.booleans(), *[floats] * 6), min_size=1, max_size=5)


@given(rows, st.floats(0, 1))
def test_a_double_target_is_never_more_and_an_end_is_worth_its_reward(drawn, gamma):
    reward, ended = torch.tensor([r[0] for r in drawn]), torch.tensor([r[1] for r in drawn])
    online, frozen = torch.tensor([r[2:5] for r in drawn]), torch.tensor([r[5:8] for r in drawn])
    single = td_target(reward, ended, online, frozen, gamma)
    double = double_td_target(reward, ended, online, frozen, gamma)
    assert (double <= single).all()
    assert (double_td_target(reward, ended, frozen, frozen, gamma) == single).all()
    assert (single[ended] == reward[ended]).all()
    assert (double[ended] == reward[ended]).all()


def test_of_two_networks_one_chooses_and_the_frozen_one_values():
    online, frozen = torch.tensor([[0.0, 1.0], [3.0, 2.0]]), torch.tensor([[10.0, 4.0], [6.0, 8.0]])
    reward, ended = torch.tensor([1.0, 1.0]), torch.tensor([False, False])
    assert td_target(reward, ended, online, frozen, 0.5).tolist() == [6.0, 5.0]
    assert double_td_target(reward, ended, online, frozen, 0.5).tolist() == [3.0, 4.0]


def test_a_value_of_infinity_behind_an_end_is_not_read():
    wild = torch.tensor([[float("inf"), float("nan")]])
    for target in (td_target, double_td_target):
        assert target(torch.tensor([1.0]), torch.tensor([True]), wild, wild, 0.9) == 1


def test_the_frozen_copy_is_refreshed_as_it_says():
    online, frozen = (torch.nn.Linear(1, 1, bias=False) for _ in range(2))
    torch.nn.init.constant_(online.weight, 1.0)
    torch.nn.init.constant_(frozen.weight, 0.0)
    seen = []
    for n in range(1, 5):
        Copy(every=3).refresh(frozen, online, n)
        seen.append(float(frozen.weight.detach()))
    assert seen == [0, 0, 1, 1]
    torch.nn.init.constant_(frozen.weight, 0.0)
    for _ in range(2):
        Polyak(0.25).refresh(frozen, online, 1)
    assert float(frozen.weight.detach()) == pytest.approx(1 - 0.75**2)
    assert float(online.weight.detach()) == 1


def test_the_memory_replays_the_last_steps_each_as_likely():
    replay = Replay(3, 1)
    for n in range(5):
        replay.add([float(n)], n, float(n), [n + 1.0], n == 4)
    assert replay.size == 3
    drawn = replay.draw(3000, torch.Generator().manual_seed(0))
    actions, times = replay.action[drawn].unique(return_counts=True)
    assert actions.tolist() == [2, 3, 4]
    assert times.numpy() == pytest.approx(1000, abs=5 * 26)
    assert (replay.reward == replay.action).all()
    assert replay.terminated.tolist() == [n == 4 for n in replay.action.tolist()]


@pytest.mark.parametrize(("huber", "limit"), [(100.0, 1.0), (0.9, 0.1)])
def test_a_small_threshold_of_hubers_loss_moves_the_fixed_point(huber, limit):
    """Rewards 0 (nine times) and 10: the mean is 1, while 9 · m = 1 · huber has m = huber/9."""
    replay = Replay(10, 1)
    for n in range(10):
        replay.add([1.0], 0, 10.0 * (n == 9), [1.0], True)
    online = network(1, (), 1, seed=0)
    optimiser = torch.optim.SGD(online.parameters(), lr=0.1)
    settings = DqnSettings(huber=huber)
    for _ in range(400):
        update(online, online, optimiser, replay, torch.arange(10), settings)
    assert float(online(torch.ones(1)).detach()) == pytest.approx(limit, abs=1e-3)


def test_actions_and_observations_that_dqn_cannot_have_are_refused():
    env = MdpEnv(maze())
    env.action_space = gymnasium.spaces.Box(0.0, 1.0, (2,), np.float32)
    with pytest.raises(UserError, match="needs actions"):
        train(env, DqnSettings(), seed=0)
    env = MdpEnv(maze())
    env.observation_space = gymnasium.spaces.Box(0.0, 1.0, (2, 2), np.float32)
    with pytest.raises(UserError, match="reads vectors"):
        train(env, DqnSettings(), seed=0)
