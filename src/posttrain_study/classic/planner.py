"""Model-based: count what happened, take the counts for the world, and plan in it.

    P̂(s'|s,a) = n(s,a,s') / n(s,a)        R̂(s,a) = mean reward seen

What this loses is bounded by what the counts say wrong of the true values (`certainty_error`), so
with enough data the plan is optimal.
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
    """The problem that this experience shows.

    An action that was never tried is taken to stay where it is with reward `unseen`: with a low one
    the plan avoids what it does not know, with a high one it goes to find out (R-max, Brafman and
    Tennenholtz 2002). Without `start`, episodes begin in any state that can go on.
    """
    seen, total = np.zeros((states, actions, states)), np.zeros((states, actions))
    np.add.at(seen, (data.state, data.action, data.after), 1)
    np.add.at(total, (data.state, data.action), data.reward)
    n = seen.sum(axis=2)
    P = np.where(n[:, :, None] > 0, seen / np.maximum(n, 1)[:, :, None], np.eye(states)[:, None, :])
    R = np.where(n > 0, total / np.maximum(n, 1), unseen)
    terminal = np.zeros(states, dtype=bool)
    terminal[data.after[data.ended]] = True
    R[terminal] = 0
    begin = np.asarray(~terminal / (~terminal).sum()) if start is None else start
    return Mdp(transition=P, reward=R, gamma=gamma, terminal=terminal, start=begin)


def certainty_error(world: Mdp, model: Mdp) -> float:
    """max_{s,a} |Q*_world − Q*_model| is at most this: max |T_world V* − T_model V*| / (1 − γ).

    T is Bellman's backup and V* the world's optimal value. It holds for any model, since the model's
    backup contracts by γ and V* moves by no more than the numerator under it. ValueError if γ = 1.

    Source: simulation lemma, Kearns and Singh 2002, in its form with V*.
    """
    if model.gamma == 1:
        raise ValueError("without discount the error of a model is not bounded")
    true = value_iteration(world).value
    wrong = np.abs(action_values(world, true) - action_values(model, true))[~world.terminal]
    return float(wrong.max() / (1 - model.gamma))


def imagined_returns(
    model: Mdp, state: int, plans: NDArray[np.int64], *, samples: int, rng: np.random.Generator
) -> Array:
    """Mean discounted return in the model of each row of actions [N, H], over `samples` runs of each."""
    N, H = plans.shape
    at = np.full((N, samples), state)
    total, cumulative = np.zeros((N, samples)), model.transition.cumsum(axis=2)
    for t in range(H):
        action = plans[:, t : t + 1]
        total += model.gamma**t * model.reward[at, action]
        drawn = rng.random((N, samples, 1))
        at = np.minimum((cumulative[at, action] <= drawn).sum(axis=2), model.states - 1)
    return np.asarray(total.mean(axis=1))


def planned_action(
    model: Mdp, state: int, *, horizon: int, plans: int, samples: int, rng: np.random.Generator
) -> int:
    """The first action of the best of `plans` random rows of actions: random shooting.

    Only one action is taken; the next state is planned for again (receding horizon). Rewards beyond
    the horizon are not seen, and a plan does not react to what it meets on its way, so in a random
    world it is a lower bound on what acting can get.

    Source: model predictive control by random shooting, as in arXiv:1708.02596, section IV.
    """
    drawn = rng.integers(model.actions, size=(plans, horizon))
    return int(drawn[imagined_returns(model, state, drawn, samples=samples, rng=rng).argmax(), 0])
