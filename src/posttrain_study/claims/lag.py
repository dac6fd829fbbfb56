"""Naive against decoupled clipping of old answers: GRPO on sums, with a lag of 0, 4 and 16 updates.

The learner is that of every run, ahead of itself by `async.max_lag` with pace = "steps" and swap = "within",
so each run is the same whatever the machine does. An update takes as many steps of the engine as samplers
need for three: the lag grows to its bound and stays there.

    naive      the clipped ratio is π/π_gen, with the policy that sampled the token
    decoupled  the clipped ratio is π/π_old, and π_old/π_gen, capped at 5, weighs it (arXiv:2505.24298)

The start is recipes/pretrain_to_reasoner.toml's Llama of 126 000 weights, after half of its SFT.
"""

import json
import shutil
import statistics
from pathlib import Path
from typing import Any

from posttrain.api.opening import train
from posttrain.methods import table as methods
from posttrain.methods.policy_gradient import PolicyGradient
from posttrain.recipe import config
from posttrain.types import Batch, Outputs, PerToken
from posttrain_study.claims.experiment import (
    Experiment,
    Figures,
    Report,
    Results,
    VerdictRule,
    markdown,
    spread,
)
from posttrain_study.claims.reasoner import last_checkpoint, recipe, stages

LAGS = (0, 4, 16)
UPDATES, GROUPS, SIZE, LATE, LR, START_SEED = 60, 32, 8, 3, 5e-4, 1
"""LATE: evaluations at the end, ten updates apart, whose mean a run is judged by."""
STEPS = 48
"""Of the engine in an update: an answer has at most 14 tokens, and GROUPS × SIZE rows run together."""
ARMS = {"naive": "naive_grpo", "decoupled": "grpo"}
CASES = [(arm, lag) for lag in LAGS for arm in ARMS if lag or arm == "decoupled"]
"""Without lag both are one: the policy that sampled a token is that at the start of its update."""
METRICS = ("lag/mean", "reward/mean", "clip/fraction", "entropy", "grad_norm")
"""Metrics of a run's last ten updates."""


class Naive(PolicyGradient):
    """GRPO whose ratio is over the policy that sampled each token, however old; its correction is then 1."""

    def _old(self, out: Outputs, batch: Batch) -> PerToken:
        return batch.logp_gen


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Train every arm at every lag from the same start. Runs that OUT holds are not made again."""
    lines: dict[str, methods.Line] = methods.METHODS  # type: ignore[assignment]
    naive = Naive(**vars(methods.GRPO))
    lines["naive_grpo"] = methods.Line(naive, "GRPO, clipped from the sampler", "arXiv:2505.24298, Table 3")
    try:
        report("lag, the start")
        start = half_taught(stages(out / "start", START_SEED), out)
        figures: Figures = {}
        for arm, lag in CASES:
            report(f"lag, seed {seed}, {arm}, {lag}")
            figures[f"{arm}, {lag}"] = run(arm, lag, seed, start, out)
        return figures
    finally:
        del lines["naive_grpo"]


def half_taught(folder: Path, out: Path) -> Path:
    """Return a model after half of the recipe's SFT, which answers about a fifth of the sums."""
    place = out / "sft"
    if not place.exists():
        sets = [f"model.path={last_checkpoint(folder / '03-pretrain') / 'model'}", "run.updates=120"]
        sets += [f"task.data.path={folder / '01-data' / 'sft.jsonl'}", "run.seed=1", "run.threads=1"]
        loaded = config.read(recipe("sft"), sets)
        train(loaded, place, title="sft", resume=False, view=lambda kind, data: None)
    return last_checkpoint(place) / "model"


