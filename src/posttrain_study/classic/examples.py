"""One example for each chapter: learnt values next to the exact optimum, in seconds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from posttrain.math.evolution import centred_ranks, unshaped
from posttrain_study.classic import bandits as bandit
from posttrain_study.classic import dqn as deep
from posttrain_study.classic import evolution as evolving
from posttrain_study.classic import mdp as exact
from posttrain_study.classic import planner as planning
from posttrain_study.classic import tabular as tables
from posttrain_study.classic.maze import HORIZON, LAYOUT, MOVES, NAME
from posttrain_study.classic.maze import maze as maze_problem
from posttrain_study.classic.mdp import Array, Mdp
from posttrain_study.classic.simulate import experience, mean_return


@dataclass(frozen=True, kw_only=True)
class PlotLine:
    label: str
    x: Sequence[float] | NDArray[Any]
    y: Sequence[float] | NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Example:
    """The results of an example: a table and a plot."""

    title: str
    head: tuple[str, ...]
    rows: list[tuple[str | float, ...]]
    curves: list[PlotLine]
    x: str
    y: str
    scale: str = "linear"
    """Scale of the y axis: linear or log."""


def bandits(seed: int) -> Example:
    """Compare the regret of five strategies on four arms with the least possible growth."""
    arms, pulls = bandit.Bernoulli((0.1, 0.3, 0.5, 0.6)), 2000
    strategies: dict[str, bandit.Strategy] = {
        "ε-greedy, ε = 0.1": bandit.EpsilonGreedy(0.1),
        "UCB1": bandit.Ucb(),
        "Thompson": bandit.Thompson(),
        "gradient": bandit.Gradient(0.1),
        "gradient, no baseline": bandit.Gradient(0.1, bandit.no_baseline),
    }
    t = np.arange(1, pulls + 1)
    least = bandit.lai_robbins(arms) * np.log(t)
    rows: list[tuple[str | float, ...]] = []
    curves = [PlotLine(label="limit: Lai-Robbins · log t", x=t, y=least)]
    for name, strategy in strategies.items():
        history = bandit.play(arms, strategy, pulls=pulls, games=100, seed=seed)
        regret = bandit.regret(arms, history).mean(axis=0)
        rows.append((name, regret[pulls // 2 - 1], regret[-1], float((history[:, -200:] == 3).mean())))
        curves.append(PlotLine(label=name, x=t, y=regret))
    rows.append(("exact: the best arm", 0.0, 0.0, 1.0))
    head = ("strategy", f"regret at {pulls // 2}", f"at {pulls}", "best arm, last 200")
    title = "Bandit with means 0.1, 0.3, 0.5, 0.6: mean of 100 games"
    return Example(title=title, head=head, rows=rows, curves=curves, x="pull", y="regret")


def mdp(seed: int) -> Example:
    """Reach V* in three ways: by sweeps, by policies, and by the gradient of J."""
    world = exact.random_mdp(8, 3, seed=seed, branching=3)
    optimum = exact.policy_iteration(world)
    plan = exact.value_iteration(world)
    best = float(world.start @ optimum.value)
    objectives = _climb(world, steps=200, rate=10)
    v, errors = np.zeros(8), []
    for _ in range(100):
        errors.append(float(np.abs(v - optimum.value).max()))
        v = exact.action_values(world, v).max(axis=1)
    n = np.arange(100)
    return Example(
        title="A random problem of 8 states and 3 actions, γ = 0.9",
        head=("method", "rounds", "J", "J* − J"),
        rows=[
            ("policy iteration", optimum.sweeps, best, 0.0),
            ("value iteration", plan.sweeps, float(world.start @ plan.value), _gap(world, plan.action)),
            ("exact policy gradient", 200, objectives[-1], best - objectives[-1]),
            ("uniform policy", 0, objectives[0], best - objectives[0]),
        ],
        curves=[
            PlotLine(label="value iteration: ‖V − V*‖", x=n, y=errors),
            PlotLine(label="its bound γⁿ ‖V*‖", x=n, y=errors[0] * world.gamma**n),
            PlotLine(label="policy gradient: J* − J", x=np.arange(200), y=best - np.array(objectives)),
        ],
        x="round",
        y="error",
        scale="log",
    )


def maze(seed: int) -> Example:
    """Solve the 2×3 maze, and walk the optimal path in Gymnasium."""
    world = maze_problem()
    optimum = exact.policy_iteration(world)
    names, columns = list(MOVES), len(LAYOUT[0])
    rows: list[tuple[str | float, ...]] = []
    for s, cell in enumerate("".join(LAYOUT)):
        move = "end" if world.terminal[s] else names[optimum.action[s]]
        rows.append((f"({s // columns}, {s % columns}) {cell}", optimum.value[s], move))
    env = gymnasium.make(NAME)
    _, info = env.reset(seed=seed)
    total, weight, terminated = 0.0, 1.0, False
    while not terminated:
        _, reward, terminated, truncated, info = env.step(optimum.action[info["state"]])
        total, weight, terminated = (
            total + weight * float(reward),
            weight * world.gamma,
            terminated or truncated,
        )
    rows.append(("walked in Gymnasium", total, "return"))
    objectives = _climb(world, steps=100, rate=0.1)
    steps = np.arange(100)
    return Example(
        title="The 2×3 maze of notes E: +10 at G, −10 at X, γ = 0.9",
        head=("state", "V*", "best move"),
        rows=rows,
        curves=[
            PlotLine(label="J of the softmax policy, exact gradient", x=steps, y=objectives),
            PlotLine(label="J*", x=steps, y=np.full(100, float(world.start @ optimum.value))),
        ],
        x="step",
        y="J",
    )


def tabular(seed: int) -> Example:
    """Learn tables on a random problem with ε = 0.3 throughout: SARSA's limit is a policy that explores."""
    world = exact.random_mdp(5, 2, seed=1, branching=3)
    truth, exploring = exact.policy_iteration(world).action_value, exact.explored_optimum(world, 0.3)
    learning = tables.Learning(steps=100_000, epsilon=tables.constant(0.3))
    rows: list[tuple[str | float, ...]] = []
    curves = []
    methods = {
        "Q-learning": tables.q_learning,
        "SARSA": tables.sarsa,
        "double Q-learning": tables.double_q_learning,
    }
    for name, learn in methods.items():
        learnt = learn(world, learning, seed=seed)
        errors = np.abs(learnt.tables - truth).max(axis=(1, 2))
        distance = float(np.abs(learnt.action_value - exploring).max())
        rows.append((name, float(errors[-1]), distance))
        curves.append(PlotLine(label=f"{name}: ‖Q − Q*‖", x=learnt.steps, y=errors))
    rows.append(("exact: Q*", 0.0, float(np.abs(truth - exploring).max())))
    return Example(
        title="Tables after 100 000 steps on a random problem of 5 states and 2 actions",
        head=("method", "‖Q − Q*‖", "‖Q − Q of the best ε-greedy policy‖"),
        rows=rows,
        curves=curves,
        x="step",
        y="error",
        scale="log",
    )


