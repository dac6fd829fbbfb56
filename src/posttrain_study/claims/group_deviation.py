"""What dividing by a group's deviation does: gradients by prompt, and prompts whose rewards are only noise.

First the gradient of each question at the reference, over many groups of 16: with gold times a factor from
0.01 to 10 as reward, and with a right answer for 2 to 98 % of the reference's answers. Then training, where
half of the questions pay gold and the others pay noise of deviation 0.01. The advantage is divided by the
group's deviation (GRPO), by nothing (Dr. GRPO), or by that of the batch. The rate is the middle of three that
were tried on seeds 100 and 101.
"""

import math
import statistics
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from posttrain.math import reduce
from posttrain.methods.build import build
from posttrain.types import Method
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
from posttrain_study.claims.online import PrefixPolicy, Routine, batch_of, improve, log_probs, reference
from posttrain_study.claims.tiny import (
    COUNT,
    LONGEST,
    QUESTIONS,
    Table,
    gold_of,
)

CREDITS = {"normalised": "group's σ", "centred": "nothing", "centred_batch_normalised": "batch's σ"}
LR = 1e-2
SCALES = torch.logspace(-2, 1, QUESTIONS, dtype=torch.float64)
SHARES = torch.tensor([0.02, 0.05, 0.15, 0.35, 0.65, 0.85, 0.95, 0.98], dtype=torch.float64)
"""Chance of a right answer of each question, in the measurement with right and wrong answers."""
GROUPS, UPDATES, NOISE = 24, 60, 0.01
REAL = torch.arange(QUESTIONS) % 2 == 0
"""Questions that pay gold; the others pay noise."""


def method_of(credit: str) -> Method:
    """Return Dr. GRPO with this credit."""
    return build("dr_grpo", {"credit": credit}, horizon=LONGEST)


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Measure gradients at the reference, and train every arm."""
    model, gold = reference(seed), gold_of(seed)
    logp_ref, cases = log_probs(model), {}
    kinds = {"scale": gold * SCALES[:, None], "share": at_random(logp_ref, seed)}
    for credit in CREDITS:
        report(f"group_deviation, seed {seed}, {credit}")
        norms = {kind: norms_of(model, credit, worth, logp_ref, seed) for kind, worth in kinds.items()}
        path: list[dict[str, float]] = []
        plan = Routine(UPDATES, lr=LR)
        see = recorder(path, gold, logp_ref)
        improve(model, method_of(credit), noisy(gold), plan, seed, see)
        cases[credit] = {"norms": norms, "path": path}
    return {"cases": cases}


def at_random(logp: Table, seed: int) -> Table:
    """Return 1 for random answers that have each question's SHARES of the probability, else 0."""
    order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(seed)).tolist()
    right = torch.zeros_like(logp)
    for x, share in enumerate(SHARES.tolist()):
        for answer in order:
            p = float(logp[x, answer].exp())
            if p <= share:
                right[x, answer], share = 1.0, share - p
    return right


def noisy(gold: Table) -> Callable[[torch.Generator], Table]:
    """Return gold for the REAL questions, and for the others noise that is drawn for each update."""

    def drawn(chance: torch.Generator) -> Table:
        noise = NOISE * torch.randn(gold.shape, generator=chance, dtype=torch.float64)
        return torch.where(REAL[:, None], gold, noise)

    return drawn


def norms_of(network: nn.Module, credit: str, worth: Table, logp: Table, seed: int) -> list[float]:
    """Return the root of the mean squared norm of each question's gradient, over GROUPS groups of 16."""
    policy, chance = PrefixPolicy(network, method_of(credit), 1.0), torch.Generator().manual_seed(seed)
    draws = torch.multinomial(logp.exp(), GROUPS * 16, replacement=True, generator=chance)
    draws = draws.view(QUESTIONS, GROUPS, 16)
    squares = torch.zeros(QUESTIONS, dtype=torch.float64)
    for n in range(GROUPS):
        # The batch's deviation is that of all questions, whose gradients are then taken one by one.
        batch = batch_of(torch.arange(QUESTIONS), draws[:, n], worth.gather(1, draws[:, n]))
        batch = policy.method.prepare(batch)
        losses = policy.method.loss(policy.outputs(batch), batch)
        weight = policy.method.weight(batch)
        for x in range(QUESTIONS):
            loss = reduce.weighted_sum(losses, weight, batch.mask & (batch.group == x)[:, None])
            gradient = torch.autograd.grad(loss, policy.weights, retain_graph=True)
            squares[x] += sum(float(g.square().sum()) for g in gradient)
    return [float(norm) for norm in (squares / GROUPS).sqrt()]


