"""What a run shows on the terminal while it works: bars, numbers and a line that rises."""

import json
import sys
from collections.abc import Mapping

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from posttrain.report.watch import Watch


def console(*, stderr: bool = False, width: int | None = None) -> Console:
    """A console that prints text as it stands: what stands in brackets or between colons is text too."""
    return Console(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)


out, err = console(), console(stderr=True)
BARS = "▁▂▃▄▅▆▇█"

NAMES = {
    "sample": "sampling",
    "feed": "waiting for samplers",
    "train": "training",
    "publish": "handing over",
    "eval": "evaluating",
    "reference": "asking the reference",
    "checkpoint": "saving",
}


class Terminal:
    """Shows the phases, updates and alarms of a loop; used as its `show`, inside a `with`."""

    def __init__(self, console: Console, updates: int, watch: Watch | None = None) -> None:
        self.rewards: list[float] = []
        self.watch = watch or Watch()
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[numbers]}"),
            console=console,
            transient=True,
        )
        self._all: TaskID = self.progress.add_task("updates", total=updates, numbers="")
        self._phase: TaskID = self.progress.add_task("", total=None, numbers="", visible=False)

    def __enter__(self) -> "Terminal":
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def __call__(self, phase: str, numbers: Mapping[str, float]) -> None:
        """Takes news of a phase, or the line of an update."""
        if phase != "update":
            done, total = numbers.get("done"), numbers.get("total")
            self.progress.update(
                self._phase,
                description=NAMES.get(phase, phase),
                completed=done or 0,
                total=total,
                numbers=f"{numbers['ahead']:.0f} groups are finished" if numbers.get("ahead") else "",
                visible=True,
            )
            return
        if "reward/mean" in numbers:
            self.rewards.append(numbers["reward/mean"])
        self.progress.update(
            self._all, completed=numbers["update"], numbers=f"{summary(numbers)}  {sparkline(self.rewards)}"
        )
        evaluated = any(key.startswith("eval/") for key in numbers)
        style = "bold" if evaluated else None
        self.progress.console.print(line(numbers), style=style, soft_wrap=True)
        for rule, found in self.watch.see(numbers):
            self.progress.console.print("alarm", style="bold red", end=" ")
            self.progress.console.print(f"{rule.name}: {found.text}", soft_wrap=True)


def quiet(phase: str, numbers: Mapping[str, float]) -> None:
    """Shows nothing."""


def as_json(phase: str, numbers: Mapping[str, float]) -> None:
    """Prints the line of each update as one JSON object."""
    if phase == "update":
        clean = {k: v if v == v and abs(v) != float("inf") else None for k, v in numbers.items()}
        sys.stdout.write(json.dumps(clean) + "\n")
        sys.stdout.flush()


def summary(numbers: Mapping[str, float]) -> str:
    """The numbers that are looked at first.

    >>> summary({"reward/mean": 0.5, "kl/ref": 0.01, "speed/sample_tokens": 812.0})
    'reward 0.500  kl 0.0100  812 tok/s'
    """
    wanted = (
        ("reward/mean", "reward {:.3f}"),
        ("loss", "loss {:.3f}"),
        ("kl/ref", "kl {:.4f}"),
        ("speed/sample_tokens", "{:.0f} tok/s"),
    )
    shown = [text.format(numbers[key]) for key, text in wanted if numbers.get(key) is not None]
    if "reward/mean" in numbers:
        shown = [s for s in shown if not s.startswith("loss")]
    return "  ".join(shown)


def line(numbers: Mapping[str, float]) -> str:
    """One line of text for one update; where verdicts are scores, neither right nor wrong, with rewards."""
    graded = bool(numbers.get("verdict/scored") or numbers.get("eval/scored"))
    hidden = {"accuracy", "eval/accuracy"} if graded else {"eval/reward"}
    hidden |= set() if numbers.get("lag/max") else {"lag/mean"}
    wanted = (
        ("reward/mean", "reward {:.3f}"),
        ("loss", "loss {:+.4f}"),
        ("accuracy", "right {:.0%}"),
        ("kl/ref", "kl {:.4f}"),
        ("entropy", "entropy {:.2f}"),
        ("length/mean", "length {:.0f}"),
        ("grad_norm", "grad {:.2f}"),
        ("lag/mean", "lag {:.1f}"),
        ("samplers/busy", "samplers busy {:.0%}"),
        ("eval/accuracy", "held-out accuracy {:.1%}"),
        ("eval/reward", "held-out reward {:.3f}"),
        ("eval/loss", "held-out loss {:.4f}"),
        ("eval/rewards/accuracy", "held-out pairs in order {:.1%}"),
        ("time/total", "{:.1f} s"),
    )
    there = [(key, text) for key, text in wanted if numbers.get(key) is not None and key not in hidden]
    shown = [text.format(numbers[key]) for key, text in there]
    return f"update {int(numbers['update']):4d}  " + "  ".join(shown)


def sparkline(values: list[float], width: int = 24) -> str:
    """The last values as blocks between their least and greatest.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▄█'
    """
    last = values[-width:]
    low, high = min(last, default=0.0), max(last, default=0.0)
    span = (high - low) or 1.0
    return "".join(BARS[int((v - low) / span * (len(BARS) - 1))] for v in last)
