"""What an experiment is: figures for each seed, and rules that turn them into verdicts.

A module of this package that ends in `EXPERIMENT = Experiment(...)` is one. Its cards are the pages of
docs/claims that name it, and its rules have their names:

    def measure(seed: int, out: Path, report: Report) -> Figures: ...    # trains, and returns what it saw
    def table(results: Results) -> str: ...                              # Markdown
    def draw(results: Results, figure: Any) -> None: ...                 # figure: matplotlib's
    EXPERIMENT = Experiment(measure, table, draw, rules={"card": VerdictRule("gold, A - B", lambda x: ...)})
"""

import datetime
import importlib
import json
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.base.atomic_files import put
from posttrain.errors import UserError
from posttrain.evaluation.seeds import LEAST, mean_interval
from posttrain_study.claims.cards import FAILS, HOLDS, UNDECIDED, Card

Figures = dict[str, Any]
"""What one seed measured, as JSON holds it: texts as keys, and nothing that is not a number."""
Report = Callable[[str], None]
"""Takes a few words on what is running, for the progress bar."""


@dataclass(frozen=True)
class Decision:
    """A verdict with the mean over seeds and its 95 % interval, which one or two seeds do not have."""

    verdict: str
    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class VerdictRule:
    """Decide a claim by the 95 % interval, over seeds, of a number that the claim says is above 0.

    The claim holds if the interval is above 0, and does not hold if it is below `margin`; otherwise, or with
    fewer than three seeds, it is undecided. An interval that is both above 0 and below the margin shows an
    effect that is too small to matter: the claim does not hold.

    With `equal` the claim says that the number is 0, to within `margin`: it holds if the interval is inside
    ± margin, and does not hold if it is outside.
    """

    quantity: str
    """What the number is, with its unit, in the direction of the claim: "gold at the end, IPO minus DPO"."""
    measure: Callable[[Figures], float]
    """The number of one seed. Compare arms within it: what they share does not widen the interval."""
    margin: float = 0.0
    """The smallest value that would matter, chosen before the seeds are run."""
    equal: bool = False
    exact: bool = False
    """Nothing is sampled, so that a single value decides; the margin must be larger than rounding."""

    def __post_init__(self) -> None:
        if self.margin < 0 or (not self.margin and (self.equal or self.exact)):
            raise ValueError("margin must be positive if the rule is equal or exact, and never negative")

    def decide(self, values: Sequence[float]) -> Decision:
        """Return the verdict for what each seed measured.

        >>> rule = VerdictRule("accuracy, A minus B", lambda x: x["a"] - x["b"], margin=0.05)
        >>> [rule.decide(x).verdict for x in ([0.1, 0.12, 0.11], [0.01, 0.02, 0.01], [0.2, 0.3, -0.1])]
        ['holds here', 'does not hold here', 'undecided']
        """
        if not all(map(math.isfinite, values)):
            raise UserError("values", f"not all of {list(values)} are finite", "mend the experiment")
        mean = statistics.fmean(values)
        if self.exact:
            return Decision(self._verdict(min(values), max(values)), mean, min(values), max(values))
        interval = mean_interval(values)
        low, high = interval["low"], interval["high"]
        if low is None or high is None or len(values) < LEAST:
            return Decision(UNDECIDED, mean, None, None)
        return Decision(self._verdict(low, high), mean, low, high)

    def _verdict(self, low: float, high: float) -> str:
        if self.equal:
            inside = -self.margin < low and high < self.margin
            outside = low > self.margin or high < -self.margin
            return HOLDS if inside else FAILS if outside else UNDECIDED
        return FAILS if high < self.margin or high <= 0 else HOLDS if low > 0 else UNDECIDED

    @property
    def words(self) -> str:
        """When the claim holds, in words."""
        subject = "value" if self.exact else "95 % interval"
        if self.equal:
            return (
                f"the claim holds if the {subject} is inside ±{self.margin:g}, and does not if it is outside"
            )
        return f"the claim holds if the {subject} is above 0, and does not if it is below {self.margin:g}"

    def sentence(self, values: Sequence[float]) -> str:
        """Return the mean with its interval and range in words."""
        decision = self.decide(values)
        mean = f"{self.quantity}: {number(decision.mean)}"
        if self.exact:
            return f"{mean}, computed exactly"
        if decision.low is None or decision.high is None:
            return f"{mean}, of {count(len(values))} and without an interval"
        interval = f"95 % interval {number(decision.low)} to {number(decision.high)}"
        return f"{mean} ({interval}; {count(len(values))}, {number(min(values))} to {number(max(values))})"


@dataclass(frozen=True)
class Results:
    """What an experiment measured, and the processor seconds that it took, by seed."""

    figures: Mapping[int, Figures]
    seconds: Mapping[int, float]

    @property
    def runs(self) -> list[Figures]:
        """The figures in the order of the seeds."""
        return [self.figures[seed] for seed in sorted(self.figures)]

    @property
    def minutes(self) -> float:
        """Minutes of one core that all seeds took together, at least a tenth."""
        return max(0.1, round(sum(self.seconds.values()) / 60, 1))


