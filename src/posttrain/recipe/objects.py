"""Python objects as values in a recipe's tables: how a file names them, and which source code a run keeps."""

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
_HOW_TO_SAVE: dict[type, str] = {
    LoadedModel: "save it, model.save_pretrained(DIR) and tokenizer.save_pretrained(DIR), and give DIR",
    Records: _SAVE_RECORDS,
    Line: "put it into a file and name it as 'file.py:NAME'",
}


def is_object(value: Any) -> bool:
    """Return whether a value in the tables is a Python object that TOML cannot hold."""
    return not isinstance(value, Mapping | list | tuple | str | bool | int | float | None)


def copy_tables(tables: Any) -> Any:
    """Copy the tables and their lists, but not the objects in them."""
    if isinstance(tables, Mapping):
        return {key: copy_tables(value) for key, value in tables.items()}
    return [copy_tables(value) for value in tables] if isinstance(tables, list | tuple) else tables


def iter_objects(tables: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key, object) for the objects of the tables; items of a list have the key of the list."""
    if isinstance(tables, Mapping):
        for name, value in tables.items():
            yield from iter_objects(value, f"{key}.{name}" if key else name)
    elif isinstance(tables, list | tuple):
        for value in tables:
            yield from iter_objects(value, key)
    elif is_object(tables):
        yield key, tables


def export_tables(tables: Any) -> Any:
    """Return the tables as config.toml of a run holds them: each object is replaced by a "memory:" name.

    Such a name cannot be loaded. A loaded model is left out.
    """
    if isinstance(tables, Mapping):
        name = str(tables.get("name", ""))
        return {
            key: _export(key, value, name)
            for key, value in tables.items()
            if not isinstance(value, LoadedModel)
        }
    return [export_tables(value) for value in tables] if isinstance(tables, list | tuple) else tables


def _export(key: str, value: Any, name: str) -> Any:
    """Return the value of a key in the file. name: that of the table, under which a reward is recorded."""
    if not is_object(value):
        return export_tables(value)
    if isinstance(value, Line):
        return f"{MEMORY}{like(value)}"
    if isinstance(value, Records):
        return str(value)
    if key == "env":
        return {"factory": f"{MEMORY}{type(value).__name__}"}
    return f"{MEMORY}{name or type(value).__name__}"


def make_portable(tables: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the tables with functions replaced by "file.py:NAME", so that any program can read them.

    Raises UserError at `key` if other objects are left, and says how to save each.
    """
    portable: dict[str, Any] = copy_tables(tables)
    for entry in portable.get("verifier", {}).get("function", ()):
        if isinstance(entry, dict) and is_object(entry["function"]):
            entry["function"] = find_importable_name(entry["function"]) or entry["function"]
    faults = []
    for place, value in iter_objects(portable):
        fix, place = _HOW_TO_SAVE.get(type(value), _SAVE_FUNCTION), place.removesuffix(".path")
        if isinstance(value, LoadedModel):
            place = "model.path"
        elif place == "task.env":
            fix = "put its class into a file and give 'file.py:CLASS'"
        elif place == "verifier.function.function":
            place = f"verifier.function {_reward_name(portable, value)}"
        faults.append(f"{place}: {fix}")
    faults += [f"{file.stem}: {_SAVE_FUNCTION}" for file in find_temporary_files(tables)]
    if faults:
        raise UserError(key, f"only this program holds {'; '.join(faults)}")
    return portable