def dqn(seed: int) -> Example:
    """Train a network on the maze, with each target and each way to refresh the frozen copy."""
    world = maze_problem()
    truth = exact.policy_iteration(world).action_value
    rows: list[tuple[str | float, ...]] = []
    curves = []
    frozen: dict[str, deep.Copy | deep.Polyak] = {"copied": deep.Copy(), "Polyak": deep.Polyak()}
    for name, target in (("DQN", deep.td_target), ("double DQN", deep.double_td_target)):
        for how, refresh in frozen.items():
            settings = replace(deep.DqnSettings(), target=target, frozen=refresh)
            trained = deep.train(gymnasium.make(NAME), settings, seed=seed)
            q = trained.network(torch.eye(world.states)).detach().numpy()
            error = float(np.abs(q - truth)[~world.terminal].max())
            rows.append((f"{name}, {how}", error, float(q[0].max()), _gap(world, q.argmax(axis=1))))
            y = np.convolve(trained.returns, np.ones(20) / 20, mode="valid")
            curves.append(PlotLine(label=f"{name}, {how}", x=np.arange(len(y)) + 20, y=y))
    rows.append(("exact", 0.0, float(truth[0].max()), 0.0))
    return Example(
        title=f"DQN on the maze, {deep.DqnSettings().steps} steps",
        head=("method", "‖Q − Q*‖", "max Q at the start", "J* − J"),
        rows=rows,
        curves=curves,
        x="episode",
        y="return, mean of 20 episodes (exploring)",
    )


