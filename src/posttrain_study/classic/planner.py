"""Model-based learning: estimate a model by counting, and plan in it.

    P̂(s'|s,a) = n(s,a,s') / n(s,a)        R̂(s,a) = mean reward seen

The loss is bounded by the model's error at the true values (`certainty_error`), so with enough data the
plan is optimal.
"""

import numpy as np
from numpy.typing import NDArray

from posttrain_study.classic.mdp import Array, Mdp, action_values, value_iteration
from posttrain_study.classic.simulate import Experience


def learned_model(
    data: Experience,
    states: int,
    actions: int,
    *,
    gamma: float,
    unseen: float = 0.0,
    start: Array | None = None,
) -> Mdp:
    """Estimate the decision problem from experience.

    An untried action is assumed to stay in its state with reward `unseen`: with a low value the plan avoids
    the unknown, with a high one it explores it (R-max, Brafman and Tennenholtz 2002). Without `start`,
    episodes begin uniformly in the states that are not terminal.
    """
    counts, total = np.zeros((states, actions, states)), np.zeros((states, actions))
    np.add.at(counts, (data.state, data.action, data.after), 1)
    np.add.at(total, (data.state, data.action), data.reward)
    n = counts.sum(axis=2)
    P = np.where(n[:, :, None] > 0, counts / np.maximum(n, 1)[:, :, None], np.eye(states)[:, None, :])
    R = np.where(n > 0, total / np.maximum(n, 1), unseen)
    terminal = np.zeros(states, dtype=bool)
    terminal[data.after[data.terminal]] = True
    R[terminal] = 0
    begin = np.asarray(~terminal / (~terminal).sum()) if start is None else start
    return Mdp(transition=P, reward=R, gamma=gamma, terminal=terminal, start=begin)


def certainty_error(world: Mdp, model: Mdp) -> float:
    """max |T_world V* − T_model V*| / (1 − γ), a bound on max_{s,a} |Q*_world − Q*_model|.

    T is Bellman's backup and V* the world's optimal value. The bound holds for any model, since the model's
    backup contracts by γ and moves V* by at most the numerator. Raises ValueError if γ = 1.

    Source: simulation lemma, Kearns and Singh 2002, in its form with V*.
    """
    if model.gamma == 1:
        raise ValueError("without discount the error of a model is not bounded")
    values = value_iteration(world).value
    errors = np.abs(action_values(world, values) - action_values(model, values))[~world.terminal]
    return float(errors.max() / (1 - model.gamma))


def imagined_returns(
    model: Mdp, state: int, plans: NDArray[np.int64], *, samples: int, rng: np.random.Generator
) -> Array:
    """Mean discounted return in the model of each row of actions [N, H], over `samples` runs of each."""
    N, H = plans.shape
    states = np.full((N, samples), state)
    total, cumulative = np.zeros((N, samples)), model.transition.cumsum(axis=2)
    for t in range(H):
        action = plans[:, t : t + 1]
        total += model.gamma**t * model.reward[states, action]
        uniforms = rng.random((N, samples, 1))
        states = np.minimum((cumulative[states, action] <= uniforms).sum(axis=2), model.states - 1)
    return np.asarray(total.mean(axis=1))


def planned_action(
    model: Mdp, state: int, *, horizon: int, plans: int, samples: int, rng: np.random.Generator
) -> int:
    """Return the first action of the best of `plans` random rows of actions: random shooting.

    Only one action is taken; the next state is planned for again (receding horizon). Rewards beyond
    the horizon are not seen, and a plan does not react to the states it meets, so in a random world
    its return is a lower bound on the optimum.

    Source: model predictive control by random shooting, as in arXiv:1708.02596, section IV.
    """
    sequences = rng.integers(model.actions, size=(plans, horizon))
    return int(sequences[imagined_returns(model, state, sequences, samples=samples, rng=rng).argmax(), 0])
