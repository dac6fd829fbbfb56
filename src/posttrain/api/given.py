"""What a program gives, as the plain tables of a recipe file."""

import ast
import atexit
import dataclasses
import hashlib
import inspect
import os
import shutil
import sys
import tempfile
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from posttrain.base.reader import key_of, keys_at
from posttrain.base.usercode import MEMORY, file_of
from posttrain.methods.table import Line, like, line
from posttrain.recipe import config
from posttrain.recipe.recipe import Recipe
from posttrain.recipe.verifier import VERIFIERS, VerifierChoice
from posttrain.types import UserError
from posttrain.verifiers.function import Function

_OF_PEFT = {
    "r": "rank",
    "lora_alpha": "alpha",
    "target_modules": "targets",
    "use_rslora": "rslora",
    "use_dora": "dora",
    "init_lora_weights": "init",
}
"""What [lora] calls the fields of peft's LoraConfig."""
_UNTRAINED = {"peft_type", "peft_version", "task_type", "inference_mode", "base_model_name_or_path"}
"""Fields of it from which no number of an adapter follows."""

HOW_TO_SAVE = {
    "model.path": "save it, model.save_pretrained(DIR) and tokenizer.save_pretrained(DIR), and give DIR",
    "task.data": "save them, as by datasets' data.to_json(FILE), and give FILE",
    "task.held_out": "save them, as by datasets' data.to_json(FILE), and give FILE",
    "method.name": "put it into a file and name it as 'file.py:NAME'",
    "task.env": "put its class into a file and give 'file.py:CLASS'",
    "verifier.function": "put it into a file and give 'file.py:NAME'",
}
"""What only a program holds, by its key, and what to do before it is written to a file."""


def method_table(method: Any) -> tuple[dict[str, Any], Line | None]:
    """The table [method] of a name, a dictionary, or a method itself, which is then given too."""
    if isinstance(method, str):
        return {"name": method}, None
    if isinstance(method, Mapping):
        own = [k for k, v in method.items() if callable(v) or (k == "name" and not isinstance(v, str))]
        if own:
            fix = "posttrain.method('grpo', credit=..., surrogate=...) takes functions and methods"
            raise UserError(f"method.{own[0]}", "a table holds names and numbers", fix)
        return table_of("method", method), None
    held = line(method)
    return {"name": f"{MEMORY}{like(held)}"}, held


def rewards_of(reward: Any) -> list[tuple[Any, float | None]]:
    """Each reward with its weight, or None where it has none."""
    if reward is None:
        return []
    given = [reward] if not isinstance(reward, list | tuple) or _weighted(reward) else list(reward)
    return [(each[0], each[1]) if _weighted(each) else (each, None) for each in given]


def _weighted(each: Any) -> bool:
    return isinstance(each, tuple) and len(each) == 2 and isinstance(each[1], int | float)


def kinds_of_verifiers() -> dict[type, str]:
    """Which verifier of a recipe a class is the configuration of."""
    hints = typing.get_type_hints(VerifierChoice)
    named = {cls: name for name in VERIFIERS for cls in typing.get_args(hints[name]) if isinstance(cls, type)}
    return {cls: name for cls, name in named.items() if cls not in (Function, type(None))}


def table_of(key: str, given: Any) -> dict[str, Any]:
    """A dictionary, or a configuration's fields that are not at their defaults, as plain data."""
    if hasattr(given, "peft_type"):
        usual = type(given)()
        own = {k: v for k, v in vars(given).items() if v != getattr(usual, k) and k not in _UNTRAINED}
        own = {"r": given.r, "lora_alpha": given.lora_alpha, **own}
        given = {_OF_PEFT.get(name, name): value for name, value in own.items()}
    if dataclasses.is_dataclass(given) and not isinstance(given, type):
        blank = {
            f.name: f.default_factory() for f in dataclasses.fields(given) if callable(f.default_factory)
        }
        given = {
            key_of(f.name): getattr(given, f.name)
            for f in dataclasses.fields(given)
            if getattr(given, f.name) != blank.get(f.name, f.default)
        }
    if not isinstance(given, Mapping):
        keys = ", ".join(keys_at(Recipe, key.split(".")))
        fix = f"write {key}={{...}} with some of {keys}"
        raise UserError(key_of(key), f"{given!r:.60} is no table", fix)
    return {str(name): plain_of(value) for name, value in given.items() if value is not None}