def evolution(seed: int) -> Example:
    """Improve a linear policy on the maze by the returns of perturbed copies."""
    world = maze_problem()
    best = float(world.start @ exact.policy_iteration(world).value)
    before = nn.Linear(world.states, world.actions, bias=False)
    nn.init.zeros_(before.weight)

    def policy(module: nn.Module) -> Array:
        logits = module(torch.eye(world.states)).detach().double().numpy()
        return exact.softmax(logits)

    def fitness(module: nn.Module, draw: int) -> float:
        return mean_return(world, policy(module), episodes=8, horizon=HORIZON, seed=draw)

    rows: list[tuple[str | float, ...]] = [("before", exact.objective(world, policy(before)))]
    curves = []
    for name, shape in (("ranks", centred_ranks), ("raw fitness", unshaped)):
        evolved = evolving.evolve(before, fitness, evolving.EvolutionSettings(shape=shape), seed=seed)
        rows.append((f"after, {name}", exact.objective(world, policy(evolved.module))))
        curves.append(PlotLine(label=name, x=np.arange(len(evolved.fitness)), y=evolved.fitness))
    rows.append(("exact: J*", best))
    curves.append(PlotLine(label="J*", x=np.arange(60), y=np.full(60, best)))
    return Example(
        title="Evolution strategies on the maze: 60 generations of 32 trials",
        head=("policy", "J"),
        rows=rows,
        curves=curves,
        x="generation",
        y="mean return of the trials",
    )


def planner(seed: int) -> Example:
    """Plan in counted models of a random problem, and by rollouts in a model of the maze."""
    world = exact.random_mdp(8, 3, seed=1, branching=3)
    truth = exact.policy_iteration(world).action_value
    uniform = np.full((8, 3), 1 / 3)
    rows: list[tuple[str | float, ...]] = []
    sizes, errors, bounds = [100, 300, 1000, 3000, 10_000, 30_000], [], []
    for steps in sizes:
        data = experience(world, uniform, steps=steps, horizon=50, seed=seed)
        model = planning.learned_model(data, 8, 3, gamma=world.gamma)
        plan = exact.value_iteration(model)
        errors.append(float(np.abs(plan.action_value - truth).max()))
        bounds.append(planning.certainty_error(world, model))
        rows.append((f"{steps} steps counted", errors[-1], bounds[-1], _gap(world, plan.action)))
    grid = maze_problem()
    data = experience(grid, np.full((6, 4), 0.25), steps=1000, horizon=HORIZON, seed=seed)
    model = planning.learned_model(data, 6, 4, gamma=grid.gamma)
    rng = np.random.default_rng(seed)
    moves = [
        planning.planned_action(model, s, horizon=4, plans=500, samples=1, rng=rng)
        for s in range(grid.states)
    ]
    rows.append(("maze by rollouts, 1000 steps", "", "", _gap(grid, np.array(moves))))
    return Example(
        title="Planning in a model that was counted from uniformly random steps",
        head=("model", "‖Q − Q*‖", "its bound", "J* − J"),
        rows=rows,
        curves=[
            PlotLine(label="‖Q − Q*‖", x=np.log10(sizes), y=errors),
            PlotLine(label="bound", x=np.log10(sizes), y=bounds),
        ],
        x="log₁₀ steps",
        y="error",
        scale="log",
    )


EXAMPLES: dict[str, Callable[[int], Example]] = {
    "bandits": bandits,
    "mdp": mdp,
    "maze": maze,
    "tabular": tabular,
    "dqn": dqn,
    "evolution": evolution,
    "planner": planner,
}


def _climb(world: Mdp, *, steps: int, rate: float) -> list[float]:
    """Return J before each step of exact gradient ascent on the logits of a softmax policy."""
    logits, objectives = np.zeros((world.states, world.actions)), []
    for _ in range(steps):
        objectives.append(exact.objective(world, exact.softmax(logits)))
        logits += rate * exact.objective_gradient(world, logits)
    return objectives


def _gap(world: Mdp, action: Any) -> float:
    """Return J* − J of the deterministic policy with these actions."""
    best = float(world.start @ exact.policy_iteration(world).value)
    return best - exact.objective(world, exact.deterministic(action, world.actions))
