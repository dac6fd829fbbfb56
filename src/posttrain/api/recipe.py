"""A recipe in a program: the tables of a recipe file, with the program's own objects in them.

What can be written down is a table from the start, and is read as strictly as a file. Records, functions, an
environment or a loaded model stand in the tables as the objects that they are.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.base.kinds import by_class
from posttrain.base.name_hints import did_you_mean, elsewhere
from posttrain.base.table_reader import key_of, keys_at
from posttrain.base.toml import dump
from posttrain.base.usercode import MEMORY
from posttrain.data import Records
from posttrain.data.records import typed_columns
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
PLAYED, ALIKE = ("repair", "tools", "agent", "env"), ("columns", "system", "template", "bad")
"""What tasks are played with, whatever they are; and how records are read."""
SHORT = {"updates": "run.updates", "seed": "run.seed", "lr": "optim.lr"}
KEYWORDS = ("data", "held_out", "reward", "env", "tools", *SHORT, "dir", "resume", "callbacks")
TABLES = {key_of(f.name) for f in dataclasses.fields(Settings)}
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


class Recipe:
    """A whole run: model, method, data, who judges, and any table of a recipe file as a keyword.

    model: a path, a Hub id, a run, or (model, tokenizer) as transformers loaded them, which are copied.
    method: a name of `posttrain methods`, a dictionary of it with options over its defaults, or a method
        itself, as posttrain.method makes it.
    data, held_out: a file, a Hub id, a `datasets.Dataset`, dictionaries, or tasks; or the table [task.data].
        data may be a family of tasks too, as an object.
    reward: a function (docs/verifiers.md), a verifier's name or object, the run, path or Hub id of a reward
        model, or a list of these, each alone or as (reward, weight).
    env: an object with `start` and `reply`, or 'file.py:FACTORY'.
    tools: functions that the policy may call, or 'file.py:NAME' of them (docs/agents.md).
    updates, seed, lr: run.updates, run.seed and optim.lr.
    tables: as optim={"lr": 1e-5} or sampling=posttrain.Sampling(max_new_tokens=64); async_ for [async].

    Raises UserError, with the key, for whatever cannot be used as it stands.
    """

    tables: dict[str, Any]
    """What was given, as a recipe file would have it, with the program's objects in their places."""

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
            near = "" if key_of(name) in TABLES or elsewhere(name) else did_you_mean(name, KEYWORDS)
            if near:
                raise UserError(name, f"unknown keyword {name!r}", near)
        # What is no table of a recipe is for the reader to refuse: it knows what the key is called here.
        own = {
            key_of(name): table_of(name, table)
            if key_of(name) in TABLES or isinstance(table, Mapping)
            else {}
            for name, table in tables.items()
        }
        self.tables = {"model": self._model(model), "method": _method(method), "task": {}, **own}
        for key, given in zip(DATA, (data, held_out), strict=True):
            if family := by_class("tasks").get(type(given)):
                self._put(f"task.{family}", table_of(f"task.{family}", given))
            elif given is not None:
                self._put(key, self._data(key, given))
        if env is not None:
            self._put("task.env", self._env(env))
        if tools:
            several = tools if isinstance(tools, list | tuple) else [tools]
            self._put("task.tools", {"functions": [make_importable(each, "tools") for each in several]})
        for each in _rewards(reward):
            self._reward(*each)
        for name, value in (("updates", updates), ("seed", seed), ("lr", lr)):
            if value is not None:
                self._put(SHORT[name], plain_of(value))
        self._read()

    @classmethod
    def of(cls, tables: dict[str, Any]) -> "Recipe":
        """Return that of these tables."""
        made = cls.__new__(cls)
        made.tables = tables
        made._read()
        return made

    @staticmethod
    def read(path: str | Path, overrides: Sequence[str] = ()) -> "Recipe":
        """That of a file, with "section.key=value" on top; UserError, with file and line, for a mistake."""
        return Recipe.of(config.read(Path(path).expanduser(), overrides).tables)

    def write(self, path: str | Path) -> None:
        """Writes it as TOML, from which `read` makes the same.

        A function of an imported file is named. UserError for what only this program holds, and how to save
        that.
        """
        Path(path).expanduser().write_text(dump(make_portable(self.tables, str(path))), encoding="utf-8")

    def replace(self, **keys: Any) -> "Recipe":
        """The recipe with other values: replace(lr=1e-5, **{"rollout.groups": 8}); None takes a key out."""
        tables = copy_tables(self.tables)
        for key, value in keys.items():
            put(tables, SHORT.get(key, key), plain_of(value), key)
        return Recipe.of(tables)

    def with_held_out(self, data: Any) -> "Recipe":
        """The recipe with other tasks to be evaluated on."""
        data = list(data) if isinstance(data, Iterator) else data
        tables = copy_tables(self.tables)
        task, path = tables["task"], (tables["task"].get("data") or {}).get("path", "")
        read = {key: value for key, value in (task.get("data") or {}).items() if key in ALIKE}
        task.pop("held_out", None)
        table = self._data("task.held_out", data)
        if isinstance(records := table.get("path"), Records):
            fits = {*read.get("columns", {}).values()} <= records.records[0].keys()
            read = {k: v for k, v in read.items() if not records.tasks and (fits or k != "columns")}
        if "data" not in task or (str(path).startswith(MEMORY) and isinstance(path, str)):
            # Held-out records stand beside others.
            task = {key: task[key] for key in PLAYED if key in task} | {"data": read | table}
        tables["task"] = task | {"held_out": read | table}
        return Recipe.of(tables)

    @property
    def settings(self) -> Settings:
        """Every key with its value, defaults included."""
        return self.found.recipe

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and self.tables == other.tables

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<Recipe {self.tables['method'].get('name')} of {self.tables['model'].get('path')}>"

    # ------------------------------------------------------------------ from objects to tables

    def _read(self) -> None:
        """Read the tables as strictly as those of a file."""
        self.found = config.from_tables(copy_tables(self.tables))
        kinds = {"method.name", "task.env", "verifier.function.function"}
        here = kinds.intersection(dict(iter_objects(self.tables)))
        if here and self.settings.async_.where in ("process", "ray"):
            problem = "samplers in other processes cannot be given functions or objects of this one"
            fix = "set it to 'thread', or put them into a file and give 'file.py:NAME'"
            raise UserError("async.place", problem, fix)

    def _put(self, key: str, value: Any) -> None:
        table, _, name = key.partition(".")
        here = self.tables.setdefault(table, {})
        here[name] = here[name] | value if isinstance(here.get(name), dict) else value

    def _model(self, given: Any) -> dict[str, Any]:
        if isinstance(given, Mapping):
            beside = table_of("model", {k: v for k, v in given.items() if k != "path"})
            return self._model(given.get("path", "")) | beside
        if isinstance(given, Recipe) or (isinstance(given, str | Path) and str(given).endswith(".toml")):
            raise UserError("model", "a recipe is no model", "posttrain.Session(RECIPE).run()")
        if isinstance(given, str | os.PathLike):
            return {"path": os.fspath(given)}
        pair = given if isinstance(given, tuple) else (given, None)
        if len(pair) != 2 or not hasattr(pair[0], "named_parameters") or hasattr(pair[0], "peft_config"):
            problem = f"a {type(pair[0]).__name__} is no model that could be trained"
            fix = "give a path, a Hub id, a run, or (model, tokenizer)"
            if hasattr(pair[0], "peft_config"):
                fix = "give (model.merge_and_unload(), tokenizer), and lora={'rank': ...} for a new adapter"
            raise UserError("model", problem, fix)
        if pair[1] is None:
            raise UserError("model", "the model has no tokenizer beside it", "(model, tokenizer)")
        dtype = str(next(pair[0].parameters()).dtype).removeprefix("torch.")
        own = {"dtype": dtype} if dtype in ("float32", "bfloat16") else {}
        return {"path": f"{MEMORY}{type(pair[0]).__name__}", "loaded": LoadedModel(*pair), **own}

    def _data(self, key: str, given: Any) -> dict[str, Any]:
        if isinstance(given, str | os.PathLike):
            return {"path": os.fspath(given)}
        if isinstance(given, Mapping) and any(hasattr(v, "column_names") for v in given.values()):
            fix = f"take one of {', '.join(map(repr, given))}"
            raise UserError(key.partition(".")[2], "it has splits", fix)
        if isinstance(given, Mapping) or (dataclasses.is_dataclass(given) and not isinstance(given, type)):
            return table_of(key, given)
        return {"path": Records.of(_records(given, key.partition(".")[2]), typed_columns(given))}

    def _env(self, given: Any) -> Any:
        if isinstance(given, str):
            return {"factory": given}
        return table_of("task.env", given) if isinstance(given, Mapping) else given

    def _reward(self, given: Any, weight: float | None) -> None:
        """Puts one reward into the table of verifiers."""
        verifier, kinds = self.tables.setdefault("verifier", {}), by_class("verifiers")
        name = ""
        if isinstance(given, Mapping):
            table = table_of("verifier", given)
            entries = table.pop("function", [])
            verifier |= table
            for entry in entries if isinstance(entries, list) else [entries]:
                if isinstance(entry, Mapping) and callable(entry.get("function")):
                    self._function(entry["function"], entry.get("name", ""))
                else:
                    verifier.setdefault("function", []).append(entry)
        elif isinstance(given, str) and not {":", "/"}.intersection(given):
            name = given
            verifier.setdefault(given, {})  # the reader knows which there are
        elif isinstance(given, os.PathLike) or (isinstance(given, str) and ":" not in given):
            name = "model"
            paths = verifier.setdefault("model", {}).setdefault("paths", [])
            paths.append(str(resolve(os.fspath(given)) if os.path.isdir(given) else given))
        elif type(given) in kinds:
            name = getattr(given, "name", kinds[type(given)])
            verifier[kinds[type(given)]] = table_of("verifier", given)
        elif isinstance(given, str) or callable(given):
            name = self._function(given)
        else:
            fix = "give a function, a verifier's name, or a run, alone or as (reward, number)"
            raise UserError("reward", f"a {type(given).__name__} judges nothing", fix)
        if weight is not None:
            if not name:
                raise UserError("reward", "a table has weights of its own", "{'weights': ...}")
            verifier.setdefault("weights", {})[name] = float(weight)

    def _function(self, given: str | Callable[..., Any], name: str = "") -> str:
        """The name under which the function's score is recorded; another one's of that name gets a number."""
        entries = self.tables["verifier"].setdefault("function", [])
        names = {entry.get("name") for entry in entries} | RESERVED_NAMES
        if "tools" in self.tables["task"]:  # its workers judge too, and are given no object of this program
            given = make_importable(given, "reward")
        # A function's parameters are looked at; one in a file is loaded by the reader.
        called = None if isinstance(given, str) else Function(function=given, name=name)
        own = called.name if called else re.split("[:.]", str(given))[-1]
        name = next(n for k in range(1, 100) if (n := own if k == 1 else f"{own}_{k}") not in names)
        entries.append({"function": given, "name": name})
        return name


