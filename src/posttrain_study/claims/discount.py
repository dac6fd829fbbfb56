"""A discount on the reward at the end of an answer: factors γ from 0.7 to 1.

The answers of most gold, which are 5 % of the reference's, are right, and paid 1 at their last token. A token
is credited with γ to the number of tokens that follow it, whitened over all tokens of the batch. The rate was
the one that RLOO does best with on this task on seed 100. Chances and lengths are exact.
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
from posttrain_study.claims.online import Routine, best_answers, improve, log_probs, reference
from posttrain_study.claims.tiny import LENGTH, LONGEST, QUESTIONS, Table, gold_of, mean_of

GAMMAS, SHARE, EVERY = (0.7, 0.8, 0.9, 0.95, 1.0), 0.05, 10
PLAN = Routine(updates=60, lr=1e-2)


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Train with every γ from the same reference."""
    start, cases = reference(seed), {}
    logp = log_probs(start)
    right = best_answers(logp, gold_of(seed), SHARE)
    for gamma in GAMMAS:
        report(f"discount, seed {seed}, {gamma:g}")
        path: list[tuple[float, float]] = []
        numbers = {"gamma": gamma, "credit": "batch_normalised"}
        method = build("reinforce_to_go", numbers, horizon=LONGEST)
        improve(start, method, right, PLAN, seed, recorder(path, right))
        cases[f"{gamma:g}"] = path
    letters = LENGTH.double().expand(QUESTIONS, -1)
    return {"cases": cases, "right_length": mean_of(right * letters, logp) / mean_of(right, logp)}


def recorder(path: list[tuple[float, float]], right: Table) -> Callable[[int, Table], None]:
    """Return a function that appends the chance of a right answer, and the expected letters, to the path."""
    letters = LENGTH.double().expand(QUESTIONS, -1)

    def see(update: int, logp: Table) -> None:
        if update % EVERY == 0:
            path.append((mean_of(right, logp), mean_of(letters, logp)))

    return see


def final(figures: Figures, gamma: float, place: int) -> float:
    """Return the chance (0) or the letters (1) at the end."""
    return float(figures["cases"][f"{gamma:g}"][-1][place])


RULES = {
    "discount": VerdictRule(
        "chance of a right answer at the end, γ = 1 minus γ = 0.9",
        lambda figures: final(figures, 1.0, 0) - final(figures, 0.9, 0),
        margin=0.03,
    ),
}


def table(results: Results) -> str:
    """Return the table of all γ: means, and ranges over seeds."""
    head = ("γ", "right at the end", "letters of an answer at the end")
    rows = []
    for gamma in GAMMAS:
        chance = spread([final(run, gamma, 0) for run in results.runs], ".0%")
        rows.append([f"{gamma:g}", chance, spread([final(run, gamma, 1) for run in results.runs])])
    return markdown(head, rows)


def draw(results: Results, figure: Any) -> None:
    """Draw the chance of a right answer and the expected letters by update for each γ."""
    axes = figure.subplots(1, 2)
    viridis = ("#440154", "#414487", "#2a788e", "#22a884", "#7ad151")
    updates = range(0, PLAN.updates + 1, EVERY)
    for place, panel in enumerate(axes):
        for gamma, color in zip(GAMMAS, viridis, strict=True):
            paths = [run["cases"][f"{gamma:g}"] for run in results.runs]
            curve(panel, updates, [[point[place] for point in path] for path in paths], f"{gamma:g}", color)
        panel.set(xlabel="update")
    length = statistics.fmean(run["right_length"] for run in results.runs)
    axes[1].axhline(length, color="black", lw=0.8, ls=":", label="right answers of the reference")
    axes[0].set_ylabel("chance of a right answer")
    axes[1].set_ylabel("expected letters of an answer")
    axes[0].legend(frameon=False, title="γ")
    axes[1].legend(*[handles[-1:] for handles in axes[1].get_legend_handles_labels()], frameon=False)


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(10.0, 4.0))
