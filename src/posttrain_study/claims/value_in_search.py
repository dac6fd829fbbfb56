"""A prior, a value, both and neither: theorems that searches prove, by the number of moves.

The world is that of sequents.py. A Llama learns by expert iteration from the product's trees on training
theorems: moves of proofs, and values of states. Then the same held-out theorems are searched by `hypertree`
in every arm, with the same Llama. An unguided search does not prove any within EASY moves.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.search.choice import SearchChoice
from posttrain.types import Task
from posttrain_prove.tasks.propositional import Propositional, propositional
from posttrain_study.claims.experiment import (
    Experiment,
    Figures,
    Report,
    Results,
    VerdictRule,
    curve,
    markdown,
    spread,
)
from posttrain_study.claims.sequents import Guide, TreeLearner, is_provable, new_llama, rows_of, search_all

TRAIN, HELD_OUT = Propositional(low=10, high=24), Propositional(low=24, high=32)
ROUNDS, THEOREMS, STEPS, LESSONS = 2, 128, 160, 16
TESTED, EASY = 20, 32
"""Held-out theorems, and the moves within which an unguided search does not prove any."""
BUDGETS = (16, 64, 256, 1024, 2048)
WALK = SearchChoice(strategy="hypertree", moves=BUDGETS[-1], width=4, depth=48, values=True)
BEST_FIRST = replace(WALK, values=False)


@dataclass(frozen=True)
class SearchArm:
    """How a search is guided; c: of PUCT, None for the score of best-first search."""

    prior: bool
    value: str
    c: float | None

    @property
    def choice(self) -> SearchChoice:
        """The search that this arm makes of the recipe's choice."""
        return BEST_FIRST if self.c is None else replace(WALK, c=self.c)


ARMS = {
    "neither": SearchArm(False, "none", 0.4),
    "value alone": SearchArm(False, "model", 0.4),
    "prior alone": SearchArm(True, "none", 0.4),
    "prior and value": SearchArm(True, "model", 0.4),
    "prior, best-first": SearchArm(True, "none", None),
    "prior and exact value": SearchArm(True, "exact", 0.4),
}


def trained(seed: int, report: Report = lambda text: None) -> TreeLearner:
    """Return a Llama that learnt from its own searches of training theorems."""
    tasks = propositional("train", replace(TRAIN, seed=seed, train=ROUNDS * THEOREMS))
    learner = TreeLearner(new_llama(seed), seed)
    for number in range(ROUNDS):
        report(f"seed {seed}, round {number + 1} of {ROUNDS}")
        guide = Guide(learner.model, seed, prior=number > 0)
        part = tasks[number * THEOREMS : (number + 1) * THEOREMS]
        for tree in search_all(part, guide, replace(BEST_FIRST, moves=128), LESSONS):
            learner.add(rows_of(tree, BEST_FIRST, 2 * LESSONS))
        learner.train(STEPS)
    return learner


def hard_theorems(seed: int, guide: Guide, count: int) -> list[Task]:
    """Return the first held-out theorems that an unguided search does not prove within EASY moves."""
    tasks = propositional("held_out", replace(HELD_OUT, seed=seed, held_out=3 * count))
    plain = replace(guide, prior=False, value="none")
    trees = search_all(tasks, plain, replace(WALK, moves=EASY))
    return [task for task, tree in zip(tasks, trees, strict=True) if not tree.solved][:count]


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Train, and search the same theorems in every arm."""
    guide, arms = Guide(trained(seed, report).model, seed), {}
    tasks = hard_theorems(seed, guide, TESTED)
    for name, arm in ARMS.items():
        report(f"seed {seed}, {name}")
        trees = search_all(tasks, replace(guide, prior=arm.prior, value=arm.value), arm.choice)
        moves = [tree.drawn for tree in trees if tree.solved]
        solved = [sum(n <= budget for n in moves) / len(tasks) for budget in BUDGETS]
        arms[name] = {"solved": solved, "moves": sorted(moves)}
    return {"theorems": len(tasks), "arms": arms, **quality(guide)}


def quality(guide: Guide) -> dict[str, float]:
    """Return the share of provable sequents of those read, and how well values tell both kinds apart."""
    truth = np.array([is_provable(sequent) for sequent in guide.memory])
    values = np.array([value for _, value in guide.memory.values()])
    order = values.argsort().argsort() + 1.0
    good, bad = int(truth.sum()), int((~truth).sum())
    area = (order[truth].sum() - good * (good + 1) / 2) / max(good * bad, 1)
    return {"provable": good / len(truth), "area": float(area), "read": float(len(truth))}


# ---------------------------------------------------------------------- rule, table and picture


def mean_solved(figures: Figures, arm: str) -> float:
    """Return the share of theorems proved, the mean over budgets."""
    return statistics.fmean(figures["arms"][arm]["solved"])


def gain(one: str, other: str) -> Callable[[Figures], float]:
    """Return the measure of how much more one arm proves than another."""
    return lambda figures: mean_solved(figures, one) - mean_solved(figures, other)


RULES = {
    "value_in_search": VerdictRule(
        "share of theorems proved, mean over 16 to 2,048 moves, PUCT with prior and value minus prior alone",
        gain("prior and value", "prior alone"),
        0.02,
    ),
}


def table(results: Results) -> str:
    """Return the shares proved within each budget."""
    rows = []
    for name in ARMS:
        columns = zip(*(run["arms"][name]["solved"] for run in results.runs), strict=True)
        rows.append([name, *(spread(column, ".0%") for column in columns)])
    return markdown(("search", *(f"{budget:,} moves" for budget in BUDGETS)), rows)


def draw(results: Results, figure: Any) -> None:
    """Draw the shares proved by moves."""
    axes = figure.subplots()
    grid = [2 ** (n / 4) for n in range(12, 45)]
    for n, name in enumerate(ARMS):
        of_runs = [(run["arms"][name]["moves"], run["theorems"]) for run in results.runs]
        curve(axes, grid, [proved_within(grid, *pair) for pair in of_runs], name, f"C{n}")
    axes.set(xscale="log", xlabel="moves drawn", ylabel="theorems proved", ylim=(0, 1))
    axes.set_xticks(BUDGETS, [f"{budget:,}" for budget in BUDGETS])
    axes.legend(frameon=False)


def proved_within(grid: Sequence[float], moves: Sequence[int], count: int) -> list[float]:
    """Return the share of theorems proved within each number of moves; 0 moves stand for no proof."""
    return [sum(0 < n <= most for n in moves) / count for most in grid]


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(7.5, 4.2))
