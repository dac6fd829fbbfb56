"""What r1_zero.toml came to: length, answers with steps and right ones, by level, before and after.

    python recipes/r1_zero/curves.py runs/r1_zero-0 runs/r1_zero-1 runs/r1_zero-2 --out runs/r1_zero.svg

Each directory is that of a finished pipeline. All is read from the answers to the held-out tasks that the
run of GRPO recorded, one drawn at temperature 1 for each task. An answer has steps if it begins with
several digits.
"""

import argparse
import json
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

GRPO = "04-grpo"
LEVELS = {"1": "1", "2": "2", "3–5": "345", "6–8": "678"}


@dataclass(frozen=True)
class Answer:
    """One answer to a held-out task; `true` is the share of its steps that are right, 0 without steps."""

    level: str
    tokens: int
    steps: bool
    right: bool
    form: bool
    true: float


Evaluated = dict[int, list[Answer]]
"""By the update after which they were asked."""


def main() -> None:
    """Prints two tables and draws the curves."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pipelines", type=Path, nargs="+", help="the directories of finished pipelines")
    parser.add_argument("--out", type=Path, required=True, help="where the picture goes")
    options = parser.parse_args()
    runs = {place.name: read(place / GRPO / "samples") for place in options.pipelines}
    print(by_level(list(runs.values())))
    print(by_run(runs))
    draw(list(runs.values()), options.out)


def read(samples: Path) -> Evaluated:
    """The answers of every evaluation of a run."""
    return {
        int(file.stem.removeprefix("eval_")): [answer(json.loads(line)) for line in file.open()]
        for file in sorted(samples.glob("eval_*.jsonl"))
    }


def answer(sample: dict[str, Any]) -> Answer:
    """What a line of samples says."""
    own = [p for p, mine in zip(sample["pieces"], sample["sampled"], strict=True) if mine]
    text = "".join(own[:-1] if sample["stop"] == "eos" else own)
    row = re.findall(r"\d+", sample["prompt"])[-1]
    left = list(accumulate(map(int, row), lambda so_far, digit: abs(so_far - digit)))
    shown = re.match(r"\s*(\d{2,})", text)
    said = [int(digit) for digit in shown[1]] if shown else []
    return Answer(
        level=sample["task"].split("-")[0],
        tokens=sum(sample["sampled"]),
        steps=bool(shown),
        right=sample["parts"]["number"] == 1.0,
        form=sample["parts"]["regex"] == 1.0,
        true=sum(a == b for a, b in zip(said, left, strict=False)) / max(len(said), len(left)),
    )


def mean(found: Sequence[Answer], of: Callable[[Answer], float]) -> float:
    """The mean of a number over answers; not a number where there are none."""
    return statistics.fmean(map(of, found)) if found else float("nan")


MEASURES: dict[str, Callable[[Answer], float]] = {
    "tokens": lambda each: each.tokens,
    "steps": lambda each: each.steps,
    "right": lambda each: each.right,
}


def spread(runs: Sequence[Evaluated], last: bool, levels: str, of: Callable[[Answer], float]) -> str:
    """Mean over the runs and its range, before the first update or after the last."""
    found = []
    for run in runs:
        answers = run[max(run) if last else min(run)]
        found.append(mean([each for each in answers if each.level in levels], of))
    shown = (lambda x: f"{x:.1f}") if of is MEASURES["tokens"] else (lambda x: f"{100 * x:.0f}")
    return f"{shown(statistics.fmean(found))} ({shown(min(found))}–{shown(max(found))})"


def by_level(runs: Sequence[Evaluated]) -> str:
    """Markdown: each measure before and after, by level, with the range over the runs."""
    rows = ["| digits that are not 0 | " + " | ".join(f"{m}, before | after" for m in MEASURES) + " |"]
    rows.append("|" + "---|" * 7)
    for name, levels in LEVELS.items():
        cells = (spread(runs, last, levels, of) for of in MEASURES.values() for last in (False, True))
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def by_run(runs: dict[str, Evaluated]) -> str:
    """Markdown: each evaluation of each run; the columns from the fourth on are of levels 3 to 8, in form."""
    heads = ["in form", "right", "with steps", "right with steps", "steps that are right", "right at once"]
    rows = ["| run | after | " + " | ".join(heads) + " |", "|" + "---|" * (2 + len(heads))]
    for name, run in runs.items():
        for update, found in run.items():
            hard = [each for each in found if each.level not in "12" and each.form]
            stepped, at_once = ([each for each in hard if each.steps == kind] for kind in (True, False))
            cells = [mean(found, lambda each: each.form), mean(found, MEASURES["right"])]
            cells += [mean(found, MEASURES["steps"]), mean(stepped, MEASURES["right"])]
            cells += [mean(stepped, lambda each: each.true), mean(at_once, MEASURES["right"])]
            shown = " | ".join("–" if cell != cell else f"{100 * cell:.0f} %" for cell in cells)
            rows.append(f"| {name} | {update} | {shown} |")
    return "\n".join(rows)


def draw(runs: Sequence[Evaluated], out: Path) -> None:
    """Length, share with steps and share right, by update and level; strong lines are means of runs."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    labels = {"tokens": "tokens of an answer", "steps": "answers with steps", "right": "right answers"}
    figure, axes = pyplot.subplots(1, len(labels), figsize=(11, 3.6))
    updates = sorted(set.intersection(*(set(run) for run in runs)))
    for place, (key, label) in zip(axes, labels.items(), strict=True):
        for colour, (name, levels) in enumerate(LEVELS.items()):
            curves = [
                [mean([each for each in run[at] if each.level in levels], MEASURES[key]) for at in updates]
                for run in runs
            ]
            for curve in curves:
                place.plot(updates, curve, color=f"C{colour}", alpha=0.25, linewidth=1)
            middle = [statistics.fmean(column) for column in zip(*curves, strict=True)]
            place.plot(updates, middle, color=f"C{colour}", label=name)
        place.set(xlabel="update", title=label, ylim=(0, None if key == "tokens" else 1.03))
        place.grid(alpha=0.25)
        place.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8, title="digits that are not 0", title_fontsize=8)
    figure.tight_layout()
    figure.savefig(out)


if __name__ == "__main__":
    main()
