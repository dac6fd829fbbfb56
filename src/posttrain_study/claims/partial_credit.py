"""All-or-nothing reward against partial credit, for programs that are run on eight cases.

A seed is one run of recipes/partial_credit.toml: a tiny model is shown what programs look like, and then
learns by GRPO on requests in words, paid 1 for a program that passes all eight cases, or the share it passes.
Held-out requests have stronger cases. A program is right if it passes every case, under either reward.
"""

from pathlib import Path
from typing import Any

import posttrain
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
from posttrain_study.claims.pipelines import run_pipeline

ARMS = {"all or nothing": "04-all_or_nothing", "partial credit": "05-partial_credit"}
MEASURED = {"pass@1": "eval/pass@1", "pass@8": "eval/pass@8"}


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Run the pipeline, and read its two runs of GRPO."""
    report(f"partial_credit, seed {seed}")
    place = out / f"partial_credit-{seed}"
    trained = ("shown", "all_or_nothing", "partial_credit")
    run_pipeline("partial_credit", place, seed, seeded=("data", "nothing"), trained=trained)
    return {arm: curve_of(place / folder) for arm, folder in ARMS.items()}


def curve_of(run: Path) -> list[dict[str, float]]:
    """Return pass@1 and pass@8 on held-out requests by update."""
    return [
        {"update": float(line["update"])} | {name: line[key] for name, key in MEASURED.items()}
        for line in posttrain.load(run).metrics
        if "eval/accuracy" in line
    ]


def gain(figures: Figures) -> float:
    """Return how far partial credit ends above all or nothing, in pass@1."""
    ends = {arm: figures[arm][-1]["pass@1"] for arm in ARMS}
    return float(ends["partial credit"] - ends["all or nothing"])


RULES = {
    "partial_credit": VerdictRule(
        "held-out pass@1 after 60 updates, partial credit minus all or nothing", gain, 0.05
    )
}


def table(results: Results) -> str:
    """Return pass@1 and pass@8 by arm and update: means, and ranges over seeds."""
    rows = []
    for arm in ARMS:
        for n, point in enumerate(results.runs[0][arm]):
            cells = [spread([run[arm][n][key] for run in results.runs], ".0%") for key in MEASURED]
            rows.append([arm, f"{point['update']:.0f}", *cells])
    return markdown(("paid", "updates", *MEASURED), rows)


def draw(results: Results, figure: Any) -> None:
    """Draw pass@1 and pass@8 by update for both rewards."""
    panels = figure.subplots(1, len(MEASURED), sharey=True)
    for axes, key in zip(panels, MEASURED, strict=True):
        for color, arm in enumerate(ARMS):
            updates = [point["update"] for point in results.runs[0][arm]]
            heights = [[100 * point[key] for point in run[arm]] for run in results.runs]
            curve(axes, updates, heights, arm, f"C{color}")
        axes.set(xlabel="updates", title=f"{key} of held-out requests, %")
    panels[0].set_ylim(0, 100)
    panels[0].legend(frameon=False, loc="upper left")


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(10.0, 3.8))
