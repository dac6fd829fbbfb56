"""DPO and IPO on the comparisons of judges with a cycle in their taste, which no reward can express.

An answer's kind is its first letter, and of two kinds the judge prefers a to b, b to c, and c to a. With
probability `cycle` a pair is decided by that (by a coin within a kind), and otherwise by Bradley and Terry's
model on gold. DPO and IPO learn from 512 pairs of the reference; gold is replaced by what both are asked for:
the chance that an answer of the policy is preferred to one of the reference. It is exact, and compared where
KL(π ‖ π_ref) first reaches 1 nat. Rates and β were chosen for each on seed 100.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from posttrain.methods.build import build
from posttrain.types import Method
from posttrain_study.claims.experiment import (
    Experiment,
    Figures,
    Report,
    Results,
    VerdictRule,
    markdown,
    spread,
)
from posttrain_study.claims.fitting import SURE, with_reference
from posttrain_study.claims.tiny import (
    LETTERS,
    LONGEST,
    SPELT,
    Pairs,
    Table,
    Trainee,
    frontier,
    gold_of,
    kl_of,
    likelihoods,
    mean_of,
    reference_model,
    sample_pairs,
)

PAIRS, PAIRS_A_STEP, EPOCHS, EVERY, NEAR = 512, 64, 24, 2, 1.0
CYCLES = (0.0, 0.5, 1.0)
METHODS = {"DPO": ("dpo", 3e-3, 0.1), "IPO": ("ipo", 3e-3, 0.03)}
"""Method, rate and β of each arm."""
KIND = torch.tensor([answer[0] for answer in SPELT])
"""Number of the first letter; the empty answer has LETTERS, which the cycle leaves out."""


def preferred(gold: Table, cycle: float) -> torch.Tensor:
    """Return P(i preferred to j) of every two answers to each question, [QUESTIONS, COUNT, COUNT]."""
    ahead, letters = (KIND[None, :] - KIND[:, None]) % LETTERS, (KIND[:, None] < LETTERS) & (KIND < LETTERS)
    turn = torch.tensor([0.5, 1.0, 0.0]).double()[ahead].where(letters, 0.5)
    return cycle * turn + (1 - cycle) * (SURE * (gold[:, :, None] - gold[:, None, :])).sigmoid()


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Train by both methods on the comparisons of each judge."""
    model, gold = reference_model(seed), gold_of(seed)
    logp_ref, draw = likelihoods(model), torch.Generator().manual_seed(10000 + seed)
    pairs = sample_pairs(logp_ref, PAIRS, draw)
    lots = torch.rand(PAIRS, generator=draw, dtype=torch.float64)
    judges = {}
    for cycle in CYCLES:
        judge = preferred(gold, cycle)
        wins = (judge @ logp_ref.exp()[..., None])[..., 0]
        labelled = pairs.turned(lots > judge[pairs.question, pairs.won, pairs.lost])
        paths = {}
        for name in METHODS:
            report(f"not_bradley_terry, seed {seed}, {cycle:.0%} cycle, {name}")
            paths[name] = train(Trainee(model, *arm(name)), labelled, logp_ref, wins, seed)
        best = [point for point in frontier(logp_ref, wins) if point[0] < 2 * NEAR]
        judges[f"{cycle:g}"] = {"paths": paths, "frontier": best}
    return {"judges": judges}


def arm(name: str) -> tuple[Method, float]:
    """Return the method and rate of an arm."""
    method, lr, beta = METHODS[name]
    return build(method, {"beta": beta}, horizon=LONGEST), lr


def train(
    trainee: Trainee, pairs: Pairs, logp_ref: Table, wins: Table, seed: int
) -> list[tuple[float, float]]:
    """Return (KL, chance to be preferred to the reference) every few steps, until the KL has passed NEAR."""
    batch, draw = with_reference(trainee, pairs.batch()), torch.Generator().manual_seed(seed)
    path = [(0.0, mean_of(wins, logp_ref))]
    for _ in range(EPOCHS):
        order = torch.randperm(PAIRS, generator=draw)
        for n, start in enumerate(range(0, PAIRS, PAIRS_A_STEP)):
            part = order[start : start + PAIRS_A_STEP]
            trainee.step(batch.rows((2 * part[:, None] + torch.arange(2)).flatten()))
            if n % EVERY == EVERY - 1:
                logp = likelihoods(trainee.model)
                path.append((kl_of(logp, logp_ref), mean_of(wins, logp)))
                if path[-1][0] > NEAR:
                    return path
    return path


def near(path: Sequence[Sequence[float]]) -> float:
    """Return the chance at the first KL of NEAR, between the evaluations around it, or the last one.

    >>> near([(0.0, 0.5), (0.5, 0.6), (1.5, 0.8)])
    0.7
    """
    for (kl, chance), (further, after) in pairwise(path):
        if further > NEAR:
            return round(chance + (after - chance) * (NEAR - kl) / (further - kl), 9)
    return path[-1][1]


def advantage(figures: Figures, cycle: float) -> float:
    """Return the chance to be preferred to the reference, IPO minus DPO, for one judge."""
    paths = figures["judges"][f"{cycle:g}"]["paths"]
    return near(paths["IPO"]) - near(paths["DPO"])


RULES = {
    "not_bradley_terry": VerdictRule(
        "chance to be preferred to the reference at a KL of 1, IPO minus DPO, mean of 50 and 100 % cycle",
        lambda figures: (advantage(figures, 0.5) + advantage(figures, 1.0)) / 2,
        0.01,
    ),
}


# ---------------------------------------------------------------------- table and picture


def table(results: Results) -> str:
    """Return mean and range over seeds for each judge."""
    rows = []
    for cycle in CYCLES:
        judges = [run["judges"][f"{cycle:g}"] for run in results.runs]
        arms = [spread([near(judge["paths"][name]) for judge in judges], ".1%") for name in METHODS]
        best = spread([near(judge["frontier"]) for judge in judges], ".1%")
        difference = spread([100 * advantage(run, cycle) for run in results.runs], "+.1f")
        rows.append([f"{cycle:.0%}", *arms, difference, best])
    return markdown(("cycle", *METHODS, "IPO minus DPO, points", "best possible"), rows)


def draw(results: Results, figure: Any) -> None:
    """Draw the chance to be preferred by KL, a panel for each judge; a thin line for each seed."""
    for axes, cycle in zip(figure.subplots(1, len(CYCLES), sharey=True), CYCLES, strict=True):
        for run in results.runs:
            judge = run["judges"][f"{cycle:g}"]
            for n, name in enumerate(METHODS):
                axes.plot(*zip(*judge["paths"][name], strict=True), color=f"C{n}", lw=1)
            axes.plot(*zip(*judge["frontier"], strict=True), color="grey", lw=0.5)
        axes.set(title=f"{cycle:.0%} cycle", xlabel="KL(π ‖ π_ref)", xlim=(0, 1.2 * NEAR))
    for n, name in enumerate(METHODS):
        axes.plot([], [], color=f"C{n}", label=name)
    axes.plot([], [], color="grey", lw=0.5, label="best possible")
    axes.legend(frameon=False)
    figure.axes[0].set_ylabel("chance to be preferred to the reference")


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(12.0, 4.0))
