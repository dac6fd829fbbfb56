"""Rewards that order answers as gold does: how much gold their exact optimum loses, and best of n.

The reward is gold itself (tiny.py), or an increasing function of it, so that no two answers to a question
change places. A policy that maximises E[R] - β KL is π_ref exp(R/β)/Z, and β is chosen for each reward so
that the KL from the reference is the same. The best of n answers is a function of their order alone.
"""

from collections.abc import Callable
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
from posttrain_study.claims.reward_model_by_distance import tilted
from posttrain_study.claims.tiny import Table, gold_of, kl_of, likelihoods, mean_of, reference_model
from posttrain_study.claims.unseen_tokens import best_of

KLS, N = (0.25, 0.5, 1.0, 2.0, 3.0), 8
AT = KLS.index(2.0)


def rank(gold: Table) -> Table:
    """Return the rank of each answer to its question, from 0 to 1."""
    return gold.argsort(1).argsort(1).double() / (gold.shape[1] - 1)


REWARDS: dict[str, Callable[[Table], Table]] = {
    "gold": lambda gold: gold,
    "cube": lambda gold: gold**3,
    "exponential": torch.exp,
    "rank": rank,
    "hyperbolic tangent": torch.tanh,
    "two levels": lambda gold: torch.sigmoid(40 * (gold - 1)) + 1e-3 * gold,
}
"""Increasing functions of gold, in deviations from the mean."""
NAMES = list(REWARDS)


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Return gold at each KL for each reward, and of the best of eight answers."""
    report(f"rankings_only, seed {seed}")
    gold, logp_ref = gold_of(seed), likelihoods(reference_model(seed))
    figures: dict[str, Any] = {}
    for name, function in REWARDS.items():
        rewards = function(gold)
        optima = [tilted(logp_ref, rewards, kl) for kl in KLS]
        best = best_of(rewards, logp_ref, N)
        figures[name] = {
            "gold": [mean_of(gold, logp) for logp in optima],
            "kl": [kl_of(logp, logp_ref) for logp in optima],
            "best of n": float((best * gold).sum(1).mean()),
        }
    return figures


def worst(figures: Figures) -> float:
    """Return the most gold that a reward of the same order loses at a KL of 2."""
    return max(float(figures["gold"]["gold"][AT] - figures[name]["gold"][AT]) for name in NAMES[1:])


RULES = {
    "rankings_only": VerdictRule(
        "gold lost by the exact optimum at a KL of 2, the most of five rewards that order as gold does",
        worst,
        margin=0.1,
        equal=True,
    ),
}


def table(results: Results) -> str:
    """Return gold at the optimum of each reward, and of the best of eight."""
    rows = []
    for name in NAMES:
        runs = [run[name] for run in results.runs]
        cells = [spread([run["gold"][KLS.index(kl)] for run in runs]) for kl in (0.5, 1.0, 2.0)]
        rows.append([name, *cells, spread([run["best of n"] for run in runs])])
    return markdown(("reward", "at KL 0.5", "at KL 1", "at KL 2", "best of 8"), rows)


def draw(results: Results, figure: Any) -> None:
    """Draw gold by KL at the optimum of each reward, and what each loses."""
    first, second = figure.subplots(1, 2)
    for n, name in enumerate(NAMES):
        heights = [run[name]["gold"] for run in results.runs]
        curve(first, KLS, heights, name, f"C{n}")
        losses = [
            [best - value for best, value in zip(run["gold"]["gold"], run[name]["gold"], strict=True)]
            for run in results.runs
        ]
        curve(second, KLS, losses, name, f"C{n}")
    first.set(title="gold at the exact optimum of each reward", xlabel="KL(π ‖ π_ref)")
    second.set(title="gold lost against gold as the reward", xlabel="KL(π ‖ π_ref)")
    first.legend(frameon=False)


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(10.0, 4.0))
