"""Run the stages of a pipeline in order, and then the comparison.

stage     consumes the outputs of earlier ones; a finished one is skipped, an interrupted one resumed
compare   consumes the models of the stages that it names
report    is written after each stage, and after an error
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
from posttrain.evaluation.compare import Compare, compare_policies
from posttrain.evaluation.standings import standings
from posttrain.pipeline.check import check, locate_comparison_error, read_comparison, report_disk
from posttrain.pipeline.file import COMPARE, Pipeline
from posttrain.pipeline.kinds import make_data, make_model
from posttrain.pipeline.record import (
    Place,
    describe,
    locate_error,
    outputs_of,
    places,
    read_stage_recipe,
    stage_tables,
    thin,
)
from posttrain.process import machine
from posttrain.report import terminal
from posttrain.report.pipeline import write
from posttrain.report.terminal import View
from posttrain.run.journal import stop_requested_since
from posttrain.types import RunError, UserError

RESULT = "compare.json"


@dataclass(frozen=True)
class StageLog:
    """Report the progress of a pipeline, as lines for a person or as JSON."""

    say: Callable[[str], None]
    """Prints a line for a person."""
    quiet: bool
    as_json: bool

    def stage(self, name: str, state: str, text: str = "") -> None:
        """Report that a stage begins, ends or is skipped."""
        if self.as_json:
            _print({"stage": name, "state": state})
        else:
            self.say(f"stage {name}: {state}" + (f", {text}" if text else ""))

    def view(self, name: str) -> View | Callable[[str, Mapping[str, float]], None]:
        """Return the view of the updates of a stage's run."""
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


def run(pipeline: Pipeline, root: Path, log: StageLog, *, begin: str = "") -> Path:
    """Run all stages in this directory, and return the path of the pipeline's report.

    begin: a stage to make again, with all after it; their earlier outputs are moved to before-001, -002 ...

    Raises UserError for a mistake that can be found before anything is trained; then nothing is moved.
    """
    stage_places = places(pipeline, root)
    again = stage_places[pipeline.number(begin) :] if begin else []
    finished: dict[str, dict[str, str]] = {}
    outputs: dict[str, str] = {}
    for place in stage_places[: len(stage_places) - len(again)]:
        if stage_outputs := outputs_of(pipeline, place, outputs):
            finished[place.stage.name] = stage_outputs
            outputs |= stage_outputs
    log.say("checking all stages")
    need = check(pipeline, stage_places, finished, log.say, again=[place.stage.name for place in again])
    report_disk(need, root, log.say)
    if begin:
        _set_aside(root, again)
    describe(pipeline, root)
    try:
        for place in stage_places:
            name = place.stage.name
            if name in finished:
                thin(pipeline, place)  # a kill may have prevented it
                log.stage(name, "already finished")
                continue
            log.stage(name, "begins", place.stage.label)
            _run_stage(pipeline, place, outputs, log)
            finished[name] = outputs_of(pipeline, place, outputs)
            if not finished[name]:
                raise RunError("stopped", f"run.max_time ended stage {name!r}", f"continue with {RESUME}")
            outputs |= finished[name]
            thin(pipeline, place)
            log.stage(name, "finished")
            write(root)
            if place.stage.kind != "recipe":
                # Later stages that use its output can be checked now.
                check(pipeline, stage_places, finished, log.say)
        if pipeline.compare is not None:
            _compare(pipeline, root, outputs, log)
    except BaseException:
        with suppress(Exception):  # the report may fail too, as on a full disk
            write(root)
        raise
    return write(root)


def _set_aside(root: Path, stage_places: list[Place]) -> None:
    """Move the files of these stages and of the comparison to a new directory."""
    paths = [p for place in stage_places for p in (place.directory, place.record) if p.exists()]
    paths += [p for p in (root / COMPARE, root / RESULT) if p.exists()]
    if paths:
        aside = next(p for n in range(1, 1000) if not (p := root / f"before-{n:03d}").exists())
        aside.mkdir()
        for path in reversed(paths):  # the first stage last, so that after a kill it is still there to move
            path.replace(aside / path.name)


def _run_stage(pipeline: Pipeline, place: Place, outputs: Mapping[str, str], log: StageLog) -> None:
    stage, directory = place.stage, place.directory
    put(place.record, dump(stage_tables(pipeline, place)))
    if stage.kind == "new":
        log.say(make_model(pipeline, stage, directory, outputs))
        return
    if stage.kind == "make":
        log.say(make_data(pipeline, stage, directory, outputs))
        return
    loaded, start_time = read_stage_recipe(pipeline, stage, outputs), time.monotonic()
    try:
        resume = (directory / "config.toml").exists()
        train(loaded, directory, title=stage.name, resume=resume, view=log.view(stage.name))
    except UserError as error:
        raise locate_error(pipeline, stage, error) from None
    except RunError as error:
        raise RunError(f"stage {stage.name!r}", str(error)) from error
    if stop_requested_since(start_time):  # during its last update
        raise RunError("stopped", f"stage {stage.name!r} is finished and saved", f"continue with {RESUME}")


def _compare(pipeline: Pipeline, root: Path, outputs: Mapping[str, str], log: StageLog) -> None:
    """Compare the policies, unless the results are current: answers in compare/, numbers in compare.json."""
    compare, folder = read_comparison(pipeline, outputs), root / COMPARE
    models = ({"base": compare.base} if compare.base else {}) | {n: outputs[n] for n in compare.stages}
    # Relative paths, so that the directory may be moved. A stage that was continued has another checkpoint.
    policies = {name: os.path.relpath(outputs[name], root) for name in compare.stages}
    question = dump({COMPARE: dict(pipeline.compare or {}), "models": policies})
    record = folder / "asked.toml"
    if not record.exists() or record.read_text(encoding="utf-8") != question:
        shutil.rmtree(folder, ignore_errors=True)
        (root / RESULT).unlink(missing_ok=True)
        folder.mkdir()
        put(record, question)
    if (root / RESULT).exists():
        log.stage(COMPARE, "already finished")
        return
    log.stage(COMPARE, "begins", ", ".join(compare.stages))
    machine.configure()
    hidden = log.quiet or log.as_json
    with Progress(
        console=terminal.err, disable=hidden or not terminal.err.is_terminal, transient=True
    ) as bar:
        line = bar.add_task("", total=None)

        def show(name: str, count: int, total: int) -> None:
            bar.update(line, description=f"{name} answers", completed=count, total=total)

        try:
            answers = compare_policies(compare, models, folder, log.say, show)
        except UserError as error:
            raise locate_comparison_error(pipeline, error) from None
    put(root / RESULT, json.dumps(standings(compare, _judge(compare), answers), indent=1))
    log.stage(COMPARE, "finished")


def _judge(compare: Compare) -> str:
    judge = compare.verifier.build()
    return judge.name if judge else ""
