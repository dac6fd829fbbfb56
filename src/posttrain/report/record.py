"""What a run directory says: its configuration, plan and metrics.

Files are taken as they are found. A run that is still going ends in half a line, a killed one may
lack a file; what cannot be read becomes a note that the page shows, never an exception.
"""

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.errors import UserError
from posttrain.report.condition import Condition
from posttrain.report.series import Curve

Row = dict[str, Any]

SIGNS_OF_A_RUN = ("metrics.jsonl", "config.toml", "plan.json")
ON_REQUEST = "stopped on request"
"""How the reason begins for which a run ended that was asked to."""
SAMPLES = re.compile(r"(eval_)?(\d{1,15})\.jsonl")
TREES = re.compile(r"(?:(eval_)?(\d{1,15})|([a-z][a-z_]{0,40}))\.jsonl")
"""Those of an update or an evaluation, or of a strategy."""
LARGEST_INTEGER = 2**53
"""Integers beyond it are not exact in the reader's browser."""
LARGEST = 1e305
"""Of numbers beyond it a mean over updates may not be finite."""


@dataclass(frozen=True, slots=True)
class Curves:
    """The curves of a run: for each name, its value at each update that has one.

    None stands for a value that was not a number.

    >>> m = Metrics(updates=(0, 1, 2), series={"loss": {1: 0.5, 2: None}})
    >>> m.points("loss"), m.points("entropy")
    ([(1, 0.5)], [])
    """

    updates: tuple[int, ...]
    series: Mapping[str, Mapping[int, float | None]]

    def points(self, name: str) -> list[tuple[int, float]]:
        """(update, value) of the finite values of a curve, in order."""
        return [(u, y) for u, y in sorted(self.series.get(name, {}).items()) if y is not None]

    def windows(self, names: Sequence[str], size: int) -> list[tuple[int, tuple[list[float], ...]]]:
        """Each `size` updates in a row of those that have all these curves: (the last, values of each).

        >>> Metrics((1, 2, 4), {"a": {1: 5, 2: 6, 4: 7}, "b": {1: 0, 2: 0, 4: 1}}).windows(("a", "b"), 2)
        [(2, ([5, 6], [0, 0])), (4, ([6, 7], [0, 1]))]
        """
        curves = [dict(self.points(name)) for name in names]
        shared = [u for u in self.updates if all(u in curve for curve in curves)]
        spans = [shared[end - size : end] for end in range(size, len(shared) + 1)]
        return [(span[-1], tuple([curve[u] for u in span] for curve in curves)) for span in spans]


@dataclass(frozen=True, slots=True)
class Samples:
    """One file of rollouts or searches: those of an update, of the evaluation after it, or of a strategy."""

    path: Path
    kind: str
    """train, eval or, of searches alone, strategy."""
    update: int
    size: int
    """Bytes."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Everything in a run directory but the rollouts, which are read one file at a time."""

    name: str
    title: str
    sections: list[tuple[str, list[tuple[str, str]]]]
    """The plan: (title, [(key, value), ...])."""
    config: str
    code: str
    metrics: Curves
    samples: list[Samples]
    notes: list[str]
    """What could not be read, one sentence each."""
    stopped: str = ""
    """Why the run had to stop, where it had to."""
    trees: Sequence[Samples] = ()
    """Files of searches."""

    @property
    def ended_early(self) -> str:
        """Which `run.stop_when` ended the run and after which update; empty if none did."""
        try:
            asked = tomllib.loads(self.config).get("run", {}).get("stop_when")
            condition = Condition.parse(asked) if asked else None
        except (tomllib.TOMLDecodeError, AttributeError, TypeError, ValueError):
            condition = None
        if condition is None:
            return ""
        points = self.metrics.points(condition.metric)
        update = condition.first_update({"update": at, condition.metric: value} for at, value in points)
        return f"{condition} after update {update}" if update else ""


def number(value: object) -> float | None:
    """A float of at most LARGEST, or None for anything else.

    >>> number(3), number(True), number("3"), number(float("nan")), number(10**400), number(1e308)
    (3.0, 1.0, None, None, None, None)
    """
    if not isinstance(value, (int, float)):
        return None
    try:
        result = float(value)
    except OverflowError:
        return None
    return result if abs(result) <= LARGEST else None


