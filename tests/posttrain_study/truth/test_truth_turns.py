"""Credit by turn in the 2×3 maze, played by every sequence of moves: A_turn → Q(s, a) - V(s), exactly.

An update that holds each sequence of a policy's moves as often as its chance says is the limit of many
episodes, so nothing is sampled, and differences are rounding. Keys are those of the environment's states.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch

from posttrain.envs.protocol import Start, Turn, guarded_reply, guarded_start
from posttrain.math import advantages
from posttrain.methods.policy_gradient import PolicyGradient
from posttrain.methods.table import DR_GRPO, GIGPO, RLOO
from posttrain.types import Batch, Trajectory
from posttrain_envs.maze import TWO_BY_THREE, Maze, layout_tasks
from posttrain_study.classic.maze import MOVES, maze
from posttrain_study.classic.mdp import action_values, value_iteration
from posttrain_study.truth import table

GAMMA, HORIZON = 0.9, 5
NAMES = list(MOVES)
CENTRED: PolicyGradient = replace(GIGPO, credit=advantages.centred, turn_gamma=GAMMA)
Visit = tuple[int, int, int]
"""Number of moves before it, cell, and the move."""


class Played:
    """Episodes of one task, a token a turn: token 4 is the prompt, others are the number of the move."""

    def __init__(self, layout: str, turns: int) -> None:
        self.env = Maze(layout=layout, max_turns=turns, reward=10)
        [self.task] = layout_tasks(1, layout=layout)
        self.columns, self.turn = layout.index("/"), lru_cache(None)(self._turn)

    def _turn(self, moves: tuple[int, ...]) -> Start | Turn:
        if not moves:
            start = guarded_start(self.env, self.task, keyed=True)
            assert isinstance(start, Start)
            return start
        return guarded_reply(self.env, self.turn(moves[:-1]).state, NAMES[moves[-1]], keyed=True)

    def cell(self, moves: tuple[int, ...]) -> int:
        x, y = self.turn(moves).state.at
        return int(y * self.columns + x)

    def row(self, moves: Sequence[int]) -> tuple[Trajectory, list[Visit]]:
        """The episode that ends with these moves or before, and its visits."""
        tokens, states, rewards = [4], dict[int, int](), [0.0]
        visits: list[Visit] = []
        for n, move in enumerate(moves):
            before = tuple(moves[:n])
            visits.append((n, self.cell(before), move))
            states[2 * n + 1] = self.turn(before).key
            turn = self.turn((*before, move))
            assert isinstance(turn, Turn)
            tokens += [move, 4]
            rewards += [turn.reward or 0.0, 0.0]
            if turn.done:
                break
        sampled = [token != 4 for token in tokens]
        return Trajectory.given(tokens, trained=sampled, reward=rewards, turn_state=states), visits

    def by_turn(self, method: PolicyGradient, episodes: Iterable[Sequence[int]]) -> dict[Visit, list[float]]:
        """Advantages by turn of each visit, of a method with ω = 1, over this update of one group."""
        rows, visits = zip(*map(self.row, episodes), strict=True)
        batch = Batch.of(rows, [0] * len(rows))
        batch = replace(batch, logp_gen=batch.logp_gen.double())
        both, episode = (
            replace(method, turn_weight=weight).prepare(batch).advantage for weight in (1.0, 0.0)
        )
        assert both is not None
        assert episode is not None
        out = defaultdict[Visit, list[float]](list)
        for i, each in enumerate(visits):
            for n, visit in enumerate(each):
                out[visit].append(float(both[i, 2 * n + 1] - episode[i, 2 * n + 1]))
        return out


def test_many_visits_tend_to_the_advantage_of_the_policy() -> None:
    """A policy that moves at random, with so many moves left: Q and V by Bellman's backup."""
    problem = maze(gamma=GAMMA)
    value, Q = np.zeros(problem.states), list[np.ndarray]()
    for _ in range(HORIZON):  # Q[k]: with k + 1 moves left
        Q.append(action_values(problem, value))
        value = Q[-1].mean(axis=1) * ~problem.terminal
    played = Played(TWO_BY_THREE, HORIZON)
    found = played.by_turn(CENTRED, itertools.product(range(4), repeat=HORIZON))
    assert len(found) > 40
    for (n, cell, move), numbers in found.items():
        q = Q[HORIZON - 1 - n][cell]
        assert np.mean(numbers) == pytest.approx(q[move] - q.mean(), abs=1e-9), (n, cell, move)
    last = {visit: numbers for visit, numbers in found.items() if visit[0] == HORIZON - 1}
    assert max(np.ptp(numbers) for numbers in last.values()) < 1e-9, "the last move has one outcome"


