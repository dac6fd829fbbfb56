"""GRPO on a biased reward model with KL penalties, against a run without one that is stopped early.

The judge and the reward model are those of goodhart.py: 384 pairs of the reference's answers to 8 questions,
P(a preferred to b) = σ(2 Δgold + 0.4 Δletters), so longer answers win more often than they should. The run
without a penalty is read at the first update at which its KL is that of the penalised run at its end. The
exact optimum of the score at that KL, π_ref exp(R/β)/Z, is what both approach. Gold and KL are exact.
"""

from pathlib import Path
from typing import Any

import torch

from posttrain_study.claims.experiment import (
    Experiment,
    Figures,
    Report,
    Results,
    VerdictRule,
    markdown,
    spread,
)
from posttrain_study.claims.goodhart import LETTERS_OF, LONGER, PAIRS, SURE, reward_model, scaled
from posttrain_study.claims.policy_path import follow
from posttrain_study.claims.reward_model_by_distance import tilted
from posttrain_study.claims.tiny import gold_of, likelihoods, mean_of, reference_model, sample_pairs

UPDATES = 60
BETAS = (0.0, 0.05, 0.2, 1.0)
"""Weights of the KL penalty in the loss."""
MIDDLE = 0.2
KLS = (0.0, 0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0)


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Train the reward model, and a policy for each weight of the penalty."""
    model, gold = reference_model(seed), gold_of(seed)
    logp_ref, chance = likelihoods(model), torch.Generator().manual_seed(4000 + seed)
    pairs = sample_pairs(logp_ref, PAIRS, chance)
    lots = torch.rand(PAIRS, generator=chance, dtype=torch.float64)
    report(f"kl_or_early_stop, seed {seed}, reward model")
    taste = SURE * gold + LONGER * LETTERS_OF
    score = reward_model(model, pairs.turned(lots > pairs.gap(taste).sigmoid()), seed)
    score, paths = scaled(score, logp_ref), dict[str, Any]()
    tables = {"gold": gold, "proxy": score, "letters": LETTERS_OF}
    for beta in BETAS:
        report(f"kl_or_early_stop, seed {seed}, penalty {beta:g}")
        paths[f"{beta:g}"] = follow(model, score, tables, seed=seed, updates=UPDATES, kl_weight=beta)
    ends = {beta: path["kl"][-1] for beta, path in paths.items()}
    optimum = {beta: mean_of(gold, tilted(logp_ref, score, kl)) for beta, kl in ends.items()}
    curve = [mean_of(gold, tilted(logp_ref, score, kl)) for kl in KLS]
    return {"paths": paths, "optimum": optimum, "optimum by KL": curve}


def end(figures: Figures, beta: float, key: str = "gold") -> float:
    """Return a value at the end of the run with this penalty."""
    return float(figures["paths"][f"{beta:g}"][key][-1])


def stopped(figures: Figures, beta: float, key: str = "gold") -> float:
    """Return a value of the run without a penalty when its KL first is that at the end of the other."""
    path, kl = figures["paths"]["0"], end(figures, beta, "kl")
    first = next((n for n, reached in enumerate(path["kl"]) if reached >= kl), -1)
    return float(path[key][first])


RULES = {
    "kl_or_early_stop": VerdictRule(
        "gold at the end with a penalty of 0.2 minus gold of the run without one, stopped at the same KL",
        lambda figures: end(figures, MIDDLE) - stopped(figures, MIDDLE),
        margin=0.1,
    ),
    "kl_range": VerdictRule(
        "gold at the end with a penalty of 0.2 minus the higher gold of penalties of 0 and 1",
        lambda figures: end(figures, MIDDLE) - max(end(figures, 0.0), end(figures, 1.0)),
        margin=0.1,
    ),
}


def table(results: Results) -> str:
    """Return the end of each run, the unpenalised run at the same KL, and the score's optimum there."""
    runs, rows = results.runs, []
    for beta in BETAS:
        cells = [spread([end(run, beta, key) for run in runs]) for key in ("gold", "proxy", "kl", "letters")]
        early = spread([stopped(run, beta) for run in runs]) if beta else "–"
        optimum = spread([run["optimum"][f"{beta:g}"] for run in runs])
        rows.append([f"{beta:g}", *cells, early, optimum])
    head = ("KL penalty", "gold", "score", "KL", "letters", "gold of an early stop", "gold of the optimum")
    return markdown(head, rows)


def draw(results: Results, figure: Any) -> None:
    """Draw gold by KL along each run, a panel for each penalty, with the run without one and the optimum."""
    panels = figure.subplots(1, len(BETAS) - 1, sharey=True)
    for axes, beta in zip(panels, BETAS[1:], strict=True):
        for run in results.runs:
            for weight, color in ((0.0, "#d1495b"), (beta, "#2a788e")):
                path = run["paths"][f"{weight:g}"]
                axes.plot(path["kl"], path["gold"], color=color, lw=0.8, alpha=0.7)
                axes.plot(path["kl"][-1:], path["gold"][-1:], "o", color=color, ms=4)
            axes.plot(KLS, run["optimum by KL"], color="grey", lw=0.5)
        axes.plot([], [], color="#d1495b", label="no penalty")
        axes.plot([], [], color="#2a788e", label=f"penalty {beta:g}")
        axes.plot([], [], color="grey", lw=0.5, label="exact optimum of the score")
        axes.set(title=f"KL penalty {beta:g}, update after update", xlabel="KL(π ‖ π_ref)", xlim=(0, 8))
        axes.legend(frameon=False, fontsize="small", loc="upper left")
    panels[0].set_ylabel("expected gold")


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(13.5, 4.0))
