"""Read a run directory: its configuration, plan and metrics.

A run that is still running ends in half a line, and a killed one may lack a file: what cannot be read
becomes a note that the page shows, never an exception.
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
from posttrain.report.curve import Curve

Row = dict[str, Any]

SIGNS_OF_A_RUN = ("metrics.jsonl", "config.toml", "plan.json")
STOPPED_ON_REQUEST = "stopped on request"
OUT_OF_TIME = "run.max_time ended the run"
"""Beginnings of stopped.txt of a run that has not failed, and can be continued."""
"""Start of the reason in stopped.txt if the user stopped the run."""
SAMPLES = re.compile(r"(eval_)?(\d{1,15})\.jsonl")
TREES = re.compile(r"(?:(eval_)?(\d{1,15})|([a-z][a-z_]{0,40}))\.jsonl")
"""Files of the searches of an update, of an evaluation, or of a strategy."""
LARGEST_INTEGER = 2**53
"""Integers from here on are not exact in a browser."""
LARGEST = 1e305
"""Bound of numbers, so that means over updates stay finite."""


@dataclass(frozen=True, slots=True)
class Curves:
    """The curves of a run: for each name, its value at each update that has one.

    None stands for a value that was not a number.

    >>> m = Curves(updates=(0, 1, 2), series={"loss": {1: 0.5, 2: None}})
    >>> m.points("loss"), m.points("entropy")
    ([(1, 0.5)], [])
    """

    updates: tuple[int, ...]
    series: Mapping[str, Mapping[int, float | None]]

    def points(self, name: str) -> list[tuple[int, float]]:
        """Return (update, value) of the finite values of a curve, in the order of updates."""
        return [(u, y) for u, y in sorted(self.series.get(name, {}).items()) if y is not None]

    def windows(self, names: Sequence[str], size: int) -> list[tuple[int, tuple[list[float], ...]]]:
        """Return every window of `size` consecutive updates, among those that have all these curves.

        A window is (its last update, the values of each curve).

        >>> Curves((1, 2, 4), {"a": {1: 5, 2: 6, 4: 7}, "b": {1: 0, 2: 0, 4: 1}}).windows(("a", "b"), 2)
        [(2, ([5, 6], [0, 0])), (4, ([6, 7], [0, 1]))]
        """
        curves = [dict(self.points(name)) for name in names]
        shared = [u for u in self.updates if all(u in curve for curve in curves)]
        spans = [shared[end - size : end] for end in range(size, len(shared) + 1)]
        return [(span[-1], tuple([curve[u] for u in span] for curve in curves)) for span in spans]


@dataclass(frozen=True, slots=True)
class Samples:
    """A file of rollouts or searches: of an update, of the evaluation after it, or of a strategy."""

    path: Path
    kind: str
    """train, eval, or strategy (searches only)."""
    update: int
    size: int
    """Bytes."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The contents of a run directory, without rollouts and searches, which are read one file at a time."""

    name: str
    title: str
    sections: list[tuple[str, list[tuple[str, str]]]]
    """The plan: (title, [(key, value), ...])."""
    config: str
    code: str
    metrics: Curves
    samples: list[Samples]
    notes: list[str]
    """One sentence for each thing that could not be read."""
    stopped: str = ""
    """Reason in stopped.txt; empty if the run did not stop early."""
    trees: Sequence[Samples] = ()
    """Files of searches."""

    @property
    def ended_early(self) -> str:
        """How `run.stop_when` or `run.patience` ended the run, as text; empty if the run did not end so."""
        from posttrain.report.headline import progress_ended  # it imports this module

        try:
            tables = tomllib.loads(self.config)
            run, best = tables.get("run", {}), tables.get("checkpoint", {}).get("best")
            condition = Condition.parse(run["stop_when"]) if run.get("stop_when") else None
            metric = best if isinstance(best, str) else ""
            text = progress_ended(self.metrics, run.get("patience", 0), metric)
        except (tomllib.TOMLDecodeError, AttributeError, TypeError, ValueError):
            condition, text = None, ""
        if condition is None:
            return text
        points = self.metrics.points(condition.metric)
        update = condition.first_update({"update": at, condition.metric: value} for at, value in points)
        return f"{condition} after update {update}" if update else text


