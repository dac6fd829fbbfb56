"""How many answers to a prompt: groups of 2 to 32 at 128 answers an update, and so 64 to 4 groups.

GRPO, and RLOO, which does not divide by the deviation, learn gold from one reference with as many answers
and steps in every arm. Questions are dealt in random order, so an update of groups of 32 sees four.
The rate is the middle of three that were tried on seeds 100 and 101, where the order was alike.
"""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posttrain.methods.build import build
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
from posttrain_study.claims.online import Routine, improve, reference
from posttrain_study.claims.tiny import LONGEST, Table, gold_of, mean_of

SIZES, ANSWERS, UPDATES, EVERY = (2, 4, 8, 16, 32), 128, 60, 10
METHODS = {"grpo": "GRPO", "rloo": "RLOO"}
COLORS = {"grpo": "#c44e52", "rloo": "#4c72b0"}
LR = 1e-2


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Train every method with every size of groups."""
    model, gold, cases = reference(seed), gold_of(seed), {}
    for method in METHODS:
        for size in SIZES:
            report(f"group_size, seed {seed}, {method}, {size}")
            path: list[float] = []
            plan = Routine(UPDATES, ANSWERS // size, size, lr=LR)
            improve(model, build(method, {}, horizon=LONGEST), gold, plan, seed, recorder(path, gold))
            cases[f"{method}-{size}"] = path
    return {"cases": cases}


def recorder(path: list[float], gold: Table) -> Callable[[int, Table], None]:
    """Return a function that appends the expected gold to the path."""

    def see(update: int, logp: Table) -> None:
        if update % EVERY == 0:
            path.append(mean_of(gold, logp))

    return see


def final(figures: Figures, method: str, size: int) -> float:
    """Return the gold at the end."""
    return float(figures["cases"][f"{method}-{size}"][-1])


RULES = {
    "group_size": VerdictRule(
        "gold at the end of GRPO, groups of 16 minus groups of 2",
        lambda figures: final(figures, "grpo", 16) - final(figures, "grpo", 2),
        margin=0.05,
    ),
}


def table(results: Results) -> str:
    """Return the table of all arms: means, and ranges over seeds."""
    head = ("answers of a group", "groups", *(f"gold at the end, {name}" for name in METHODS.values()))
    rows = []
    for size in SIZES:
        cells = [spread([final(run, method, size) for run in results.runs]) for method in METHODS]
        rows.append([f"{size}", f"{ANSWERS // size}", *cells])
    return markdown(head, rows)


def draw(results: Results, figure: Any) -> None:
    """Draw gold by the size of groups, less the mean of each seed and method, and by update for each size."""
    axes = figure.subplots(1, 3)
    for method, name in METHODS.items():
        heights = [[final(run, method, size) for size in SIZES] for run in results.runs]
        centred = [[gold - statistics.fmean(run) for gold in run] for run in heights]
        curve(axes[0], SIZES, centred, name, COLORS[method])
    axes[0].set(
        xscale="log",
        xlabel="answers of a group, of 128 an update",
        ylabel="gold at the end, less the mean of the seed",
    )
    axes[0].set_xticks(SIZES, [str(size) for size in SIZES])
    axes[0].minorticks_off()
    axes[0].legend(frameon=False)
    viridis = ("#440154", "#414487", "#2a788e", "#22a884", "#7ad151")
    for panel, (method, name) in zip(axes[1:], METHODS.items(), strict=True):
        for size, color in zip(SIZES, viridis, strict=True):
            paths = [run["cases"][f"{method}-{size}"] for run in results.runs]
            means = [statistics.fmean(points) for points in zip(*paths, strict=True)]
            panel.plot(range(0, UPDATES + 1, EVERY), means, color=color, label=str(size), lw=1.8)
        panel.set(title=name, xlabel="update", ylabel="expected gold, mean over seeds")
    axes[1].legend(frameon=False, title="group")


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(12.0, 3.8))
