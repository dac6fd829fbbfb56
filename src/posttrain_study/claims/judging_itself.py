"""Four rounds of DPO on verdicts of the policy itself, of a fixed outside judge, of both, and of people.

People compare answers to the questions of tiny.py and prefer longer ones more than they should: P(a preferred
to b) is σ(2 (gold of a - gold of b) + 0.4 (letters of a - letters of b)). In round 0 DPO learns from 256 of
their comparisons of the reference's answers. In each of four more rounds the policy gives 256 pairs, which
are labelled by one of

    itself          the answer with more implicit reward, log π/π_ref with π the policy as it then is
    outside         a reward model that has learnt from 256 other comparisons by people, and stays as it is
    better outside  the same with 2048 comparisons
    half            itself for every other pair, the outside judge for the rest
    people          new comparisons by people

and DPO takes as many steps on them for every judge. Gold, letters and KL are exact. Rates, steps and β were
chosen on seed 100.
"""

from pathlib import Path
from typing import Any

import torch

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
from posttrain_study.claims.fitting import SURE, judged, reward_model, with_reference
from posttrain_study.claims.goodhart import LETTERS_OF, LONGER, agreement
from posttrain_study.claims.tiny import (
    LONGEST,
    Pairs,
    Trainee,
    gold_of,
    kl_of,
    likelihoods,
    mean_of,
    reference_model,
    sample_pairs,
)

PAIRS, PAIRS_A_STEP, EPOCHS, ROUNDS, FRESH, LR, BETA, REWARD_LR = 256, 64, 4, 4, 2048, 3e-3, 0.3, 3e-3
JUDGES = ("itself", "half", "outside", "better outside", "people")
OUTSIDE = {"outside": PAIRS, "better outside": 2048}
"""Comparisons by people that an outside judge has learnt from."""


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Train four rounds by each judge, after the same round by people."""
    model, gold = reference_model(seed), gold_of(seed)
    logp_ref, taste = likelihoods(model), SURE * gold + LONGER * LETTERS_OF
    draw = torch.Generator().manual_seed(9000 + seed)
    report(f"judging_itself, seed {seed}, outside judges")
    fixed = {}
    for judge, number in OUTSIDE.items():
        labelled = judged(sample_pairs(logp_ref, number, draw), taste, draw)
        fixed[judge] = reward_model(model, labelled, REWARD_LR, seed).reward
    first = Trainee(model, build("dpo", {"beta": BETA}, horizon=LONGEST), LR)
    learn(first, judged(sample_pairs(logp_ref, PAIRS, draw), taste, draw), draw)
    paths: dict[str, list[dict[str, float]]] = {}
    for judge in JUDGES:
        report(f"judging_itself, seed {seed}, {judge}")
        trainee, draw, paths[judge] = first, torch.Generator().manual_seed(9500 + seed), []
        for n in range(ROUNDS + 1):
            logp = likelihoods(trainee.model)
            itself = logp - logp_ref
            fresh = sample_pairs(logp, FRESH, torch.Generator().manual_seed(seed))
            fresh = fresh.turned(fresh.gap(gold) < 0)
            means = {
                "gold": mean_of(gold, logp),
                "letters": mean_of(LETTERS_OF, logp),
                "kl": kl_of(logp, logp_ref),
            }
            outside = fixed.get(judge, fixed["outside"])
            verdicts = {"itself": itself, "half": itself, "people": taste}.get(judge, outside)
            paths[judge].append(means | agreement(fresh.gap(verdicts), fresh))
            if n < ROUNDS:
                pairs = sample_pairs(logp, PAIRS, draw)
                by_itself = pairs.turned(pairs.gap(itself) < 0)
                theirs = pairs.turned(pairs.gap(outside) < 0)
                half = by_itself.turned((by_itself.won != theirs.won) & (torch.arange(PAIRS) % 2 > 0))
                labels = {"itself": by_itself, "half": half, "people": judged(pairs, taste, draw)}
                trainee = Trainee(trainee.model, trainee.method, LR)
                learn(trainee, labels.get(judge, theirs), draw)
    return {
        "paths": paths,
        "start": {"gold": mean_of(gold, logp_ref), "letters": mean_of(LETTERS_OF, logp_ref)},
    }


def learn(trainee: Trainee, pairs: Pairs, draw: torch.Generator) -> None:
    """Train on pairs, with the present weights as the reference."""
    batch = with_reference(trainee, pairs.batch())
    for _ in range(EPOCHS):
        trainee.epoch(batch, PAIRS_A_STEP, draw)


def end(figures: Figures, judge: str, key: str, n: int = -1) -> float:
    """Return a figure of the policy after a round, by default the last."""
    return float(figures["paths"][judge][n][key])


RULES = {
    "judging_itself": VerdictRule(
        "letters of an answer after four rounds minus after round 0, judged by itself",
        lambda figures: end(figures, "itself", "letters") - end(figures, "itself", "letters", 0),
        0.2,
    ),
    "self_improvement": VerdictRule(
        "gold after four rounds minus after round 0, judged by itself",
        lambda figures: end(figures, "itself", "gold") - end(figures, "itself", "gold", 0),
        0.1,
    ),
    "outside_judge": VerdictRule(
        "gold after four rounds, judged by a fixed outside judge minus by itself",
        lambda figures: end(figures, "outside", "gold") - end(figures, "itself", "gold"),
        0.1,
    ),
}


# ---------------------------------------------------------------------- table and picture


def table(results: Results) -> str:
    """Return mean and range over seeds before and after round 0, and after one and four more."""
    runs = results.runs
    starts = [spread([run["start"][key] for run in runs]) for key in ("gold", "letters")]
    rows = [["the reference", *starts, "–", "–", "–"]]
    rows.append(["round 0, by people", *cells([run["paths"]["people"][0] for run in runs])[:-2], "–", "–"])
    for judge in JUDGES:
        for n, words in ((1, "one round"), (ROUNDS, f"{ROUNDS} rounds")):
            rows.append([f"{words}, by {judge}", *cells([run["paths"][judge][n] for run in runs])])
    head = ("policy", "gold", "letters", "KL(π ‖ π_ref)", "own pairs right", "length bias")
    return markdown(head, rows)


def cells(points: list[dict[str, float]]) -> list[str]:
    """Return the cells of a policy and of its judge."""
    forms = {"gold": ".2f", "letters": ".2f", "kl": ".1f", "right": ".0%", "length_bias": ".2f"}
    return [spread([point[key] for point in points], form) for key, form in forms.items()]


def draw(results: Results, figure: Any) -> None:
    """Draw gold, letters and the judge's accuracy on pairs of the policy by round."""
    titles = {
        "gold": "expected gold",
        "letters": "letters of an answer",
        "right": "pairs of the policy judged right",
    }
    for axes, (key, title) in zip(figure.subplots(1, 3), titles.items(), strict=True):
        for n, judge in enumerate(JUDGES):
            paths = [[point[key] for point in run["paths"][judge]] for run in results.runs]
            curve(axes, range(ROUNDS + 1), paths, judge, f"C{n}")
        axes.set(title=title, xlabel="rounds", xticks=range(ROUNDS + 1))
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(13.0, 4.0))
