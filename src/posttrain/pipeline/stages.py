"""The stages of a pipeline, one after the other, and then the comparison.

stage     consumes what earlier ones made; a finished one is passed over, a broken-off one goes on
compare   consumes the models of the stages that it names
report    is written after each, whatever ended it
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

from posttrain.api.opening import train
from posttrain.base.atomic_files import put
from posttrain.base.toml import dump
from posttrain.errors import RESUME
from posttrain.evaluation.compare import Compare, compared
from posttrain.evaluation.standings import standings
from posttrain.pipeline.check import check, comparison, located, tell
from posttrain.pipeline.file import COMPARE, Pipeline
from posttrain.pipeline.kinds import make_data, make_model
from posttrain.pipeline.record import Place, asked, describe, made_by, placed, places, reading, thin
from posttrain.process import machine
from posttrain.report import terminal
from posttrain.report.pipeline import write
from posttrain.report.terminal import View
from posttrain.run.journal import stop_asked_since
from posttrain.types import RunError, UserError

RESULT = "compare.json"


@dataclass(frozen=True)
class News:
    """Who is told how the pipeline goes on."""

    say: Callable[[str], None]
    """A line for a person."""
    quiet: bool
    as_json: bool

    def stage(self, name: str, state: str, text: str = "") -> None:
        """A stage begins, ends or is passed over."""
        if self.as_json:
            _print({"stage": name, "state": state})
        else:
            self.say(f"stage {name}: {state}" + (f", {text}" if text else ""))

    def view(self, name: str) -> View | Callable[[str, Mapping[str, float]], None]:
        """How the updates of a stage's run are shown."""
        if not self.as_json:
            return "none" if self.quiet else "plan"

        def update(phase: str, numbers: Mapping[str, float]) -> None:
            if phase == "update":
                finite = {k: v if abs(v) < float("inf") else None for k, v in numbers.items()}
                _print({"stage": name, **finite})

        return update


def _print(line: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def run(pipeline: Pipeline, root: Path, news: News, *, begin: str = "") -> Path:
    """The report of the pipeline, once all its stages have run in this directory.

    `begin`: a stage that is made again, and all after it; what they had made is moved to before-001, -002 ...
    Raises UserError for what can be known before anything trained, and then nothing was moved.
    """
    where = places(pipeline, root)
    again = where[pipeline.number(begin) :] if begin else []
    finished: dict[str, dict[str, str]] = {}
    made: dict[str, str] = {}
    for place in where[: len(where) - len(again)]:
        if found := made_by(pipeline, place, made):
            finished[place.stage.name] = found
            made |= found
    news.say("checking all stages")
    need = check(pipeline, where, finished, news.say, again=[place.stage.name for place in again])
    tell(need, root, news.say)
    if begin:
        _set_aside(root, again)
    describe(pipeline, root)
    try:
        for place in where:
            name = place.stage.name
            if name in finished:
                thin(pipeline, place)  # a kill may have come before it
                news.stage(name, "already finished")
                continue
            news.stage(name, "begins", place.stage.recipe or place.stage.make or "posttrain model new")
            _one(pipeline, place, made, news)
            finished[name] = made_by(pipeline, place, made)
            made |= finished[name]
            thin(pipeline, place)
            news.stage(name, "finished")
            write(root)
            if place.stage.kind != "recipe":
                # There may now be the data that later stages could not be checked on.
                check(pipeline, where, finished, news.say)
        if pipeline.compare is not None:
            _compare(pipeline, root, made, news)
    except BaseException:
        with suppress(Exception):  # on a full disk the first error is the one to tell
            write(root)
        raise
    return write(root)


def _set_aside(root: Path, where: list[Place]) -> None:
    """Moves what these stages and the comparison left to a directory of its own."""
    there = [p for place in where for p in (place.directory, place.record) if p.exists()]
    there += [p for p in (root / COMPARE, root / RESULT) if p.exists()]
    if there:
        aside = next(p for n in range(1, 1000) if not (p := root / f"before-{n:03d}").exists())
        aside.mkdir()
        for path in reversed(there):  # the first stage last: a kill in between leaves it to be set aside
            path.replace(aside / path.name)


def _one(pipeline: Pipeline, place: Place, made: Mapping[str, str], news: News) -> None:
    stage, directory = place.stage, place.directory
    put(place.record, dump(asked(pipeline, place)))
    if stage.kind == "new":
        news.say(make_model(pipeline, stage, directory, made))
        return
    if stage.kind == "make":
        news.say(make_data(pipeline, stage, directory, made))
        return
    found, began = reading(pipeline, stage, made), time.monotonic()
    try:
        resume = (directory / "config.toml").exists()
        train(found, directory, title=stage.name, resume=resume, view=news.view(stage.name))
    except UserError as error:
        raise placed(pipeline, stage, error) from None
    except RunError as error:
        raise RunError(f"stage {stage.name!r}", str(error)) from error
    if stop_asked_since(began):  # in its last update, after which it ended
        raise RunError("stopped", f"stage {stage.name!r} is finished and saved", f"go on with {RESUME}")


def _compare(pipeline: Pipeline, root: Path, made: Mapping[str, str], news: News) -> None:
    """Compares the policies, unless that was done; answers go to compare/, numbers to compare.json."""
    compare, folder = comparison(pipeline, made), root / COMPARE
    models = ({"base": compare.base} if compare.base else {}) | {n: made[n] for n in compare.stages}
    # From here, so that the directory may be moved. A stage that went on has another checkpoint.
    compared_now = {name: os.path.relpath(made[name], root) for name in compare.stages}
    asked_now = dump({COMPARE: dict(pipeline.compare or {}), "models": compared_now})
    record = folder / "asked.toml"
    if not record.exists() or record.read_text(encoding="utf-8") != asked_now:
        shutil.rmtree(folder, ignore_errors=True)
        (root / RESULT).unlink(missing_ok=True)
        folder.mkdir()
        put(record, asked_now)
    if (root / RESULT).exists():
        news.stage(COMPARE, "already finished")
        return
    news.stage(COMPARE, "begins", ", ".join(compare.stages))
    machine.configure()
    silent = news.quiet or news.as_json
    with Progress(
        console=terminal.err, disable=silent or not terminal.err.is_terminal, transient=True
    ) as bar:
        line = bar.add_task("", total=None)

        def seen(name: str, done: int, total: int) -> None:
            bar.update(line, description=f"{name} answers", completed=done, total=total)

        try:
            found = compared(compare, models, folder, news.say, seen)
        except UserError as error:
            raise located(pipeline, error) from None
    put(root / RESULT, json.dumps(standings(compare, _judge(compare), found), indent=1))
    news.stage(COMPARE, "finished")


def _judge(compare: Compare) -> str:
    judge = compare.verifier.build()
    return judge.name if judge else ""
