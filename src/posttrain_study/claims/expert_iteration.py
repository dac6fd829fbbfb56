"""Expert iteration against GRPO on the same number of sampled answers, with as many optimiser steps.

All start from the model of digit_sums.py, which answers one question of three rightly, sample 48 x 32 x 8
answers to questions that are not held out, and make 192 steps. GRPO and expert iteration train after every
256 answers, in four steps; expert iteration also in four rounds of 3072, in two epochs of 24 steps. It
imitates what the verifier accepts: after every 256 each answer as often as it was sampled; in rounds
different ones to a question once each, and every question alike. Chances of right answers are computed on
held-out questions.
"""

from pathlib import Path
from typing import Any

from posttrain_study.claims.digit_sums import (
    HELD_OUT,
    TAUGHT,
    Changes,
    answered,
    last_checkpoint,
    quality,
    questions,
    run,
    start,
)
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

UPDATES, GROUPS, SIZE, ROUNDS, SAMPLES = 48, 32, 8, 4, 16
ASKED = questions()[HELD_OUT + TAUGHT :][:2048]
"""Questions that are neither held out nor part of the start's SFT."""
COMMON: Changes = {
    "rollout.select": "all",
    "rollout.group_size": SIZE,
    "optim.schedule": "linear",
    "optim.min_lr_ratio": 0.3,
    "checkpoint.keep": 0,
}
OFTEN: Changes = {
    "run.updates": UPDATES,
    "rollout.groups": GROUPS,
    "steps.minibatches": 4,
    "checkpoint.every": UPDATES // ROUNDS,
}
RARELY: Changes = {
    "run.updates": ROUNDS,
    "rollout.groups": GROUPS * UPDATES // ROUNDS,
    "steps.epochs": 2,
    "steps.minibatches": 24,
    "checkpoint.every": 1,
}
EXPERT: Changes = {"method.name": "expert_iteration"}
COUNTED: Changes = {**EXPERT, "method.repeats": "counted", "method.balance": "unbalanced"}
CASES: dict[str, Changes] = {
    "GRPO, every 256": {**OFTEN, "optim.lr": 3e-3},
    "expert iteration, every 256": {**COUNTED, **OFTEN, "optim.lr": 3e-3},
    "expert iteration, four rounds": {**EXPERT, **RARELY, "optim.lr": 1e-2},
}
"""The rate of each is the best of steps of three by the chance of a right answer, on seeds 100 and 101."""
GRPO, OFTEN_IMITATED, FOUR_ROUNDS = CASES
START = "the start"
COLUMNS = {"greedy": ".1%", "pass@1": ".1%", f"pass@{SAMPLES}": ".1%", "entropy": ".3f"}


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Train with each method from the same start."""
    report("expert_iteration, the start")
    model, digest = start(out)
    figures: Figures = {START: {"digest": digest, **figures_of(model)}}
    for name, changes in CASES.items():
        report(f"expert_iteration, seed {seed}, {name}")
        figures[name] = train(name, changes, seed, model, out)
    return figures


def train(name: str, changes: Changes, seed: int, model: Path, out: Path) -> dict[str, Any]:
    """Return the chance of a right answer by checkpoint, and what the trained model is."""
    place = out / f"{name.replace(', ', '-').replace(' ', '_')}-{seed}"
    run("grpo", model, answered(ASKED), {**COMMON, **changes, "run.seed": seed}, place)
    path = [quality(folder / "model").right for folder in sorted((place / "checkpoints").glob("step_*"))]
    return {"path": path, **figures_of(last_checkpoint(place) / "model")}


def figures_of(model: Path) -> dict[str, float]:
    """Return the figures of the columns."""
    measured = quality(model)
    chances = {"pass@1": measured.right, f"pass@{SAMPLES}": measured.any_of(SAMPLES)}
    return {"greedy": measured.greedy, **chances, "entropy": measured.entropy}


def minus(one: str, other: str) -> Any:
    """Return the measure chance of a right answer of one case minus that of another."""
    return lambda figures: float(figures[one]["pass@1"] - figures[other]["pass@1"])


RULES = {
    "expert_iteration": VerdictRule(
        "chance of a right answer, GRPO minus expert iteration, both after every 256 answers",
        minus(GRPO, OFTEN_IMITATED),
        0.05,
    ),
    "expert_iteration_rounds": VerdictRule(
        "chance of a right answer, GRPO after every 256 answers minus expert iteration in four rounds",
        minus(GRPO, FOUR_ROUNDS),
        0.05,
    ),
}


def table(results: Results) -> str:
    """Return mean and range over seeds of each measure."""
    runs = results.runs
    first = runs[0][START]
    rows = [[f"the start, {first['digest']}", *(f"{first[key]:{form}}" for key, form in COLUMNS.items())]]
    for name in CASES:
        rows.append(
            [name, *(spread([seed[name][key] for seed in runs], form) for key, form in COLUMNS.items())]
        )
    return markdown(("method", "greedy accuracy", "pass@1", f"pass@{SAMPLES}", "entropy, nats a token"), rows)


def draw(results: Results, figure: Any) -> None:
    """Draw the chance of a right answer by answers, and where pass@1, pass@16 and the entropy end."""
    curves, ends = figure.subplots(1, 2)
    first, answers = (
        results.runs[0][START],
        [n * UPDATES // ROUNDS * GROUPS * SIZE for n in range(ROUNDS + 1)],
    )
    marks = {f"pass@{SAMPLES}": "o", "pass@1": "^"}
    for n, name in enumerate(CASES):
        runs = [seed[name] for seed in results.runs]
        curve(curves, answers, [[first["pass@1"], *seed["path"]] for seed in runs], name, f"C{n}")
        for key, mark in marks.items():
            ends.plot([seed["entropy"] for seed in runs], [seed[key] for seed in runs], mark, color=f"C{n}")
    for key, mark in marks.items():
        ends.plot(first["entropy"], first[key], mark, color="k", label=f"{key}; black: the start")
    curves.set(xlabel="answers", ylabel="chance of a right answer, held-out questions")
    ends.set(xlabel="entropy, nats a token", ylabel="on held-out questions")
    for axes in (curves, ends):
        axes.legend(frameon=False)


EXPERIMENT = Experiment(measure, table, draw, RULES)
