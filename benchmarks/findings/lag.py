"""Naive against decoupled clipping when answers are old: GRPO on sums, with 0 to 16 updates of lag and more.

The learner is that of every run, ahead of itself by `async.max_lag` with pace = "steps" and swap = "within",
so each run is the same whatever the machine does. An update takes so many steps of the engine that samplers
could draw for three: the lag grows to its bound and stays there. "inf" is a bound that no run reaches.

    naive      the clipped ratio is π/π_gen: the anchor is whoever drew the token
    decoupled  the clipped ratio is π/π_old, and π_old/π_gen, capped at 5, weighs it (arXiv:2505.24298)

    python benchmarks/findings/lag.py --seeds 3 --out runs/findings/lag

The start is recipes/pretrain_to_reasoner.toml's Llama of 126 000 weights, after half of its SFT; without
--start the pipeline makes it first, once. Runs that are there are not made again.
"""

import argparse
import json
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

from lora_rank import PIPELINE, made, newest

from posttrain.api.opening import train
from posttrain.methods import table as methods
from posttrain.methods.policy_gradient import PolicyGradient
from posttrain.process.machine import configure
from posttrain.recipe import config
from posttrain.types import Batch, Outputs, PerToken

LAGS = {"0": 0, "1": 1, "2": 2, "4": 4, "8": 8, "16": 16, "inf": 1000}
UPDATES, GROUPS, SIZE, LATE = 60, 32, 8, 3
"""LATE: evaluations at the end, ten updates apart, whose mean a run is judged by."""
STEPS = 48
"""Of the engine in an update: an answer has at most 14 tokens, and GROUPS × SIZE rows are drawn together."""
ARMS = {"naive": "naive_grpo", "decoupled": "grpo"}
CASES = [(arm, lag) for lag in LAGS for arm in ARMS if lag != "0" or arm == "decoupled"]
"""Without lag both are one: whoever drew a token is the policy at the start of its update."""
SHOWN = ("lag/mean", "reward/mean", "clip/fraction", "entropy", "grad_norm")
"""Metrics of a run's last ten updates."""
Runs = dict[tuple[str, str], list[dict[str, Any]]]


class Naive(PolicyGradient):
    """GRPO whose ratio is over the policy that drew each token, however old; its correction is then 1."""

    def _old(self, out: Outputs, batch: Batch) -> PerToken:
        return batch.logp_gen


def main() -> None:
    """Makes the runs that are missing, prints the table and draws it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--lag", action="append", choices=list(LAGS), help="this bound alone; several times")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--start", type=Path, help="a directory of the pipeline; made if not given")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    configure(1)
    options.out.mkdir(parents=True, exist_ok=True)
    known()
    start = begun(options.start or made(options.out / "start"), options.out)
    found: Runs = {case: [] for case in CASES if case[1] in (options.lag or LAGS)}
    for seed in range(options.first, options.first + options.seeds):
        for (arm, lag), runs in found.items():
            runs.append(run(arm, lag, seed, options.lr, start, options.out))
    print(table(found))
    draw(found, options.out / "lag.svg")


def known() -> None:
    """Puts the naive method into the table of methods, for recipes to name."""
    lines: dict[str, methods.Line] = methods.METHODS  # type: ignore[assignment]
    naive = Naive(**vars(methods.GRPO))
    lines["naive_grpo"] = methods.Line(naive, "GRPO, clipped from the sampler", "arXiv:2505.24298, Table 3")


def begun(stages: Path, out: Path) -> Path:
    """A model that SFT has begun to teach: half of the recipe's updates, about a fifth of the sums right."""
    place = out / "sft"
    if not place.exists():
        sets = [f"model.path={newest(stages / '03-pretrain') / 'model'}", "run.updates=120", "run.seed=1"]
        sets += [f"task.data.path={stages / '01-data' / 'sft.jsonl'}", "run.threads=1"]
        read = config.read(PIPELINE.with_suffix("") / "sft.toml", sets)
        train(read, place, title="sft", resume=False, view=lambda kind, data: None)
    return newest(place) / "model"


