"""Uniform tasks against three curricula, from the same start, on chains of additions of mixed length.

Tasks and policy are those of process_outcome.py: running sums of digits, and a table that knows some
additions better than others. Chains of 2 to 6 digits come in equal shares; an answer is paid if every step
is right. GRPO samples 200 x 16 x 8 answers to 200 tasks, in random order, easiest first within each
epoch, by a band of success rates, or by a bandit over the lengths (docs/curriculum.md); the code that
`[curriculum]` runs decides what comes next, from two starts: a fair one, which takes 38 % of its
steps rightly, and a weak one, which takes 21 %.

Runs are judged by the chance, computed and not sampled, that every step is right, the mean over five lengths.
"""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import one_hot

from posttrain.curriculum.curriculum import build_supply
from posttrain.methods.build import build
from posttrain.recipe.settings import Curriculum
from posttrain.types import Task
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
from posttrain_study.claims.process_outcome import GROUPS, LONGEST, SIZE, ChainPolicy, chains, sums

UPDATES, EVERY, EACH, HELD_OUT = 200, 5, 40, 100
"""EACH and HELD_OUT count chains of each length."""
LENGTHS = range(2, LONGEST + 1)
LR = 0.1
"""Of Adam; with uniform tasks and another seed it ends as well as 0.3, and better than 0.03."""
STARTS = {"fair": 2.0, "weak": 1.0}
KINDS = {
    "uniform": Curriculum(),
    "order": Curriculum(kind="order"),
    "band": Curriculum(kind="band"),
    "bandit": Curriculum(kind="bandit", buckets=len(LENGTHS)),
}
CASES = [f"{start}, {kind}" for start in STARTS for kind in KINDS]


def tasks(seed: int) -> list[Task]:
    """Return EACH chains of each length; the difficulty is the number of steps."""
    draw = torch.Generator().manual_seed(seed + 4000)
    return [
        Task(id=f"{length}/{n}", messages=(), fields={"difficulty": length - 1, "digits": digits})
        for length in LENGTHS
        for n, digits in enumerate(chains(EACH, draw, length).tolist())
    ]


def sound(questions: torch.Tensor, answers: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """Return 1 at the last step if all steps are right."""
    padding = torch.arange(LONGEST - 1) >= length[:, None]
    right = ((answers == sums(questions)) | padding).all(1)
    return one_hot(length - 1, LONGEST - 1) * right[:, None].float()


def train(name: str, seed: int) -> dict[str, list[float]]:
    """Train with a curriculum, and return how likely held-out chains are answered right."""
    start, kind = name.split(", ")
    policy = ChainPolicy(seed, build("grpo", {}, horizon=LONGEST - 1), LR, STARTS[start])
    supply = build_supply(KINDS[kind], tasks(seed), seed=seed)
    draw, dice = (torch.Generator().manual_seed(seed + more) for more in (1000, 2000))
    held_out = {length: chains(HELD_OUT, dice, length) for length in LENGTHS}
    curves: dict[str, list[float]] = {"answers": [], "all": [], "long": [], "length": [], "useful": []}
    for update in range(UPDATES + 1):
        if update % EVERY == 0:
            chances = [policy.chances(held_out[length], length)[1] for length in LENGTHS]
            curves["answers"].append(update * GROUPS * SIZE)
            curves["all"].append(statistics.fmean(chances))
            curves["long"].append(chances[-1])
        group_tasks = [supply.take()[1] for _ in range(GROUPS)]
        questions = torch.tensor([task.fields["digits"] for task in group_tasks]).repeat_interleave(SIZE, 0)
        length = torch.tensor([task.fields["difficulty"] for task in group_tasks]).repeat_interleave(SIZE)
        answers = policy.answers(questions, draw)
        rewards = sound(questions, answers, length)
        rates = rewards.sum(1).view(GROUPS, SIZE).mean(1).tolist()
        supply.observe(list(zip(group_tasks, rates, strict=True)))
        policy.learn(questions, answers, rewards, length)
        curves["length"].append(float(length.float().mean()))
        curves["useful"].append(statistics.fmean(0 < rate < 1 for rate in rates))
    return curves


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Train from both starts with every curriculum."""
    curves = {}
    for name in CASES:
        report(f"curriculum, seed {seed}, {name}")
        curves[name] = train(name, seed)
    return curves


# ---------------------------------------------------------------------- the rules


def area_gain(kind: str) -> Callable[[Figures], float]:
    """Return the measure mean over the run and both starts of P(right), a curriculum minus uniform tasks."""

    def measured(figures: Figures) -> float:
        return statistics.fmean(
            statistics.fmean(figures[f"{start}, {kind}"]["all"])
            - statistics.fmean(figures[f"{start}, uniform"]["all"])
            for start in STARTS
        )

    return measured


RULES = {
    "curriculum_order": VerdictRule(
        "share of right answers, mean over the run and both starts, easiest first minus uniform",
        area_gain("order"),
        0.05,
    ),
    "curriculum_band": VerdictRule(
        "share of right answers, mean over the run and both starts, band minus uniform",
        area_gain("band"),
        0.05,
    ),
}


# ---------------------------------------------------------------------- table and picture


def table(results: Results) -> str:
    """Return mean and range over seeds of the chances, and the share of groups with signal."""
    runs = results.runs
    answers = runs[0][CASES[0]]["answers"]
    places = [(0, "all"), (len(answers) // 4, "all"), (len(answers) // 2, "all"), (-1, "all"), (-1, "long")]
    heads = [f"{'six digits' if key == 'long' else 'right'}, after {answers[n]:,}" for n, key in places]
    rows = []
    for name in CASES:
        cells = [spread([run[name][key][n] for run in runs], ".1%") for n, key in places]
        useful = statistics.fmean(statistics.fmean(run[name]["useful"]) for run in runs)
        rows.append([name, *cells, f"{useful:.0%}"])
    return markdown(("start, tasks", *heads, "groups with signal"), rows)


def draw(results: Results, figure: Any) -> None:
    """Draw the learning curves from each start."""
    panels = figure.subplots(1, len(STARTS), sharey=True)
    for axes, start in zip(panels, STARTS, strict=True):
        for n, kind in enumerate(KINDS):
            runs = [run[f"{start}, {kind}"] for run in results.runs]
            curve(axes, runs[0]["answers"], [run["all"] for run in runs], kind, f"C{n}")
        axes.set(xlabel="answers", title=f"{start} start", ylim=(0, 1))
    panels[0].set(ylabel="chance that every step is right")
    panels[1].legend(frameon=False)


EXPERIMENT = Experiment(measure, table, draw, RULES, first_seed=1)
