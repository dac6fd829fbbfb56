"""Finite Markov decision problems and their exact solutions: the oracle of everything in this folder.

With P(s'|s,a), R(s,a) and γ known, the quantities that learners estimate are linear algebra:

    V^π = (I − γ P_π)⁻¹ R_π        Q^π = R + γ P V^π        A^π = Q^π − V^π
    V* = max_a Q*(·, a)            d^π = start (I − γ P_π)⁻¹     J(π) = start · V^π = d^π · R_π

A terminal state gives nothing and is never left. Everything is in float64.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
"""Values are [S], action values and policies [S, A], transitions [S, A, S]."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Mdp:
    """A finite decision problem.

    Raises ValueError if a row is not a distribution or a terminal state can be left.

    >>> chain = Mdp(transition=[[[0.0, 1.0]], [[0.0, 1.0]]], reward=[[2.0], [0.0]], gamma=0.9,
    ...             terminal=[False, True], start=[1.0, 0.0])
    >>> chain.states, chain.actions
    (2, 1)
    """

    transition: Array
    """P[s, a, s'], the probability of s' after action a in state s."""
    reward: Array
    """R[s, a], the expected reward of that action."""
    gamma: float
    """Discount, in [0, 1]; with 1 every evaluated policy must reach a terminal state."""
    terminal: NDArray[np.bool_]
    start: Array
    """Probability that an episode begins in each state."""

    def __post_init__(self) -> None:
        for name, kind in (("transition", float), ("reward", float), ("terminal", bool), ("start", float)):
            value = np.array(getattr(self, name), dtype=kind)
            value.setflags(write=False)
            object.__setattr__(self, name, value)
        S, A = self.reward.shape
        if (self.transition.shape, self.terminal.shape, self.start.shape) != ((S, A, S), (S,), (S,)):
            raise ValueError(f"shapes do not fit: reward {(S, A)}, transition {self.transition.shape}")
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"gamma lies in [0, 1], not {self.gamma}")
        _check_distribution(self.transition, "transition")
        _check_distribution(self.start, "start")
        ends = np.flatnonzero(self.terminal)
        if (self.transition[ends, :, ends] != 1).any() or (self.reward[ends] != 0).any():
            raise ValueError("a terminal state must stay where it is and give nothing")

    @property
    def states(self) -> int:
        """S, with the terminal states."""
        return int(self.reward.shape[0])

    @property
    def actions(self) -> int:
        """A, the same in every state."""
        return int(self.reward.shape[1])


@dataclass(frozen=True, kw_only=True, eq=False)
class Solution:
    """An optimum: V*, Q*, one deterministic π* as the action of each state, and the number of sweeps."""

    value: Array
    action_value: Array
    action: NDArray[np.int64]
    sweeps: int


def random_mdp(
    states: int, actions: int, *, seed: int, gamma: float = 0.9, branching: int | None = None, ends: int = 0
) -> Mdp:
    """Draw a problem with Dirichlet transitions to `branching` states each, and rewards uniform in [0, 1].

    The last `ends` states are terminal; episodes begin uniformly in the others. This is the GARNET
    of Archibald, McKinnon and Thomas 1995 with uniform rewards.

    >>> mdp = random_mdp(4, 2, seed=0, branching=2)
    >>> (mdp.transition > 0).sum(axis=2).tolist()
    [[2, 2], [2, 2], [2, 2], [2, 2]]
    """
    rng = np.random.default_rng(seed)
    P = np.zeros((states, actions, states))
    for s in range(states):
        for a in range(actions):
            successors = rng.choice(states, size=branching or states, replace=False)
            P[s, a, successors] = rng.dirichlet(np.ones(len(successors)))
    R = rng.uniform(size=(states, actions))
    terminal = np.arange(states) >= states - ends
    P[terminal] = np.eye(states)[terminal][:, None, :]
    R[terminal] = 0
    return Mdp(transition=P, reward=R, gamma=gamma, terminal=terminal, start=~terminal / (~terminal).sum())


def softmax(logits: Array) -> Array:
    """π(a|s) = exp θ(s,a) / Σ_b exp θ(s,b).

    >>> softmax(np.array([[0.0, 0.0], [0.0, np.log(3)]])).round(2).tolist()
    [[0.5, 0.5], [0.25, 0.75]]
    """
    raised = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(raised / raised.sum(axis=-1, keepdims=True))


def deterministic(action: NDArray[np.int64], actions: int) -> Array:
    """Return the policy [S, A] that takes this action in each state."""
    return np.eye(actions)[action]


def action_values(mdp: Mdp, value: Array) -> Array:
    """Q(s,a) = R(s,a) + γ Σ_s' P(s'|s,a) V(s').    Bellman's backup of a V

    >>> chain = Mdp(transition=[[[0.0, 1.0]], [[0.0, 1.0]]], reward=[[2.0], [0.0]], gamma=0.9,
    ...             terminal=[False, True], start=[1.0, 0.0])
    >>> action_values(chain, np.array([0.0, 0.0])).tolist()
    [[2.0], [0.0]]
    """
    return np.asarray(mdp.reward + mdp.gamma * mdp.transition @ value)


def value(mdp: Mdp, policy: Array) -> Array:
    """V^π = (I − γ P_π)⁻¹ R_π, and 0 in terminal states.

    Raises ValueError if γ = 1 and an episode of the policy may never end.
    """
    out = np.zeros(mdp.states)
    live = ~mdp.terminal
    out[live] = _solve(_live_matrix(mdp, policy), (policy * mdp.reward).sum(axis=1)[live])
    return out


