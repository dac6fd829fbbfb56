"""Tables against the oracle: exactly where nothing is random, within the noise where something is."""

import numpy as np
import pytest

from posttrain_study.classic import mdp as exact
from posttrain_study.classic.maze import maze
from posttrain_study.classic.mdp import Array, Mdp
from posttrain_study.classic.tabular import (
    Learning,
    constant,
    decaying,
    double_q_learning,
    q_learning,
    sarsa,
)

WORLD = exact.random_mdp(4, 2, seed=1, gamma=0.8, branching=3)
STEPS = 40_000
POWER = 0.6
# Cut after 5 steps although nothing ends: a cut that counted as an end would cost most of the value.
LEARNING = Learning(steps=STEPS, step_size=decaying(POWER), epsilon=constant(0.4), horizon=5)


def noise(mdp: Mdp, q: Array, updates: float) -> float:
    """Five deviations of an entry that follows its targets with α = n^−POWER.

    Such an average has variance α σ²/2 about its target, σ² that of r + γV(s'); the target moves
    with the other entries, which multiplies by at most 1/(1 − γ) in standard deviation.
    """
    v = q.max(axis=1)
    variance = (mdp.transition @ v**2 - (mdp.transition @ v) ** 2).max()
    return 5 * float(np.sqrt(updates**-POWER * mdp.gamma**2 * variance / 2) / (1 - mdp.gamma))


# Each of the 8 entries is updated in at least a tenth of what an even share would be, 5000.
BOUND = noise(WORLD, exact.policy_iteration(WORLD).action_value, 0.1 * STEPS / 8)


@pytest.mark.parametrize("learn", [q_learning, double_q_learning])
def test_where_nothing_is_random_a_step_of_one_gives_q_exactly(learn):
    """α = 1 is dynamic programming in the order of the walk: notes E's "simplified update"."""
    learning = Learning(steps=6000, step_size=constant(1.0), epsilon=constant(1.0), horizon=20)
    truth = exact.policy_iteration(maze()).action_value
    np.testing.assert_allclose(learn(maze(), learning, seed=0).action_value, truth, atol=1e-12)


def test_the_bound_on_the_noise_tells_something():
    values = exact.policy_iteration(WORLD).action_value
    assert 0.2 * np.abs(values).min() > BOUND
    assert np.abs(values - exact.explored_optimum(WORLD, 0.4)).max() > 2 * BOUND


@pytest.mark.parametrize("learn", [q_learning, double_q_learning])
def test_q_learning_reaches_the_optimum_while_it_explores(learn):
    truth = exact.policy_iteration(WORLD).action_value
    assert np.abs(learn(WORLD, LEARNING, seed=0).action_value - truth).max() < BOUND


def test_sarsa_learns_what_exploring_for_ever_is_worth():
    learnt = sarsa(WORLD, LEARNING, seed=0).action_value
    assert np.abs(learnt - exact.explored_optimum(WORLD, 0.4)).max() < BOUND
    assert np.abs(learnt - exact.policy_iteration(WORLD).action_value).max() > BOUND


def test_sarsa_reaches_the_optimum_if_it_ceases_to_explore():
    """ε falls as t^−½, slowly enough that every action is tried for ever."""
    ceasing = Learning(steps=STEPS, step_size=decaying(POWER), epsilon=decaying(0.5), horizon=5)
    learnt = sarsa(WORLD, ceasing, seed=0).action_value
    best = exact.policy_iteration(WORLD)
    # What is still tried often is known; other actions are rarely tried, which is its price.
    taken = np.arange(4), best.action
    assert np.abs(learnt[taken] - best.action_value[taken]).max() < BOUND
    assert (learnt.argmax(axis=1) == best.action).all()


@pytest.mark.parametrize("learn", [q_learning, sarsa, double_q_learning])
def test_an_episode_is_cut_at_its_horizon(learn):
    """A chain from state 0 whose every step pays 1: states behind the horizon are never left."""
    chain = Mdp(
        transition=np.eye(9)[np.minimum(np.arange(9) + 1, 8)][:, None, :],
        reward=np.ones((9, 1)),
        gamma=0.9,
        terminal=np.zeros(9),
        start=np.eye(9)[0],
    )
    learnt = learn(chain, Learning(steps=200, horizon=4), seed=0).action_value
    assert (learnt[:4] > 0).all()
    assert (learnt[4:] == 0).all()


def bait() -> Mdp:
    """From 0, action 0 leads to 1, and any other to the end with 0. From 1 all five are a toss of +1 or −1.1.

    States 2 and 3 pay the toss out; 4 is the end. Q*(0, 0) = −0.05, and the best is to stay away.
    """
    P, R = np.zeros((5, 5, 5)), np.zeros((5, 5))
    P[0, 0, 1] = P[0, 1:, 4] = 1
    P[1, :, [2, 3]] = 0.5
    P[2:, :, 4] = 1
    R[2], R[3] = 1.0, -1.1
    terminal = np.arange(5) == 4
    return Mdp(transition=P, reward=R, gamma=1.0, terminal=terminal, start=np.eye(5)[0])


def test_a_maximum_of_noise_lures_one_table_and_not_two():
    assert exact.policy_iteration(bait()).action_value[0, 0] == pytest.approx(-0.05)
    learning = Learning(steps=1000, step_size=constant(0.1), epsilon=constant(0.3))
    lured = {
        learn: np.mean([learn(bait(), learning, seed=s).action_value[0, 0] for s in range(40)])
        for learn in (q_learning, double_q_learning)
    }
    assert lured[q_learning] > 0.05
    assert lured[double_q_learning] < 0


@pytest.mark.parametrize("learn", [q_learning, sarsa, double_q_learning])
def test_a_table_is_fixed_by_its_seed(learn):
    short = Learning(steps=500)
    one, same, other = (learn(WORLD, short, seed=s) for s in (3, 3, 4))
    assert (one.tables == same.tables).all()
    assert (one.action_value != other.action_value).any()
    assert one.steps[0] == 0
    assert (one.tables[0] == 0).all()
    assert (one.tables[-1] == one.action_value).all()


def test_terminal_states_are_worth_nothing():
    for learn in (q_learning, sarsa, double_q_learning):
        assert (learn(maze(), Learning(steps=2000), seed=0).action_value[4:] == 0).all()


def test_schedules():
    assert [decaying(0.5)(n) for n in (0, 1, 4)] == [1.0, 1.0, 0.5]
