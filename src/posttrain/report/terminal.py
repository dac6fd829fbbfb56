"""Show a run on the terminal or in a notebook while it works: bars, numbers and a sparkline."""

import json
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from html import escape
from itertools import groupby
from typing import Any, Literal

import rich.table
from rich.console import Console
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from posttrain.report.condition import Condition
from posttrain.report.headline import duration
from posttrain.report.watch import Watch


def console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return a console that prints text literally: no markup in brackets, no emoji between colons."""
    # In a notebook, rich would display even what is printed to stderr.
    jupyter = False if stderr else None
    return Console(
        stderr=stderr, width=width, markup=False, emoji=False, highlight=False, force_jupyter=jupyter
    )


out, err = console(), console(stderr=True)
View = Literal["auto", "plan", "table", "lines", "json", "none"]
"""Display of a run. plan: the plan, then a bar; auto: a table in a notebook, a bar on a terminal, otherwise
lines; json: lines for other programs; none: nothing."""


def say(text: str) -> None:
    """Print one line of progress on stderr."""
    err.print(text, style="dim", soft_wrap=True)


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
    """Show the phases, updates and alarms of a loop: its `show`, used inside a `with`."""

    def __init__(
        self,
        console: Console,
        updates: int,
        watch: Watch | None = None,
        stop_when: Condition | None = None,
        judged_by: Collection[str] = (),
    ) -> None:
        self.rewards: list[float] = []
        self.judged_by = judged_by
        self.updates, self.watch, self.stop_when = updates, watch or Watch(), stop_when
        self.finished: list[tuple[float, float]] = []
        """(seconds, update) of each line of metrics."""
        self.measured: list[tuple[float, float]] = []
        """(seconds, value) of the lines that have the metric of `stop_when`."""
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
        """Show the progress of a phase, or the metrics of an update."""
        if phase != "update":
            total = numbers.get("total")
            self.progress.update(
                self._phase,
                description=NAMES.get(phase, phase),
                completed=numbers.get("done") or 0,
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
        self.progress.console.print(line(numbers, self.judged_by), style=style, soft_wrap=True)
        if self.stop_when:
            self._follow(self.stop_when, numbers)
        for rule, finding in self.watch.see(numbers, last=numbers["update"] >= self.updates):
            self.progress.console.print("alarm", style="bold red", end=" ")
            self.progress.console.print(f"{rule.name}: {finding.text}", soft_wrap=True)

    def _follow(self, condition: Condition, numbers: Mapping[str, float]) -> None:
        """Print the metric of `stop_when` and the remaining time, if the line has the metric."""
        seconds, value = numbers["seconds"], numbers.get(condition.metric)
        self.finished.append((seconds, numbers["update"]))
        if value is not None:
            self.measured.append((seconds, value))
            if not condition.holds(numbers):
                self.progress.console.print(self._outlook(condition), style="dim", soft_wrap=True)

    def _outlook(self, condition: Condition) -> str:
        most = time_left(self.finished[1:], self.updates)
        about = time_left(self.measured, condition.bound)
        if about is not None and most is not None and about > most:
            about = None
        texts = [f"about {duration(about)}" if about else "", f"at most {duration(most)}" if most else ""]
        remaining = ", ".join(filter(None, texts))
        curve = sparkline([value for _, value in self.measured])
        return f"             {curve}  ends at {condition}{f'; {remaining} left' if remaining else ''}"


def time_left(points: Sequence[tuple[float, float]], target: float) -> float | None:
    """Return the seconds until the value reaches the target at its mean pace so far.

    points: (seconds, value). None if the value does not move towards the target.

    >>> time_left([(10.0, 0.2), (30.0, 0.6)], 0.8)
    10.0
    """
    if len(points) < 2:
        return None
    (begin, first), (now, last) = points[0], points[-1]
    pace = (last - first) / (now - begin) if now > begin else 0.0
    seconds = (target - last) / pace if pace else -1.0
    return round(seconds, 3) if seconds >= 0 else None


class NotebookTable:
    """Show the last updates in a notebook, at most once a second: the `show` of a loop."""

    def __init__(self, updates: int, draw: Callable[[str], None], now: Callable[[], float] = time.monotonic):
        self.updates, self.draw, self.now = updates, draw, now
        self.lines: list[dict[str, float]] = []
        self._last_draw = -1.0

    def __call__(self, phase: str, numbers: Mapping[str, float]) -> None:
        """Add the metrics of an update; phases are not shown."""
        if phase == "update":
            self.lines.append(dict(numbers))
            if self._last_draw < 0 or self.now() - self._last_draw >= 1.0:
                self.finish()

    def finish(self) -> None:
        self._last_draw = self.now()
        if self.lines:
            self.draw(self.html())

    def html(self) -> str:
        """Return the last five lines as a table, under curves of the reward or loss and of evaluations."""
        names = {key for line in self.lines for key, value in line.items() if value is not None}
        columns = [key for key in COLUMNS if key in names]
        cells = ("".join(f"<td>{_cell(line.get(key))}</td>" for key in columns) for line in self.lines[-5:])
        rows = "".join(f"<tr>{row}</tr>" for row in cells)
        head = "".join(f"<th>{escape(key)}</th>" for key in columns)
        trained = [key for key in ("reward/mean", "loss") if key in names][:1]
        evaluated = [key for key in ("eval/accuracy", "eval/reward", "eval/loss") if key in names][:1]
        keys = (*trained, *evaluated)
        curves = " ".join(_curve(key, [line[key] for line in self.lines if key in line]) for key in keys)
        progress = f"{int(self.lines[-1]['update'])} of {self.updates} updates"
        return f"<p>{progress} {curves}</p><table><tr>{head}</tr>{rows}</table>"


COLUMNS = (
    *("update", "reward/mean", "loss", "accuracy", "rewards/accuracy", "rewards/margin", "kl/ref", "entropy"),
    *("length/mean", "grad_norm", "eval/accuracy", "eval/reward", "eval/loss", "time/total"),
)
"""Metrics of a notebook's table, and of `posttrain run show`, shown if a run has them."""


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _curve(name: str, values: list[float]) -> str:
    """Return an SVG line as high as a line of text, with the last value."""
    finite = [v for v in values if v == v and abs(v) != float("inf")]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    step, span = 160 / max(1, len(finite) - 1), (high - low) or 1.0
    points = " ".join(f"{n * step:.1f},{22 - 20 * (v - low) / span:.1f}" for n, v in enumerate(finite))
    line = f'<polyline points="{points}" fill="none" stroke="currentColor"/>'
    return f'{escape(name)} <svg width="160" height="24" role="img">{line}</svg> {_cell(values[-1])}'


