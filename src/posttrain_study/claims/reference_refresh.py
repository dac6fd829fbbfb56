"""A KL penalty whose reference is refreshed every n updates, against one whose reference is fixed.

GRPO learns gold with k3 in the loss, by a range of weights β. A refresh copies the policy into the reference,
so the penalty then holds the policy near what it was a few updates ago. Gold and KL to the start are exact.
β of both references was chosen on seeds 100 and 101, by gold at the end.
"""

import statistics
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
from posttrain_study.claims.online import Routine, improve, log_probs, reference
from posttrain_study.claims.tiny import LONGEST, Table, frontier, gold_of, kl_of, mean_of

BETAS, REFRESHES = (0.03, 0.1, 0.3, 1.0), (0, 20, 5)
"""REFRESHES: updates between copies; 0: the reference is fixed."""
PLAN, EVERY = Routine(updates=80, lr=1e-2), 5
SAME, FIXED_BETA, REFRESHED_BETA = 0.3, 0.03, 0.3
"""β at which both are drawn by update, and the β of each, chosen for the gold at the end."""
COLORS = {0: "#4c72b0", 20: "#55a868", 5: "#c44e52"}
Point = dict[str, float]


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Train with every weight and every reference, and without a penalty."""
    start, gold = reference(seed), gold_of(seed)
    logp_start, paths = log_probs(start), dict[str, list[Point]]()
    for beta, refresh in [(0.0, 0), *((beta, refresh) for beta in BETAS for refresh in REFRESHES)]:
        report(f"reference_refresh, seed {seed}, {beta:g}, {refresh}")
        path: list[Point] = []

        def see(update: int, logp: Table, path: list[Point] = path) -> None:
            if update % EVERY == 0:
                path.append({"gold": mean_of(gold, logp), "kl": kl_of(logp, logp_start)})

        method = build("grpo", {"kl_in_loss": beta}, horizon=LONGEST)
        improve(start, method, gold, PLAN, seed, see, refresh_every=refresh)
        paths[key(beta, refresh)] = path
    return {"paths": paths, "frontier": [point for point in frontier(logp_start, gold) if point[0] < 7]}


def key(beta: float, refresh: int) -> str:
    """Return the key of a run in the figures."""
    return f"{beta:g}-{refresh}"


def final(figures: Figures, beta: float, refresh: int, name: str = "gold") -> float:
    """Return gold, or KL, at the end."""
    return float(figures["paths"][key(beta, refresh)][-1][name])


RULES = {
    "reference_refresh": VerdictRule(
        "gold at the end, reference refreshed every 20 updates minus a fixed one, each with its best β",
        lambda figures: final(figures, REFRESHED_BETA, 20) - final(figures, FIXED_BETA, 0),
        margin=0.05,
    ),
}


def table(results: Results) -> str:
    """Return gold and KL at the end for each weight and reference: means, and ranges over seeds."""
    rows = [["0", *cells(results, 0.0, 0), *["–"] * 4]]
    rows += [[f"{beta:g}", *(c for n in REFRESHES for c in cells(results, beta, n))] for beta in BETAS]
    names = [f"every {refresh}" if refresh else "fixed" for refresh in REFRESHES]
    return markdown(("β", *(f"{label}, {name}" for name in names for label in ("gold", "KL"))), rows)


def cells(results: Results, beta: float, refresh: int) -> list[str]:
    """Return gold and KL at the end."""
    distance = statistics.fmean(final(run, beta, refresh, "kl") for run in results.runs)
    return [spread([final(run, beta, refresh) for run in results.runs]), f"{distance:.1f}"]


def draw(results: Results, figure: Any) -> None:
    """Draw gold by update at one β, and gold by KL to the start at the end, for each β; means over seeds."""
    first, second = figure.subplots(1, 2, sharey=True)
    for refresh, color in COLORS.items():
        label = f"refreshed every {refresh}" if refresh else "fixed"
        runs = [[point["gold"] for point in run["paths"][key(SAME, refresh)]] for run in results.runs]
        curve(first, range(0, PLAN.updates + 1, EVERY), runs, label, color)
        ends = [
            [statistics.fmean(final(run, beta, refresh, name) for run in results.runs) for beta in BETAS]
            for name in ("kl", "gold")
        ]
        second.plot(*ends, "o-", color=color, label=label)
        if not refresh:  # those of the others would lie on each other
            for n, beta in enumerate(BETAS):
                place = ends[0][n], ends[1][n]
                second.annotate(f"β = {beta:g}", place, (4, -10), textcoords="offset points", fontsize=7)
    free = [statistics.fmean(final(run, 0.0, 0, name) for run in results.runs) for name in ("kl", "gold")]
    second.plot(*([value] for value in free), "k*", ms=9, label="no penalty")
    for run in results.runs:
        second.plot(*zip(*run["frontier"], strict=True), color="grey", lw=0.4)
    second.plot([], [], color="grey", lw=0.4, label="best possible, each seed")
    first.set(xlabel="update", ylabel="expected gold", title=f"β = {SAME:g}")
    second.set(xlabel="KL(π ‖ start) at the end, nats an answer", title="every β")
    first.legend(frameon=False, title="reference")
    second.legend(frameon=False)


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(11.0, 4.2))
