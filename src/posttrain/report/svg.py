"""A small static picture of one metric over several runs: the mean, and the band between extremes."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.base.name_hints import did_you_mean
from posttrain.errors import UserError
from posttrain.report.headline import Show, figure, mean, percent
from posttrain.report.record import read

WIDTH, HEIGHT = 760, 360
LEFT, RIGHT, TOP, BOTTOM = 62, 96, 78, 52
SHARES = ("accuracy", "eval/accuracy", "clip/fraction", "length/clipped")
"""Metrics between 0 and 1 that are written in percent."""

STYLE = """
.plane{fill:#fdfdfc}.title{fill:#14130f;font-size:17px;font-weight:650}.soft{fill:#7d7a72;font-size:12px}
.grid{stroke:#eceae4}.mean{fill:none;stroke:#2a78d6;stroke-width:2.5;stroke-linejoin:round;stroke-linecap:round}
.run{fill:none;stroke:#2a78d6;stroke-opacity:.35}.band{fill:#2a78d6;fill-opacity:.15}
.dot{fill:#2a78d6;stroke:#fdfdfc;stroke-width:2}.value{fill:#14130f;font-size:15px;font-weight:650}
@media (prefers-color-scheme:dark){.plane{fill:#1b1b19}.title,.value{fill:#f3f1ea}.soft{fill:#918e85}
.grid{stroke:#2a2926}.mean,.run{stroke:#4d95ec}.band,.dot{fill:#4d95ec}.dot{stroke:#1b1b19}}
""".replace("\n", "")


@dataclass(frozen=True, slots=True)
class Frame:
    """Axes: the position of updates and values in the picture, in pixels."""

    marks: list[float]
    """Values at the lines of the grid; the lowest and the highest are the edges."""
    first: int
    last: int
    labels: list[str]
    """Texts of the marks."""

    @property
    def left(self) -> float:
        """Start of the curves, right of the labels, whose letters are about 7 wide."""
        return max(LEFT, 16 + 7 * max(map(len, self.labels)))

    def x(self, update: float) -> float:
        share = (update - self.first) / max(1, self.last - self.first)
        return self.left + share * (WIDTH - self.left - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.marks[0], self.marks[-1]
        return TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def path(self, points: Sequence[tuple[int, float]]) -> str:
        """Write points as an SVG path."""
        return "M" + "L".join(f"{self.x(u):.1f} {self.y(v):.1f}" for u, v in points)


def curves_svg(run_dirs: list[Path], out: Path, metric: str, title: str) -> Path:
    """Draw the mean of a metric over runs and the band from least to greatest; return the SVG's path, `out`.

    Only updates that every run has measured are drawn: a mean over fewer runs would jump where a run
    ends. The picture adapts to a light or dark page.

    Raises UserError for an empty list of runs, a run without the metric, or runs without a common update.
    """
    if not run_dirs:
        raise UserError(str(out), "no run was given to draw", "give at least one run directory")
    runs = [_points(run_dir, metric) for run_dir in run_dirs]
    common = sorted(set.intersection(*(set(run) for run in runs)))
    if not common:
        raise UserError(str(run_dirs[0]), f"these runs have no update with {metric!r} in common")
    picture = _picture([[(u, run[u]) for u in common] for run in runs], metric, title)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(picture.encode("utf-8", "replace"))
    except OSError as error:
        raise UserError(str(out), f"cannot write the picture: {error.strerror}") from None
    return out


def _points(run_dir: Path, metric: str) -> dict[int, float]:
    metrics = read(run_dir).metrics
    points = dict(metrics.points(metric))
    if not points:
        names = ", ".join(sorted(metrics.series)) or "nothing"
        fix = did_you_mean(metric, metrics.series) or f"it has: {names}"
        raise UserError(str(run_dir), f"this run has no metric {metric!r}", fix)
    return points


def _picture(runs: list[list[tuple[int, float]]], metric: str, title: str) -> str:
    updates = [u for u, _ in runs[0]]
    columns = [[run[i][1] for run in runs] for i in range(len(updates))]
    means = list(zip(updates, map(mean, columns), strict=True))
    lows, highs = (list(zip(updates, map(f, columns), strict=True)) for f in (min, max))
    several = f"mean of {len(runs)} runs, band from least to greatest" if len(runs) > 1 else "one run"
    show = percent if metric in SHARES else figure
    frame = _frame(metric, updates, [v for column in columns for v in column], show)
    end_x, end_y = frame.x(updates[-1]), frame.y(means[-1][1])
    body = [
        f'<rect class="plane" width="{WIDTH}" height="{HEIGHT}" rx="12"/>',
        f'<text class="title" x="24" y="32">{_safe(title)}</text>',
        f'<text class="soft" x="24" y="51">{_safe(metric)} · {several}</text>',
        *_axes(frame),
    ]
    if len(runs) > 1:
        body.append(f'<path class="band" d="{frame.path([*highs, *reversed(lows)])}Z"/>')
        body += [f'<path class="run" d="{frame.path(run)}"/>' for run in runs]
    body += [
        f'<path class="mean" d="{frame.path(means)}"/>',
        f'<circle class="dot" cx="{end_x:.1f}" cy="{end_y:.1f}" r="5"/>',
        f'<text class="value" x="{end_x + 11:.1f}" y="{end_y + 5:.1f}">{show(means[-1][1])}</text>',
    ]
    description = (
        f"{metric}: {show(means[0][1])} at update {updates[0]}, {show(means[-1][1])} at update {updates[-1]}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" role="img" font-family="system-ui, -apple-system, Segoe UI, Roboto, '
        f'DejaVu Sans, sans-serif"><title>{_safe(title)}</title><desc>{_safe(description)}</desc>'
        f"<style>{STYLE}</style>{''.join(body)}</svg>\n"
    )


def ticks(low: float, high: float, n: int) -> list[float]:
    """Return round numbers, about n steps from low or below to high or above.

    >>> ticks(0, 1, 4), ticks(3, 40, 4)
    ([0.0, 0.25, 0.5, 0.75, 1.0], [0.0, 10.0, 20.0, 30.0, 40.0])
    """
    rough = (high - low) / n
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    return [round(k * step, 12) for k in range(math.floor(low / step), math.ceil(high / step - 1e-9) + 1)]


def _frame(metric: str, updates: list[int], values: list[float], show: Show) -> Frame:
    low, high = (0.0, 1.0) if metric in SHARES else (min(0.0, *values), max(0.0, *values))
    marks = ticks(low, high if low < high else low + 1.0, 4)
    labels = [f"{value * 100:.0f}%" if show is percent else show(value) for value in marks]
    return Frame(marks, updates[0], updates[-1], labels)


def _axes(frame: Frame) -> list[str]:
    lines, left = [], f"{frame.left:g}"
    for value, label in zip(frame.marks, frame.labels, strict=True):
        y = frame.y(value)
        lines.append(f'<path class="grid" d="M{left} {y:.1f}H{WIDTH - RIGHT}"/>')
        lines.append(
            f'<text class="soft" x="{frame.left - 10:g}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
        )
    for update in ticks(frame.first, max(frame.last, frame.first + 1), 5):
        if frame.first <= update <= frame.last and update.is_integer():
            x = frame.x(update)
            lines.append(
                f'<text class="soft" x="{x:.1f}" y="{HEIGHT - 26}" text-anchor="middle">{update:.0f}</text>'
            )
    middle = (frame.left + WIDTH - RIGHT) / 2
    return [*lines, f'<text class="soft" x="{middle}" y="{HEIGHT - 9}" text-anchor="middle">update</text>']


def _safe(text: str) -> str:
    return html.escape("".join(c if c.isprintable() else " " for c in text))