@contextmanager
def view(
    show: View | Callable[[str, Mapping[str, float]], None],
    updates: int,
    watch: Watch | None = None,
    stop_when: Condition | None = None,
    judged_by: Collection[str] = (),
) -> Iterator[Callable[[str, Mapping[str, float]], None]]:
    """Yield the `show` of a loop for this view, or the caller's own function.

    judged_by: metrics that decide about the run, and are printed wherever they are measured.
    """
    if callable(show):
        yield show
        return
    python = sys.modules.get("IPython")
    notebook = python is not None and hasattr(python.get_ipython(), "kernel")
    if show == "table" or (show == "auto" and notebook):
        table = NotebookTable(updates, _display())
        try:
            yield table
        finally:
            table.finish()
    elif show == "plan" or (show == "auto" and err.is_terminal):
        with Terminal(err, updates, watch, stop_when, judged_by) as terminal:
            yield terminal
    else:
        yield {"none": quiet, "json": as_json}.get(show, partial(as_lines, judged_by=judged_by))


def _display() -> Callable[[str], None]:
    from IPython.display import HTML, display  # installed with the notebook

    handles: list[Any] = []

    def draw(page: str) -> None:
        if handles:
            handles[0].update(HTML(page))
        else:
            handles.append(display(HTML(page), display_id=True))

    return draw


def as_lines(phase: str, numbers: Mapping[str, float], judged_by: Collection[str] = ()) -> None:
    """Print a line for each update."""
    if phase == "update":
        err.print(line(numbers, judged_by), soft_wrap=True)


def quiet(phase: str, numbers: Mapping[str, float]) -> None: ...