def advantages(mdp: Mdp, policy: Array) -> Array:
    """A^π(s,a) = Q^π(s,a) − V^π(s); its mean under π is 0 in every state."""
    v = value(mdp, policy)
    return np.asarray(action_values(mdp, v) - v[:, None])


def visits(mdp: Mdp, policy: Array) -> Array:
    """d^π(s) = Σ_t γ^t Pr(s_t = s), not normalised, and 0 for terminal states.

    Without terminal states it sums to 1/(1 − γ).
    """
    out = np.zeros(mdp.states)
    live = ~mdp.terminal
    out[live] = _solve(_live_matrix(mdp, policy).T, mdp.start[live])
    return out


def objective(mdp: Mdp, policy: Array) -> float:
    """J(π) = Σ_s start(s) V^π(s), the expected discounted return of an episode."""
    return float(mdp.start @ value(mdp, policy))


def objective_gradient(mdp: Mdp, logits: Array) -> Array:
    """∂J/∂θ(s,a) = d^π(s) π(a|s) A^π(s,a) for the softmax policy of these logits.

    Source: policy gradient theorem, Sutton et al. 1999, theorem 1, with the softmax's score put in.
    d^π carries the γ^t that practice leaves out (docs/errata.md).
    """
    policy = softmax(logits)
    return np.asarray(visits(mdp, policy)[:, None] * policy * advantages(mdp, policy))


def value_iteration(mdp: Mdp, *, tolerance: float = 1e-12, sweeps: int = 1_000_000) -> Solution:
    """V ← max_a Q(·, a) until ‖V − V*‖ ≤ tolerance, which follows from the last change.

    The backup contracts: ‖TV − TU‖ ≤ γ‖V − U‖ in the largest component, so the error is at most
    γ/(1 − γ) times the change. With γ = 1 the tolerance applies to the change itself. Raises ValueError
    if that is not reached.

    Source: Puterman 1994, section 6.3.
    """
    v = np.zeros(mdp.states)
    factor = mdp.gamma / (1 - mdp.gamma) if mdp.gamma < 1 else 1.0
    for sweep in range(1, sweeps + 1):
        q = action_values(mdp, v)
        new = q.max(axis=1)
        change, v = float(np.abs(new - v).max()), new
        # A value does not change by less than its rounding.
        if factor * change <= max(tolerance, factor * 4 * np.finfo(float).eps * float(np.abs(v).max())):
            q = action_values(mdp, v)
            return Solution(value=v, action_value=q, action=best(q), sweeps=sweep)
    raise ValueError(f"value iteration has not converged after {sweeps} sweeps")


def policy_iteration(mdp: Mdp) -> Solution:
    """Evaluate exactly, then act greedily, until no action is better: V* up to rounding.

    Begins with the policy that is greedy in the immediate reward. An action is exchanged only for
    one that is better by more than rounding, so that it ends.

    Source: Howard 1960; Puterman 1994, section 6.4.
    """
    action = best(mdp.reward)
    sweep = 0
    while True:
        sweep += 1
        v = value(mdp, deterministic(action, mdp.actions))
        q = action_values(mdp, v)
        better = q.max(axis=1) > v + 1e-12 * (1 + np.abs(v))
        if not better.any():
            return Solution(value=v, action_value=q, action=action, sweeps=sweep)
        action = np.where(better, best(q), action)


def explored_optimum(mdp: Mdp, epsilon: float, *, tolerance: float = 1e-12) -> Array:
    """Q of the best among the policies that explore with ε: the limit of SARSA with a fixed ε.

    The fixed point of Q = R + γ P [(1 − ε) max_a Q + ε mean_a Q], a contraction too. Raises ValueError
    if γ = 1.

    Source: Sutton and Barto 2018, section 5.4.
    """
    if mdp.gamma == 1:
        raise ValueError("the fixed point of an exploring policy needs gamma < 1")
    q = np.zeros_like(mdp.reward)
    change = np.inf
    while change > tolerance:
        new = action_values(mdp, (1 - epsilon) * q.max(axis=1) + epsilon * q.mean(axis=1))
        change, q = float(np.abs(new - q).max()), new
    return q


def best(action_value: Array) -> NDArray[np.int64]:
    """argmax_a Q(s, a), the first of equal values."""
    return np.asarray(action_value.argmax(axis=1))


def _live_matrix(mdp: Mdp, policy: Array) -> Array:
    """I − γ P_π among the states that are not terminal."""
    live = np.flatnonzero(~mdp.terminal)
    P = np.einsum("sa,sat->st", policy, mdp.transition)[np.ix_(live, live)]
    return np.asarray(np.eye(len(live)) - mdp.gamma * P)


def _solve(matrix: Array, right: Array) -> Array:
    if len(matrix) and np.linalg.matrix_rank(matrix) < len(matrix):
        raise ValueError("with gamma = 1 this policy can go on for ever: it has no value")
    return np.asarray(np.linalg.solve(matrix, right))


def _check_distribution(rows: Any, name: str) -> None:
    if (rows < 0).any() or not np.allclose(rows.sum(axis=-1), 1, atol=1e-12):
        raise ValueError(f"a row of {name} is not a distribution")
