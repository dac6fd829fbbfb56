"""Q-learning, SARSA and double Q-learning with a table: Q(s,a) ← Q(s,a) + α (target − Q(s,a)).

They differ in the target alone:

    Q-learning   r + γ max_a Q(s', a)                 tends to Q*, whoever acts
    SARSA        r + γ Q(s', a'), a' the next action  tends to Q of the policy that acts, exploring too
    double Q     r + γ Q₂(s', argmax_a Q₁(s', a))     Q₁ and Q₂ swap at random; no maximum of noise

α is a function of how often that entry was updated, ε of the step. Rows of terminal states stay 0.
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
    """The same number for ever.

    >>> constant(0.1)(1000)
    0.1
    """
    return lambda n: value


def decaying(power: float) -> Schedule:
    """n^−power for n = 1, 2, ...; with a power in (1/2, 1] a step size that averages noise away.

    With 1 the first values are forgotten as slowly as n^−(1−γ); powers below 1 do that fast.

    >>> decaying(1.0)(4)
    0.25
    """
    return lambda n: float(max(n, 1) ** -power)


@dataclass(frozen=True, kw_only=True)
class Learning:
    """How long, with which step size and how much exploration."""

    steps: int
    step_size: Schedule = field(default_factory=lambda: decaying(0.6))
    """α of the n-th update of an entry."""
    epsilon: Schedule = field(default_factory=lambda: constant(0.1))
    """Probability of any action, at step t."""
    horizon: int = 100
    """Steps after which an episode is cut; that is no terminal state."""
    snapshots: int = 50
    """Tables kept on the way."""


@dataclass(frozen=True, eq=False)
class Learnt:
    """The table at the end, and tables [n, S, A] on the way with the steps after which they were taken."""

    action_value: Array
    steps: list[int]
    tables: Array


def q_learning(mdp: Mdp, learning: Learning, *, seed: int) -> Learnt:
    """Towards Q* from the actions of an exploring policy.

    Source: Watkins and Dayan 1992; notes E, section 3.1, whose update is the one with α = 1.
    """

    def target(q: list[Table], draw: Any, reward: float, after: int, _: int) -> tuple[int, float]:
        return 0, reward + mdp.gamma * max(q[0][after])

    return _learn(mdp, learning, seed, 1, target)


def sarsa(mdp: Mdp, learning: Learning, *, seed: int) -> Learnt:
    """Towards Q of the exploring policy itself: Q* only if ε tends to 0.

    With a constant ε the limit is mdp.py: explored_optimum.

    Source: Rummery and Niranjan 1994; Singh et al. 2000.
    """

    def target(q: list[Table], draw: Any, reward: float, after: int, then: int) -> tuple[int, float]:
        return 0, reward + mdp.gamma * q[0][after][then]

    return _learn(mdp, learning, seed, 1, target)


def double_q_learning(mdp: Mdp, learning: Learning, *, seed: int) -> Learnt:
    """Towards Q* with two tables, of which one chooses and the other values; their mean acts.

    Source: van Hasselt 2010, algorithm 1.
    """

    def target(q: list[Table], draw: Any, reward: float, after: int, _: int) -> tuple[int, float]:
        chooses = int(draw() < 0.5)
        row = q[chooses][after]
        return chooses, reward + mdp.gamma * q[1 - chooses][after][row.index(max(row))]

    return _learn(mdp, learning, seed, 2, target)


Target = Callable[[list[Table], Any, float, int, int], tuple[int, float]]
"""Which table is updated, and towards what."""


def _learn(mdp: Mdp, learning: Learning, seed: int, tables: int, target: Target) -> Learnt:
    """The loop that all three share. The next action is chosen before the update, as SARSA must."""
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

    every = max(learning.steps // learning.snapshots, 1)
    taken, kept = [0], [mean()]
    state, age = world.start(), 0
    action = choose(state, 0)
    for t in range(1, learning.steps + 1):
        reward, after, ended = world.step(state, action)
        then = choose(after, t)
        which, aim = target(q, world.draw, reward, after, then)
        updates[which][state][action] += 1
        rate = learning.step_size(updates[which][state][action])
        q[which][state][action] += rate * (aim - q[which][state][action])
        age += 1
        if ended or age == learning.horizon:
            state, age = world.start(), 0
            action = choose(state, t)
        else:
            state, action = after, then
        if t % every == 0:
            taken.append(t)
            kept.append(mean())
    return Learnt(mean(), taken, np.array(kept))
