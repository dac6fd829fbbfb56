"""A recipe in a program: the tables of a recipe file, with the program's own objects in them.

Whatever TOML can hold becomes a table at once, and is read as strictly as a file. Records, functions, an
environment or a model object are values in the tables.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.base.kinds import by_class
from posttrain.base.name_hints import did_you_mean, translate_name
from posttrain.base.table_reader import key_of, keys_at
from posttrain.base.toml import dump
from posttrain.base.usercode import MEMORY, how_to_name_function
from posttrain.data import Records
from posttrain.data.records import typed_columns
from posttrain.errors import REWARD
from posttrain.methods.table import Line, line
from posttrain.models.pretrained import resolve
from posttrain.recipe import config
from posttrain.recipe.document import put
from posttrain.recipe.objects import copy_tables, iter_objects, make_importable, make_portable
from posttrain.recipe.recipe import LoadedModel
from posttrain.recipe.recipe import Recipe as Settings
from posttrain.types import Method, UserError
from posttrain.verifiers.combine.combined import RESERVED_NAMES
from posttrain.verifiers.function import Function

DATA = ("task.data", "task.held_out")
PLAY_KEYS, READING_KEYS = ("repair", "tools", "agent", "env"), ("columns", "system", "template", "bad")
"""Keys of [task] that hold for any tasks; and keys of [task.data] that say how records are read."""
SHORT = {"updates": "run.updates", "seed": "run.seed", "lr": "optim.lr"}
KEYWORDS = ("data", "held_out", "reward", "env", "tools", *SHORT, "dir", "resume", "callbacks")
TABLES = {key_of(f.name) for f in dataclasses.fields(Settings)}
_LORA_KEYS = {
    "r": "rank",
    "lora_alpha": "alpha",
    "target_modules": "targets",
    "use_rslora": "rslora",
    "use_dora": "dora",
    "init_lora_weights": "init",
}
"""The key of [lora] for a field of peft's LoraConfig."""
_IGNORED = {"peft_type", "peft_version", "task_type", "inference_mode", "base_model_name_or_path"}
"""Fields of a LoraConfig that no weight of an adapter depends on."""