def number(value: object) -> float | None:
    """Return the value as a float of magnitude at most LARGEST, or None for anything else.

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


def integer(value: object) -> int | None:
    """Return the value if it is an integer, not negative and exact in a browser, or None."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < LARGEST_INTEGER:
        return None
    return value


def text(value: object) -> str:
    """Return a JSON value as a string; None is the empty string."""
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value)


def read_json_lines(path: Path) -> tuple[list[Row], list[str]]:
    """Return the objects of a JSONL file, and notes on lines that are not an object."""
    notes: list[str] = []
    return list(iterate_lines(path, notes)), notes


def iterate_lines(path: Path, notes: list[str]) -> Iterator[Row]:
    """Yield the objects of a JSONL file; notes on lines that are not an object are added at the end."""
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
        notes.append(
            f"{path.name} has {len(bad)} line(s) that are not a JSON object (line {which}): left out."
        )


def json_object(path: Path) -> tuple[Row | None, list[str]]:
    """Return the object of a JSON file, or None and a note with the reason."""
    content, notes = file_text(path)
    value = None if notes else _parsed(content)
    if isinstance(value, dict):
        return value, []
    return None, notes or [f"{path.name} is not a JSON object, so it was left out."]


def file_text(path: Path) -> tuple[str, list[str]]:
    """Return the text of a file, and a note if it could not be read."""
    try:
        return path.read_bytes().decode("utf-8-sig", "replace"), []  # some editors write a byte order mark
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
    """Return the curves of metrics.jsonl, and notes; the last line of an update counts.

    before: the curves of earlier lines; they are reused and changed in place.

    >>> curves, _ = metrics([{"update": 1, "loss": 2.0}, {"update": 1, "loss": 1.5}])
    >>> curves.points("loss"), metrics([{"update": 2, "loss": 1.0}], curves)[0].points("loss")
    ([(1, 1.5)], [(1, 1.5), (2, 1.0)])
    """
    updates = dict.fromkeys(before.updates if before else ())
    series: dict[str, Curve] = dict(before.series) if before else {}  # type: ignore[arg-type]
    nameless = 0
    for row in rows:
        update = integer(row.get("update"))
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
    """Read a run directory.

    Raises UserError if it is not a run directory.
    """
    if not run_dir.is_dir():
        raise UserError(str(run_dir), "there is no such directory", "give a run directory")
    if not any((run_dir / name).exists() for name in SIGNS_OF_A_RUN):
        raise UserError(
            str(run_dir),
            f"this is not a run directory: it has none of {', '.join(SIGNS_OF_A_RUN)}",
            "give the directory that `posttrain train` wrote",
        )
    name = run_dir.resolve().name
    config, no_config = file_text(run_dir / "config.toml")
    code, no_code = file_text(run_dir / "code.txt")
    title, sections, bad_plan = _plan(run_dir / "plan.json")
    bad_lines: list[str] = []
    curves, nameless = metrics(iterate_lines(run_dir / "metrics.jsonl", bad_lines))
    notes = [*no_config, *no_code, *bad_plan, *bad_lines, *nameless]
    samples, no_samples = samples_in(run_dir / "samples")
    stopped = file_text(run_dir / "stopped.txt")[0].strip()
    trees, no_trees = samples_in(run_dir / "trees", TREES)
    if any(file.kind == "strategy" for file in trees):  # written by `posttrain search`, which does not train
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
    """Return files of rollouts or searches, in the order of updates, and a note if they cannot be read."""
    files, notes = [], []
    try:
        for path in folder.iterdir() if folder.is_dir() else ():
            if (match := names.fullmatch(path.name)) and path.is_file():
                kind = "strategy" if match.lastindex == 3 else "eval" if match[1] else "train"
                files.append(Samples(path, kind, int(match[2] or 0), path.stat().st_size))
    except OSError as error:
        notes = [f"{folder.name} could not be read: {error.strerror}."]
    return sorted(files, key=lambda s: (s.update, s.kind, s.path.name)), notes
