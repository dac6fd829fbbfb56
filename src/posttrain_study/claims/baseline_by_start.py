"""Does a baseline reduce variance, and does less variance learn faster, by how often the start is right?

The language of tiny.py: 8 questions, whose best answers by gold are right, enough for the start to be right
with a chance of 0.05, 0.5 or 0.9. 40 updates of 8 × 16 answers, with AdamW and gradients clipped to a norm of
1. Chances are exact. At the start the variance of the gradient is estimated from 32 batches. Rates were
chosen for each arm and start on seeds from 100 on.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from posttrain.math import reduce
from posttrain.methods.build import build
from posttrain.types import Batch
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
from posttrain_study.claims.tiny import (
    LONGEST,
    Table,
    Trainee,
    gold_of,
    likelihoods,
    mean_of,
    reference_model,
    sampled_batch,
)

STARTS = (0.05, 0.5, 0.9)
SIZE, UPDATES, BATCHES = 16, 40, 32
METHODS = {
    "none": "reinforce",
    "running mean": "reinforce_running",
    "leave-one-out": "rloo",
    "V": "reinforce",
}
"""V subtracts each question's exact chance of a right answer from the rewards."""
RATES = {
    "none": (0.01, 0.01, 0.01),
    "running mean": (0.01, 0.01, 0.01),
    "leave-one-out": (0.01, 0.01, 0.01),
    "V": (0.01, 0.01, 0.01),
}
"""Learning rate of AdamW for each of the STARTS."""


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Return the variance at the start, and the chance of a right answer by update, of each case."""
    model, gold = reference_model(seed), gold_of(seed)
    start, figures = likelihoods(model), Figures()
    for n, p in enumerate(STARTS):
        right = right_answers(gold, start, p)
        for arm, rates in RATES.items():
            report(f"baseline_by_start, seed {seed}, {arm} at {p:g}")
            trainee = Trainee(model, build(METHODS[arm], {}, horizon=LONGEST), rates[n])
            spread_of = variance(trainee, arm, right, start, seed)
            figures[f"{arm} {p:g}"] = {"variance": spread_of, "right": train(trainee, arm, right, seed)}
    return figures


def right_answers(gold: Table, logp: Table, p: float) -> Table:
    """Return 1 for the answers of most gold, as many as a policy gives with a chance of at most p."""
    order = gold.argsort(1, descending=True)
    inside = logp.exp().gather(1, order).cumsum(1) <= p
    return torch.zeros_like(gold).scatter(1, order, inside.double())


def sample(
    trainee: Trainee, arm: str, right: Table, logp: Table, draw: torch.Generator, memory: Mapping[str, float]
) -> Batch:
    """Return prepared answers of a policy, with their rewards."""
    p = logp.exp()
    worth = right - (p * right).sum(1, keepdim=True) if arm == "V" else right
    batch = sampled_batch(torch.multinomial(p, SIZE, replacement=True, generator=draw), worth)
    return trainee.method.prepare(replace(batch, state=memory))


def variance(trainee: Trainee, arm: str, right: Table, logp: Table, seed: int) -> float:
    """Return the trace of the covariance of a batch's gradient, a running mean being what it tends to."""
    draw = torch.Generator().manual_seed(seed + 5000)
    memory = {"mean": mean_of(right, logp), "mean_weight": 1.0} if trainee.method.start else {}
    gradients = []
    for _ in range(BATCHES):
        batch = sample(trainee, arm, right, logp, draw, memory)
        loss = trainee.method.loss(trainee.outputs(batch), batch)
        total = reduce.weighted_sum(loss, trainee.method.weight(batch), batch.mask)
        parts = torch.autograd.grad(total, trainee.weights)
        gradients.append(torch.cat([part.flatten() for part in parts]))
    return float(torch.stack(gradients).var(0).sum())


def train(trainee: Trainee, arm: str, right: Table, seed: int) -> list[float]:
    """Train, and return the chance of a right answer before each update and at the end."""
    draw, memory, chances = torch.Generator().manual_seed(seed + 4000), trainee.method.start, []
    for update in range(UPDATES + 1):
        logp = likelihoods(trainee.model)
        chances.append(mean_of(right, logp))
        if update < UPDATES:
            batch = sample(trainee, arm, right, logp, draw, memory)
            trainee.step(batch)
            memory = trainee.method.update_state(batch, {})
    return chances


# ---------------------------------------------------------------------- rules, table and picture


def errors(figures: Figures, arm: str, p: float) -> float:
    """Return the mean chance of a wrong answer over the run, as a share of the start's."""
    right = figures[f"{arm} {p:g}"]["right"]
    return float((1 - sum(right) / len(right)) / (1 - right[0]))


def reduction(figures: Figures, p: float) -> float:
    """Return log10 of the variance without a baseline over that of leave-one-out."""
    none, rloo = (figures[f"{arm} {p:g}"]["variance"] for arm in ("none", "leave-one-out"))
    return math.log10(none / rloo)


RULES = {
    "baseline_variance": VerdictRule(
        "log10 of the gradient's variance at the start, none over leave-one-out, least of three starts",
        lambda figures: min(reduction(figures, p) for p in STARTS),
        0.05,
    ),
    "baseline_by_start": VerdictRule(
        "mean error rate as a share of the start's, from a start of 0.9, none minus leave-one-out",
        lambda figures: errors(figures, "none", 0.9) - errors(figures, "leave-one-out", 0.9),
        0.05,
    ),
}


def table(results: Results) -> str:
    """Return variance and mean error rate of each arm and start."""
    head = ("right at the start", "baseline", "learning rate", "variance over that of none")
    rows = []
    for n, p in enumerate(STARTS):
        for arm, rates in RATES.items():
            ratios = [
                run[f"{arm} {p:g}"]["variance"] / run[f"none {p:g}"]["variance"] for run in results.runs
            ]
            means = [errors(run, arm, p) for run in results.runs]
            ends = [run[f"{arm} {p:g}"]["right"][-1] for run in results.runs]
            cells = [f"{p:g}", arm, f"{rates[n]:g}", spread(ratios)]
            rows.append([*cells, spread(means, ".0%"), spread(ends, ".1%")])
    return markdown((*head, "mean error rate, share of the start's", "right at the end"), rows)


def draw(results: Results, figure: Any) -> None:
    """Draw the chance of a right answer by update for each start."""
    for axes, p in zip(figure.subplots(1, 3), STARTS, strict=True):
        for n, arm in enumerate(RATES):
            runs = [run[f"{arm} {p:g}"]["right"] for run in results.runs]
            curve(axes, range(UPDATES + 1), runs, arm, f"C{n}")
        axes.set(xlabel="updates of 128 answers", title=f"start right with chance {p:g}")
    figure.axes[0].set_ylabel("chance of a right answer")
    figure.axes[0].legend(frameon=False, title="baseline")


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(12.0, 4.0))
