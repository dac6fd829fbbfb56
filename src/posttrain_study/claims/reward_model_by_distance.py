"""A reward model far from its pairs: how it orders answers, and what it promises, by KL from the reference.

384 pairs of the reference's answers to 8 questions (tiny.py) are compared by the judges of goodhart.py: one
that prefers more gold, P(a preferred to b) = σ(2 Δgold), and one that also prefers longer answers. Nothing is
trained on the reward models: at each KL the policy is the exact optimum π_ref exp(R/β)/Z of a score R, which
is the reward model's, the gold reward, or the gold of another world, a direction that means nothing here.
Accuracy is the chance that two answers of that policy are ordered as gold orders them. A score is promised in
units of gold: it is centred for each question and multiplied by its least-squares slope on the reference.
"""

import math
import statistics
from pathlib import Path
from typing import Any

import torch

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
from posttrain_study.claims.goodhart import LETTERS_OF, LONGER, PAIRS, SURE, reward_model
from posttrain_study.claims.tiny import (
    Table,
    gold_of,
    kl_of,
    likelihoods,
    mean_of,
    reference_model,
    sample_pairs,
)

JUDGES = {"right judge": 0.0, "judge that likes length": LONGER}
"""How much the log-odds of each judge rise with a letter."""
KLS = (0.0, 0.25, 0.5, 1.0, 2.0, 3.0, 4.0)
FAR = KLS.index(4.0)
DIRECTIONS = ("its score", "gold", "another gold")


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Train a reward model for each judge, and return what each score is worth at each KL."""
    model, gold = reference_model(seed), gold_of(seed)
    logp_ref, chance = likelihoods(model), torch.Generator().manual_seed(7000 + seed)
    pairs = sample_pairs(logp_ref, PAIRS, chance)
    lots = torch.rand(PAIRS, generator=chance, dtype=torch.float64)
    gold, figures = centred(gold, logp_ref), dict[str, Any]()
    for judge, longer in JUDGES.items():
        report(f"reward_model_by_distance, seed {seed}, {judge}")
        taste = SURE * gold + longer * LETTERS_OF
        score = reward_model(model, pairs.turned(lots > pairs.gap(taste).sigmoid()), seed)
        score = centred(score, logp_ref)
        promised = score * mean_of(score * gold, logp_ref) / mean_of(score.square(), logp_ref)
        figures[judge] = {}
        for name, goal in zip(DIRECTIONS, (score, gold, gold_of(seed + 500)), strict=True):
            policies = [tilted(logp_ref, goal, kl) for kl in KLS]
            figures[judge][name] = {
                "accuracy": [accuracy(score, gold, logp) for logp in policies],
                "promised": [mean_of(promised, logp) for logp in policies],
                "gold": [mean_of(gold, logp) for logp in policies],
            }
    return figures


def centred(table: Table, logp: Table) -> Table:
    """Return the table less its mean over each question's answers."""
    return table - (logp.exp() * table).sum(1, keepdim=True)


def tilted(logp_ref: Table, score: Table, kl: float) -> Table:
    """Return log π of the policy π_ref exp(score/β)/Z at this KL from π_ref, or as far as there is one."""
    if kl == 0.0:
        return logp_ref
    low, high = -12.0, 12.0  # of log 1/β, in which the KL rises
    for _ in range(40):
        middle = (low + high) / 2
        near = kl_of((logp_ref + score * math.pow(2.0, middle)).log_softmax(1), logp_ref) < kl
        low, high = (middle, high) if near else (low, middle)
    return (logp_ref + score * math.pow(2.0, low)).log_softmax(1)


def accuracy(score: Table, gold: Table, logp: Table) -> float:
    """Return the chance that score and gold order two different answers of a policy alike."""
    shares = []
    for s, g, p in zip(score, gold, logp.exp(), strict=True):
        chance = p[:, None] * p * (g[:, None] != g)
        shares.append(float((chance * ((s[:, None] > s) == (g[:, None] > g))).sum() / chance.sum()))
    return statistics.fmean(shares)


def fall(figures: Figures, judge: str = "right judge", direction: str = "its score") -> float:
    """Return how much accuracy is lost from the reference to a KL of 4."""
    values = figures[judge][direction]["accuracy"]
    return float(values[0] - values[FAR])


def excess(figures: Figures, judge: str = "right judge") -> float:
    """Return the gold that the score promises at a KL of 4 and the policy does not have."""
    end = figures[judge]["its score"]
    return float(end["promised"][FAR] - end["gold"][FAR])


RULES = {
    "reward_model_by_distance": VerdictRule(
        "accuracy on pairs of the reference minus accuracy on pairs of the score's own optimum at a KL of 4",
        fall,
        margin=0.05,
    ),
    "overestimation": VerdictRule(
        "gold that the score promises minus gold, at the score's own optimum at a KL of 4, "
        "in standard deviations",
        excess,
        margin=0.1,
    ),
}


def table(results: Results) -> str:
    """Return accuracy, promise and gold at the reference and at KLs of 1, 2 and 4."""
    rows = []
    for judge in JUDGES:
        for direction in DIRECTIONS:
            runs = [run[judge][direction] for run in results.runs]
            for kl in (0.0, 1.0, 2.0, 4.0):
                if kl or direction == DIRECTIONS[0]:
                    n = KLS.index(kl)
                    cells = [
                        spread([run[key][n] for run in runs]) for key in ("accuracy", "promised", "gold")
                    ]
                    rows.append([judge, direction if kl else "the reference", f"{kl:g}", *cells])
    return markdown(("pairs of", "optimum of", "KL", "accuracy", "gold promised", "gold"), rows)


def draw(results: Results, figure: Any) -> None:
    """Draw accuracy by KL in each direction, and promise and gold by KL for both judges."""
    first, *panels = figure.subplots(1, 3)
    colors = ("#d1495b", "#2a788e", "#888888")
    for direction, color in zip(DIRECTIONS, colors, strict=True):
        heights = [run["right judge"][direction]["accuracy"] for run in results.runs]
        curve(first, KLS, heights, f"optimum of {direction}", color)
    first.axhline(0.5, color="k", lw=0.7, ls=":")
    first.set(title="accuracy of the reward model, right judge", xlabel="KL(π ‖ π_ref)", ylim=(0.3, 0.9))
    first.legend(frameon=False, loc="lower left")
    for axes, judge in zip(panels, JUDGES, strict=True):
        for key, color in (("promised", "#d1495b"), ("gold", "#2a788e")):
            curve(axes, KLS, [run[judge]["its score"][key] for run in results.runs], key, color)
        best = [run[judge]["gold"]["gold"] for run in results.runs]
        curve(axes, KLS, best, "best possible gold", "#888888")
        axes.set(title=f"optimum of the score, {judge}", xlabel="KL(π ‖ π_ref)", ylim=(-0.8, 3.5))
        axes.legend(frameon=False, loc="upper left")


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(13.5, 4.0))
