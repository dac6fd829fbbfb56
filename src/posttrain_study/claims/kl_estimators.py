"""Estimators of the KL to the reference: as penalties at an equal KL, and their spread.

GRPO without its divisions learns gold with a penalty of several weights β: k1 in the reward, k2, k3 or k1 in
the loss. The gold of a penalty at a KL of 2 nats is interpolated between its β. Then k1 and k3 of 16,384
answers of each policy under k2 are compared with the exact KL. Gold and KL are exact.
"""

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from posttrain.math import kl
from posttrain.methods.build import build
from posttrain_study.claims.experiment import (
    Experiment,
    Figures,
    Report,
    Results,
    VerdictRule,
    markdown,
    spread,
)
from posttrain_study.claims.online import PrefixPolicy, Routine, improve, log_probs, reference, sample
from posttrain_study.claims.tiny import LONGEST, Table, frontier, gold_of, kl_of, mean_of

BETAS = (0.05, 0.1, 0.2, 0.4, 0.8)
PENALTIES: dict[str, Callable[[float], dict[str, Any]]] = {
    "k1 in the reward": lambda beta: {"kl_in_reward": beta},
    "k2 in the loss": lambda beta: {"kl": "k2", "kl_in_loss": beta},
    "k3 in the loss": lambda beta: {"kl": "k3", "kl_in_loss": beta},
    "k1 in the loss": lambda beta: {"kl": "k1", "kl_in_loss": beta},
}
COLORS = ("#4c72b0", "#55a868", "#c44e52", "#8c8c8c")
PLAN, TARGET, JUDGED = Routine(updates=60, lr=2e-2), 2.0, 2048
"""TARGET: the KL at which penalties are compared. JUDGED: answers to each question for the spread."""


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Train with every penalty and weight, and estimate the KL of the policies under k2."""
    start, gold = reference(seed), gold_of(seed)
    logp_ref, spreads = log_probs(start), list[dict[str, float]]()
    cases: dict[str, list[list[float]]] = {}
    for name, numbers in PENALTIES.items():
        cases[name] = []
        for beta in BETAS:
            report(f"kl_estimators, seed {seed}, {name}, {beta:g}")
            method = build("dr_grpo", {"reduction": "per_row", **numbers(beta)}, horizon=LONGEST)
            policy = improve(start, method, gold, PLAN, seed)
            logp = log_probs(policy.network)
            cases[name].append([kl_of(logp, logp_ref), mean_of(gold, logp)])
            if name == "k2 in the loss":
                spreads.append({"kl": cases[name][-1][0]} | estimates(policy, start, logp, seed))
    best = [point for point in frontier(logp_ref, gold) if point[0] < 5]
    return {"cases": cases, "spreads": spreads, "frontier": best}


@torch.no_grad()
def estimates(policy: PrefixPolicy, start: nn.Module, logp: Table, seed: int) -> dict[str, float]:
    """Return mean and deviation over answers of k1 and k3, each summed over the answer's tokens."""
    chance = torch.Generator().manual_seed(seed)
    batch = sample(logp, torch.zeros_like(logp), Routine(0, size=JUDGED), chance)
    ours, theirs = policy.outputs(batch).logp, PrefixPolicy(start, policy.method, 0.0).outputs(batch).logp
    figures: dict[str, float] = {}
    for name, estimator in (("k1", kl.k1), ("k3", kl.k3)):
        sums = (estimator(ours, theirs).double() * batch.mask).sum(1)
        figures |= {name: float(sums.mean()), f"{name}_sd": float(sums.std())}
    return figures


# ---------------------------------------------------------------------- what the claims say


