"""The 2×3 maze: one problem in three forms, which must agree move by move."""

import itertools

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from posttrain_envs.maze import MOVES as WORDS
from posttrain_envs.maze import TWO_BY_THREE, Maze, layout_tasks
from posttrain_study.classic import mdp as exact
from posttrain_study.classic.environment import MdpEnv
from posttrain_study.classic.maze import HORIZON, LAYOUT, MOVES, NAME, MazeEnv, maze


def test_the_values_of_the_maze():
    """By hand: the goal is three moves away, so V* = 10 · 0.9² at the start."""
    optimum = exact.policy_iteration(maze())
    np.testing.assert_allclose(optimum.value, [8.1, 9.0, 10.0, 7.29, 0.0, 0.0])
    assert [list(MOVES)[a] for a in optimum.action[:4]] == ["right", "right", "down", "up"]
    q = dict(zip(MOVES, optimum.action_value[0], strict=True))
    assert q["right"] > q["down"], "notes E: from (0, 0) rather right than down"
    assert (maze().reward.max(), maze().reward.min()) == (10, -10)


def test_gymnasium_finds_nothing_wrong_with_the_environments():
    check_env(gymnasium.make(NAME).unwrapped)
    check_env(gymnasium.make(NAME, render_mode="ansi").unwrapped)
    env = MdpEnv(exact.random_mdp(4, 3, seed=0, ends=1))
    check_env(env, skip_render_check=True)


def test_the_module_and_name_are_enough_to_make_it():
    env = gymnasium.make(f"posttrain_study.classic.maze:{NAME}")
    assert isinstance(env.unwrapped, MazeEnv)
    env.reset(seed=0)
    # Against a wall for ever: time runs out, which is no terminal state.
    ends = [env.step(0)[2:4] for _ in range(HORIZON)]
    assert ends == [(False, False)] * (HORIZON - 1) + [(False, True)]


def test_problem_gymnasium_and_text_agree_on_every_way_of_four_moves():
    for way in itertools.product(MOVES, repeat=4):
        _walk_all_three(way)


def _walk_all_three(way: tuple[str, ...]) -> None:
    problem, env, text = maze(), MazeEnv(), Maze(max_turns=HORIZON, reward=10.0)
    [task] = layout_tasks(1)
    state = int(problem.start.argmax())
    env.reset(seed=0)
    walk = text.start(task).state
    for move in way:
        a = list(MOVES).index(move)
        reward = problem.reward[state, a]
        state = int(problem.transition[state, a].argmax())
        seen, got, ended, _, info = env.step(np.int64(a))
        turn = text.reply(walk, move)
        assert (got, ended, info["state"]) == (reward, bool(problem.terminal[state]), state)
        assert seen.argmax() == state
        assert (turn.reward or 0.0, turn.done) == (reward, ended)
        assert turn.state.at == (state % 3, state // 3)
        if ended:
            return
        walk = turn.state


def test_the_mazes_in_words_and_in_numbers_are_one():
    assert "/".join(LAYOUT) == TWO_BY_THREE
    assert {name: (down, right) for name, (right, down) in WORDS.items()} == MOVES
    [task] = layout_tasks(1)
    optimum = exact.policy_iteration(maze())
    state, way = 0, []
    while not maze().terminal[state]:
        way.append(list(MOVES)[optimum.action[state]])
        state = int(maze().transition[state, optimum.action[state]].argmax())
    assert task.answer == " ".join(way)


@pytest.mark.parametrize("layout", [("S.", "X"), ("..G",), ("SS", ".G"), ("S#G",)])
def test_what_is_no_maze_is_refused(layout):
    with pytest.raises(ValueError, match="rows of equal length"):
        maze(layout)


def test_a_random_problem_in_gymnasium_walks_with_its_probabilities():
    mdp = exact.random_mdp(3, 2, seed=1)
    env = MdpEnv(mdp)
    env.reset(seed=0)
    seen = np.zeros(3)
    for _ in range(4000):
        env.state = 1
        seen[env.step(np.int64(0))[4]["state"]] += 1
    p = mdp.transition[1, 0]
    assert (np.abs(seen / 4000 - p) < 5 * np.sqrt(p * (1 - p) / 4000)).all()
