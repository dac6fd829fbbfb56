"""The few numbers at the top of the page, formatted for people."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from posttrain.errors import counted
from posttrain.report.record import Curves

Show = Callable[[float], str]
Tiles = list[tuple[str, str, str]]

UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
WINDOW = 5
"""Updates averaged, at most, for a first and a last value of a noisy curve."""


@dataclass(frozen=True, slots=True)
class Headline:
    """The result of a run as before → after, and the tiles next to it."""

    label: str
    before: str
    after: str
    change: str
    note: str
    tiles: Tiles
    """(label, value, remark)."""


def headline(metrics: Curves) -> Headline:
    """Return the headline of a run: its first metric of HELD_OUT, or accuracy or reward while training.

    If verdicts are scores, neither right nor wrong, rewards take the place of accuracy.
    """
    tiles = _tiles(metrics)
    scores = graded(metrics)
    for name, label in HELD_OUT.items():
        if scores and name == "eval/accuracy":
            continue
        points = metrics.points(name)
        if points:
            (first, before), (last, after) = points[0], points[-1]
            show = percent if name.endswith("accuracy") else figure
            note = f"update {first} → update {last}" if last > first else f"update {first}"
            return _between(label, before, after, show, note, several=last > first, tiles=tiles)
    for name, label in (("accuracy", "Accuracy while training"), ("reward/mean", "Reward while training")):
        if scores and name == "accuracy":
            continue
        values = [y for _, y in metrics.points(name)]
        if values:
            show = percent if name == "accuracy" else figure
            before, after, n = ends(values)
            span = f"the first {n} updates → the last {n}" if n > 1 else "the first update → the last"
            note = (span if n else "one update") + "; never evaluated on held-out tasks"
            return _between(label, before, after, show, note, several=n > 0, tiles=tiles)
    return Headline("Held-out accuracy", "", "—", "", "nothing measured yet", tiles)


HELD_OUT = {
    "eval/accuracy": "Held-out accuracy",
    "eval/reward": "Held-out reward",
    "eval/rewards/accuracy": "Held-out pairs in order",
    "eval/score/accuracy": "Held-out pairs in order",
    "eval/loss": "Held-out loss",
}
LOWER = ("loss", "perplexity", "bits_per_byte")
"""Ends of the names of metrics of which less is better; so it is of those that begin with kl/."""


def direction(by: str) -> tuple[str, int]:
    """Return the metric of "METRIC", "min METRIC" or "max METRIC": 1 if higher is better, -1 if lower is.

    >>> direction("eval/loss"), direction("kl/ref"), direction("eval/accuracy"), direction("min eval/length")
    (('eval/loss', -1), ('kl/ref', -1), ('eval/accuracy', 1), ('eval/length', -1))
    """
    how, _, metric = by.rpartition(" ")
    lower = metric.endswith(LOWER) or metric.removeprefix("eval/").startswith("kl/")
    return metric, {"min": -1, "max": 1}.get(how, -1 if lower else 1)


BEST = dict(map(direction, HELD_OUT))
"""Metrics by which a run is judged, in order of preference, with their directions."""


def graded(metrics: Curves) -> bool:
    """Return whether verdicts are scores, neither right nor wrong, so that rewards replace accuracy."""
    return any(y for name in ("verdict/scored", "eval/scored") for _, y in metrics.points(name))


def best(
    metrics: Curves, among: Collection[int] | None = None, by: str = ""
) -> tuple[str, int, float] | None:
    """Return (metric, update, value) of the best evaluation, the first of equals; None if there are none.

    among: the updates that count; None: all. by: "METRIC", "min METRIC" or "max METRIC"; "" for the
    first of BEST.

    >>> best(Curves((0, 5), {"eval/accuracy": {0: 0.5, 5: 0.25}, "eval/loss": {0: 1.0, 5: 0.5}}))
    ('eval/accuracy', 0, 0.5)
    >>> best(Curves((0, 5), {"eval/length": {0: 12.0, 5: 9.0}}), by="min eval/length")
    ('eval/length', 5, 9.0)
    """
    signs = dict([direction(by)]) if by else BEST
    for name, sign in signs.items():
        if not by and name == "eval/accuracy" and graded(metrics):
            continue
        points = [(u, y) for u, y in metrics.points(name) if among is None or u in among]
        if points:
            update, value = max(points, key=lambda p: (sign * p[1], -p[0]))
            return name, update, value
    return None


def progress_ended(metrics: Curves, patience: int, by: str = "") -> str:
    """Return since when no evaluation was better; "" if that are fewer evaluations than `patience`.

    >>> progress_ended(Curves((0, 5, 9), {"eval/loss": {0: 1.0, 5: 2.0, 9: 1.5}}), 2)
    'eval/loss was best at update 0, 2 evaluations ago'
    """
    top = best(metrics, by=by) if patience else None
    since = sum(update > top[1] for update, _ in metrics.points(top[0])) if top else 0
    if top is None or since < patience:
        return ""
    return f"{top[0]} was best at update {top[1]}, {counted(since, 'evaluation')} ago"


def _between(
    label: str, before: float, after: float, show: Show, note: str, *, several: bool, tiles: Tiles
) -> Headline:
    if not several:
        return Headline(label, "", show(after), "", note, tiles)
    difference = after - before
    sign = "+" if difference >= 0 else "−"
    size = f"{abs(difference) * 100:.1f} points" if show is percent else figure(abs(difference))
    return Headline(label, show(before), show(after), sign + size, note, tiles)


def _tiles(metrics: Curves) -> Tiles:
    tiles = []
    if rewards := [y for _, y in metrics.points("reward/mean")]:
        first, last, n = ends(rewards)
        remark = f"from {figure(first)}" + (f"; means of {n} updates" if n > 1 else "") if n else "one update"
        tiles.append(("Reward", figure(last), remark))
    if metrics.updates:
        tiles.append(("Updates", str(metrics.updates[-1]), ""))
    if seconds := metrics.points("seconds"):
        tiles.append(("Time", duration(seconds[-1][1]), "from start to the last line"))
    if tokens := metrics.points("tokens"):
        tiles.append(("Tokens trained", count(tokens[-1][1]), ""))
    if speeds := sorted(y for _, y in metrics.points("speed/sample_tokens")):
        tiles.append(("Sampling", f"{count(speeds[len(speeds) // 2])} tok/s", "median update"))
    return tiles


def ends(values: list[float]) -> tuple[float, float, int]:
    """Return (mean of the first n, mean of the last n, n) with n ≤ WINDOW and no value in both.

    For a single value n is 0, and both means are that value.

    >>> ends([1.0, 2.0, 4.0, 8.0, 16.0]), ends([3.0])
    ((1.5, 12.0, 2), (3.0, 3.0, 0))
    """
    n = min(WINDOW, len(values) // 2)
    return (mean(values[:n]), mean(values[-n:]), n) if n else (values[0], values[0], 0)


def mean(values: list[float]) -> float:
    """Σ values / n.

    >>> mean([1.0, 2.0])
    1.5
    """
    return sum(values) / len(values)


def percent(x: float) -> str:
    """Format a share in percent, with one decimal.

    >>> percent(0.865)
    '86.5%'
    """
    return f"{x * 100:.1f}%"


def figure(x: float) -> str:
    """Format three significant digits, without an exponent if that is readable.

    >>> figure(0.12345), figure(-1234.5), figure(0.0000123), figure(999.7)
    ('0.123', '-1234', '1.23e-05', '1000')
    """
    return f"{x:.0f}" if 999.5 <= abs(x) < 1e7 else f"{x:.3g}"


def count(x: float) -> str:
    """Format three significant digits with k, M, G, T or P.

    >>> count(950), count(12_345), count(7_800_000), count(999_700)
    ('950', '12.3k', '7.8M', '1M')
    """
    rounded = float(f"{x:.3g}")  # 999,700 rounds up to the next unit: 1M
    size, letter = next((unit for unit in UNITS if rounded >= unit[0]), (1.0, ""))
    return f"{rounded / size:.3g}{letter}"


def duration(seconds: float) -> str:
    """Format a time in its two largest units.

    >>> duration(9.53), duration(192), duration(8000)
    ('9.5 s', '3 min 12 s', '2 h 13 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
