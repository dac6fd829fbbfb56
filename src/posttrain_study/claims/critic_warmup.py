"""PPO with a critic that is trained alone first, on the chains of 12 additions of gae_lambda.py.

In the first updates of a run the policy stands still and its critic learns, from zero. Every run has 100
updates of 32 answers, those of the critic alone included. Rates of policy and critic were chosen for each arm
on seeds 100 and 101, by the mean of the chance to end right over the run.
"""

from pathlib import Path
from typing import Any

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
from posttrain_study.claims.gae_lambda import EVERY, UPDATES, train

LENGTH, LAMBDA = 12, 0.95
RATES: dict[int, tuple[float, float]] = {
    0: (0.3, 0.03),
    5: (0.3, 0.03),
    10: (0.3, 0.03),
    20: (0.3, 0.03),
}
"""Of Adam for the policy and for the critic, by the updates of the critic alone."""
WARMUP = 5
"""Updates of the critic alone in the arm that the claim is judged by, the best on seeds 100 and 101."""
OWN = 80
"""Updates of the policy that every arm has."""


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Return the chance to end right by update for every length of the warm-up."""
    paths = {}
    for warmup, rates in RATES.items():
        report(f"critic_warmup, seed {seed}, {warmup}")
        paths[f"{warmup}"] = train("learnt", LENGTH, LAMBDA, rates, seed, name="ppo", warmup=warmup)
    return {"paths": paths}


def score(figures: Figures, warmup: int) -> float:
    """Return the mean of the chance over the run, which rises with the speed of learning."""
    path = figures["paths"][f"{warmup}"]
    return float(sum(path) / len(path))


def final(figures: Figures, warmup: int) -> float:
    """Return the chance to end right after the last update."""
    return float(figures["paths"][f"{warmup}"][-1])


def own(figures: Figures, warmup: int) -> float:
    """Return the mean of the chance over the policy's first OWN updates, the warm-up not counted."""
    path = figures["paths"][f"{warmup}"][warmup // EVERY :][: OWN // EVERY + 1]
    return float(sum(path) / len(path))


RULES = {
    "critic_warmup": VerdictRule(
        f"chance to end right, mean over the run, PPO with {WARMUP} updates of the critic alone minus PPO",
        lambda figures: score(figures, WARMUP) - score(figures, 0),
        margin=0.02,
    ),
}


def table(results: Results) -> str:
    """Return the chance to end right of each arm: means, and ranges over seeds."""
    rows = []
    for warmup, (lr, critic_lr) in RATES.items():
        cells = [spread([of(run, warmup) for run in results.runs], ".1%") for of in (score, own, final)]
        rows.append([str(warmup), f"{lr:g}", f"{critic_lr:g}", *cells])
    head = (
        *("updates of the critic alone", "rate of the policy", "of the critic", "right, mean over the run"),
        *(f"over the policy's first {OWN} updates", f"after {UPDATES} updates"),
    )
    return markdown(head, rows)


def draw(results: Results, figure: Any) -> None:
    """Draw the chance to end right by update, counted with the warm-up and without it."""
    both, alone = figure.subplots(1, 2, sharey=True)
    for n, warmup in enumerate(RATES):
        runs = [run["paths"][f"{warmup}"] for run in results.runs]
        curve(both, range(0, UPDATES + 1, EVERY), runs, f"{warmup} updates", f"C{n}")
        rest = [run[warmup // EVERY :] for run in runs]
        curve(alone, range(0, UPDATES + 1 - warmup, EVERY), rest, f"{warmup} updates", f"C{n}")
    both.set(xlabel="update, the warm-up counted", ylabel="chance to end right")
    alone.set(xlabel="update of the policy, the warm-up not counted")
    both.legend(frameon=False, title="critic alone")


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(10.0, 4.0))