def test_normalised_divides_by_the_deviation_in_the_state() -> None:
    played, episodes = Played(TWO_BY_THREE, 3), list(itertools.product(range(4), repeat=3))
    centred, scaled = (
        played.by_turn(method, episodes) for method in (CENTRED, replace(GIGPO, turn_gamma=GAMMA))
    )
    by_state = defaultdict[tuple[int, int], list[tuple[float, float]]](list)
    for (n, cell, move), numbers in centred.items():
        by_state[n, cell] += zip(numbers, scaled[n, cell, move], strict=True)
    for pairs in by_state.values():
        a, b = np.array(pairs).T
        if a.std():
            np.testing.assert_allclose(b, a / (a.std() + 1e-6), rtol=1e-9)
        else:
            assert not b.any()


@pytest.mark.parametrize("layout", ["S../.XG", ".S./.XG", "..S/.XG", ".../SXG"])
def test_one_free_move_before_the_best_ones_is_value_iteration(layout: str) -> None:
    """Episodes that move freely once and then as π* does: G = Q*(s, a) of the state where they begin."""
    problem = maze(tuple(layout.split("/")), gamma=GAMMA)
    solution = value_iteration(problem)
    played = Played(layout, 9)
    episodes = []
    for first in range(4):
        moves = [first]
        while not (turn := played.turn(tuple(moves))).done:  # type: ignore[union-attr]
            moves.append(int(solution.action[played.cell(tuple(moves))]))
        assert isinstance(turn, Turn)
        episodes.append(moves)
    start = played.cell(())
    found = played.by_turn(CENTRED, episodes)
    q = solution.action_value[start]
    for move in range(4):
        assert found[0, start, move] == pytest.approx([q[move] - q.mean()], abs=1e-9)
    loo = played.by_turn(replace(RLOO, turn_gamma=GAMMA), episodes)
    assert loo[0, start, 0] == pytest.approx([(q[0] - q[1:].mean())], abs=1e-9)


def test_few_visits_are_short_by_the_share_of_their_own_turn() -> None:
    """K visits of one state: E[A] = (K - 1)/K (Q - V) with the mean, and Q - V with the others' alone."""
    played, K = Played(TWO_BY_THREE, 1), 2
    sums = {name: np.zeros(4) for name in ("centred", "loo")}
    counts = np.zeros(4)
    for group in itertools.product(range(4), repeat=K):
        for name, method in (("centred", DR_GRPO), ("loo", RLOO)):
            method = replace(method, turn_gamma=GAMMA)
            for (_, _, move), numbers in played.by_turn(method, [[m] for m in group]).items():
                sums[name][move] += sum(numbers)
                counts[move] += len(numbers) / 2
    q = action_values(maze(gamma=GAMMA), np.zeros(6))[0]
    np.testing.assert_allclose(sums["loo"] / counts, q - q.mean(), atol=1e-9)
    np.testing.assert_allclose(sums["centred"] / counts, (K - 1) / K * (q - q.mean()), atol=1e-9)


def test_an_answer_of_one_turn_is_credited_twice(short) -> None:  # type: ignore[no-untyped-def]
    """All begin in the prompt, so A = (1 + ω) A of GRPO: what the table of truth measures."""
    grpo = replace(GIGPO, turn_weight=0.0)
    once, twice = (short.estimate(method, 3).mean for method in (grpo, replace(GIGPO, turn_weight=0.5)))
    torch.testing.assert_close(twice, 1.5 * once)


@pytest.mark.full
def test_the_table_says_that_an_answer_of_one_turn_is_credited_twice() -> None:
    sentences = {row.sentence for row in table.rows("gigpo")}
    assert [text.partition("; ")[0] for text in sentences] == [table.REASONS["turn_weight"]]