def run(arm: str, lag: str, seed: int, lr: float, start: Path, out: Path) -> dict[str, Any]:
    """What a run came to; made unless it is there."""
    place = out / f"{arm}-{lag}-{lr:g}-{seed}"
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
            "optim.lr": lr,
            "optim.schedule": "constant",
            "optim.min_lr_ratio": "",
            "run.updates": UPDATES,
            "run.seed": seed,
            "run.threads": 1,
            "eval.every": 10,
            "record.tokens": 1,
        }
        if LAGS[lag]:
            ahead = {"place": "here", "pace": "steps", "steps_per_update": STEPS, "swap": "within"}
            sets |= {f"async.{key}": value for key, value in ahead.items()}
            sets["async.max_lag"] = LAGS[lag]
        words = [f"{key}={value}" for key, value in sets.items()]
        read = config.read(PIPELINE.with_suffix("") / "grpo.toml", words)
        train(read, place, title=f"{arm}, lag {lag}", resume=False, view=lambda kind, data: None)
        lines = [json.loads(x) for x in (place / "metrics.jsonl").read_text().splitlines()]
        last = [line for line in lines if line["update"] > UPDATES - 10]
        told: dict[str, Any] = {key: statistics.fmean(x.get(key, 0.0) for x in last) for key in SHOWN}
        told["lag/max"] = max(line.get("lag/max", 0.0) for line in lines)
        told["accuracy"] = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
        told["seconds"] = lines[-1]["seconds"]
        result.write_text(json.dumps(told) + "\n")
    found: dict[str, Any] = json.loads(result.read_text())
    shown = ", ".join(f"{x:.3f}" for x in found["accuracy"])
    print(f"{place.name}: lag {found['lag/mean']:.1f}, {shown}, {found['seconds']:.0f} s", file=sys.stderr)
    return found


def late(run: dict[str, Any]) -> float:
    """What a run is judged by."""
    return statistics.fmean(run["accuracy"][-LATE:])


def table(found: Runs) -> str:
    """Markdown: mean and range over seeds of the accuracy, means of the rest."""
    lines = [
        "| bound | arm | seeds | accuracy (range) | lag (most) | clipped | reward |",
        "|---|---|---|---|---|---|---|",
    ]
    for (arm, lag), runs in found.items():
        right = [late(run) for run in runs]
        mean = {key: statistics.fmean(run[key] for run in runs) for key in SHOWN}
        cells = [
            f"{statistics.fmean(right):.1%} ({min(right):.1%}–{max(right):.1%})",
            f"{mean['lag/mean']:.1f} ({max(run['lag/max'] for run in runs):.0f})",
            f"{mean['clip/fraction']:.1%}",
            f"{mean['reward/mean']:.2f}",
        ]
        lines.append(f"| {lag} | {arm if lag != '0' else 'both'} | {len(runs)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(found: Runs, out: Path) -> None:
    """Accuracy by the bound of the lag, a point a seed; and the curves of means at some bounds."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2), sharey=True)
    lags = [lag for lag in LAGS if any(each == lag for _, each in found)]
    for n, arm in enumerate(ARMS):
        runs = [found[arm if lag != "0" else "decoupled", lag] for lag in lags]
        for x, seeds in enumerate(runs):
            left.plot([x] * len(seeds), [late(run) for run in seeds], "o", color=f"C{n}", alpha=0.4)
        left.plot(
            range(len(lags)), [statistics.fmean(map(late, seeds)) for seeds in runs], f"C{n}-", label=arm
        )
        for lag, style in [(lag, style) for lag, style in (("4", "-"), ("16", "--")) if lag in lags]:
            curves = zip(*(run["accuracy"] for run in found[arm, lag]), strict=True)
            means = [statistics.fmean(point) for point in curves]
            right.plot(range(0, UPDATES + 1, 10), means, f"C{n}{style}", label=f"{arm}, {lag}")
    none = zip(*(run["accuracy"] for run in found["decoupled", "0"]), strict=True)
    right.plot(range(0, UPDATES + 1, 10), [statistics.fmean(x) for x in none], "k:", label="no lag")
    left.set_xticks(range(len(lags)), ["∞" if lag == "inf" else lag for lag in lags])
    left.set(xlabel="async.max_lag", ylabel="held-out sums right", ylim=(0, 1))
    right.set(xlabel="updates")
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(out)


if __name__ == "__main__":
    main()