def gold_at(points: list[list[float]]) -> float:
    """Return the gold at TARGET between the two nearest points, by √KL; NaN if no KL is below or above it.

    >>> gold_at([[1.0, 0.0], [4.0, 1.0]])
    0.41421356237309515
    """
    below = max((p for p in points if p[0] <= TARGET), default=None)
    above = min((p for p in points if p[0] > TARGET), default=None)
    if below is None or above is None:
        return math.nan
    low, high = math.sqrt(below[0]), math.sqrt(above[0])
    share = (math.sqrt(TARGET) - low) / (high - low)
    return float(below[1] + share * (above[1] - below[1]))


def nearest(figures: Figures) -> dict[str, float]:
    """Return the estimates of the policy whose KL is nearest to TARGET."""
    return min(figures["spreads"], key=lambda point: abs(math.log(point["kl"] / TARGET)))


RULES = {
    "kl_in_loss": VerdictRule(
        "gold at a KL of 2 nats, k3 in the loss minus k1 in the reward",
        lambda figures: (
            gold_at(figures["cases"]["k3 in the loss"]) - gold_at(figures["cases"]["k1 in the reward"])
        ),
        margin=0.05,
        equal=True,
    ),
    "kl_k3_variance": VerdictRule(
        "log₂ of the deviation of k1 over that of k3, over answers of the policy nearest to 2 nats",
        lambda figures: math.log2(nearest(figures)["k1_sd"] / nearest(figures)["k3_sd"]),
    ),
}


# ---------------------------------------------------------------------- table and picture


def table(results: Results) -> str:
    """Return two tables: every penalty, and the estimates of the policies under k2."""
    head = ("penalty", f"gold at {TARGET:g} nats", *(f"KL, gold at β = {beta:g}" for beta in BETAS))
    rows = []
    for name in PENALTIES:
        runs = [run["cases"][name] for run in results.runs]
        means = [[statistics.fmean(run[n][k] for run in runs) for k in (0, 1)] for n in range(len(BETAS))]
        cells = [f"{distance:.2f}, {gold:.2f}" for distance, gold in means]
        gold = [gold_at(run) for run in runs]
        rows.append([name, "–" if any(map(math.isnan, gold)) else spread(gold), *cells])
    one = markdown(head, rows)
    head = ("β of k2", "exact KL", "k1", "k3", "deviation of k1", "of k3")
    rows = []
    for n, beta in enumerate(BETAS):
        keys = ("kl", "k1", "k3", "k1_sd", "k3_sd")
        rows.append(
            [f"{beta:g}", *(spread([run["spreads"][n][key] for run in results.runs]) for key in keys)]
        )
    return f"{one}\n\n{markdown(head, rows)}"


def draw(results: Results, figure: Any) -> None:
    """Draw gold by KL for each penalty, each weight's mean over seeds, and the deviations by KL."""
    first, second = figure.subplots(1, 2)
    for (name, color), style in zip(
        zip(PENALTIES, COLORS, strict=True), ("o-", "s-", "^-", "x"), strict=True
    ):
        runs = [run["cases"][name] for run in results.runs]
        means = [[statistics.fmean(run[n][k] for run in runs) for n in range(len(BETAS))] for k in (0, 1)]
        first.plot(*means, style, ms=5, color=color, label=name)
    frontiers = [run["frontier"] for run in results.runs]
    for points in frontiers:
        first.plot(*zip(*points, strict=True), color="grey", lw=0.4)
    first.plot([], [], color="grey", lw=0.4, label="best possible, each seed")
    first.set(xlabel="KL(π ‖ π_ref), nats an answer", ylabel="expected gold")
    first.legend(frameon=False)
    for key, name, color in (("k1_sd", "k1", COLORS[0]), ("k3_sd", "k3", COLORS[2])):
        points = [point for run in results.runs for point in run["spreads"]]
        second.plot([p["kl"] for p in points], [p[key] for p in points], ".", color=color, label=name)
    second.set(xlabel="KL(π ‖ π_ref), nats an answer", ylabel="deviation over answers, nats", yscale="log")
    second.legend(frameon=False)


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(10.0, 4.2))
