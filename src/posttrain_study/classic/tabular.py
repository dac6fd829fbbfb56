"""Q-learning, SARSA and double Q-learning with a table: Q(s,a) ← Q(s,a) + α (target − Q(s,a)).

They differ in the target alone:

    Q-learning   r + γ max_a Q(s', a)                 tends to Q* for any behaviour
    SARSA        r + γ Q(s', a'), a' the next action  tends to Q of the policy that acts, exploring too
    double Q     r + γ Q₂(s', argmax_a Q₁(s', a))     Q₁ and Q₂ swap at random; no maximum of noise

α is a function of the number of updates of that entry, ε of the step. Rows of terminal states stay 0.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from posttrain_study.classic.mdp import Array, Mdp
from posttrain_study.classic.simulate import Simulator

Schedule = Callable[[int], float]
Table = list[list[float]]


def constant(value: float) -> Schedule:
    """The same value at every n.

    >>> constant(0.1)(1000)
    0.1
    """
    return lambda n: value


def decaying(power: float) -> Schedule:
    """n^−power for n = 1, 2, ...; with a power in (1/2, 1] a step size that averages noise away.

    With power 1 the first values fade as slowly as n^−(1−γ); smaller powers forget them faster.

    >>> decaying(1.0)(4)
    0.25
    """
    return lambda n: float(max(n, 1) ** -power)


@dataclass(frozen=True, kw_only=True)
class Learning:
    """The length of a run, its step sizes and its exploration."""

    steps: int
    step_size: Schedule = field(default_factory=lambda: decaying(0.6))
    """α of the n-th update of an entry."""
    epsilon: Schedule = field(default_factory=lambda: constant(0.1))
    """Probability of a random action, at step t."""
    horizon: int = 100
    """Steps after which an episode is cut; the last state is then not terminal."""
    snapshots: int = 50
    """Number of tables recorded during the run."""


@dataclass(frozen=True, eq=False)
class Learnt:
    """The final table, and tables [n, S, A] during the run with the steps at which they were recorded."""

    action_value: Array
    steps: list[int]
    tables: Array


def q_learning(mdp: Mdp, learning: Learning, *, seed: int) -> Learnt:
    """Learn Q* from the actions of an exploring policy.

    Source: Watkins and Dayan 1992; notes E, section 3.1, whose update is the one with α = 1.
    """

    def target(q: list[Table], draw: Any, reward: float, after: int, _: int) -> tuple[int, float]:
        return 0, reward + mdp.gamma * max(q[0][after])

    return _learn(mdp, learning, seed, 1, target)


def sarsa(mdp: Mdp, learning: Learning, *, seed: int) -> Learnt:
    """Learn Q of the exploring policy itself: Q* only if ε tends to 0.

    With a constant ε the limit is mdp.py: explored_optimum.

    Source: Rummery and Niranjan 1994; Singh et al. 2000.
    """

    def target(q: list[Table], draw: Any, reward: float, after: int, next_action: int) -> tuple[int, float]:
        return 0, reward + mdp.gamma * q[0][after][next_action]

    return _learn(mdp, learning, seed, 1, target)


def double_q_learning(mdp: Mdp, learning: Learning, *, seed: int) -> Learnt:
    """Learn Q* with two tables, of which one chooses and the other values; their mean acts.

    Source: van Hasselt 2010, algorithm 1.
    """

    def target(q: list[Table], draw: Any, reward: float, after: int, _: int) -> tuple[int, float]:
        chooses = int(draw() < 0.5)
        row = q[chooses][after]
        return chooses, reward + mdp.gamma * q[1 - chooses][after][row.index(max(row))]

    return _learn(mdp, learning, seed, 2, target)


Target = Callable[[list[Table], Any, float, int, int], tuple[int, float]]
"""Returns the index of the table to update, and its target."""


def _learn(mdp: Mdp, learning: Learning, seed: int, tables: int, target: Target) -> Learnt:
    """Run the loop that all three share. The next action is chosen before the update, as SARSA must."""
    world = Simulator(mdp, seed=seed)
    q = [np.zeros_like(mdp.reward).tolist() for _ in range(tables)]
    updates = [np.zeros(mdp.reward.shape, dtype=int).tolist() for _ in range(tables)]

    def mean() -> Array:
        return np.asarray(np.mean(q, axis=0))

    def choose(state: int, t: int) -> int:
        if world.draw() < learning.epsilon(t):
            return int(world.draw() * mdp.actions)
        row = q[0][state] if tables == 1 else [x + y for x, y in zip(q[0][state], q[1][state], strict=True)]
        top = [a for a, x in enumerate(row) if x == max(row)]
        return top[int(world.draw() * len(top))]

    interval = max(learning.steps // learning.snapshots, 1)
    record_steps, snapshots = [0], [mean()]
    state, age = world.start(), 0
    action = choose(state, 0)
    for t in range(1, learning.steps + 1):
        reward, after, terminal = world.step(state, action)
        next_action = choose(after, t)
        index, goal = target(q, world.draw, reward, after, next_action)
        updates[index][state][action] += 1
        rate = learning.step_size(updates[index][state][action])
        q[index][state][action] += rate * (goal - q[index][state][action])
        age += 1
        if terminal or age == learning.horizon:
            state, age = world.start(), 0
            action = choose(state, t)
        else:
            state, action = after, next_action
        if t % interval == 0:
            record_steps.append(t)
            snapshots.append(mean())
    return Learnt(mean(), record_steps, np.array(snapshots))
