"""The two kinds of stages that train nothing: a model from nothing, and data that a function writes."""

import contextlib
import io
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import typer

from posttrain.api.new import new
from posttrain.pipeline.away import bind, call
from posttrain.pipeline.file import Pipeline, Stage, filled
from posttrain.process.interpreter import asked
from posttrain.types import UserError

_app = typer.Typer(add_completion=False)
_app.command()(new)
_NEW = typer.main.get_command(_app)


def words_of(pipeline: Pipeline, stage: Stage, made: Mapping[str, str]) -> list[str]:
    """Return a stage's options for `posttrain model new`; UserError for one that it does not have."""
    words: list[str] = []
    for key, value in filled(stage.new, made).items():
        flag = key.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            for each in value if isinstance(value, list) else [value]:
                words += [f"--{flag}", str(each)]
    try:
        _NEW.make_context("new", ["directory", *words])
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        said = str(error.format_message()).rstrip(".")
        named = re.search(r"--(?:no-)?([a-z][a-z-]*)", said)
        keys = [named[1].replace("-", "_")] if named else []
        raise UserError(pipeline.at(stage, "new", *keys), said) from None
    return words


def make_model(pipeline: Pipeline, stage: Stage, directory: Path, made: Mapping[str, str]) -> str:
    """Makes the model of a stage; what `posttrain model new` says of it."""
    words = words_of(pipeline, stage, made)

    def write(fresh: Path) -> str:
        told = io.StringIO()
        with contextlib.redirect_stdout(told):
            _NEW.main([str(fresh), *words], standalone_mode=False)
        return told.getvalue().strip().replace(str(fresh), str(directory))

    return _whole(directory, write)


def check_function(pipeline: Pipeline, stage: Stage) -> None:
    """UserError if the function of a stage that makes data is not there, or does not take its options."""
    try:
        asked(bind, _named(pipeline, stage), stage.make, stage.options, name=stage.make)
    except UserError as error:
        key = "options" if error.key == "options" and stage.options else "make"
        raise _at(pipeline, stage, error, key) from None


def make_data(pipeline: Pipeline, stage: Stage, directory: Path, made: Mapping[str, str]) -> str:
    """Has the function of a stage called with a fresh directory and its options; what there is then."""
    check_function(pipeline, stage)

    def write(fresh: Path) -> str:
        fresh.mkdir()
        options = filled(stage.options, made)
        try:
            named = _named(pipeline, stage)
            asked(call, named, stage.make, str(fresh), options, name=stage.make, endless=True)
        except UserError as error:
            raise _at(pipeline, stage, error, "make") from None
        files = sorted(p for p in fresh.rglob("*") if p.is_file())
        if not files:
            raise UserError(pipeline.at(stage, "make"), f"{stage.make} wrote nothing")
        return f"{directory}: " + ", ".join(str(f.relative_to(fresh)) for f in files[:8])

    return _whole(directory, write)


def _named(pipeline: Pipeline, stage: Stage) -> str:
    """The function's name; a file is looked for from the pipeline's own."""
    place, colon, name = stage.make.rpartition(":")
    return f"{pipeline.path.parent / place if place.endswith('.py') else place}{colon}{name}"


def _at(pipeline: Pipeline, stage: Stage, error: UserError, key: str) -> UserError:
    return error.at(pipeline.at(stage, key), keep=error.key not in (stage.make, key, "options"))


def _whole(directory: Path, write: Callable[[Path], str]) -> str:
    """What `write` says, once all that it wrote has its place; a kill before leaves nothing there."""
    fresh = directory.with_name(f".{directory.name}.tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    said = write(fresh)
    fresh.replace(directory)
    return said
