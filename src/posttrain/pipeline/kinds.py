"""The two kinds of stages without training: a new model, and data that a function writes."""

import contextlib
import io
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import typer

from posttrain.api.new import new
from posttrain.pipeline.file import Pipeline, Stage, substitute
from posttrain.pipeline.user_function import call, check_call
from posttrain.process.interpreter import call_in_fresh_process
from posttrain.types import UserError

_app = typer.Typer(add_completion=False)
_app.command()(new)
_NEW = typer.main.get_command(_app)


def command_words(pipeline: Pipeline, stage: Stage, outputs: Mapping[str, str]) -> list[str]:
    """Return a stage's words for `posttrain model new`; raise UserError for an option that it lacks."""
    words: list[str] = []
    for key, value in substitute(stage.new, outputs).items():
        flag = key.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            for item in value if isinstance(value, list) else [value]:
                words += [f"--{flag}", str(item)]
    try:
        _NEW.make_context("new", ["directory", *words])
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        problem = str(error.format_message()).rstrip(".")
        option = re.search(r"--(?:no-)?([a-z][a-z-]*)", problem)
        keys = [option[1].replace("-", "_")] if option else []
        raise UserError(pipeline.at(stage, "new", *keys), problem) from None
    return words


def make_model(pipeline: Pipeline, stage: Stage, directory: Path, outputs: Mapping[str, str]) -> str:
    """Make the model of a stage; return the line that `posttrain model new` prints."""
    words = command_words(pipeline, stage, outputs)

    def write(fresh: Path) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            _NEW.main([str(fresh), *words], standalone_mode=False)
        return printed.getvalue().strip().replace(str(fresh), str(directory))

    return _make_directory(directory, write)


def check_function(pipeline: Pipeline, stage: Stage) -> None:
    """Raise UserError if the function of a stage cannot be loaded, or does not take its options."""
    try:
        call_in_fresh_process(
            check_call, _function_name(pipeline, stage), stage.make, stage.options, name=stage.make
        )
    except UserError as error:
        key = "options" if error.key == "options" and stage.options else "make"
        raise _locate(pipeline, stage, error, key) from None


def make_data(pipeline: Pipeline, stage: Stage, directory: Path, outputs: Mapping[str, str]) -> str:
    """Call the function of a stage with a fresh directory and its options; return a line naming its files."""
    check_function(pipeline, stage)

    def write(fresh: Path) -> str:
        fresh.mkdir()
        options = substitute(stage.options, outputs)
        try:
            function = _function_name(pipeline, stage)
            call_in_fresh_process(
                call, function, stage.make, str(fresh), options, name=stage.make, endless=True
            )
        except UserError as error:
            raise _locate(pipeline, stage, error, "make") from None
        files = sorted(p for p in fresh.rglob("*") if p.is_file())
        if not files:
            raise UserError(pipeline.at(stage, "make"), f"{stage.make} wrote nothing")
        return f"{directory}: " + ", ".join(str(f.relative_to(fresh)) for f in files[:8])

    return _make_directory(directory, write)


def _function_name(pipeline: Pipeline, stage: Stage) -> str:
    """Return the function's name, with the path of its file from the pipeline's."""
    place, colon, name = stage.make.rpartition(":")
    return f"{pipeline.path.parent / place if place.endswith('.py') else place}{colon}{name}"


def _locate(pipeline: Pipeline, stage: Stage, error: UserError, key: str) -> UserError:
    return error.at(pipeline.at(stage, key), keep=error.key not in (stage.make, key, "options"))


def _make_directory(directory: Path, write: Callable[[Path], str]) -> str:
    """Make a directory by `write`, which fills a temporary one; return its text. A kill leaves nothing."""
    fresh = directory.with_name(f".{directory.name}.tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    text = write(fresh)
    fresh.replace(directory)
    return text
