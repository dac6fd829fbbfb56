"""How wide the range of good rates is: supervised fine-tuning, RLOO, PPO's clip, and DPO.

The answers of most gold, which are 5 % of the reference's, are right. SFT imitates right answers, RLOO and
four clipped epochs (with PPO's ratio) are paid 1 for those that they sample, and DPO prefers a right
answer to a wrong one of the reference. All have 60 updates of 128 answers at each of nine rates, two a
decade. The width is that of the rates whose chance of a right answer is at least 90 % of the method's best.
"""

import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

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
from posttrain_study.claims.online import (
    PrefixPolicy,
    Routine,
    batch_of,
    best_answers,
    improve,
    log_probs,
    prepared,
    reference,
)
from posttrain_study.claims.tiny import LONGEST, QUESTIONS, Table, gold_of, mean_of

RATES = tuple(10 ** (n / 2) for n in range(-8, 1))
UPDATES, SHARE, PAIRS = 60, 0.05, 8
METHODS = {"sft": "SFT", "rloo": "RLOO", "ppo": "RLOO, 4 clipped epochs", "dpo": "DPO"}
COLORS = ("#4c72b0", "#c44e52", "#dd8452", "#55a868")


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Return the chance of a right answer under each method at each rate."""
    start = reference(seed)
    logp = log_probs(start)
    right = best_answers(logp, gold_of(seed), SHARE)
    cases = {}
    for method in METHODS:
        report(f"finicky, seed {seed}, {method}")
        policies = [trained(method, start, logp, right, rate, seed) for rate in RATES]
        cases[method] = [mean_of(right, log_probs(policy.network)) for policy in policies]
    return {"cases": cases}


def trained(name: str, start: nn.Module, logp: Table, right: Table, rate: float, seed: int) -> PrefixPolicy:
    """Return the policy that a method makes at a rate."""
    good, bad = (logp + right.log()).log_softmax(1), (logp + (1 - right).log()).log_softmax(1)
    if name == "dpo":
        return by_pairs(start, good, bad, rate, seed)
    options = {"surrogate": "clipped"} if name == "ppo" else {}
    method = build("sft" if name == "sft" else "rloo", options, horizon=LONGEST)
    plan = Routine(UPDATES, lr=rate, epochs=4 if name == "ppo" else 1)
    return improve(start, method, right, plan, seed, source=good if name == "sft" else None)


def by_pairs(start: nn.Module, good: Table, bad: Table, rate: float, seed: int) -> PrefixPolicy:
    """Return the policy that DPO makes of fresh pairs of a right and a wrong answer in every update."""
    method, chance = build("dpo", {}, horizon=LONGEST), torch.Generator().manual_seed(5000 + seed)
    policy, ref = PrefixPolicy(start, method, rate), PrefixPolicy(start, method, rate)
    questions = torch.arange(QUESTIONS).repeat_interleave(PAIRS)
    worth = torch.tensor([1.0, 0.0]).expand(len(questions), 2)
    for _ in range(UPDATES):
        sides = [torch.multinomial(x.exp()[questions], 1, generator=chance) for x in (good, bad)]
        policy.step(prepared(policy, ref, batch_of(questions, torch.cat(sides, 1), worth), Routine(UPDATES)))
    return policy


# ---------------------------------------------------------------------- what the claims say


def width(figures: Figures, method: str) -> float:
    """Return the decades of rates whose chance is 90 % of the best, interpolated by log rate."""
    chances = figures["cases"][method]
    level, total = 0.9 * max(chances), 0.0
    for low, high in pairwise(chances):
        inside, outside = max(low, high), min(low, high)
        if inside >= level:
            total += 0.5 if outside >= level else 0.5 * (inside - level) / (inside - outside)
    return total


RULES = {
    "finicky": VerdictRule(
        "decades of rates within 90 % of the best, SFT minus RLOO",
        lambda figures: width(figures, "sft") - width(figures, "rloo"),
        margin=0.3,
    ),
    "finicky_dpo": VerdictRule(
        "decades of rates within 90 % of the best, DPO minus RLOO with four clipped epochs",
        lambda figures: width(figures, "dpo") - width(figures, "ppo"),
        margin=0.3,
    ),
}


# ---------------------------------------------------------------------- table and picture


def table(results: Results) -> str:
    """Return the table of all methods: means, and ranges over seeds."""
    head = ("method", "decades within 90 % of the best", "right at the best rate", "best rate", "right at 1")
    rows = []
    for method, name in METHODS.items():
        runs = [run["cases"][method] for run in results.runs]
        widths = spread([width(run, method) for run in results.runs])
        best = statistics.median(RATES[run.index(max(run))] for run in runs)
        last = spread([run[-1] for run in runs], ".0%")
        rows.append([name, widths, spread([max(run) for run in runs], ".0%"), f"{best:.2g}", last])
    return markdown(head, rows)


def draw(results: Results, figure: Any) -> None:
    """Draw the chance of a right answer by rate, as it is and over the best of the method."""
    first, second = figure.subplots(1, 2)
    for (method, name), color in zip(METHODS.items(), COLORS, strict=True):
        runs = [run["cases"][method] for run in results.runs]
        curve(first, RATES, runs, name, color)
        curve(second, RATES, [[p / max(run) for p in run] for run in runs], name, color)
    second.axhline(0.9, color="black", lw=0.8, ls=":")
    first.set(xscale="log", xlabel="learning rate", ylabel="chance of a right answer")
    second.set(xscale="log", xlabel="learning rate", ylabel="the same over the method's best")
    first.legend(frameon=False)


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(11.0, 4.0))