def as_json(phase: str, numbers: Mapping[str, float]) -> None:
    """Print the metrics of each update as one line of JSON, with null for NaN and infinity."""
    if phase == "update":
        clean = {k: v if v == v and abs(v) != float("inf") else None for k, v in numbers.items()}
        sys.stdout.write(json.dumps(clean) + "\n")
        sys.stdout.flush()


def summary(numbers: Mapping[str, float]) -> str:
    """Return the most important numbers of an update.

    >>> summary({"reward/mean": 0.5, "kl/ref": 0.01, "speed/sample_tokens": 812.0})
    'reward 0.500  kl 0.0100  812 tok/s'
    """
    formats = {
        "reward/mean": "reward {:.3f}",
        "loss": "loss {:.3f}",
        "kl/ref": "kl {:.4f}",
        "speed/sample_tokens": "{:.0f} tok/s",
    }
    return _formatted(numbers, formats, {"loss"} if "reward/mean" in numbers else set())


def _formatted(numbers: Mapping[str, float], formats: Mapping[str, str], hidden: set[str]) -> str:
    keys = [key for key in formats if numbers.get(key) is not None and key not in hidden]
    return "  ".join(formats[key].format(numbers[key]) for key in keys)


def line(numbers: Mapping[str, float], judged_by: Collection[str] = ()) -> str:
    """Return one line of text for an update, with rewards in place of accuracy if verdicts are scores.

    judged_by: metrics that are shown in any case.
    """
    graded = bool(numbers.get("verdict/scored") or numbers.get("eval/scored"))
    hidden = {"accuracy", "eval/accuracy"} if graded else {"eval/reward"}
    hidden |= set() if numbers.get("lag/max") else {"lag/mean"}
    hidden |= set() if numbers.get("value/warmup") else {"value/warmup"}
    formats = {
        "reward/mean": "reward {:.3f}",
        "loss": "loss {:+.4f}",
        "accuracy": "right {:.0%}",
        "rewards/accuracy": "pairs in order {:.0%}",
        "rewards/margin": "margin {:+.3f}",
        "kl/ref": "kl {:.4f}",
        "entropy": "entropy {:.2f}",
        "length/mean": "length {:.0f}",
        "grad_norm": "grad {:.2g}",
        "value/warmup": "the critic warms up",
        "lag/mean": "lag {:.1f}",
        "samplers/busy": "samplers busy {:.0%}",
        "eval/accuracy": "held-out accuracy {:.1%}",
        "eval/reward": "held-out reward {:.3f}",
        "eval/loss": "held-out loss {:.4f}",
        "eval/rewards/accuracy": "held-out pairs in order {:.1%}",
    }
    formats |= {name: f"{name} {{:.4g}}" for name in judged_by if name not in formats}
    formats["time/total"] = "{:.1f} s"
    return f"update {int(numbers['update']):4d}  " + _formatted(numbers, formats, hidden - {*judged_by})


def print_wide(table: rich.table.Table) -> None:
    """Print a table at its full width: a terminal wraps its lines, a file gets each on one line."""
    for column in table.columns:
        column.no_wrap = True
    wide = out.options.update(max_width=10_000)
    out.print(table, width=Measurement.get(out, wide, table).maximum, crop=False, soft_wrap=True)


def join_pieces(pieces: Iterable[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Join the texts of neighbours that are alike in whether they are marked.

    >>> join_pieces([("1", False), ("+", False), ("2", True)])
    [('1+', False), ('2', True)]
    """
    spans = groupby(pieces, key=lambda piece: piece[1])
    return [("".join(text for text, _ in span), is_marked) for is_marked, span in spans]


def mark(pieces: Iterable[tuple[str, bool]]) -> str:
    """Return a text with its marked pieces between ⟦ and ⟧.

    >>> mark([("1+", False), ("2", True)])
    '1+⟦2⟧'
    """
    return "".join(f"⟦{text}⟧" if is_marked else text for text, is_marked in pieces)


def sparkline(values: list[float], width: int = 24) -> str:
    """Draw the last `width` values as blocks between their least and greatest.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▄█'
    """
    last = values[-width:]
    low, high = min(last, default=0.0), max(last, default=0.0)
    span = (high - low) or 1.0
    return "".join(BARS[int((v - low) / span * (len(BARS) - 1))] for v in last)
