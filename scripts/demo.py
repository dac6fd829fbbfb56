"""Run the main job: GRPO on a real model, with held-out accuracy measured and drawn while it learns.

By default one seed, until 80 % of the held-out problems are solved; with --full all updates of the recipe.
The last line is `demo: accuracy BEFORE -> AFTER in SECONDS s, report PATH`: means over the seeds, and the
seconds of one run, from loading the model to its last checkpoint.
"""

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
RECIPE = Path("recipes/arithmetic_grpo.toml")
SHORT = ("run.updates=24", "eval.every=4", "eval.limit=100", 'run.stop_when="eval/accuracy >= 0.8"')
"""What makes the demo short: an evaluation of 200 problems takes as long as an update."""
QUESTION = "What is 17 + 25? Answer with just the number."


@dataclass(frozen=True)
class Result:
    """The lines of metrics of one run."""

    seed: int
    directory: Path
    lines: list[dict[str, float]]

    @property
    def evaluations(self) -> list[dict[str, float]]:
        """The lines with a held-out accuracy."""
        return [line for line in self.lines if "eval/accuracy" in line]

    @property
    def sampled(self) -> float:
        """The mean reward of sampled answers over the last five updates."""
        return statistics.fmean([line["reward/mean"] for line in self.lines if "reward/mean" in line][-5:])


def free_directory(name: str) -> Path:
    """Return the first directory runs/NAME-001, -002 ... that does not exist."""
    directories = (Path("runs") / f"{name}-{n:03d}" for n in range(1, 100_000))
    return next(directory for directory in directories if not (ROOT / directory).exists())


def run(seed: int, sets: list[str]) -> Result:
    """Train with one seed; exit with the code of a run that fails."""
    directory = free_directory(f"demo-seed{seed}")
    command = [sys.executable, "-m", "posttrain", "train", str(RECIPE), "--run-dir", str(directory)]
    for item in [f"run.seed={seed}", *sets]:
        command += ["--set", item]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code:
        sys.exit(code)
    text = (ROOT / directory / "metrics.jsonl").read_text(encoding="utf-8")
    return Result(seed, directory, [json.loads(line) for line in text.splitlines()])


def chart(result: Result) -> Table:
    """Draw each held-out evaluation of a run as a bar."""
    title = "held-out accuracy: greedy answers to problems that are never trained on"
    table = Table(title=title, title_justify="left", box=None, show_header=False, padding=(0, 2, 0, 0))
    for line in result.evaluations:
        accuracy = line["eval/accuracy"]
        bar = "█" * round(40 * accuracy)
        table.add_row(
            f"update {line['update']:.0f}", f"{line['seconds']:.0f} s", f"{accuracy:.1%}", f"{bar:·<40}"
        )
    return table


def comparison(results: list[Result]) -> Table:
    """Compare the runs of several seeds."""
    table = Table(title="held-out accuracy by seed", title_justify="left")
    for head in ("seed", "updates", "before", "after", "sampled reward, last 5 updates", "seconds"):
        table.add_column(head, justify="right")
    for result in results:
        first, last = result.evaluations[0], result.evaluations[-1]
        accuracies = f"{first['eval/accuracy']:.1%}", f"{last['eval/accuracy']:.1%}"
        numbers = f"{result.sampled:.3f}", f"{result.lines[-1]['seconds']:.0f}"
        table.add_row(str(result.seed), f"{last['update']:.0f}", *accuracies, *numbers)
    return table


def next_steps(result: Result, full: bool) -> str:
    """List what to look at after the demo, a command and what it shows in each pair of lines."""
    command = ".venv/bin/posttrain"
    steps = {
        f"{result.directory}/report.html": "open it in a browser: curves, and every answer token by token",
        f'{command} sample {result.directory} "{QUESTION}"': "ask the trained model",
        f"{command} train {RECIPE} --set method.name=rloo": "the same task with another method",
        "docs/first-recipe.md": "the recipe key by key, your own data and your own reward",
    }
    if not full:
        steps["make demo FULL=1 SEEDS=3"] = "all updates, three seeds: the table of benchmarks/RESULTS.md"
    lines = [f"  {step}\n      {why}" for step, why in steps.items()]
    return "\n".join(["what to look at now", *lines])


def main() -> None:
    """Run the seeds and show the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds to run, from 0")
    parser.add_argument("--full", action="store_true", help="make all updates of the recipe")
    parser.add_argument(
        "--set", action="append", default=[], metavar="A.B=C", help="override a key of the recipe"
    )
    args = parser.parse_args()
    sets = [*(() if args.full else SHORT), *args.set]
    results = [run(seed, sets) for seed in range(args.seeds)]
    console = Console(soft_wrap=True)
    console.print()
    console.print(chart(results[0]) if len(results) == 1 else comparison(results))
    console.print()
    console.print(next_steps(results[0], args.full))
    console.print()
    before, after = (statistics.fmean(r.evaluations[at]["eval/accuracy"] for r in results) for at in (0, -1))
    seconds = statistics.fmean(r.lines[-1]["seconds"] for r in results)
    report = ROOT / results[0].directory / "report.html"
    print(f"demo: accuracy {before:.3f} -> {after:.3f} in {seconds:.0f} s, report {report}")


if __name__ == "__main__":
    main()