def whole(value: object) -> int | None:
    """An integer that a browser holds exactly, or None."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < LARGEST_INTEGER:
        return None
    return value


def text(value: object) -> str:
    """Any JSON value as a string; None as an empty one."""
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value)


def json_lines(path: Path) -> tuple[list[Row], list[str]]:
    """The objects of a JSONL file, and notes on the lines that hold none."""
    notes: list[str] = []
    return list(each_line(path, notes)), notes


def each_line(path: Path, notes: list[str]) -> Iterator[Row]:
    """The objects of a JSONL file as they are read; once all are, there are notes on what holds none."""
    bad: list[int] = []
    try:
        with path.open("rb") as file:
            for at, line in enumerate(file, start=1):
                row = _parsed(line.decode("utf-8-sig", "replace"))
                if isinstance(row, dict):
                    yield row
                elif line.strip() and line.endswith(b"\n"):
                    bad.append(at)
                elif line.strip():
                    notes.append(f"The last line of {path.name} is cut short, so it was left out.")
    except OSError as error:
        notes.append(_unread(path, error))
    if bad:
        which = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
        notes.append(f"{path.name} has {len(bad)} line(s) that are no JSON object (line {which}): left out.")


def json_object(path: Path) -> tuple[Row | None, list[str]]:
    """The object that a JSON file holds; None if it holds none, and a note that says why."""
    content, notes = file_text(path)
    found = None if notes else _parsed(content)
    if isinstance(found, dict):
        return found, []
    return None, notes or [f"{path.name} is no JSON object, so it was left out."]


def file_text(path: Path) -> tuple[str, list[str]]:
    """A file as text, and a note if it could not be read."""
    try:
        return path.read_bytes().decode("utf-8-sig", "replace"), []  # editors may begin with a mark
    except OSError as error:
        return "", [_unread(path, error)]


def _unread(path: Path, error: OSError) -> str:
    missing = isinstance(error, FileNotFoundError)
    return f"{path.name} {'is not there' if missing else f'could not be read: {error.strerror}'}."


def _parsed(line: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def metrics(rows: Iterable[Row], before: Curves | None = None) -> tuple[Curves, list[str]]:
    """The curves in the lines of metrics.jsonl; a later line about an update overrides an earlier one.

    before: the curves of earlier lines, which are given up: the new ones are made of them.

    >>> curves, _ = metrics([{"update": 1, "loss": 2.0}, {"update": 1, "loss": 1.5}])
    >>> curves.points("loss"), metrics([{"update": 2, "loss": 1.0}], curves)[0].points("loss")
    ([(1, 1.5)], [(1, 1.5), (2, 1.0)])
    """
    updates = dict.fromkeys(before.updates if before else ())
    series: dict[str, Curve] = dict(before.series) if before else {}  # type: ignore[arg-type]
    nameless = 0
    for row in rows:
        update = whole(row.get("update"))
        if update is None:
            nameless += 1
            continue
        updates[update] = None
        for name, value in row.items():
            if name != "update" and (value is None or isinstance(value, (int, float))):
                if name not in series:
                    series[name] = Curve()
                series[name][update] = number(value)
    notes = [f"metrics.jsonl has {nameless} line(s) that name no update: left out."] if nameless else []
    return Curves(tuple(sorted(updates)), series), notes


def read(run_dir: Path) -> RunRecord:
    """What the run directory says.

    Raises UserError if it is no run directory.
    """
    if not run_dir.is_dir():
        raise UserError(str(run_dir), "there is no such directory", "give a run directory")
    if not any((run_dir / name).exists() for name in SIGNS_OF_A_RUN):
        raise UserError(
            str(run_dir),
            f"this is no run directory: it holds none of {', '.join(SIGNS_OF_A_RUN)}",
            "give the directory that `posttrain train` wrote",
        )
    name = run_dir.resolve().name
    config, no_config = file_text(run_dir / "config.toml")
    code, no_code = file_text(run_dir / "code.txt")
    title, sections, bad_plan = _plan(run_dir / "plan.json")
    bad_lines: list[str] = []
    curves, nameless = metrics(each_line(run_dir / "metrics.jsonl", bad_lines))
    notes = [*no_config, *no_code, *bad_plan, *bad_lines, *nameless]
    samples, no_samples = samples_in(run_dir / "samples")
    stopped = file_text(run_dir / "stopped.txt")[0].strip()
    trees, no_trees = samples_in(run_dir / "trees", TREES)
    if any(file.kind == "strategy" for file in trees):  # what `posttrain search` leaves trained nothing
        notes = [note for note in notes if note != "metrics.jsonl is not there."]
    notes += [*no_samples, *no_trees]
    return RunRecord(name, title or name, sections, config, code, curves, samples, notes, stopped, trees)


def _plan(path: Path) -> tuple[str, list[tuple[str, list[tuple[str, str]]]], list[str]]:
    plan, notes = json_object(path)
    if plan is None:
        return "", [], notes
    sections = []
    listed = plan.get("sections")
    for section in listed if isinstance(listed, list) else []:
        rows = section.get("rows") if isinstance(section, dict) else None
        if isinstance(rows, list):
            pairs = [(text(row[0]), text(row[1])) for row in rows if isinstance(row, list) and len(row) == 2]
            sections.append((text(section.get("title")), pairs))
        else:
            notes.append(f"A section of {path.name} has no rows, so it was left out.")
    return text(plan.get("title")), sections, notes


def samples_in(folder: Path, names: re.Pattern[str] = SAMPLES) -> tuple[list[Samples], list[str]]:
    """Files of rollouts or searches, in the order of their updates, and a note if they cannot be read."""
    found, notes = [], []
    try:
        for path in folder.iterdir() if folder.is_dir() else ():
            if (match := names.fullmatch(path.name)) and path.is_file():
                kind = "strategy" if match.lastindex == 3 else "eval" if match[1] else "train"
                found.append(Samples(path, kind, int(match[2] or 0), path.stat().st_size))
    except OSError as error:
        notes = [f"{folder.name} could not be read: {error.strerror}."]
    return sorted(found, key=lambda s: (s.update, s.kind, s.path.name)), notes