class Recipe:
    """The recipe of a run: model, method, data, reward, and any table of a recipe file as a keyword.

    model: a path, a Hub id, a run, or (model, tokenizer) as transformers loaded them, which are copied.
    method: a name of `posttrain methods`, a dictionary of its name and options, or an object that
        posttrain.method makes.
    data, held_out: a file, a Hub id, a `datasets.Dataset`, dictionaries, or tasks; the table [task.data]; or
        the object of a family of tasks.
    reward: a function (docs/verifiers.md), a verifier's name or object, the run, path or Hub id of a reward
        model, or a list of these, each alone or as (reward, weight).
    env: an object with `start` and `reply`, or 'file.py:FACTORY'.
    tools: functions that the policy may call, or their names 'file.py:NAME' (docs/agents.md).
    updates, seed, lr: run.updates, run.seed and optim.lr.
    tables: as optim={"lr": 1e-5} or sampling=posttrain.Sampling(max_new_tokens=64); async_ for [async]; a
        list as task=[{"name": "sums", ...}, ...] is a mixture.

    Raises UserError, with the key, for a value that cannot be used.
    """

    tables: dict[str, Any]
    """The tables of a recipe file, with the program's objects as values."""

    def __init__(
        self,
        model: Any,
        *,
        method: str | Mapping[str, Any] | Line | Method = "grpo",
        data: Any = None,
        held_out: Any = None,
        reward: Any = None,
        env: Any = None,
        tools: Any = None,
        updates: int | None = None,
        seed: int | None = None,
        lr: float | None = None,
        **tables: Any,
    ) -> None:
        for name in tables:
            near = "" if key_of(name) in TABLES or translate_name(name) else did_you_mean(name, KEYWORDS)
            if near:
                raise UserError(name, f"unknown keyword {name!r}", near)
        # An unknown table is left to the reader, which refuses it by the key's name in Python.
        rest = {
            key_of(name): [_source_table(source) for source in table]
            if name == "task" and isinstance(table, list | tuple)
            else to_table(name, table)
            if key_of(name) in TABLES or isinstance(table, Mapping)
            else {}
            for name, table in tables.items()
        }
        self.tables = {"model": _model_table(model), "method": _method_table(method), "task": {}, **rest}
        for key, value in zip(DATA, (data, held_out), strict=True):
            if family := by_class("tasks").get(type(value)):
                self._put(f"task.{family}", to_table(f"task.{family}", value))
            elif value is not None:
                self._put(key, _data_table(key, value))
        if env is not None:
            self._put("task.env", _env_table(env))
        if tools:
            several = tools if isinstance(tools, list | tuple) else [tools]
            self._put("task.tools", {"functions": [make_importable(tool, "tools") for tool in several]})
        for weighted in _rewards(reward):
            self._add_reward(*weighted)
        for name, value in (("updates", updates), ("seed", seed), ("lr", lr)):
            if value is not None:
                self._put(SHORT[name], to_plain(value))
        self._load()

    @classmethod
    def of(cls, tables: dict[str, Any]) -> "Recipe":
        """Return the recipe of these tables."""
        recipe = cls.__new__(cls)
        recipe.tables = tables
        recipe._load()
        return recipe

    @staticmethod
    def read(path: str | Path, overrides: Sequence[str] = ()) -> "Recipe":
        """Read a recipe file and apply "section.key=value" overrides; raise UserError, at file and line."""
        return Recipe.of(config.read(Path(path).expanduser(), overrides).tables)

    def write(self, path: str | Path) -> None:
        """Write the recipe as TOML, from which `read` makes the same.

        A function of an imported file is written as its name. Raises UserError for an object that only this
        program has, with a way to save it.
        """
        Path(path).expanduser().write_text(dump(make_portable(self.tables, str(path))), encoding="utf-8")

    def replace(self, **keys: Any) -> "Recipe":
        """Return a changed recipe: replace(lr=1e-5, **{"rollout.groups": 8}); None removes a key."""
        tables = copy_tables(self.tables)
        for key, value in keys.items():
            put(tables, SHORT.get(key, key), to_plain(value), key)
        return Recipe.of(tables)

    def with_held_out(self, data: Any) -> "Recipe":
        """Return a recipe that is evaluated on these tasks."""
        data = list(data) if isinstance(data, Iterator) else data
        tables = copy_tables(self.tables)
        if isinstance(tables["task"], list):
            fix = "give each source a held_out of its own"
            raise UserError("task", "it has several sources, and data could be of any", fix)
        task, path = tables["task"], (tables["task"].get("data") or {}).get("path", "")
        reading = {key: value for key, value in (task.get("data") or {}).items() if key in READING_KEYS}
        task.pop("held_out", None)
        table = _data_table("task.held_out", data)
        if isinstance(records := table.get("path"), Records):
            fits = {*reading.get("columns", {}).values()} <= records.records[0].keys()
            reading = {k: v for k, v in reading.items() if not records.tasks and (fits or k != "columns")}
        if "data" not in task or (str(path).startswith(MEMORY) and isinstance(path, str)):
            # [task.held_out] is read only together with [task.data].
            task = {key: task[key] for key in PLAY_KEYS if key in task} | {"data": reading | table}
        tables["task"] = task | {"held_out": reading | table}
        return Recipe.of(tables)

    @property
    def settings(self) -> Settings:
        """The value of every key, defaults included."""
        return self.loaded.recipe

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and self.tables == other.tables

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<Recipe {self.tables['method'].get('name')} of {self.tables['model'].get('path')}>"

    # ------------------------------------------------------------------ from objects to tables

    def _load(self) -> None:
        """Read the tables as strictly as a file's."""
        self.loaded = config.from_tables(copy_tables(self.tables))
        keys = {"method.name", "task.env", "verifier.function.function"}
        objects = keys.intersection(dict(iter_objects(self.tables)))
        if objects and self.settings.async_.where in ("process", "ray"):
            problem = "samplers in other processes cannot be given functions or objects of this one"
            fix = "set it to 'thread', or put them into a file and give 'file.py:NAME'"
            raise UserError("async.place", problem, fix)

    def _put(self, key: str, value: Any) -> None:
        """Set a key, or merge a table into the one that is there."""
        table, _, name = key.partition(".")
        here = self.tables.setdefault(table, {})
        here[name] = here[name] | value if isinstance(here.get(name), dict) else value

    def _add_reward(self, reward: Any, weight: float | None) -> None:
        """Put one reward into the table [verifier]."""
        verifier, kinds = self.tables.setdefault("verifier", {}), by_class("verifiers")
        name = ""
        if isinstance(reward, Mapping):
            table = to_table("verifier", reward)
            entries = table.pop("function", [])
            verifier |= table
            for entry in entries if isinstance(entries, list) else [entries]:
                if isinstance(entry, Mapping) and callable(entry.get("function")):
                    self._add_function(entry["function"], entry.get("name", ""))
                else:
                    verifier.setdefault("function", []).append(entry)
        elif isinstance(reward, str | os.PathLike) and os.fspath(reward).endswith(".py"):
            problem = f"{os.fspath(reward)} is a file, and one of its functions judges"
            raise UserError(str(REWARD), problem, how_to_name_function(Path(reward)))
        elif isinstance(reward, str) and not {":", "/"}.intersection(reward):
            name = reward
            verifier.setdefault(reward, {})  # the reader refuses an unknown name
        elif isinstance(reward, os.PathLike) or (isinstance(reward, str) and ":" not in reward):
            name = "model"
            paths = verifier.setdefault("model", {}).setdefault("paths", [])
            paths.append(str(resolve(os.fspath(reward)) if os.path.isdir(reward) else reward))
        elif type(reward) in kinds:
            name = getattr(reward, "name", kinds[type(reward)])
            verifier[kinds[type(reward)]] = to_table("verifier", reward)
        elif isinstance(reward, str) or callable(reward):
            name = self._add_function(reward)
        else:
            fix = "give a function, a verifier's name, or a run, alone or as (reward, number)"
            raise UserError("reward", f"a {type(reward).__name__} judges nothing", fix)
        if weight is not None:
            if not name:
                raise UserError("reward", "a table has weights of its own", "{'weights': ...}")
            verifier.setdefault("weights", {})[name] = float(weight)

    def _add_function(self, function: str | Callable[..., Any], name: str = "") -> str:
        """Add a function to [verifier.function], and return its name, with a number if that is taken."""
        entries = self.tables["verifier"].setdefault("function", [])
        names = {entry.get("name") for entry in entries} | RESERVED_NAMES
        sources = self.tables["task"] if isinstance(self.tables["task"], list) else [self.tables["task"]]
        if any("tools" in source for source in sources):  # workers of the tools judge too, in other processes
            function = make_importable(function, "reward")
        # Function checks the parameters; the reader does so for one in a file.
        wrapper = None if isinstance(function, str) else Function(function=function, name=name)
        default = wrapper.name if wrapper else re.split("[:.]", str(function))[-1]
        name = next(n for k in range(1, 100) if (n := default if k == 1 else f"{default}_{k}") not in names)
        entries.append({"function": function, "name": name})
        return name


