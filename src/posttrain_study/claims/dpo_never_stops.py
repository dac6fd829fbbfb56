"""How far DPO and IPO move two answers apart, by the number of steps, if a judge is always right.

Four answers with rewards, and a policy with separate logits in each state, descend the expected loss over all
pairs of the reference (truth/preferences.py) by plain gradient steps: nothing is sampled. The margin is β
times the log-ratio to the reference of the best answer less that of the worst. Where the judge is wrong in
1 % of the comparisons, the margin of the minimum is computed too.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain.methods.table import DPO, IPO
from posttrain_study.claims.experiment import (
    Experiment,
    Figures,
    Report,
    Results,
    VerdictRule,
    markdown,
    number,
)

STEPS = (50, 200, 800, 3200)
RATES = {"DPO": (DPO, 20.0), "IPO": (IPO, 0.5)}
"""Method and rate of plain gradient descent."""
STOPPED = 0.01
"""A margin has stopped if four times the steps add less than this share."""


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Descend from the reference by both losses; the seed has nothing to decide."""
    from posttrain_study.truth import exact
    from posttrain_study.truth.preferences import BETA, by_order, chances, descend, margin, minimise
    from posttrain_study.truth.soft import TabularPolicy
    from posttrain_study.truth.world import short

    world = short()
    theirs = exact.chances(world, world.reference)
    start, judge, figures = TabularPolicy.with_answers(world, theirs), by_order(world.returns), {}
    for name, (line, rate) in RATES.items():
        method, policy, finished, margins = replace(line, beta=BETA), start, 0, []
        for steps in STEPS:
            report(f"dpo_never_stops, {name}, {steps} steps")
            policy = descend(policy, method, judge, steps - finished, rate=rate, sampler=theirs)
            finished = steps
            margins.append(margin(policy, BETA))
        least = minimise(start, method, chances(world, theirs, by_order(world.returns, 0.01)))
        figures[name] = {"margins": margins, "one_in_100_wrong": margin(least, BETA)}
    return figures


def growth(figures: Figures, name: str) -> float:
    """Return the share by which the last quadrupling of the steps raises the margin."""
    before, after = figures[name]["margins"][-2:]
    return float(after / before - 1)


RULES = {
    "dpo_never_stops": VerdictRule(
        "a share of 1 %, less that by which the margin grows from 800 to 3200 steps",
        lambda figures: STOPPED - growth(figures, "DPO"),
        0.001,
        exact=True,
    ),
}


# ---------------------------------------------------------------------- table and picture


def table(results: Results) -> str:
    """Return the margin of both methods after each number of steps."""
    (figures,) = results.runs[:1]
    rows = []
    for name in RATES:
        margins = [number(margin) for margin in figures[name]["margins"]]
        rows.append([name, *margins, number(figures[name]["one_in_100_wrong"])])
    head = ("method", *(f"{steps} steps" for steps in STEPS), "minimum, 1 % wrong")
    return markdown(head, rows)


def draw(results: Results, figure: Any) -> None:
    """Draw the margin by the number of steps."""
    axes = figure.subplots()
    for n, name in enumerate(RATES):
        axes.plot(STEPS, results.runs[0][name]["margins"], "o-", color=f"C{n}", label=name)
        least = results.runs[0][name]["one_in_100_wrong"]
        axes.axhline(least, color=f"C{n}", ls=":", label=f"{name}, minimum, 1 % wrong")
    axes.set(xlabel="gradient steps", xscale="log", ylabel="margin of the best over the worst answer, nats")
    axes.legend(frameon=False)


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(7.0, 4.0))
