"""DPO on pairs of the reference, and on pairs that lack the best answers.

A judge compares 512 pairs of answers (tiny.py) by Bradley and Terry's model on gold. The best answers are the
1 % with the most gold to each question. DPO learns from pairs of the reference, and from pairs of a sampler
that is the reference but never gives one of the best. Both stop where the loss on a fifth of their pairs is
least (fitting.py). What the policies are is exact; rate and β were chosen on seed 100.
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
    markdown,
    spread,
)
from posttrain_study.claims.fitting import SURE, implicit_reward, judged
from posttrain_study.claims.tiny import (
    COUNT,
    QUESTIONS,
    Pairs,
    Table,
    gold_of,
    kl_of,
    likelihoods,
    mean_of,
    reference_model,
    sample_pairs,
)

PAIRS, BETA, LR = 512, 0.1, 3e-3
BEST = COUNT // 100
"""How many answers to a question are the best."""
DATA, WITHOUT = "pairs of the reference", "pairs without the best answers"


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Train on each set of pairs."""
    model, gold = reference_model(seed), gold_of(seed)
    logp_ref, draw = likelihoods(model), torch.Generator().manual_seed(8000 + seed)
    best = torch.zeros(QUESTIONS, COUNT).double().scatter(1, gold.topk(BEST, 1).indices, 1.0)
    without = logp_ref.masked_fill(best > 0, -torch.inf).log_softmax(1)

    def figures(logp: Table, pairs: Pairs) -> dict[str, float]:
        return {
            "gold": mean_of(gold, logp),
            "kl": kl_of(logp, logp_ref),
            "best": mean_of(best, logp),
            "winners": float(gold[pairs.question, pairs.won].mean()),
            "top": top_of(gold, pairs),
            "compared": float((best[pairs.question, pairs.won] + best[pairs.question, pairs.lost]).mean())
            / 2,
        }

    cases = {}
    for name, sampler in ((DATA, logp_ref), (WITHOUT, without)):
        report(f"beyond_the_pairs, seed {seed}, {name}")
        pairs = judged(sample_pairs(sampler, PAIRS, draw), SURE * gold, draw)
        cases[name] = figures(likelihoods(implicit_reward(model, pairs, BETA, LR, seed).model), pairs)
    start = {"gold": mean_of(gold, logp_ref), "kl": 0.0, "best": mean_of(best, logp_ref)}
    return {"cases": cases, "start": start}


def top_of(gold: Table, pairs: Pairs) -> float:
    """Return the gold of the best answer to each question that a pair has, the mean over questions."""
    compared = torch.full_like(gold, -torch.inf)
    for answers in (pairs.won, pairs.lost):
        compared[pairs.question, answers] = gold[pairs.question, answers]
    return float(compared.max(1).values.mean())


RULES = {
    "beyond_the_pairs": VerdictRule(
        "gold, mean of the preferred answers of the pairs minus expectation under DPO",
        lambda figures: figures["cases"][DATA]["winners"] - figures["cases"][DATA]["gold"],
        0.1,
    ),
    "dpo_unseen_best": VerdictRule(
        "log of the chance of one of the best answers, reference minus DPO on pairs that have none of them",
        lambda figures: math.log(figures["start"]["best"] / figures["cases"][WITHOUT]["best"]),
    ),
}


# ---------------------------------------------------------------------- table and picture


def table(results: Results) -> str:
    """Return mean and range over seeds of every policy and its data."""
    runs = results.runs
    head = (
        *("policy", "expected gold", "KL(π ‖ π_ref)", "chance of a best answer"),
        *("gold of preferred answers", "of the best compared", "best answers among the compared"),
    )
    starts = [run["start"] for run in runs]
    rows = [["the reference", *policy_cells(starts), "–", "–", "–"]]
    for name in (DATA, WITHOUT):
        cases = [run["cases"][name] for run in runs]
        data = [spread([case[key] for case in cases], form) for key, form in DATA_FORMS.items()]
        rows.append([f"DPO, {name}", *policy_cells(cases), *data])
    return markdown(head, rows)


DATA_FORMS = {"winners": ".2f", "top": ".2f", "compared": ".1%"}
"""How the figures of a set of pairs are written."""


def policy_cells(cases: list[dict[str, float]]) -> list[str]:
    """Return the cells of a policy."""
    forms = {"gold": ".2f", "kl": ".2f", "best": ".1%"}
    return [spread([case[key] for case in cases], form) for key, form in forms.items()]


def draw(results: Results, figure: Any) -> None:
    """Draw the gold of each policy next to that of its data, and the chance of a best answer."""
    panels, names = figure.subplots(1, 2), ("the reference", DATA, WITHOUT)
    for n, name in enumerate(names):
        cases = [run["start"] if not n else run["cases"][name] for run in results.runs]
        for axes, key in zip(panels, ("gold", "best"), strict=True):
            axes.plot([n] * len(cases), [case[key] for case in cases], "o", ms=4, color="C0")
            axes.plot([n], [statistics.fmean(case[key] for case in cases)], "_", ms=24, color="C0")
        if n:
            winners = [case["winners"] for case in cases]
            panels[0].plot([n + 0.2] * len(cases), winners, "x", ms=4, color="C1")
            panels[0].plot([n + 0.2], [statistics.fmean(winners)], "_", ms=24, color="C1")
    panels[0].plot([], [], "o", ms=4, color="C0", label="policy")
    panels[0].plot([], [], "x", ms=4, color="C1", label="preferred answers of its pairs")
    panels[0].legend(frameon=False, loc="upper left")
    panels[0].set(title="expected gold")
    panels[1].set(title="chance of one of the best 1 % of answers")
    for axes in panels:
        axes.set_xticks(
            range(len(names)),
            [name.replace(" of ", "\nof ").replace(" the best", "\nthe best") for name in names],
        )


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(11.0, 4.0))
