"""Sample steps and experience from a finite decision problem, fixed by a seed."""

import random
from bisect import bisect
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from posttrain_study.classic.mdp import Array, Mdp


@dataclass(frozen=True, eq=False)
class Experience:
    """Sampled steps, one entry each; `terminal` marks a step that reached a terminal state."""

    state: NDArray[np.int64]
    action: NDArray[np.int64]
    reward: Array
    after: NDArray[np.int64]
    terminal: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.state)


class Simulator:
    """Walk through an Mdp step by step.

    >>> chain = Mdp(transition=[[[0.0, 1.0]], [[0.0, 1.0]]], reward=[[2.0], [0.0]], gamma=0.9,
    ...             terminal=[False, True], start=[1.0, 0.0])
    >>> Simulator(chain, seed=0).step(0, 0)
    (2.0, 1, True)
    """

    def __init__(self, mdp: Mdp, *, seed: int) -> None:
        # Python's own lists and numbers: a step costs a microsecond, with arrays it costs ten.
        self.draw = random.Random(seed).random
        self._start = mdp.start.cumsum().tolist()
        self._next = mdp.transition.cumsum(axis=2).tolist()
        self._reward = mdp.reward.tolist()
        self._terminal = mdp.terminal.tolist()
        self._last = mdp.states - 1

    def start(self) -> int:
        """Draw the first state of an episode."""
        return min(bisect(self._start, self.draw()), self._last)

    def step(self, state: int, action: int) -> tuple[float, int, bool]:
        """Return the reward, the next state, and whether that state is terminal."""
        # A row may add up to a little less than 1 in floating point.
        after = min(bisect(self._next[state][action], self.draw()), self._last)
        return self._reward[state][action], after, self._terminal[after]


def experience(mdp: Mdp, policy: Array, *, steps: int, horizon: int, seed: int) -> Experience:
    """Sample `steps` steps of this policy, in episodes of at most `horizon`."""
    world = Simulator(mdp, seed=seed)
    likely = policy.cumsum(axis=1).tolist()
    rows: list[tuple[int, int, float, int, bool]] = []
    state, age = world.start(), 0
    for _ in range(steps):
        action = min(bisect(likely[state], world.draw()), mdp.actions - 1)
        reward, after, terminal = world.step(state, action)
        rows.append((state, action, reward, after, terminal))
        age += 1
        state, age = (world.start(), 0) if terminal or age == horizon else (after, age)
    return Experience(*(np.array(column) for column in zip(*rows, strict=True)))


def mean_return(mdp: Mdp, policy: Array, *, episodes: int, horizon: int, seed: int) -> float:
    """Estimate mdp.py: objective, cut at the horizon, by the mean discounted return of episodes."""
    world = Simulator(mdp, seed=seed)
    likely = policy.cumsum(axis=1).tolist()
    total = 0.0
    for _ in range(episodes):
        state, terminal, age = world.start(), False, 0
        while not terminal and age < horizon:
            action = min(bisect(likely[state], world.draw()), mdp.actions - 1)
            reward, state, terminal = world.step(state, action)
            total += mdp.gamma**age * reward
            age += 1
    return total / episodes