@dataclass(frozen=True)
class Experiment:
    """How to measure claims, and the rule of each."""

    measure: Callable[[int, Path, Report], Figures]
    """(seed, folder for what it wants to keep, report) -> figures; the same for the same seed."""
    table: Callable[[Results], str]
    draw: Callable[[Results, Any], None]
    """Draw the results into a matplotlib figure."""
    rules: Mapping[str, VerdictRule]
    """The rule of each card that names this experiment."""
    first_seed: int = 0
    size: tuple[float, float] = (10.0, 4.2)
    """Of the picture, in inches."""

    @property
    def name(self) -> str:
        """Name of the module that measures."""
        return self.measure.__module__.rpartition(".")[2]

    def run(
        self,
        seeds: Sequence[int],
        out: Path,
        report: Report = lambda text: None,
        advance: Callable[[], None] = lambda: None,
    ) -> Results:
        """Measure the seeds that OUT/results.json does not hold, keep each there, and return those asked for.

        advance: called after each seed.
        """
        from posttrain.process.machine import configured

        out.mkdir(parents=True, exist_ok=True)
        file = out / "results.json"
        results = load(file, self.name) if file.exists() else Results({}, {})
        figures, seconds = dict(results.figures), dict(results.seconds)
        for seed in seeds:
            if seed not in figures:
                start = processor_seconds()
                with configured(1):
                    figures[seed] = json.loads(json.dumps(self.measure(seed, out, report)))
                seconds[seed] = round(processor_seconds() - start, 1)
                content = {"experiment": self.name, "figures": figures, "seconds": seconds}
                put(file, json.dumps(content) + "\n")
            advance()
        return Results({seed: figures[seed] for seed in seeds}, {seed: seconds[seed] for seed in seeds})

    def values(self, name: str, results: Results) -> list[float]:
        """Return what the rule of a card measured for each seed, to four digits, as its head keeps them."""
        return [float(f"{self.rules[name].measure(run):.4g}") for run in results.runs]


def load(file: Path, name: str) -> Results:
    """Return the results of an experiment. Raises UserError if the file holds something else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["experiment"] != name:
            raise ValueError(content["experiment"])
        figures = {int(seed): dict(value) for seed, value in content["figures"].items()}
        return Results(figures, {int(seed): float(value) for seed, value in content["seconds"].items()})
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(str(file), f"it holds no results of {name}", "name another --out") from None


def head_lines(experiment: Experiment, name: str, results: Results) -> list[str]:
    """Return the lines of a card's head that its results decide."""
    values, first = experiment.values(name, results), min(results.figures)
    return [
        f"minutes: {results.minutes:g}",
        f"seeds: {len(values)}",
        *([f"first_seed: {first}"] if first != experiment.first_seed else []),
        f"date: {datetime.date.today()}",
        f"verdict: {experiment.rules[name].decide(values).verdict}",
        f"values: [{', '.join(f'{value:g}' for value in values)}]",
    ]


def find_experiment(card: Card) -> Experiment:
    """Return the experiment of a card. Raises UserError if it has none, or none that knows the card."""
    if not card.experiment:
        problem = f"{card.name} was measured by the recipe {card.recipe}"
        raise UserError("--run", problem, f"posttrain train {card.recipe}")
    module = importlib.import_module(f"posttrain_study.claims.{card.experiment}")
    experiment: Experiment = module.EXPERIMENT
    if card.name not in experiment.rules:
        raise UserError(str(card.file), f"{card.experiment} has no rule {card.name!r}", "add it to its rules")
    return experiment


def processor_seconds() -> float:
    """Return the seconds of processor time of this process and of its children that have ended."""
    return sum(os.times()[:4])


# ---------------------------------------------------------------------- tables and pictures


def count(seeds: int) -> str:
    """Return "one seed" or "5 seeds"."""
    return "one seed" if seeds == 1 else f"{seeds} seeds"


def number(value: float) -> str:
    """Return a number with three digits.

    >>> number(-0.12345), number(12345)
    ('−0.123', '12,345')
    """
    return (f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}").replace("-", "−")


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Return the mean and the range.

    >>> spread([0.5, 0.25], ".1%")
    '37.5% (25.0% to 50.0%)'
    """
    return f"{statistics.fmean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def curve(axes: Any, x: Sequence[float], runs: Sequence[Sequence[float]], label: str, color: str) -> None:
    """Draw the mean over seeds, and their range as a band. runs: the heights of each seed."""
    points = list(zip(*runs, strict=True))
    axes.plot(x, [statistics.fmean(point) for point in points], color=color, label=label, lw=1.8)
    axes.fill_between(x, list(map(min, points)), list(map(max, points)), color=color, alpha=0.13, lw=0)


def save_picture(experiment: Experiment, results: Results, path: Path) -> None:
    """Draw the results and save them as SVG. Raises UserError where matplotlib is not installed."""
    try:
        from posttrain_study.claims.picture import save
    except ImportError:
        fix = "pip install 'posttrain[classic]'"
        raise UserError(str(path), "a picture needs matplotlib, which is not installed", fix) from None
    save(lambda figure: experiment.draw(results, figure), experiment.size, path)
