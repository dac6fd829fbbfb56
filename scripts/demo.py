"""The main job: GRPO on a real model, for three seeds, with the reward rising while it runs.

Prints the held-out accuracy before and after for each seed, and as its last line
`demo: accuracy BEFORE -> AFTER in SECONDS s, report PATH` (means over the seeds, seconds of one run).
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "arithmetic_grpo.toml"


def fresh(name: str) -> Path:
    """The first directory runs/NAME-001, -002 ... that is not taken."""
    return next(p for n in range(1, 100_000) if not (p := ROOT / "runs" / f"{name}-{n:03d}").exists())


def run(seed: int, sets: list[str]) -> dict[str, float]:
    """Trains with one seed and reads the result off the run directory."""
    directory = fresh(f"demo-seed{seed}")
    command = [sys.executable, "-m", "posttrain", "train", str(RECIPE), "--run-dir", str(directory)]
    for item in [f"run.seed={seed}", *sets]:
        command += ["--set", item]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code:
        sys.exit(code)
    lines = [json.loads(text) for text in (directory / "metrics.jsonl").read_text().splitlines()]
    scored = [x["eval/accuracy"] for x in lines if "eval/accuracy" in x]
    sampled = [x["reward/mean"] for x in lines if "reward/mean" in x]
    return {
        "seed": seed,
        "before": scored[0],
        "after": scored[-1],
        "sampled": statistics.fmean(sampled[-5:]),
        "seconds": lines[-1]["seconds"],
        "directory": str(directory),
    }


def main() -> None:
    """Runs the seeds and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds to run")
    parser.add_argument("--set", action="append", default=[], help="override a key of the recipe")
    args = parser.parse_args()
    results = [run(seed, args.set) for seed in range(args.seeds)]
    table = Table(title="held-out accuracy, greedy, 200 problems never trained on", title_justify="left")
    for head in ("seed", "before", "after", "sampled reward, last 5 updates", "seconds"):
        table.add_column(head, justify="right")
    for r in results:
        table.add_row(
            str(r["seed"]),
            f"{r['before']:.1%}",
            f"{r['after']:.1%}",
            f"{r['sampled']:.3f}",
            f"{r['seconds']:.0f}",
        )
    Console().print(table)
    before, after, seconds = (statistics.fmean(r[k] for r in results) for k in ("before", "after", "seconds"))
    report = Path(str(results[0]["directory"])) / "report.html"
    print(f"demo: accuracy {before:.3f} -> {after:.3f} in {seconds:.0f} s, report {report}")


if __name__ == "__main__":
    main()
