"""The demo's task with one method after the other: accuracy, wall time and peak memory of whole runs.

Every run is `posttrain train recipes/methods/NAME.toml`, 16 tasks with 4 answers an update, in a process of
its own; methods that compare answers drop groups that are all alike. Seconds are of a core, so that what else
the machine does hardly counts. A run that is already there is not made again, so the table can be made in
several sittings, and by two processes that share the folder.

    python benchmarks/method_runs.py --seeds 3 --updates 16 --threads 1 --out runs/methods
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECIPES = {
    "reinforce": "REINFORCE",
    "rloo": "RLOO",
    "reinforce_pp": "REINFORCE++",
    "a2c": "A2C",
    "ppo": "PPO, shared critic",
    "ppo_own_critic": "PPO, own critic",
    "trpo": "TRPO on LoRA",
    "grpo": "GRPO",
    "dr_grpo": "Dr. GRPO",
    "dapo": "DAPO",
    "gspo": "GSPO",
    "cispo": "CISPO",
}
"""recipes/methods/NAME.toml, and what the table calls it."""


def main() -> None:
    """Makes the runs that are missing, and prints the table of those that are there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=16)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--threads", type=int, default=2, help="of torch, in each run")
    parser.add_argument("--only", action="append", choices=list(RECIPES), help="these methods alone")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    for seed in range(options.first, options.first + options.seeds):
        for name in options.only or RECIPES:
            run(name, seed, [f"run.updates={options.updates}", f"run.threads={options.threads}"], options.out)
    found = {shown: read(name, options.out) for name, shown in RECIPES.items()}
    columns = ("method", "seeds", "before", "after (each seed)", "reward of the last 4 updates")
    print(f"| {' | '.join(columns)} | core seconds | peak GiB |\n|---|---|---|---|---|---|---|")
    for name, runs in found.items():
        if runs:
            after = [r["after"] for r in runs]
            cells = [
                str(len(runs)),
                f"{statistics.fmean(r['before'] for r in runs):.1%}".replace("%", " %"),
                f"{statistics.fmean(after):.1%} ({', '.join(f'{a:.1%}' for a in after)})".replace("%", " %"),
                f"{statistics.fmean(statistics.fmean(r['rewards'][-4:]) for r in runs):.2f}",
                f"{statistics.fmean(r['cpu_seconds'] for r in runs):.0f}",
                f"{max(r['peak_mib'] for r in runs) / 1024:.1f}",
            ]
            print(f"| {name} | {' | '.join(cells)} |")
    draw({name: runs for name, runs in found.items() if runs}, options.out / "methods.svg")


def draw(found: dict[str, list[dict[str, Any]]], out: Path) -> None:
    """The sampled reward of every method, update by update: its seeds, their mean, and GRPO's in grey."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text, not outlines
    from matplotlib import pyplot

    means = {name: mean([r["rewards"] for r in runs]) for name, runs in found.items()}
    figure, panels = pyplot.subplots(3, 4, figsize=(11, 7), sharex=True, sharey=True)
    for axes, (name, runs) in zip(panels.flat, found.items(), strict=False):
        if "GRPO" in means:
            axes.plot(range(1, len(means["GRPO"]) + 1), means["GRPO"], color="0.75", linewidth=3)
        for r in runs:
            axes.plot(
                range(1, len(r["rewards"]) + 1), r["rewards"], color="tab:blue", alpha=0.35, linewidth=0.9
            )
        axes.plot(range(1, len(means[name]) + 1), means[name], color="tab:blue", linewidth=2)
        after = statistics.fmean(r["after"] for r in runs)
        axes.set_title(f"{name}: {after:.0%}", fontsize=10)
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("update")
    figure.supylabel("reward of sampled answers")
    figure.tight_layout()
    figure.savefig(out)


def mean(curves: list[list[float]]) -> list[float]:
    """Their mean, as far as all of them go."""
    return [statistics.fmean(values) for values in zip(*curves, strict=False)]


def run(name: str, seed: int, changes: list[str], out: Path) -> None:
    """Makes a run, unless it is there; what it took goes into cost.json."""
    place = out / f"{name}-{seed}"
    if (place / "cost.json").exists():
        return
    recipe = ROOT / "recipes" / "methods" / f"{name}.toml"
    words = [sys.executable, "-m", "posttrain", "train", str(recipe), "--run-dir", str(place), "--quiet"]
    for change in [f"run.seed={seed}", *changes]:
        words += ["--set", change]
    started = subprocess.Popen(words, cwd=ROOT)
    _, status, used = os.wait4(started.pid, 0)
    if status:
        sys.exit(f"{name}, seed {seed}: exit {os.waitstatus_to_exitcode(status)}")
    shutil.rmtree(place / "checkpoints")  # 2 GiB a run, which nothing here reads
    cost = {"peak_mib": used.ru_maxrss / 1024, "cpu_seconds": used.ru_utime + used.ru_stime}
    (place / "cost.json").write_text(json.dumps(cost))
    print(f"{name}, seed {seed}: {read(name, out)[-1]['after']:.1%}", flush=True)


def read(name: str, out: Path) -> list[dict[str, Any]]:
    """What the finished runs of a method came to, by seed."""
    found = []
    for cost in sorted(out.glob(f"{name}-[0-9]*/cost.json")):
        lines = [json.loads(x) for x in (cost.parent / "metrics.jsonl").read_text().splitlines()]
        scored = [x["eval/accuracy"] for x in lines if "eval/accuracy" in x]
        found.append(
            {
                "before": scored[0],
                "after": scored[-1],
                "rewards": [x["reward/mean"] for x in lines if "reward/mean" in x],
                **json.loads(cost.read_text()),
            }
        )
    return found


if __name__ == "__main__":
    main()
