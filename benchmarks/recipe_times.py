"""Measure how long recipes take: python benchmarks/recipe_times.py NAME... [--updates 3].

A recipe is run for a few updates, and its whole time is estimated: what is not of an update (loading, the
first evaluation), updates × the median update, and evaluations × one evaluation. A pipeline is run whole.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from posttrain.plan.plan import plan_run
from posttrain.recipe import config
from posttrain.recipe.catalogue import catalogue


def main() -> None:
    """Print a line for each recipe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--updates", type=int, default=3)
    args = parser.parse_args()
    entries = catalogue()
    for name in args.names:
        entry = entries[name]
        with tempfile.TemporaryDirectory() as folder:
            begin, run = time.monotonic(), Path(folder, "run")
            sets = ["--set", f"run.updates={args.updates}", "--set", "run.epochs=0"]
            command = [
                sys.executable,
                "-m",
                "posttrain",
                "train",
                str(entry.file),
                "--run-dir",
                str(run),
                "-q",
            ]
            command += [] if entry.is_pipeline else sets
            process = subprocess.run(command, capture_output=True, text=True)
            seconds = time.monotonic() - begin
            if process.returncode:
                *_, reason = [f"exit code {process.returncode}", *process.stderr.strip().splitlines()]
                print(f"{name}: {reason}", flush=True)
                continue
            note = "run whole" if entry.is_pipeline else f"of {args.updates} updates in {seconds:.0f} s"
            total = seconds if entry.is_pipeline else estimate_total(entry.file, run, seconds)
            print(f"{name}: {total / 60:.1f} min ({note})", flush=True)


def estimate_total(file: Path, run: Path, seconds: float) -> float:
    """Return the estimated seconds of the whole recipe, from the lines of a short run."""
    recipe = plan_run(config.read(file).recipe, lambda text: None).resolved.recipe
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line["time/evaluate"] for line in lines if "time/evaluate" in line]
    updates = [line["time/total"] - line.get("time/evaluate", 0.0) for line in lines if line["update"]]
    fixed = seconds - sum(updates) - sum(evaluations)
    total, every = recipe.run.updates, recipe.eval.every
    count = 1 + (total // every if every else 1) if evaluations else 0
    return fixed + total * statistics.median(updates) + count * statistics.mean(evaluations or [0.0])


if __name__ == "__main__":
    main()
