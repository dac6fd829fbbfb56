"""The two kinds of stages that train nothing: a model from nothing, and data that a function writes."""

import contextlib
import inspect
import io
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import typer

from posttrain.new import new
from posttrain.pipeline.file import Pipeline, Stage, filled
from posttrain.types import UserError
from posttrain.usercode import cause, load_named

_app = typer.Typer(add_completion=False)
_app.command()(new)
_NEW = typer.main.get_command(_app)


def words_of(pipeline: Pipeline, stage: Stage, made: Mapping[str, str]) -> list[str]:
    """The options of a stage that makes a model, as `posttrain new` takes them; UserError if it does not."""
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
        raise UserError(said, where=pipeline.at(stage, "new", *keys)) from None
    return words


def make_model(pipeline: Pipeline, stage: Stage, directory: Path, made: Mapping[str, str]) -> str:
    """Makes the model of a stage; what `posttrain new` says of it."""
    words = words_of(pipeline, stage, made)

    def write(fresh: Path) -> str:
        told = io.StringIO()
        with contextlib.redirect_stdout(told):
            _NEW.main([str(fresh), *words], standalone_mode=False)
        return told.getvalue().strip().replace(str(fresh), str(directory))

    return _whole(directory, write)


def function_of(pipeline: Pipeline, stage: Stage) -> Callable[..., Any]:
    """The function of a stage that makes data; a file is looked for from the pipeline's own.

    UserError if there is none, or if it does not take the stage's options.
    """
    place, colon, name = stage.make.rpartition(":")
    if place.endswith(".py"):
        place = str(pipeline.path.parent / place)
    try:
        found: Any = load_named(f"{place}{colon}{name}")
    except UserError as error:
        what = f"{error.where}: {error.what}"
        raise UserError(what, where=pipeline.at(stage, "make"), mend=error.mend) from None
    if not callable(found):
        raise UserError(f"{stage.make} is no function", where=pipeline.at(stage, "make"))
    try:
        signature = inspect.signature(found)
    except ValueError:  # of a function that is not written in Python nothing is known
        return found  # type: ignore[no-any-return]
    try:
        signature.bind(Path(), **stage.options)
    except TypeError as error:
        what, key = f"{stage.make} cannot be called: {error}", "options" if stage.options else "make"
        mend = f"it is {name}{signature}"
        raise UserError(what, where=pipeline.at(stage, key), mend=mend) from None
    return found  # type: ignore[no-any-return]


def make_data(pipeline: Pipeline, stage: Stage, directory: Path, made: Mapping[str, str]) -> str:
    """Calls the function of a stage with a fresh directory and its options; what there is then."""
    function = function_of(pipeline, stage)

    def write(fresh: Path) -> str:
        fresh.mkdir()
        try:
            function(fresh, **filled(stage.options, made))
        except (UserError, KeyboardInterrupt):
            raise
        except BaseException as error:  # the function may even call sys.exit
            what = f"{stage.make} fails: {cause(error)}"
            raise UserError(what, where=pipeline.at(stage, "make")) from None
        files = sorted(p for p in fresh.rglob("*") if p.is_file())
        if not files:
            raise UserError(f"{stage.make} wrote nothing", where=pipeline.at(stage, "make"))
        return f"{directory}: " + ", ".join(str(f.relative_to(fresh)) for f in files[:8])

    return _whole(directory, write)


def _whole(directory: Path, write: Callable[[Path], str]) -> str:
    """What `write` says, once all that it wrote has its place; a kill before leaves nothing there."""
    fresh = directory.with_name(f".{directory.name}.tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    said = write(fresh)
    fresh.replace(directory)
    return said