def plain_of(value: Any) -> Any:
    """A value as TOML can have it, as far as it can."""
    if isinstance(value, Mapping) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        return table_of("", value)
    if isinstance(value, list | tuple | set | frozenset):
        several = value if isinstance(value, list | tuple) else sorted(value, key=str)
        return [plain_of(each) for each in several]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item") and not isinstance(value, str):  # of numpy or torch
        return value.item()
    return value


def names_memory(tables: Mapping[str, Any], key: str) -> bool:
    """Whether a key of the tables still names what a program holds."""
    here: Any = tables
    for part in key.split("."):
        here = here.get(part) if isinstance(here, Mapping) else None
    return MEMORY in repr(here)


def place_of(call: Any) -> str:
    """The "file.py:NAME" of a function that is named in an imported file; else nothing."""
    module = sys.modules.get(getattr(call, "__module__", None) or "")
    name, file = getattr(call, "__qualname__", ""), getattr(module, "__file__", None)
    if module is None or module.__name__ == "__main__" or not file:
        return ""
    return f"{file}:{name}" if getattr(module, name, None) is call else ""


def records_of(given: Any, where: str) -> Iterable[Any]:
    """The rows of a table of pandas, polars or pyarrow, or what was given; UserError if it has none."""
    if hasattr(given, "to_dicts") or hasattr(given, "to_pylist"):  # polars', pyarrow's
        given = given.to_dicts() if hasattr(given, "to_dicts") else given.to_pylist()
    elif hasattr(given, "to_dict") and hasattr(given, "columns"):  # pandas'
        given = given.to_dict("records")
    if isinstance(given, Iterable):
        return given
    problem = f"a {type(given).__name__} holds no records"
    raise UserError(where, problem, "give a path, or dictionaries")


def named_file(given: Any, where: str) -> str:
    """The "file.py:NAME" of a function, by which other processes load it.

    A function of the program's own file or of a notebook is written, with what it names of modules and plain
    data, into a file that lies in a temporary directory until the program ends. UserError for what has no
    such source.
    """
    if isinstance(given, str):
        return given
    if place := place_of(given):
        return place
    name = getattr(given, "__name__", type(given).__name__)
    fix = "put it into a file and give 'file.py:NAME'"
    if not inspect.isfunction(given) or not name.isidentifier() or given.__closure__:
        problem = f"{name} cannot be called in another process, as it is no 'def' or has a closure"
        raise UserError(where, problem, fix)
    try:
        source = textwrap.dedent(inspect.getsource(given))
    except (OSError, TypeError):  # typed at a prompt
        raise UserError(where, f"{name} has no source", fix) from None
    used = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    own = used.intersection(given.__globals__).difference(given.__code__.co_varnames, {name})
    try:
        heads = [_definition(each, given.__globals__[each]) for each in sorted(own)]
    except ValueError as error:
        problem = f"{name} uses {error} of this program, and is called in another process"
        raise UserError(where, problem, fix) from None
    text = "".join(f"{head}\n" for head in heads) + f"\n\n{source}"
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    file = _written() / f"{name}_{digest}.py"
    file.write_text(text, encoding="utf-8")
    return f"{file}:{name}"


def _definition(name: str, value: Any) -> str:
    """The line that makes this value of a module, or plain data, anew; ValueError for anything else."""
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
    """Of the files that the tables name those that `named_file` wrote, which end with the program."""
    return [file for file in config.named_files(tables) if file.parent == _written()]


def named_in(folder: Path, tables: Mapping[str, Any]) -> dict[str, Any]:
    """The tables with those files named by their copies in this folder, where it has them."""

    def copied(name: str) -> str:
        file = file_of(name) or Path()
        copy = folder.resolve() / file.name
        return f"{copy}:{name.rpartition(':')[2]}" if file.parent == _written() and copy.is_file() else name

    return config.renamed(tables, copied, config.CALLED)


def sources_of(held: Mapping[str, Any]) -> dict[str, str]:
    """By name the source of functions and classes of a program's own, where there is any."""
    own: dict[str, Any] = {name: each.call for name, each in held.get("verifier.function", {}).items()}
    if line := held.get("method.name"):
        choices = {f.name: getattr(line.method, f.name) for f in dataclasses.fields(line.method)}
        own |= {"method": type(line.method), **{k: each for k, each in choices.items() if callable(each)}}
    if "task.env" in held:
        own["env"] = held["task.env"] if callable(held["task.env"]) else type(held["task.env"])
    found = {}
    for name, each in own.items():
        with suppress(OSError, TypeError):  # typed at a prompt, or no Python
            if not str(getattr(each, "__module__", "")).startswith("posttrain."):
                found[name] = inspect.getsource(getattr(each, "func", each))
    return found