def recorder(path: list[dict[str, float]], gold: Table, logp_ref: Table) -> Callable[[int, Table], None]:
    """Return a function that appends the gold of REAL questions, and the KL of the others, to the path."""

    def see(update: int, logp: Table) -> None:
        p = logp.exp()
        gain, drift = (p * gold).sum(1)[REAL], (p * (logp - logp_ref)).sum(1)[~REAL]
        path.append({"gold": float(gain.mean()), "drift": float(drift.mean())})

    return see


# ---------------------------------------------------------------------- what the claims say


def ratio(figures: Figures, credit: str, kind: str) -> float:
    """Return the largest over the smallest norm of a question's gradient."""
    norms = figures["cases"][credit]["norms"][kind]
    return float(max(norms) / min(norms))


def final(figures: Figures, credit: str, key: str) -> float:
    """Return the last number of a path."""
    return float(figures["cases"][credit]["path"][-1][key])


def fall(figures: Figures, credit: str) -> float:
    """Return the most gold that the real prompts lose in one update."""
    gold = [float(point["gold"]) for point in figures["cases"][credit]["path"]]
    return max(before - after for before, after in pairwise(gold))


RULES = {
    "deviation_scale": VerdictRule(
        "1 − log₂ of the largest over the smallest gradient norm of eight prompts, dividing by σ",
        lambda figures: 1 - math.log2(ratio(figures, "normalised", "scale")),
    ),
    "deviation_noise": VerdictRule(
        "gold on the other prompts at the end, without the division minus with it",
        lambda figures: final(figures, "centred", "gold") - final(figures, "normalised", "gold"),
        margin=0.05,
    ),
    "global_normalisation": VerdictRule(
        "most gold lost in one update, dividing by the group's deviation minus by the batch's",
        lambda figures: fall(figures, "normalised") - fall(figures, "centred_batch_normalised"),
        margin=0.01,
    ),
}


# ---------------------------------------------------------------------- table and picture


def table(results: Results) -> str:
    """Return the table of all arms: means, and ranges over seeds."""
    head = (
        *("divided by", "largest over smallest norm, 0.01 to 10 × gold", "2 to 98 % right"),
        *("gold of real prompts", "KL of noise prompts, nats", "most gold lost in an update"),
    )
    rows = []
    for credit, name in CREDITS.items():
        cells = [
            spread([ratio(run, credit, kind) for run in results.runs], ".3g") for kind in ("scale", "share")
        ]
        cells += [spread([final(run, credit, key) for run in results.runs]) for key in ("gold", "drift")]
        rows.append([name, *cells, spread([fall(run, credit) for run in results.runs])])
    return markdown(head, rows)


def draw(results: Results, figure: Any) -> None:
    """Draw the norm of each question's gradient, and gold and drift by update."""
    axes = figure.subplots(1, 4)
    colors = dict(zip(CREDITS, ("#c44e52", "#4c72b0", "#55a868"), strict=True))
    for panel, kind, x in zip(axes[:2], ("scale", "share"), (SCALES, SHARES), strict=True):
        for credit, name in CREDITS.items():
            norms = [run["cases"][credit]["norms"][kind] for run in results.runs]
            relative = [[norm / statistics.geometric_mean(run) for norm in run] for run in norms]
            curve(panel, x.tolist(), relative, name, colors[credit])
        panel.set(yscale="log")
    axes[0].set(xscale="log", xlabel="factor of the prompt's rewards", ylabel="gradient norm / its mean")
    axes[0].legend(frameon=False, title="divided by")
    axes[1].set(xlabel="chance of a right answer", ylabel="gradient norm / its mean")
    for panel, key in zip(axes[2:], ("gold", "drift"), strict=True):
        for credit, name in CREDITS.items():
            paths = [run["cases"][credit]["path"] for run in results.runs]
            heights = [[point[key] for point in path] for path in paths]
            curve(panel, range(UPDATES + 1), heights, name, colors[credit])
        panel.set(xlabel="update")
    axes[2].set_ylabel("expected gold, prompts that pay gold")
    axes[3].set_ylabel("KL(π ‖ π_ref), prompts that pay noise")


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(14.0, 3.8))
