"""What a mean over tokens does to the length of answers, where length is worth nothing.

An answer, which has a letter at least, is right if it begins with one, which is the likeliest, the middle or
the rarest of the reference: so right answers and wrong ones are equally long at the start. The advantage is
the reward less the group's mean; only the reduction differs: the mean over an answer's tokens (GRPO), over
all tokens of the step (DAPO), or the sum over an answer's tokens (the policy gradient itself). Expected
lengths are exact. The rate was chosen on seed 100, by the chance of a right answer at the end.
"""

import statistics
from collections.abc import Callable
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
from posttrain_study.claims.online import Routine, improve, log_probs, reference
from posttrain_study.claims.tiny import (
    LENGTH,
    LETTERS,
    LONGEST,
    QUESTIONS,
    SPELT,
    Table,
    mean_of,
)

LR = 3e-3
PLAN = Routine(updates=60, lr=LR, least=1)
EVERY = 10
REDUCTIONS = {
    "per_sequence": "mean over an answer",
    "per_token": "mean over the step",
    "per_row": "sum over an answer",
}
STARTS = {"rare": 0, "middle": 1, "common": 2}
"""How likely the right letter is, and its place among the letters by likelihood, the rarest first."""
FIRST = torch.tensor([answer[0] for answer in SPELT])


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Train with every reduction from every start."""
    start_policy = reference(seed)
    logp_ref, cases = log_probs(start_policy), {}
    for start, rank in STARTS.items():
        right = begins_right(logp_ref, rank)
        for reduction in REDUCTIONS:
            report(f"length_by_reduction, seed {seed}, {reduction}, {start}")
            path: list[dict[str, float]] = []
            method = build("dr_grpo", {"reduction": reduction}, horizon=LONGEST)
            improve(start_policy, method, right, PLAN, seed, see=recorder(path, right))
            cases[f"{reduction}-{start}"] = path
    return {"cases": cases}


def begins_right(logp: Table, rank: int) -> Table:
    """Return 1 for answers that begin with the letter of this rank in their question, else 0."""
    p = torch.stack([(logp.exp() * (letter == FIRST)).sum(1) for letter in range(LETTERS)], 1)
    return (p.argsort(1)[:, rank, None] == FIRST).double()


def recorder(path: list[dict[str, float]], right: Table) -> Callable[[int, Table], None]:
    """Return a function that appends the chance of a right answer, and expected lengths, to the path."""
    letters = LENGTH.double().expand(QUESTIONS, -1)
    sampled = (letters >= PLAN.least).double()
    parts = {"length": sampled, "right": right, "wrong": (1 - right) * sampled}

    def see(update: int, logp: Table) -> None:
        if update % EVERY == 0:
            lengths = {name: mean_of(x * letters, logp) / mean_of(x, logp) for name, x in parts.items()}
            path.append(lengths | {"p": mean_of(right, logp) / mean_of(sampled, logp)})

    return see


# ---------------------------------------------------------------------- what the claims say


def gained(figures: Figures, reduction: str, start: str, key: str) -> float:
    """Return how much longer answers are at the end than at the start, in letters."""
    path = figures["cases"][f"{reduction}-{start}"]
    return float(path[-1][key] - path[0][key])


def effect(figures: Figures, key: str) -> float:
    """Return the gain in length under the mean over an answer less that under the sum, mean over starts."""
    return statistics.fmean(
        gained(figures, "per_sequence", start, key) - gained(figures, "per_row", start, key)
        for start in STARTS
    )


RULES = {
    "length_longer": VerdictRule(
        "letters gained by an answer, mean over its tokens minus their sum, mean over three starts",
        lambda figures: effect(figures, "length"),
        margin=0.2,
    ),
    "length_wrong": VerdictRule(
        "letters gained by wrong answers less those gained by right ones, mean over its tokens minus their "
        "sum, mean over three starts",
        lambda figures: effect(figures, "wrong") - effect(figures, "right"),
        margin=0.2,
    ),
}


# ---------------------------------------------------------------------- table and picture


def table(results: Results) -> str:
    """Return the table of all cases: means, and ranges over seeds."""
    head = ("right at the start", "at the end", "reduction", "letters gained", "by right answers", "by wrong")
    rows = []
    for start in STARTS:
        for reduction, name in REDUCTIONS.items():
            paths = [run["cases"][f"{reduction}-{start}"] for run in results.runs]
            gains = [
                spread([gained(run, reduction, start, key) for run in results.runs])
                for key in ("length", "right", "wrong")
            ]
            p = [f"{statistics.fmean(path[n]['p'] for path in paths):.0%}" for n in (0, -1)]
            rows.append([*p, name, *gains])
    return markdown(head, rows)


def draw(results: Results, figure: Any) -> None:
    """Draw by how many letters the two means differ from the sum, by update; means over seeds and ranges."""
    axes = figure.subplots(1, 3, sharey=True)
    updates, names = range(0, PLAN.updates + 1, EVERY), ("rarest", "middle", "likeliest")
    cases = [("per_sequence", "right", "#4c72b0"), ("per_sequence", "wrong", "#c44e52")]
    cases += [("per_sequence", "length", "black"), ("per_token", "length", "#8c8c8c")]
    for panel, (start, rank) in zip(axes, STARTS.items(), strict=True):
        for reduction, key, color in cases:
            differences = []
            for run in results.runs:
                paths = (run["cases"][f"{name}-{start}"] for name in (reduction, "per_row"))
                differences.append([x[key] - y[key] for x, y in zip(*paths, strict=True)])
            answers = "all answers" if key == "length" else f"{key} answers"
            curve(panel, updates, differences, f"{REDUCTIONS[reduction]}, {answers}", color)
        panel.set(title=f"the {names[rank]} letter is right", xlabel="update")
    axes[0].set_ylabel("letters more than under the sum")
    axes[0].legend(frameon=False, fontsize="small")


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(12.0, 4.2))
