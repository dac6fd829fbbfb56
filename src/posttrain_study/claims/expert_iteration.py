"""Expert iteration against GRPO on the same number of sampled answers.

Both start from the SFT stage of recipes/pretrain_to_reasoner.toml, a Llama of 126 000 weights that answers
sums, and sample 16 x 64 x 8 answers to sums that are not held out. Expert iteration imitates those that the
verifier accepts: after every 512 answers, each as often as it was sampled; or in four rounds of 2048,
different answers to a task once each and every task alike, over two epochs. On the 200 held-out sums are
measured: accuracy of the greedy answer, pass@1 and pass@16 of 16 samples, and the entropy of a token.
"""

import json
import shutil
import statistics
from pathlib import Path
from typing import Any

from posttrain.api.opening import train
from posttrain.recipe import config
from posttrain_study.claims.experiment import (
    Experiment,
    Figures,
    Report,
    Results,
    VerdictRule,
    markdown,
    spread,
)
from posttrain_study.claims.reasoner import accuracy, evaluate, last_checkpoint, recipe, stages

UPDATES, SAMPLES, HELD_OUT = 16, 16, 200
COMMON = ["rollout.select=all", "run.threads=1", "optim.lr=1e-3", f"eval.limit={HELD_OUT}"]
OFTEN = [f"run.updates={UPDATES}", "eval.every=4"]
ROUNDS = [
    "run.updates=4",
    f"rollout.groups={64 * UPDATES // 4}",
    "steps.epochs=2",
    "steps.minibatches=8",
    "eval.every=1",
]
CASES: dict[str, list[str]] = {
    "GRPO": ["method.name=grpo", *OFTEN],
    "expert iteration, every 512": [
        "method.name=expert_iteration",
        "method.repeats=counted",
        "method.balance=unbalanced",
        *OFTEN,
    ],
    "expert iteration, four rounds": ["method.name=expert_iteration", *ROUNDS],
}
GRPO, OFTEN_IMITATED, FOUR_ROUNDS = CASES
MEASURED = ("greedy", "pass@1", f"pass@{SAMPLES}", "entropy")


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Train with each method from the same start."""
    report("expert_iteration, the start")
    start = last_checkpoint(stages(out / "start") / "04-sft") / "model"
    before = out / "start.json"
    if not before.exists():
        before.write_text(json.dumps(quality(start, seed=0)) + "\n")
    figures: Figures = {"the start": json.loads(before.read_text())}
    for name, sets in CASES.items():
        report(f"expert_iteration, seed {seed}, {name}")
        place = out / f"{name.replace(', ', '-').replace(' ', '_')}-{seed}"
        shutil.rmtree(place, ignore_errors=True)
        changes = [f"model.path={start}", f"run.seed={seed}", *COMMON, *sets]
        loaded = config.read(recipe("grpo"), changes)
        train(loaded, place, title=name, resume=False, view=lambda kind, data: None)
        figures[name] = {"curve": curve_of(place), **quality(last_checkpoint(place) / "model", seed)}
    return figures


def curve_of(run_dir: Path) -> list[tuple[float, float]]:
    """Return (answers, accuracy) at each evaluation of a run."""
    curve, answers = [], 0.0
    for line in (json.loads(text) for text in (run_dir / "metrics.jsonl").read_text().splitlines()):
        answers += 8 * (line.get("select/kept", 0) + line.get("select/dropped", 0))
        if "eval/accuracy" in line:
            curve.append((answers, line["eval/accuracy"]))
    return curve


def quality(model: Path, seed: int) -> dict[str, float]:
    """Return greedy accuracy, pass@k of SAMPLES answers at temperature 1, and their entropy."""
    return {"greedy": accuracy(model), **evaluate(model, samples=SAMPLES, temperature=1.0, seed=seed)}


RULES = {
    "expert_iteration": VerdictRule(
        "greedy accuracy, GRPO minus expert iteration after every 512 answers",
        lambda figures: float(figures[GRPO]["greedy"] - figures[OFTEN_IMITATED]["greedy"]),
        0.05,
    ),
    "expert_iteration_rounds": VerdictRule(
        "greedy accuracy, GRPO minus expert iteration in four rounds",
        lambda figures: float(figures[GRPO]["greedy"] - figures[FOUR_ROUNDS]["greedy"]),
        0.05,
    ),
}


def table(results: Results) -> str:
    """Return mean and range over seeds of each measure."""
    runs = results.runs
    rows = [["the start", *(form(key, [runs[0]["the start"][key]]).partition(" ")[0] for key in MEASURED)]]
    rows += [[name, *(form(key, [run[name][key] for run in runs]) for key in MEASURED)] for name in CASES]
    return markdown(("method", "greedy accuracy", "pass@1", f"pass@{SAMPLES}", "entropy, nats a token"), rows)


def form(key: str, values: list[float]) -> str:
    """Return mean and range of a measure as the table shows it."""
    return spread(values, ".3f" if key == "entropy" else ".1%")


def draw(results: Results, figure: Any) -> None:
    """Draw greedy accuracy by answers, and where pass@1, pass@16 and the entropy end."""
    curves, ends = figure.subplots(1, 2)
    for n, name in enumerate(CASES):
        runs = [run[name] for run in results.runs]
        points = list(zip(*(run["curve"] for run in runs), strict=True))
        answers = [seeds[0][0] for seeds in points]
        heights = [[height for _, height in seeds] for seeds in points]
        curves.plot(answers, list(map(statistics.fmean, heights)), "o-", ms=3, color=f"C{n}", label=name)
        curves.fill_between(
            answers, list(map(min, heights)), list(map(max, heights)), alpha=0.15, color=f"C{n}", lw=0
        )
        for key, mark in ((f"pass@{SAMPLES}", "o"), ("pass@1", "^")):
            ends.plot([run["entropy"] for run in runs], [run[key] for run in runs], mark, color=f"C{n}")
    start = results.runs[0]["the start"]
    for key, mark, label in ((f"pass@{SAMPLES}", "o", "; black: the start"), ("pass@1", "^", "")):
        ends.plot(start["entropy"], start[key], mark, color="k", label=key + label)
    curves.set(xlabel="answers", ylabel="greedy accuracy on held-out sums")
    ends.set(xlabel="entropy, nats a token", ylabel="on held-out sums")
    for axes in (curves, ends):
        axes.legend(frameon=False)


EXPERIMENT = Experiment(measure, table, draw, RULES, first_seed=1)
