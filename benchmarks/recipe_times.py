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
import tomllib
from pathlib import Path

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
            short = [] if entry.is_pipeline else ["--set", f"run.updates={args.updates}"]
            command = [sys.executable, "-m", "posttrain", "train", str(entry.file), *short]
            done = subprocess.run([*command, "--run-dir", str(run), "-q"], capture_output=True, text=True)
            seconds = time.monotonic() - begin
            if done.returncode:
                print(f"{name}: {done.stderr.strip().splitlines()[-1]}", flush=True)
                continue
            what = "run whole" if entry.is_pipeline else f"of {args.updates} updates in {seconds:.0f} s"
            total = seconds if entry.is_pipeline else _whole(entry.file, run, seconds)
            print(f"{name}: {total / 60:.1f} min ({what})", flush=True)


def _whole(recipe: Path, run: Path, seconds: float) -> float:
    """Return the estimated seconds of the whole recipe, from the lines of a short run."""
    tables = tomllib.loads(recipe.read_text())
    updates = tables["run"]["updates"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line["time/evaluate"] for line in lines if "time/evaluate" in line]
    rest = [line["time/total"] - line.get("time/evaluate", 0.0) for line in lines if line["update"]]
    fixed = seconds - sum(rest) - sum(evaluations)
    every = tables.get("eval", {}).get("every", 0)
    times = 1 + (updates // every if every else 1) if evaluations else 0
    return fixed + updates * statistics.median(rest) + times * statistics.mean(evaluations or [0.0])


if __name__ == "__main__":
    main()
