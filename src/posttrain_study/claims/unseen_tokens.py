"""A token that no pair of a reward model contains: whether search and GRPO find answers with it.

The language is that of tiny.py, except that the reference hardly writes its third letter, and no compared
pair has it; gold is two deviations lower for an answer with it. A reward model learns from 384 pairs of an
unbiased judge, P(a preferred to b) = σ(2 Δgold). The share of answers with the letter is exact: for GRPO, for
the best of n by the reward model, and for the score's optimum at a KL.
"""

from pathlib import Path
from typing import Any

import torch

from posttrain.methods.build import build
from posttrain.plan.dataset_rows import row
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
from posttrain_study.claims.goodhart import PAIRS, SURE, reward_model, scaled
from posttrain_study.claims.policy_path import follow
from posttrain_study.claims.reward_model_by_distance import tilted
from posttrain_study.claims.tiny import (
    END,
    LONGEST,
    QUESTIONS,
    SPELT,
    Table,
    Trainee,
    gold_of,
    likelihoods,
    mean_of,
    question,
    reference_model,
    sample_pairs,
)

UPDATES, PENALTIES = 60, (0.0, 0.2)
RARE, RARE_SHARE, WORTH = 2, 0.005, -2.0
"""The letter, its share of the letters that the reference is taught, and the gold of an answer with it."""
BEST_OF = (1, 4, 16, 64, 256, 1024)
HAS_RARE = torch.tensor([RARE in answer for answer in SPELT]).double().expand(QUESTIONS, len(SPELT))


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Train the reward model and the policies, and search without training."""
    model, gold = reference(seed).model, gold_of(seed) + WORTH * HAS_RARE
    logp_ref, chance = likelihoods(model), torch.Generator().manual_seed(8000 + seed)
    logp_pairs = logp_ref.masked_fill(HAS_RARE > 0, -torch.inf).log_softmax(1)
    pairs = sample_pairs(logp_pairs, PAIRS, chance)
    lots = torch.rand(PAIRS, generator=chance, dtype=torch.float64)
    report(f"unseen_tokens, seed {seed}, reward model")
    score = reward_model(model, pairs.turned(lots > (SURE * pairs.gap(gold)).sigmoid()), seed)
    score, paths = scaled(score, logp_ref), dict[str, Any]()
    tables = {"rare": HAS_RARE, "gold": gold, "proxy": score}
    for weight in PENALTIES:
        report(f"unseen_tokens, seed {seed}, GRPO with a KL penalty of {weight:g}")
        paths[f"{weight:g}"] = follow(model, score, tables, seed=seed, updates=UPDATES, kl_weight=weight)
    best = [best_of(score, logp_ref, n) for n in BEST_OF]
    return {
        "paths": paths,
        "best of n": [float((p * HAS_RARE).sum(1).mean()) for p in best],
        "gold of best of n": [float((p * gold).sum(1).mean()) for p in best],
        "optimum": mean_of(HAS_RARE, tilted(logp_ref, score, 4.0)),
        "ahead": float((ahead(score) > 0).double().mean()),
    }


def reference(seed: int) -> Trainee:
    """Return the model of tiny.reference_model taught another 4096 answers, which hardly have the letter."""
    chance, rows = torch.Generator().manual_seed(2500 + seed), []
    mixture = torch.randn(QUESTIONS, RARE, generator=chance).softmax(-1) * (1 - RARE_SHARE)
    mixture = torch.cat([mixture, torch.full((QUESTIONS, 1), RARE_SHARE)], 1)
    for n in range(4096):
        letters = torch.multinomial(mixture[n % QUESTIONS], LONGEST, replacement=True, generator=chance)
        size = int(torch.randint(LONGEST + 1, (), generator=chance))
        answer = [*letters.tolist()[:size], END][:LONGEST]
        tokens = [*question(n % QUESTIONS), *answer]
        rows.append(row(tokens, [False] * 2 + [True] * len(answer), 0.0))
    trainee = Trainee(reference_model(seed), build("sft", {}, horizon=LONGEST), lr=0.01)
    trainee.epoch(Batch.of(rows, list(range(len(rows)))), 64, chance)
    return trainee


def best_of(score: Table, logp_ref: Table, n: int) -> Table:
    """Return the chance of each answer to be the best by score of n answers of the reference."""
    order = score.argsort(1)
    below = logp_ref.exp().gather(1, order).cumsum(1).clamp(max=1.0) ** n
    chance = below.diff(dim=1, prepend=torch.zeros(QUESTIONS, 1, dtype=torch.float64))
    return torch.zeros_like(score).scatter(1, order, chance)


def ahead(score: Table) -> torch.Tensor:
    """Return by how much the best answer with the letter has a higher score than the best without."""
    without = score.masked_fill(HAS_RARE > 0, -torch.inf)
    return score.masked_fill(HAS_RARE == 0, -torch.inf).amax(1) - without.amax(1)


def rise(figures: Figures) -> float:
    """Return by how much the share of answers with the letter rises under GRPO without a KL penalty."""
    shares = figures["paths"]["0"]["rare"]
    return float(shares[-1] - shares[0])


RULES = {
    "unseen_tokens": VerdictRule(
        "share of answers with the unseen letter, at the end of GRPO minus at the start", rise, margin=0.1
    ),
}


def table(results: Results) -> str:
    """Return the share of answers with the letter, gold and score, for GRPO and for the best of n."""
    runs, rows = results.runs, []
    for weight in PENALTIES:
        paths = [run["paths"][f"{weight:g}"] for run in runs]
        for name, n in (("the reference", 0), (f"GRPO, KL penalty {weight:g}", -1)):
            if n or not weight:
                cells = [spread([path[key][n] for path in paths]) for key in ("rare", "gold", "proxy", "kl")]
                rows.append([name, *cells])
    for n, size in enumerate(BEST_OF[1:], 1):
        cells = [spread([run[key][n] for run in runs]) for key in ("best of n", "gold of best of n")]
        rows.append([f"best of {size}", *cells, "–", "–"])
    rows.append(["optimum at a KL of 4", spread([run["optimum"] for run in runs]), "–", "–", "4"])
    best = spread([run["ahead"] for run in runs])
    return (
        markdown(("policy", "answers with the letter", "gold", "score", "KL"), rows)
        + f"\n\nAn answer with the letter has the highest score of all in a share of questions of {best}."
    )


def draw(results: Results, figure: Any) -> None:
    """Draw the share of answers with the letter and gold by update, and the share in the best of n."""
    first, second, third = figure.subplots(1, 3)
    for weight, color in zip(PENALTIES, ("#d1495b", "#2a788e"), strict=True):
        for axes, key in ((first, "rare"), (second, "gold")):
            for run in results.runs:
                axes.plot(run["paths"][f"{weight:g}"][key], color=color, lw=0.5, alpha=0.5)
            heights = [run["paths"][f"{weight:g}"][key] for run in results.runs]
            curve(axes, range(UPDATES + 1), heights, f"KL penalty {weight:g}", color)
    first.set(title="GRPO: answers with the unseen letter", xlabel="update", ylim=(0, 1))
    second.set(title="GRPO: expected gold", xlabel="update")
    curve(third, BEST_OF, [run["best of n"] for run in results.runs], "best of n by score", "#555555")
    third.set(title="best of n: answers with the letter", xlabel="n", xscale="log", ylim=(0, 1))
    first.legend(frameon=False, loc="upper left")


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(13.5, 4.0))
