"""DeepSeek-R1's four stages against R1-Zero, in small: recipes/r1.toml, at 15,360 sampled answers each.

A tiny model reads rows of digits with their answers (recipes/r1_zero/rows.py). Of these documents 15 %
write their steps, and three of four of these mix two scripts. R1-Zero is RL from there. R1 first imitates 100
traces in one script, then learns by RL, imitates its own right and readable answers from the pretrained
weights, and learns by RL again. RL pays a right answer and the absence of a doubt; it is blind to scripts.

    right      the verifier of numbers accepts the answer
    readable   the form of the traces: the pattern of recipes/r1/accept.toml, a step in digits for each digit
    steps      anything stands before the answer
    doubt      the answer ends in a question mark
"""

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posttrain.recipe.catalogue import recipes_dir
from posttrain.recipe.document import read_toml
from posttrain.types import Task
from posttrain.verifiers.structure.patterns import Regex
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

ARMS = {
    "R1": (("05-rl", 0), ("08-rl_again", 7680)),
    "R1-Zero": (("09-r1_zero", 0),),
}
"""Runs of RL of each arm, and how many answers it sampled before."""
UPDATE = 256
"""Answers that an update samples."""
EARLY, ALL = 5120, 15_360
"""Sampled answers at which the arms are compared: the end of R1's first RL, and of all."""
MEASURED = ("right", "readable", "steps", "doubt", "tokens")


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Run the pipeline, and read the answers to held-out rows that its runs of RL recorded."""
    report(f"r1, seed {seed}")
    place = out / f"r1-{seed}"
    trained = ("pretrain", "cold_start", "rl", "sft", "rl_again", "r1_zero")
    run_pipeline("r1", place, seed, seeded=("data", "nothing", "accepted"), trained=trained)
    accepted = (place / "06-accepted" / "accepted.jsonl").read_text(encoding="utf-8").splitlines()
    return {name: curve_of(place, name) for name in ARMS} | {"accepted": len(accepted)}


def curve_of(place: Path, arm: str) -> list[dict[str, float]]:
    """Return the shares among held-out answers by the number of sampled answers, for an arm."""
    tables, _ = read_toml(recipes_dir() / "r1" / "accept.toml")
    form = Regex(pattern=tables["verifier"]["regex"]["pattern"])
    points = []
    for run, before in ARMS[arm]:
        for file in sorted((place / run / "samples").glob("eval_*.jsonl")):
            update = int(file.stem.removeprefix("eval_"))
            with file.open(encoding="utf-8") as lines:
                answers = [describe(json.loads(line), form) for line in lines]
            means = {key: statistics.fmean(answer[key] for answer in answers) for key in MEASURED}
            points.append({"answers": float(before + UPDATE * update), **means})
    return points


def describe(sample: dict[str, Any], form: Regex) -> dict[str, float]:
    """Return what is measured of a recorded answer, as numbers."""
    pieces = [piece for piece, sampled in zip(sample["pieces"], sample["sampled"], strict=True) if sampled]
    text = "".join(pieces[:-1] if sample["stop"] == "eos" else pieces)
    return {
        "right": float(sample["parts"]["number"] == 1.0),
        "readable": float(form(Task(id=sample["task"], messages=()), text).score or 0.0),
        "steps": float(bool(text.partition("####")[0].strip())),
        "doubt": float(text.rstrip().endswith("?")),
        "tokens": float(len(pieces)),
    }


# ---------------------------------------------------------------------- the rules


def difference(key: str, answers: int) -> Callable[[Figures], float]:
    """Return the measure: R1 minus R1-Zero, at this number of sampled answers."""

    def measured(figures: Figures) -> float:
        r1, zero = (next(point[key] for point in figures[arm] if point["answers"] == answers) for arm in ARMS)
        return float(r1 - zero)

    return measured


RULES = {
    "r1_readable": VerdictRule(
        "readable answers after 15,360 sampled answers, R1 minus R1-Zero", difference("readable", ALL), 0.1
    ),
    "r1_quicker": VerdictRule(
        "right answers after 5,120 sampled answers, R1 minus R1-Zero", difference("right", EARLY), 0.05
    ),
    "r1_or_r1_zero": VerdictRule(
        "right answers after 15,360 sampled answers, R1 minus R1-Zero",
        difference("right", ALL),
        0.05,
        equal=True,
    ),
}


# ---------------------------------------------------------------------- table and picture


def table(results: Results) -> str:
    """Return mean and range over seeds of each measure, by arm and number of sampled answers."""
    rows = []
    for arm in ARMS:
        for n, point in enumerate(results.runs[0][arm]):
            cells = [[run[arm][n][key] for run in results.runs] for key in MEASURED]
            shares = [spread(cell, ".0%") for cell in cells[:-1]]
            rows.append([arm, f"{point['answers']:,.0f}", *shares, spread(cells[-1], ".1f")])
    return markdown(("", "sampled answers", *MEASURED), rows)


def draw(results: Results, figure: Any) -> None:
    """Draw right, readable and stepped answers by sampled answers."""
    panels = figure.subplots(1, 3, sharey=True)
    titles = {"right": "right answers", "readable": "readable answers", "steps": "answers with steps"}
    for axes, (key, title) in zip(panels, titles.items(), strict=True):
        for color, arm in enumerate(ARMS):
            answers = [point["answers"] for point in results.runs[0][arm]]
            heights = [[point[key] for point in run[arm]] for run in results.runs]
            curve(axes, answers, heights, arm, f"C{color}")
        axes.set(xlabel="sampled answers", title=f"{title} to held-out rows", ylim=(0, 1.03))
        axes.set_xticks(range(0, ALL + 1, EARLY), [f"{n:,}" for n in range(0, ALL + 1, EARLY)])
    panels[0].legend(frameon=False, loc="lower right")


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(12.0, 3.8))