# ---------------------------------------------------------------------- from keywords to tables


def _method(method: Any) -> dict[str, Any]:
    """The table [method] of a name, a dictionary, or a method itself."""
    if isinstance(method, str):
        return {"name": method}
    if isinstance(method, Mapping):
        own = [k for k, v in method.items() if callable(v) or (k == "name" and not isinstance(v, str))]
        if own:
            fix = "posttrain.method('grpo', credit=..., surrogate=...) takes functions and methods"
            raise UserError(f"method.{own[0]}", "a table holds names and numbers", fix)
        return table_of("method", method)
    return {"name": line(method)}


def _rewards(reward: Any) -> list[tuple[Any, float | None]]:
    """Each reward with its weight, or None where it has none."""
    if reward is None:
        return []
    given = [reward] if not isinstance(reward, list | tuple) or _weighted(reward) else list(reward)
    return [(each[0], each[1]) if _weighted(each) else (each, None) for each in given]


def _weighted(each: Any) -> bool:
    return isinstance(each, tuple) and len(each) == 2 and isinstance(each[1], int | float)


def _records(given: Any, where: str) -> Iterable[Any]:
    """The rows of a table of pandas, polars or pyarrow, or what was given; UserError if it has none."""
    if hasattr(given, "to_dicts") or hasattr(given, "to_pylist"):  # polars', pyarrow's
        given = given.to_dicts() if hasattr(given, "to_dicts") else given.to_pylist()
    elif hasattr(given, "to_dict") and hasattr(given, "columns"):  # pandas'
        given = given.to_dict("records")
    if isinstance(given, Iterable):
        return given
    raise UserError(where, f"a {type(given).__name__} holds no records", "give a path, or dictionaries")


def table_of(key: str, given: Any) -> dict[str, Any]:
    """Return a dictionary, or a configuration's fields that are not at their defaults, as plain data."""
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
        keys = ", ".join(keys_at(Settings, key.split(".")))
        fix = f"write {key}={{...}} with some of {keys}"
        raise UserError(key_of(key), f"{given!r:.60} is no table", fix)
    return {str(name): plain_of(value) for name, value in given.items() if value is not None}


def plain_of(value: Any) -> Any:
    """Return a value as TOML can have it, as far as it can."""
    if isinstance(value, Mapping) or (dataclasses.is_dataclass(value) and not isinstance(value, type | Line)):
        return table_of("", value)
    if isinstance(value, list | tuple | set | frozenset):
        several = value if isinstance(value, list | tuple) else sorted(value, key=str)
        return [plain_of(each) for each in several]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item") and not isinstance(value, str):  # of numpy or torch
        return value.item()
    return value
