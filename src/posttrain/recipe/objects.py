"""Objects of a program in a recipe's tables: their names in a file, and the source that a run keeps."""

import ast
import atexit
import dataclasses
import hashlib
import inspect
import shutil
import sys
import tempfile
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from posttrain.base.kinds import packages
from posttrain.base.usercode import MEMORY, file_of
from posttrain.data import Records
from posttrain.methods.table import Line, like
from posttrain.recipe import config
from posttrain.recipe.recipe import LoadedModel
from posttrain.types import UserError

_SAVE_FUNCTION = "put it into a file and give 'file.py:NAME'"
_SAVE_RECORDS = "save them, as by datasets' data.to_json(FILE), and give FILE"
_SAVE: dict[type, str] = {
    LoadedModel: "save it, model.save_pretrained(DIR) and tokenizer.save_pretrained(DIR), and give DIR",
    Records: _SAVE_RECORDS,
    Line: "put it into a file and name it as 'file.py:NAME'",
}


def is_object(value: Any) -> bool:
    """Return whether a value in the tables is an object of the program, and not plain data."""
    return not isinstance(value, Mapping | list | tuple | str | bool | int | float | None)


def copied(tables: Any) -> Any:
    """Return a copy of the tables and lists, with the same objects in them."""
    if isinstance(tables, Mapping):
        return {key: copied(value) for key, value in tables.items()}
    return [copied(value) for value in tables] if isinstance(tables, list | tuple) else tables


