"""Run every combination of values of some keys, each with several seeds, and compare them.

sweep.toml    the combinations with their recipes      01-lr=1e-6,seed=0.toml    the recipe of a run
sweep.json    the runs' states and the comparison      01-lr=1e-6,seed=0/        its run directory
sweep.html    the page

Each run is `posttrain train` in a child process: its memory is freed, and its crash ends no other run.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from posttrain.base.atomic_files import put
from posttrain.base.toml import dump, flat, inline
from posttrain.errors import UserError, describe_exit
from posttrain.evaluation.seeds import LEAST, compare_seeds
from posttrain.models.pretrained import silent
from posttrain.pipeline.check import report_disk
from posttrain.pipeline.record import final_checkpoint
from posttrain.plan.model_info import Say
from posttrain.plan.plan import plan_run
from posttrain.process.child import Child
from posttrain.recipe import config
from posttrain.recipe.document import parse_override, read_toml
from posttrain.report import sweep as page
from posttrain.report.headline import direction
from posttrain.report.record import read as read_record
from posttrain.run.rundir import LOCK, claim

RECORD, RESULT = "sweep.toml", "sweep.json"
SEED = "run.seed"
_LOOK_S = 0.2
_QUOTED = re.compile(r'"(?:\\.|[^"\\])*"|\'[^\']*\'|.', re.DOTALL)
_UNSAFE = re.compile(r"[^A-Za-z0-9_.+=,-]+")


@dataclass(frozen=True)
class Combination:
    """A value of each key that varies, and the recipe with these values."""

    name: str
    """Its number and values, as in names of directories."""
    settings: Mapping[str, str]
    """By key, the value as it was written."""
    loaded: config.LoadedRecipe

    @property
    def label(self) -> str:
        """Its values, for a person."""
        return label(self.settings)

    def with_seed(self, seed: int) -> dict[str, Any]:
        """Return its tables with this run.seed."""
        tables = self.loaded.tables
        return {**tables, "run": {**tables.get("run", {}), "seed": seed}}


@dataclass(frozen=True)
class Sweep:
    """The combinations of a sweep, each to be run with seeds 0 ... seeds - 1."""

    title: str
    seeds: int
    combinations: tuple[Combination, ...]

    def runs(self, root: Path) -> list["SweepRun"]:
        """Return its runs: all combinations with the first seed, then with the second ..."""
        pairs = product(range(self.seeds), self.combinations)
        return [SweepRun(root, combination, seed) for seed, combination in pairs]


@dataclass(frozen=True)
class SweepRun:
    """A run of a sweep."""

    root: Path
    combination: Combination
    seed: int

    @property
    def name(self) -> str:
        """The name of its directory."""
        return f"{self.combination.name},seed={self.seed}"

    @property
    def directory(self) -> Path:
        return self.root / self.name

    @property
    def recipe(self) -> Path:
        """The file of its recipe."""
        return self.root / f"{self.name}.toml"

    @property
    def updates(self) -> int:
        return self.combination.loaded.recipe.run.updates

    @property
    def finished(self) -> bool:
        """Whether the checkpoint after its last update is there."""
        has_begun = (self.directory / "config.toml").exists()
        return has_begun and final_checkpoint(self.directory, self.combination.loaded.recipe.run) is not None


def label(settings: Mapping[str, str]) -> str:
    """Return values with the shortest names that tell their keys apart.

    >>> label({"optim.lr": "1e-6", "method.epsilon": "0.1"}), label({"optim.lr": "1", "critic.lr": "2"})
    ('lr=1e-6, epsilon=0.1', 'optim.lr=1, critic.lr=2')
    """
    shorts = [key.rpartition(".")[2] for key in settings]
    unique = len(set(shorts)) == len(shorts)
    parts = zip(shorts if unique else settings, settings.values(), strict=True)
    return ", ".join(f"{key}={value}" for key, value in parts) or "the recipe"


# ---------------------------------------------------------------------- the sweep


def split_values(text: str) -> list[str]:
    """Return the parts between commas that lie outside quotes, brackets and braces.

    >>> split_values('[1, 2], "a,b", 3')
    ['[1, 2]', '"a,b"', '3']
    """
    parts, depth = [""], 0
    for token in _QUOTED.findall(text):
        depth += (token in "[{") - (token in "]}") if len(token) == 1 else 0
        if token == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += token
    return [part.strip() for part in parts]


def read(path: Path, sets: Sequence[str], seeds: int) -> Sweep:
    """Return the sweep of a recipe; a key with several values varies, and one with one value is overridden.

    Raises UserError for the first mistake in the values or in the recipe of a combination.
    """
    fixed: list[str] = []
    vary: dict[str, list[str]] = {}
    for text in sets:
        key, equals, values = (part.strip() for part in text.partition("="))
        place, parts = f"--set {text}", split_values(values)
        if key == SEED:
            raise UserError(place, "the seed of each run is set by --seeds", "leave it out")
        if key in vary:
            raise UserError(place, f"{key} is set twice", "give all its values at once: --set KEY=A,B")
        if not equals or len(parts) == 1:
            fixed.append(text)
            continue
        if "" in parts:
            raise UserError(place, "one of its values is empty", "leave the comma out")
        parsed = [parse_override(f"{key}={part}", place)[1] for part in parts]
        if any(value in parsed[:n] for n, value in enumerate(parsed)):
            raise UserError(place, "has a value twice", "give each value once")
        vary[key] = parts
    combinations = []
    for number, row in enumerate(product(*vary.values()), start=1):
        settings = dict(zip(vary, row, strict=True))
        words = [*fixed, *(f"{key}={value}" for key, value in settings.items()), f"{SEED}=0"]
        loaded = config.read(path, words)
        short = _UNSAFE.sub("-", label(settings).replace(", ", ","))[:80]
        combinations.append(Combination(f"{number:02d}-{short}", settings, loaded))
    return Sweep(path.stem, seeds, tuple(combinations))


def load(root: Path, seeds: int | None = None) -> Sweep:
    """Return the sweep of a directory. Raises UserError if it has none, and for fewer seeds than it has."""
    file = root / RECORD
    if not file.exists():
        raise UserError(str(root), "there is no sweep to resume here", "start one: posttrain sweep RECIPE")
    tables, text = read_toml(file)
    try:
        head, listed = tables["sweep"], tables["combination"]
        combinations = tuple(
            Combination(
                name, one.get("set", {}), config.from_tables(one["recipe"], config.Where(file, text, {}))
            )
            for name, one in listed.items()
        )
        sweep = Sweep(head["title"], head["seeds"], combinations)
    except (KeyError, TypeError, AttributeError):
        raise UserError(str(file), "is not the record of a sweep", "give another directory") from None
    if seeds is not None and seeds < sweep.seeds:
        raise UserError("--seeds", f"the sweep has {sweep.seeds} seeds, not {seeds}", "give as many, or more")
    return Sweep(sweep.title, seeds or sweep.seeds, combinations)


def save(sweep: Sweep, root: Path) -> None:
    """Write the record of a sweep, sweep.toml, to its directory."""
    combinations = {
        one.name: {"set": dict(one.settings), "recipe": one.loaded.tables} for one in sweep.combinations
    }
    tables = {"sweep": {"title": sweep.title, "seeds": sweep.seeds}, "combination": combinations}
    put(root / RECORD, dump(tables))


def check_same(sweep: Sweep, root: Path) -> None:
    """Raise UserError unless the directory holds this sweep, with as many seeds or fewer."""
    before = load(root, sweep.seeds)
    problem = ""
    for now, one in zip(sweep.combinations, before.combinations, strict=False):
        if now.name != one.name:
            problem = f"combination {one.name!r} would be {now.name!r}"
            break
        new, old = flat(now.loaded.tables), flat(one.loaded.tables)
        if differing := sorted(key for key in new.keys() | old.keys() if new.get(key) != old.get(key)):
            key = differing[0]
            before_text, text = (inline(table[key]) if key in table else "not set" for table in (old, new))
            problem = f"{key} was {before_text} and is {text}"
            break
    if not problem and len(sweep.combinations) != len(before.combinations):
        problem = f"it has {len(before.combinations)} combinations, not {len(sweep.combinations)}"
    if problem:
        fix = f"go on with posttrain sweep --resume {root}, or give another --out"
        raise UserError(str(root), f"holds another sweep: {problem}", fix)


@contextmanager
def lock(root: Path) -> Iterator[None]:
    """Lock the directory for this process; raise UserError if it is in use, or holds something else."""
    if root.exists() and not root.is_dir():
        raise UserError(str(root), "is a file", "give another --out")
    descriptor = claim(root, "wait until it ends, or give another --out", "sweep")
    try:
        if not (root / RECORD).exists() and any(not p.name.startswith(".") for p in root.iterdir()):
            raise UserError(str(root), "is not empty, and holds no sweep", "give another --out")
        yield
    finally:
        os.close(descriptor)
        if not any(p.name != LOCK for p in root.iterdir()):  # refused before the first run
            (root / LOCK).unlink(missing_ok=True)
            root.rmdir()


def check(sweep: Sweep, root: Path, say: Say, on_progress: Callable[[int], None]) -> None:
    """Plan each combination as `posttrain validate` does; raise UserError for the first that cannot run."""
    need = 0
    for count, combination in enumerate(sweep.combinations):
        on_progress(count)
        with combination.loaded.located():
            plan = plan_run(combination.loaded.recipe, silent, root / combination.name)
            plan.check_memory()
        need += plan.disk.peak * sweep.seeds
    report_disk(need, root, say, "runs")


# ---------------------------------------------------------------------- its runs


def run(
    sweep_run: SweepRun, stopped: Callable[[], bool], on_update: Callable[[int], None]
) -> tuple[str, str]:
    """Run it to its end, or resume it; return (state, cause), where state is finished, failed or stopped.

    `stopped` is asked several times a second; when it becomes true the run finishes its update and saves.
    """
    directory = sweep_run.directory
    resumed = (directory / "config.toml").exists()
    if not resumed:
        shutil.rmtree(directory, ignore_errors=True)  # the rest of a start that was killed
    put(sweep_run.recipe, dump(sweep_run.combination.with_seed(sweep_run.seed)))
    words = ["train", str(sweep_run.recipe), "--run-dir", str(directory), "--json"]
    argv = [sys.executable, "-P", "-m", "posttrain", *words, *(["--resume"] if resumed else [])]
    output, has_stopped = b"", False
    # In a session of its own, so that one Ctrl-C does not reach it twice.
    with Child(argv, session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        while child.is_open() or child.code is None:
            if stopped() and not has_stopped:
                child.send_signal(signal.SIGINT)
                has_stopped = True
            parts = child.exchange(_LOOK_S) if child.is_open() else child.wait(_LOOK_S) and []
            *lines, output = (output + b"".join(part for stream, part in parts or () if stream == 1)).split(
                b"\n"
            )
            for line in lines:
                on_update(_update_of(line))
            if child.code is not None and not parts:
                break  # a process that it left may hold its pipes open
        code = child.code or 0
        last = child.last_words().removeprefix("error: ")
    if code == 0 and sweep_run.finished:
        return "finished", ""
    if has_stopped or code == 0:  # run.max_time ends a run without a failure
        return "stopped", ""
    return "failed", last or describe_exit(code)


def _update_of(line: bytes) -> int:
    """Return the update of a line of `posttrain train --json`, 0 for another line."""
    try:
        return int(json.loads(line)["update"])
    except (ValueError, TypeError, KeyError):
        return 0


# ---------------------------------------------------------------------- its result


def states(sweep: Sweep, root: Path) -> dict[str, tuple[str, str]]:
    """Return (state, cause) of each run, as far as files show: finished, failed, stopped or waiting."""
    try:
        run_states = {
            one["name"]: one for one in json.loads((root / RESULT).read_text(encoding="utf-8"))["runs"]
        }
    except (OSError, ValueError, KeyError, TypeError):
        run_states = {}
    out = {}
    for one in sweep.runs(root):
        before = run_states.get(one.name, {})
        if one.finished:
            out[one.name] = ("finished", "")
        elif before.get("state") == "failed":
            out[one.name] = ("failed", str(before.get("cause", "")))
        else:
            out[one.name] = ("stopped" if (one.directory / "config.toml").exists() else "waiting", "")
    return out


def report(
    sweep: Sweep, root: Path, run_states: Mapping[str, tuple[str, str]], metric: str
) -> dict[str, Any]:
    """Write sweep.json and sweep.html, and return the content of sweep.json.

    metric: as in `report.sweep.measure`.

    Raises UserError for a metric that no finished run has.
    """
    runs = sweep.runs(root)
    records = {one.name: read_record(one.directory) for one in runs if run_states[one.name][0] == "finished"}
    name, values = page.measure(records, metric)
    by_seed = [
        {one.seed: values[one.name] for one in runs if one.combination is combination and one.name in values}
        for combination in sweep.combinations
    ]
    _, sign = direction(metric or name)
    compared = compare_seeds(by_seed, sign)
    rows = [
        {"name": one.name, "label": one.label, "set": dict(one.settings), **page.clip(name, row)}
        | {"values": of_seed}
        for one, row, of_seed in zip(sweep.combinations, compared["settings"], by_seed, strict=True)
    ]
    measured = "at the end of each run" if metric else page.MEASURED.get(name, page.UNEVALUATED)
    result: dict[str, Any] = {
        "title": sweep.title,
        "seeds": sweep.seeds,
        "metric": name,
        "measured": measured + (", lower is better" if sign < 0 else ""),
        "best": None if compared["best"] is None else rows[compared["best"]]["name"],
        "combinations": rows,
        "runs": [
            {"name": one.name, "combination": one.combination.name, "seed": one.seed}
            | dict(zip(("state", "cause"), run_states[one.name], strict=True))
            for one in runs
        ],
    }
    result["says"] = conclusions(result)
    put(root / RESULT, json.dumps(result, indent=1))
    page.write(root, result, records)
    return result


def conclusions(result: Mapping[str, Any]) -> list[str]:
    """Return sentences that say which differences are real, and which runs are missing."""
    rows = result["combinations"]
    tied = [row for row in rows if row["tied"]]
    best = next((row for row in rows if row["name"] == result["best"]), tied[0] if tied else None)
    out = []
    if best is None:
        out.append("No run has a value of the metric yet.")
    elif len(rows) > 1:
        others = [row for row in rows if row is not best and row not in tied]
        real = [row["label"] for row in others if (row["against"] or {}).get("real")]
        open_ = [row["label"] for row in others if (row["against"] or {}).get("real") is False]
        untested = [row["label"] for row in others if row["n"] and (row["against"] or {}).get("real") is None]
        labels = "; ".join(row["label"] for row in tied)
        out.append(f"No best: {labels} are tied." if tied else f"{best['label']} has the best mean.")
        if real:
            subject = best["label"] if tied else "It"
            out.append(f"{subject} is better, beyond chance of seeds, than {'; '.join(real)}.")
        if open_:
            out.append(
                f"No difference is shown to {'; '.join(open_)}: {result['seeds']} seeds do not decide."
            )
        if untested:
            names = "; ".join(untested)
            out.append(f"Too few seeds to say anything about {names}: {LEAST} common ones are the least.")
    for state in ("failed", "stopped", "waiting"):
        if count := sum(one["state"] == state for one in result["runs"]):
            out.append(f"{count} of {len(result['runs'])} runs: {state}; means are over the finished ones.")
    return out
