"""`posttrain demo`: GRPO on a real model, with held-out accuracy measured and drawn while it learns.

The last line is `demo: accuracy BEFORE -> AFTER in SECONDS s, report PATH`: means over the seeds, and the
seconds of one run, from loading the model to its last checkpoint.
"""

import json
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from posttrain.api.opening import free_directory
from posttrain.commands.options import Sets
from posttrain.report.terminal import out

RECIPE = "arithmetic_grpo"
SHORT = ("run.updates=24", "eval.every=4", "eval.limit=100", 'run.stop_when="eval/accuracy >= 0.8"')
"""What makes the demo short: an evaluation of 200 problems takes as long as an update."""
QUESTION = "What is 17 + 25? Answer with just the number."


@dataclass(frozen=True)
class DemoRun:
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


def run(seed: int, sets: list[str]) -> DemoRun:
    """Train with one seed. Raises Exit with the code of a run that fails."""
    directory = free_directory(f"demo-seed{seed}")
    command = [sys.executable, "-m", "posttrain", "train", RECIPE, "--run-dir", str(directory)]
    for item in [f"run.seed={seed}", *sets]:
        command += ["--set", item]
    code = subprocess.run(command, check=False).returncode
    if code:
        raise typer.Exit(code)
    text = (directory / "metrics.jsonl").read_text(encoding="utf-8")
    return DemoRun(seed, directory, [json.loads(line) for line in text.splitlines()])


def chart(result: DemoRun) -> Table:
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


def comparison(results: list[DemoRun]) -> Table:
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


def next_steps(result: DemoRun, full: bool) -> str:
    """List what to look at after the demo, a command and what it shows in each pair of lines."""
    command = "posttrain" if shutil.which("posttrain") else f"{Path(sys.executable).parent}/posttrain"
    steps = {
        f"{result.directory}/report.html": "open it in a browser: curves, and every answer token by token",
        f'{command} sample {result.directory} "{QUESTION}"': "ask the trained model",
        f"{command} train {RECIPE} --set method.name=rloo": "the same task with another method",
        f"{command} init mine": "a recipe of your own, with its data and its reward",
    }
    if not full:
        steps[f"{command} demo --full --seeds 3"] = (
            "all updates, three seeds: what benchmarks/RESULTS.md shows"
        )
    lines = [f"  {step}\n      {why}" for step, why in steps.items()]
    return "\n".join(["what to look at now", *lines])


def demo(
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds to run, from 0.")] = 1,
    full: Annotated[bool, typer.Option("--full", help="Make all updates of the recipe.")] = False,
    sets: Sets = None,
) -> None:
    """Train a real model with GRPO until it adds numbers, and show how: two to four minutes.

    SmolLM2-135M learns to add on this machine's processor; its accuracy on held-out problems is measured and
    drawn on the way. The run ends when 80 % are solved, and is left in runs/demo-seed0-001. The recipe is
    `posttrain recipes arithmetic_grpo`.
    """
    changes = [*(() if full else SHORT), *(sets or ())]
    results = [run(seed, changes) for seed in range(seeds)]
    out.print()
    out.print(chart(results[0]) if len(results) == 1 else comparison(results))
    out.print()
    out.print(next_steps(results[0], full), soft_wrap=True)
    out.print()
    before, after = (statistics.fmean(r.evaluations[at]["eval/accuracy"] for r in results) for at in (0, -1))
    seconds = statistics.fmean(r.lines[-1]["seconds"] for r in results)
    report = (results[0].directory / "report.html").absolute()
    typer.echo(f"demo: accuracy {before:.3f} -> {after:.3f} in {seconds:.0f} s, report {report}")