def read_sources(tables: Mapping[str, Any]) -> dict[str, str]:
    """Return by name the source code of the functions and classes in the tables that are not posttrain's."""
    code: dict[str, Any] = {}
    for entry in tables.get("verifier", {}).get("function", ()):
        if isinstance(entry, Mapping) and is_object(entry["function"]):
            code[str(entry["name"])] = entry["function"]
    for key, value in iter_objects(tables):
        if isinstance(value, Line):
            method: Any = value.method
            choices = {f.name: getattr(method, f.name) for f in dataclasses.fields(method)}
            code |= {"method": type(value.method), **{k: x for k, x in choices.items() if callable(x)}}
        elif key == "task.env":
            code["env"] = value if callable(value) else type(value)
    sources = {}
    for name, value in code.items():
        with suppress(OSError, TypeError):  # entered at a prompt, or not written in Python
            if str(getattr(value, "__module__", "")).partition(".")[0] not in packages():
                sources[name] = inspect.getsource(getattr(value, "func", value))
    return sources


def _reward_name(tables: Mapping[str, Any], function: Any) -> str:
    entries = tables["verifier"]["function"]
    return str(next(e["name"] for e in entries if isinstance(e, Mapping) and e["function"] is function))


# ---------------------------------------------------------------------- functions as "file.py:NAME"


def find_importable_name(function: Any) -> str:
    """Return the "file.py:NAME" by which a function of an imported file can be loaded, or ""."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    name, file = getattr(function, "__qualname__", ""), getattr(module, "__file__", None)
    if module is None or module.__name__ == "__main__" or not file:
        return ""
    return f"{file}:{name}" if getattr(module, name, None) is function else ""


def make_importable(function: str | Callable[..., Any], key: str) -> str:
    """Return a "file.py:NAME" by which other processes can load the function.

    The source of a function of the main script or of a notebook is written to a temporary file, with the
    imports and constants that it uses; the file is deleted when the program ends. Raises UserError at `key`
    if the function uses anything else, or has no source.
    """
    if isinstance(function, str):
        return function
    if importable := find_importable_name(function):
        return importable
    name = getattr(function, "__name__", type(function).__name__)
    if not inspect.isfunction(function) or not name.isidentifier() or function.__closure__:
        problem = f"{name} cannot be called in another process, as it is no 'def' or has a closure"
        raise UserError(key, problem, _SAVE_FUNCTION)
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):  # entered at a prompt
        raise UserError(key, f"{name} has no source", _SAVE_FUNCTION) from None
    names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    global_names = names.intersection(function.__globals__).difference(function.__code__.co_varnames, {name})
    try:
        definitions = [_define(global_, function.__globals__[global_]) for global_ in sorted(global_names)]
    except ValueError as error:
        problem = f"{name} uses {error} of this program, and is called in another process"
        raise UserError(key, problem, _SAVE_FUNCTION) from None
    text = "".join(f"{line}\n" for line in definitions) + f"\n\n{source}"
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    file = _temporary_dir() / f"{name}_{digest}.py"
    file.write_text(text, encoding="utf-8")
    return f"{file}:{name}"


def _define(name: str, value: Any) -> str:
    """Return a line of code that imports or assigns this value. Raises ValueError if neither is possible."""
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__} as {name}"
    module, original = getattr(value, "__module__", None), getattr(value, "__name__", name)
    if module not in (None, "__main__") and getattr(sys.modules.get(module), original, None) is value:
        return f"from {module} import {original} as {name}"
    with suppress(ValueError, SyntaxError):
        if ast.literal_eval(repr(value)) == value:
            return f"{name} = {value!r}"
    raise ValueError(repr(name))


@cache
def _temporary_dir() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="posttrain-")).resolve()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def find_temporary_files(tables: Mapping[str, Any]) -> list[Path]:
    """Return the files in the tables that `make_importable` wrote, and that end with the program."""
    return [file for file in config.find_code_files(tables) if file.parent == _temporary_dir()]


def use_copies(folder: Path, tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables with each temporary file replaced by its copy in this folder, if there is one."""

    def copy_of(name: str) -> str:
        file = file_of(name) or Path()
        copy = folder.resolve() / file.name
        temporary = file.parent == _temporary_dir()
        return f"{copy}:{name.rpartition(':')[2]}" if temporary and copy.is_file() else name

    return config.rename_code(tables, copy_of, config.CALLED_CODE)