def objects(tables: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the objects of the tables with their keys; in a list all have the key of the list."""
    if isinstance(tables, Mapping):
        for name, value in tables.items():
            yield from objects(value, f"{key}.{name}" if key else name)
    elif isinstance(tables, list | tuple):
        for value in tables:
            yield from objects(value, key)
    elif is_object(tables):
        yield key, tables


def exported(tables: Any) -> Any:
    """Return the tables as a file has them, with a name that begins with "memory:" for each object."""
    if isinstance(tables, Mapping):
        name = str(tables.get("name", ""))
        return {
            key: _exported(key, value, name)
            for key, value in tables.items()
            if not isinstance(value, LoadedModel)
        }
    return [exported(value) for value in tables] if isinstance(tables, list | tuple) else tables


def _exported(key: str, value: Any, name: str) -> Any:
    """Return what a file has for a key of a table, whose own name a reward is recorded under."""
    if not is_object(value):
        return exported(value)
    if isinstance(value, Line):
        return f"{MEMORY}{like(value)}"
    if isinstance(value, Records):
        return str(value)
    if key == "env":
        return {"factory": f"{MEMORY}{type(value).__name__}"}
    return f"{MEMORY}{name or type(value).__name__}"


def saved(tables: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the tables as a file that another program can read has them, functions by their files.

    Raises UserError for objects that only this program has, with how to save each.
    """
    made: dict[str, Any] = copied(tables)
    for entry in made.get("verifier", {}).get("function", ()):
        if isinstance(entry, dict) and is_object(entry["function"]):
            entry["function"] = place_of(entry["function"]) or entry["function"]
    left = []
    for key, value in objects(made):
        how, at = _SAVE.get(type(value), _SAVE_FUNCTION), key.removesuffix(".path")
        if isinstance(value, LoadedModel):
            at = "model.path"
        elif key == "task.env":
            how = "put its class into a file and give 'file.py:CLASS'"
        elif key == "verifier.function.function":
            at = f"verifier.function {_name_of(made, value)}"
        left.append(f"{at}: {how}")
    left += [f"{file.stem}: {_SAVE_FUNCTION}" for file in written_files(tables)]
    if left:
        raise UserError(where, f"only this program holds {'; '.join(left)}")
    return made


def sources_of(tables: Mapping[str, Any]) -> dict[str, str]:
    """Return by name the source of the program's own functions and classes, where there is any."""
    own: dict[str, Any] = {}
    for entry in tables.get("verifier", {}).get("function", ()):
        if isinstance(entry, Mapping) and is_object(entry["function"]):
            own[str(entry["name"])] = entry["function"]
    for key, value in objects(tables):
        if isinstance(value, Line):
            method: Any = value.method
            choices = {f.name: getattr(method, f.name) for f in dataclasses.fields(method)}
            own |= {"method": type(value.method), **{k: x for k, x in choices.items() if callable(x)}}
        elif key == "task.env":
            own["env"] = value if callable(value) else type(value)
    sources = {}
    for name, value in own.items():
        with suppress(OSError, TypeError):  # typed at a prompt, or not Python
            if str(getattr(value, "__module__", "")).partition(".")[0] not in packages():
                sources[name] = inspect.getsource(getattr(value, "func", value))
    return sources


def _name_of(tables: Mapping[str, Any], function: Any) -> str:
    entries = tables["verifier"]["function"]
    return str(next(e["name"] for e in entries if isinstance(e, Mapping) and e["function"] is function))


# ---------------------------------------------------------------------- functions by their files


def place_of(call: Any) -> str:
    """Return the "file.py:NAME" of a function that is named in an imported file; else nothing."""
    module = sys.modules.get(getattr(call, "__module__", None) or "")
    name, file = getattr(call, "__qualname__", ""), getattr(module, "__file__", None)
    if module is None or module.__name__ == "__main__" or not file:
        return ""
    return f"{file}:{name}" if getattr(module, name, None) is call else ""


def named_file(function: str | Callable[..., Any], where: str) -> str:
    """Return the "file.py:NAME" of a function, by which other processes load it.

    A function of the program's own file or of a notebook is written, with what it names of modules and plain
    data, into a file that lies in a temporary directory until the program ends. UserError for what has no
    such source.
    """
    if isinstance(function, str):
        return function
    if place := place_of(function):
        return place
    name = getattr(function, "__name__", type(function).__name__)
    if not inspect.isfunction(function) or not name.isidentifier() or function.__closure__:
        problem = f"{name} cannot be called in another process, as it is no 'def' or has a closure"
        raise UserError(where, problem, _SAVE_FUNCTION)
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):  # typed at a prompt
        raise UserError(where, f"{name} has no source", _SAVE_FUNCTION) from None
    used = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    own = used.intersection(function.__globals__).difference(function.__code__.co_varnames, {name})
    try:
        heads = [_definition(each, function.__globals__[each]) for each in sorted(own)]
    except ValueError as error:
        problem = f"{name} uses {error} of this program, and is called in another process"
        raise UserError(where, problem, _SAVE_FUNCTION) from None
    text = "".join(f"{head}\n" for head in heads) + f"\n\n{source}"
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    file = _written() / f"{name}_{digest}.py"
    file.write_text(text, encoding="utf-8")
    return f"{file}:{name}"


def _definition(name: str, value: Any) -> str:
    """The line that makes this value of a module, or plain data, again; ValueError for anything else."""
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__} as {name}"
    module, known = getattr(value, "__module__", None), getattr(value, "__name__", name)
    if module not in (None, "__main__") and getattr(sys.modules.get(module), known, None) is value:
        return f"from {module} import {known} as {name}"
    with suppress(ValueError, SyntaxError):
        if ast.literal_eval(repr(value)) == value:
            return f"{name} = {value!r}"
    raise ValueError(repr(name))


@cache
def _written() -> Path:
    made = Path(tempfile.mkdtemp(prefix="posttrain-")).resolve()
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def written_files(tables: Mapping[str, Any]) -> list[Path]:
    """Return those of the files that the tables name that `named_file` wrote, which end with the program."""
    return [file for file in config.named_files(tables) if file.parent == _written()]


def named_in(folder: Path, tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables with those files named by their copies in this folder, where it has them."""

    def copy_of(name: str) -> str:
        file = file_of(name) or Path()
        copy = folder.resolve() / file.name
        return f"{copy}:{name.rpartition(':')[2]}" if file.parent == _written() and copy.is_file() else name

    return config.renamed(tables, copy_of, config.CALLED)