# ---------------------------------------------------------------------- from keywords to tables


def _model_table(model: Any) -> dict[str, Any]:
    """Return the table [model] for a path, a run, a dictionary, or (model, tokenizer)."""
    if isinstance(model, Mapping):
        others = to_table("model", {k: v for k, v in model.items() if k != "path"})
        return _model_table(model.get("path", "")) | others
    if isinstance(model, Recipe) or (isinstance(model, str | Path) and str(model).endswith(".toml")):
        raise UserError("model", "a recipe is not a model", "posttrain.Session(RECIPE).run()")
    if isinstance(model, str | os.PathLike):
        return {"path": os.fspath(model)}
    pair = model if isinstance(model, tuple) else (model, None)
    if len(pair) != 2 or not hasattr(pair[0], "named_parameters") or hasattr(pair[0], "peft_config"):
        problem = f"a {type(pair[0]).__name__} is not a model that can be trained"
        fix = "give a path, a Hub id, a run, or (model, tokenizer)"
        if hasattr(pair[0], "peft_config"):
            fix = "give (model.merge_and_unload(), tokenizer), and lora={'rank': ...} for a new adapter"
        raise UserError("model", problem, fix)
    if pair[1] is None:
        raise UserError("model", "the model has no tokenizer", "(model, tokenizer)")
    dtype = str(next(pair[0].parameters()).dtype).removeprefix("torch.")
    precision = {"dtype": dtype} if dtype in ("bfloat16", "float32", "float64") else {}
    return {"path": f"{MEMORY}{type(pair[0]).__name__}", "loaded": LoadedModel(*pair), **precision}