def run(arm: str, lag: int, seed: int, start: Path, out: Path) -> dict[str, Any]:
    """Return the figures of a run, which is made unless it is there."""
    place = out / f"{arm}-{lag}-{LR:g}-{seed}"
    result = place / "result.json"
    if not result.exists():
        shutil.rmtree(place, ignore_errors=True)
        sets: dict[str, Any] = {
            "model.path": start,
            "method.name": ARMS[arm],
            "method.correction": "token_truncated",
            "method.weight_cap": 5.0,
            "rollout.groups": GROUPS,
            "rollout.group_size": SIZE,
            "rollout.select": "all",
            "engine.rows": GROUPS * SIZE,
            "steps.minibatches": 4,
            "optim.lr": LR,
            "optim.schedule": "constant",
            "optim.min_lr_ratio": "",
            "run.updates": UPDATES,
            "run.seed": seed,
            "run.threads": 1,
            "eval.every": 10,
            "record.tokens": 1,
        }
        if lag:
            ahead = {"place": "here", "pace": "steps", "steps_per_update": STEPS, "swap": "within"}
            sets |= {f"async.{key}": value for key, value in ahead.items()}
            sets["async.max_lag"] = lag
        loaded = config.read(recipe("grpo"), [f"{key}={value}" for key, value in sets.items()])
        train(loaded, place, title=f"{arm}, lag {lag}", resume=False, view=lambda kind, data: None)
        lines = [json.loads(text) for text in (place / "metrics.jsonl").read_text().splitlines()]
        last = [line for line in lines if line["update"] > UPDATES - 10]
        numbers: dict[str, Any] = {key: statistics.fmean(x.get(key, 0.0) for x in last) for key in METRICS}
        numbers["lag/max"] = max(line.get("lag/max", 0.0) for line in lines)
        numbers["accuracy"] = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
        result.write_text(json.dumps(numbers) + "\n")
    figures: dict[str, Any] = json.loads(result.read_text())
    return figures


def late(figures: Figures, arm: str, lag: int) -> float:
    """Return the mean accuracy of the last evaluations of a run."""
    return statistics.fmean(figures[f"{arm}, {lag}"]["accuracy"][-LATE:])


RULES = {
    "lag_harms": VerdictRule(
        "accuracy late in the run, without lag minus naive clipping at a lag of 4",
        lambda figures: late(figures, "decoupled", 0) - late(figures, "naive", 4),
        0.05,
    ),
    "lag_decoupled": VerdictRule(
        "accuracy late in the run, decoupled clipping at a lag of 4 minus no lag",
        lambda figures: late(figures, "decoupled", 4) - late(figures, "decoupled", 0),
        0.05,
        equal=True,
    ),
}


def table(results: Results) -> str:
    """Return mean and range over seeds of the accuracy, and means of the rest."""
    rows = []
    for arm, lag in CASES:
        runs = [figures[f"{arm}, {lag}"] for figures in results.runs]
        mean = {key: statistics.fmean(seed[key] for seed in runs) for key in METRICS}
        cells = [
            spread([late(figures, arm, lag) for figures in results.runs], ".1%"),
            f"{mean['lag/mean']:.1f} ({max(seed['lag/max'] for seed in runs):.0f})",
            f"{mean['clip/fraction']:.1%}",
            f"{mean['reward/mean']:.2f}",
        ]
        rows.append([str(lag), arm if lag else "both", *cells])
    return markdown(("bound", "arm", "accuracy (range)", "mean lag (maximum)", "clipped", "reward"), rows)


def draw(results: Results, figure: Any) -> None:
    """Draw accuracy by the bound of the lag, a point for each seed; and the curves of means."""
    by_lag, by_update = figure.subplots(1, 2, sharey=True)
    for n, arm in enumerate(ARMS):
        heights = [
            [late(figures, arm if lag else "decoupled", lag) for figures in results.runs] for lag in LAGS
        ]
        for x, seeds in enumerate(heights):
            by_lag.plot([x] * len(seeds), seeds, "o", color=f"C{n}", alpha=0.4)
        by_lag.plot(range(len(LAGS)), list(map(statistics.fmean, heights)), f"C{n}-", label=arm)
        for lag, style in ((4, "-"), (16, "--")):
            by_update.plot(
                range(0, UPDATES + 1, 10),
                mean_curve(results, arm, lag),
                f"C{n}{style}",
                label=f"{arm}, {lag}",
            )
    by_update.plot(range(0, UPDATES + 1, 10), mean_curve(results, "decoupled", 0), "k:", label="no lag")
    by_lag.set_xticks(range(len(LAGS)), list(map(str, LAGS)))
    by_lag.set(xlabel="async.max_lag", ylabel="held-out sums right", ylim=(0, 1))
    by_update.set(xlabel="updates")
    for axes in (by_lag, by_update):
        axes.legend(frameon=False)


def mean_curve(results: Results, arm: str, lag: int) -> list[float]:
    """Return the mean accuracy over seeds at each evaluation of a run."""
    curves = zip(*(figures[f"{arm}, {lag}"]["accuracy"] for figures in results.runs), strict=True)
    return [statistics.fmean(point) for point in curves]


EXPERIMENT = Experiment(measure, table, draw, RULES, first_seed=1)
