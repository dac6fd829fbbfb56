"""A penalty of length on top of a reward model that likes length: what GRPO makes of both.

The judge and the reward model are those of goodhart.py: 384 pairs of the reference's answers to 8 questions,
P(a preferred to b) = σ(2 Δgold + 0.4 Δletters). The reward is the score, with mean 0 and deviation 1 over the
reference's answers, less a weight for each letter beyond the three of the best answers.
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
    curve,
    markdown,
    spread,
)
from posttrain_study.claims.goodhart import LETTERS_OF, LONGER, PAIRS, SURE, reward_model, scaled
from posttrain_study.claims.policy_path import follow
from posttrain_study.claims.tiny import BEST_LENGTH, gold_of, likelihoods, reference_model, sample_pairs

UPDATES, WEIGHTS, CLAIMED = 60, (0.0, 0.1, 0.3, 1.0), 0.3


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Train the reward model, and a policy for each weight of the penalty."""
    model, gold = reference_model(seed), gold_of(seed)
    logp_ref, chance = likelihoods(model), torch.Generator().manual_seed(4000 + seed)
    pairs = sample_pairs(logp_ref, PAIRS, chance)
    lots = torch.rand(PAIRS, generator=chance, dtype=torch.float64)
    report(f"length_penalty, seed {seed}, reward model")
    taste = SURE * gold + LONGER * LETTERS_OF
    score = reward_model(model, pairs.turned(lots > pairs.gap(taste).sigmoid()), seed)
    score, figures = scaled(score, logp_ref), dict[str, Any]()
    tables = {"gold": gold, "proxy": score, "letters": LETTERS_OF}
    for weight in WEIGHTS:
        report(f"length_penalty, seed {seed}, weight {weight:g}")
        rewards = score - weight * (LETTERS_OF - BEST_LENGTH).clamp(min=0)
        figures[f"{weight:g}"] = follow(model, rewards, tables, seed=seed, updates=UPDATES)
    return figures


RULES = {
    "length_penalty": VerdictRule(
        "gold at the end, with a penalty of 0.3 for a letter beyond three minus without",
        lambda figures: figures[f"{CLAIMED:g}"]["gold"][-1] - figures["0"]["gold"][-1],
        margin=0.2,
    ),
}


def table(results: Results) -> str:
    """Return the end of each run."""
    rows = []
    for weight in WEIGHTS:
        paths = [run[f"{weight:g}"] for run in results.runs]
        cells = [spread([path[key][-1] for path in paths]) for key in ("gold", "proxy", "letters", "kl")]
        rows.append([f"{weight:g}", *cells])
    return markdown(("penalty for a letter", "gold", "score", "letters", "KL"), rows)


def draw(results: Results, figure: Any) -> None:
    """Draw gold and letters by update for each weight."""
    panels = figure.subplots(1, 2)
    colors = ("#d1495b", "#e0a030", "#2a788e", "#888888")
    for axes, (key, title) in zip(
        panels, {"gold": "expected gold", "letters": "letters of an answer"}.items(), strict=True
    ):
        for weight, color in zip(WEIGHTS, colors, strict=True):
            heights = [run[f"{weight:g}"][key][::2] for run in results.runs]
            curve(axes, range(0, UPDATES + 1, 2), heights, f"{weight:g}", color)
        axes.set(title=title, xlabel="update")
    panels[0].legend(frameon=False, title="penalty for a letter", loc="upper left")


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(10.0, 4.0))