def _data_table(key: str, data: Any) -> dict[str, Any]:
    """Return the table [task.data] or [task.held_out] for a path, a table, a configuration or records."""
    if isinstance(data, str | os.PathLike):
        return {"path": os.fspath(data)}
    if isinstance(data, Mapping) and any(hasattr(v, "column_names") for v in data.values()):
        fix = f"take one of {', '.join(map(repr, data))}"
        raise UserError(key.partition(".")[2], "it has splits", fix)
    if isinstance(data, Mapping) or (dataclasses.is_dataclass(data) and not isinstance(data, type)):
        return to_table(key, data)
    return {"path": Records.of(_records(data, key.partition(".")[2]), typed_columns(data))}


def _env_table(env: Any) -> Any:
    if isinstance(env, str):
        return {"factory": env}
    return to_table("task.env", env) if isinstance(env, Mapping) else env


def _method_table(method: Any) -> dict[str, Any]:
    """Return the table [method] for a name, a dictionary, or a method object."""
    if isinstance(method, str):
        return {"name": method}
    if isinstance(method, Mapping):
        objects = [k for k, v in method.items() if callable(v) or (k == "name" and not isinstance(v, str))]
        if objects:
            fix = "posttrain.method('grpo', credit=..., surrogate=...) takes functions and methods"
            raise UserError(f"method.{objects[0]}", "a table holds names and numbers", fix)
        return to_table("method", method)
    return {"name": line(method)}


def _rewards(reward: Any) -> list[tuple[Any, float | None]]:
    """Return each reward with its weight, or with None."""
    if reward is None:
        return []
    rewards = [reward] if not isinstance(reward, list | tuple) or _is_weighted(reward) else list(reward)
    return [pair if _is_weighted(pair) else (pair, None) for pair in rewards]


def _is_weighted(reward: Any) -> bool:
    return isinstance(reward, tuple) and len(reward) == 2 and isinstance(reward[1], int | float)


def _records(data: Any, where: str) -> Iterable[Any]:
    """Return the rows of a pandas, polars or pyarrow table, or the iterable itself; else raise UserError."""
    if hasattr(data, "to_dicts") or hasattr(data, "to_pylist"):  # polars', pyarrow's
        data = data.to_dicts() if hasattr(data, "to_dicts") else data.to_pylist()
    elif hasattr(data, "to_dict") and hasattr(data, "columns"):  # pandas'
        data = data.to_dict("records")
    if isinstance(data, Iterable):
        return data
    raise UserError(where, f"a {type(data).__name__} holds no records", "give a path, or dictionaries")


def _source_table(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table of one of several sources of tasks, whose data may be objects."""
    data = {key: _data_table(f"task.{key}", source[key]) for key in ("data", "held_out") if key in source}
    return to_table("task", {key: value for key, value in source.items() if key not in data}) | data


def to_table(key: str, table: Any) -> dict[str, Any]:
    """Return a dictionary, or the fields of a configuration that are not at their defaults, as plain data."""
    if hasattr(table, "peft_type"):
        defaults = type(table)()
        options = {k: v for k, v in vars(table).items() if v != getattr(defaults, k) and k not in _IGNORED}
        options = {"r": table.r, "lora_alpha": table.lora_alpha, **options}
        table = {_LORA_KEYS.get(name, name): value for name, value in options.items()}
    if dataclasses.is_dataclass(table) and not isinstance(table, type):
        blank = {
            f.name: f.default_factory() for f in dataclasses.fields(table) if callable(f.default_factory)
        }
        table = {
            key_of(f.name): getattr(table, f.name)
            for f in dataclasses.fields(table)
            if getattr(table, f.name) != blank.get(f.name, f.default)
        }
    if not isinstance(table, Mapping):
        keys = ", ".join(keys_at(Settings, key.split(".")))
        fix = f"write {key}={{...}} with some of {keys}"
        raise UserError(key_of(key), f"{table!r:.60} is not a table", fix)
    return {str(name): to_plain(value) for name, value in table.items() if value is not None}


def to_plain(value: Any) -> Any:
    """Return a value as a type that TOML has, where there is one."""
    if isinstance(value, Mapping) or (dataclasses.is_dataclass(value) and not isinstance(value, type | Line)):
        return to_table("", value)
    if isinstance(value, list | tuple | set | frozenset):
        several = value if isinstance(value, list | tuple) else sorted(value, key=str)
        return [to_plain(item) for item in several]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item") and not isinstance(value, str):  # of numpy or torch
        return value.item()
    return value
