"""A recipe in a program: the tables of a recipe file, and beside them what the program holds itself.

What can be written down is a table from the start, and is read as strictly as a file. Records, functions, an
environment or a loaded model stay objects; in the tables their names begin with "memory:".
"""

import copy
import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.api.given import (
    HOW_TO_SAVE,
    kinds_of_verifiers,
    method_table,
    named_file,
    names_memory,
    place_of,
    plain_of,
    records_of,
    rewards_of,
    table_of,
    written_files,
)
from posttrain.base.nearest import did_you_mean, elsewhere
from posttrain.base.reader import key_of
from posttrain.base.toml import dump
from posttrain.base.usercode import MEMORY
from posttrain.data import Data, InMemoryData
from posttrain.data.records import typed_columns
from posttrain.methods.table import Line
from posttrain.models.pretrained import resolve
from posttrain.recipe import config
from posttrain.recipe.document import put
from posttrain.recipe.recipe import Recipe as Settings
from posttrain.recipe.tasks import InMemoryEnv
from posttrain.types import Method, UserError
from posttrain.verifiers.combine.combined import TAKEN
from posttrain.verifiers.function import InProcessFunction

DATA = ("task.data", "task.held_out")
PLAYED, ALIKE = ("repair", "tools", "agent", "env"), ("columns", "system", "template", "bad")
"""What tasks are played with, whatever they are; and how records are read."""
SHORT = {"updates": "run.updates", "seed": "run.seed", "lr": "optim.lr"}
KEYWORDS = ("data", "held_out", "reward", "env", "tools", *SHORT, "dir", "resume", "callbacks")
TABLES = {key_of(f.name) for f in dataclasses.fields(Settings)}


class Recipe:
    """A whole run: model, method, data, who judges, and any table of a recipe file as a keyword.

    model: a path, a Hub id, a run, or (model, tokenizer) as transformers loaded them, which are copied.
    method: a name of `posttrain methods`, a dictionary of it with options over its defaults, or a method
        itself, as posttrain.method makes it.
    data, held_out: a file, a Hub id, a `datasets.Dataset`, dictionaries, or tasks; or the table [task.data].
    reward: a function (docs/verifiers.md), a verifier's name or object, the run, path or Hub id of a reward
        model, or a list of these, each alone or as (reward, weight).
    env: an object with `start` and `reply`, or 'file.py:FACTORY'.
    tools: functions that the policy may call, or 'file.py:NAME' of them (docs/agents.md).
    updates, seed, lr: run.updates, run.seed and optim.lr.
    tables: as optim={"lr": 1e-5} or sampling=posttrain.Sampling(max_new_tokens=64); async_ for [async].

    Raises UserError, with the key, for whatever cannot be used as it stands.
    """

    tables: dict[str, Any]
    """What was given, as a recipe file would have it."""
    held: dict[str, Any]
    """What of it only this program holds, by key."""

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
        self.held = {}
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
        named, line = method_table(method)
        if line is not None:
            self.held["method.name"] = line
        self.tables = {"model": self._model(model), "method": named, "task": {}, **own}
        for key, given in zip(DATA, (data, held_out), strict=True):
            if given is not None:
                self._put(key, self._data(key, given))
        if env is not None:
            self._put("task.env", self._env(env))
        if tools:
            several = tools if isinstance(tools, list | tuple) else [tools]
            self._put("task.tools", {"functions": [named_file(each, "tools") for each in several]})
        for each in rewards_of(reward):
            self._reward(*each)
        for name, value in (("updates", updates), ("seed", seed), ("lr", lr)):
            if value is not None:
                self._put(SHORT[name], plain_of(value))
        self._read()

    @classmethod
    def of(cls, tables: dict[str, Any], held: Mapping[str, Any]) -> "Recipe":
        """That of these tables, beside what of them only this program holds."""
        made = cls.__new__(cls)
        made.tables, made.held = tables, dict(held)
        made._read()
        return made

    @staticmethod
    def read(path: str | Path, overrides: Sequence[str] = ()) -> "Recipe":
        """That of a file, with "section.key=value" on top; UserError, with file and line, for a mistake."""
        return Recipe.of(config.read(Path(path).expanduser(), overrides).tables, {})

    def write(self, path: str | Path) -> None:
        """Writes it as TOML, from which `read` makes the same.

        A function of an imported file is named. UserError for what only this program holds, and how to save
        that.
        """
        tables, left = copy.deepcopy(self.tables), []
        for key, held in self.held.items():
            for name, each in held.items() if key == "verifier.function" else [("", held)]:
                place = place_of(each.call) if key == "verifier.function" else ""
                if place:
                    entry = next(e for e in tables["verifier"]["function"] if e.get("name") == name)
                    entry["function"] = place
                else:
                    left.append(f"{key}{f' {name}' if name else ''}: {HOW_TO_SAVE[key]}")
        left += [f"{file.stem}: put it into a file and give 'file.py:NAME'" for file in written_files(tables)]
        if left:
            raise UserError(str(path), f"only this program holds {'; '.join(left)}")
        Path(path).expanduser().write_text(dump(tables), encoding="utf-8")

    def replace(self, **keys: Any) -> "Recipe":
        """The recipe with other values: replace(lr=1e-5, **{"rollout.groups": 8}); None takes a key out."""
        tables = copy.deepcopy(self.tables)
        for key, value in keys.items():
            put(tables, SHORT.get(key, key), plain_of(value), key)
        return Recipe.of(tables, {k: v for k, v in self.held.items() if names_memory(tables, k)})

    def with_held_out(self, data: Any) -> "Recipe":
        """The recipe with other tasks to be evaluated on."""
        data = list(data) if isinstance(data, Iterator) else data
        made = Recipe.of(copy.deepcopy(self.tables), self.held)
        gone = names_memory(made.tables, "task.data") and "task.data" not in made.held
        task = made.tables["task"]
        read = {key: value for key, value in (task.get("data") or {}).items() if key in ALIKE}
        task.pop("held_out", None)
        made.held.pop("task.held_out", None)
        table = made._data("task.held_out", data)
        if (held := made.held.get("task.held_out")) is not None:
            fits = {*read.get("columns", {}).values()} <= held.records[0].keys()
            read = {k: v for k, v in read.items() if not held.tasks and (fits or k != "columns")}
        if made.settings.task.data is None or gone:  # held-out records stand beside others
            made.tables["task"] = {key: task[key] for key in PLAYED if key in task}
            made._put("task.data", read | made._data("task.data", data))
        made._put("task.held_out", read | table)
        made._read()
        return made

    @property
    def settings(self) -> Settings:
        """Every key with its value, defaults included."""
        return self.found.recipe

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and (self.tables, self.held) == (other.tables, other.held)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<Recipe {self.tables['method'].get('name')} of {self.tables['model'].get('path')}>"

    # ------------------------------------------------------------------ from objects to tables

    def _read(self) -> None:
        """The settings, with what is held in its places."""
        found = config.from_tables(copy.deepcopy(self.tables))
        self.plain: Settings = found.recipe
        """The same without what only the program holds, as a file of it is read."""
        self.found = dataclasses.replace(found, recipe=self._bound(found.recipe), bind=self._bound)

    def _bound(self, recipe: Settings) -> Settings:
        task, verifier = recipe.task, recipe.verifier
        for key in DATA:
            if held := self.held.get(key):
                name = key.partition(".")[2]
                said = {f.name: getattr(getattr(task, name), f.name) for f in dataclasses.fields(Data)}
                task = dataclasses.replace(task, **{name: dataclasses.replace(held, **said)})
        if "task.env" in self.held:
            factory = recipe.task.env.factory if recipe.task.env else ""
            task = dataclasses.replace(task, env=InMemoryEnv(factory=factory, env=self.held["task.env"]))
        if functions := self.held.get("verifier.function"):
            made = tuple(functions.get(each.name, each) for each in verifier.function)
            verifier = dataclasses.replace(verifier, function=made)
        recipe = dataclasses.replace(recipe, task=task, verifier=verifier)
        if "method.name" in self.held:
            recipe = dataclasses.replace(recipe, method={"name": self.held["method.name"]})
        here = self.held.keys() & {"method.name", "task.env", "verifier.function"}
        if here and recipe.async_.where in ("process", "ray"):
            problem = "samplers in other processes cannot be given functions or objects of this one"
            fix = "set it to 'thread', or put them into a file and give 'file.py:NAME'"
            raise UserError("async.place", problem, fix)
        return recipe

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
        self.held["model.path"] = pair
        dtype = str(next(pair[0].parameters()).dtype).removeprefix("torch.")
        own = {"dtype": dtype} if dtype in ("float32", "bfloat16") else {}
        return {"path": f"{MEMORY}{type(pair[0]).__name__}", **own}

    def _data(self, key: str, given: Any) -> dict[str, Any]:
        if isinstance(given, str | os.PathLike):
            return {"path": os.fspath(given)}
        if isinstance(given, Mapping) and any(hasattr(v, "column_names") for v in given.values()):
            fix = f"take one of {', '.join(map(repr, given))}"
            raise UserError(key.partition(".")[2], "it has splits", fix)
        if isinstance(given, Mapping) or (dataclasses.is_dataclass(given) and not isinstance(given, type)):
            return table_of(key, given)
        held = self.held[key] = InMemoryData.of(
            records_of(given, key.partition(".")[2]), typed_columns(given)
        )
        return {"path": held.path}

    def _env(self, given: Any) -> dict[str, Any]:
        if isinstance(given, str):
            return {"factory": given}
        if isinstance(given, Mapping):
            return table_of("task.env", given)
        self.held["task.env"] = given
        return {"factory": f"{MEMORY}{type(given).__name__}"}

    def _reward(self, given: Any, weight: float | None) -> None:
        """Puts one reward into the table of verifiers."""
        verifier, kinds = self.tables.setdefault("verifier", {}), kinds_of_verifiers()
        name = ""
        if isinstance(given, Mapping):
            verifier |= table_of("verifier", given)
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

    def _function(self, given: str | Callable[..., Any]) -> str:
        """The name under which the function's score is recorded; another one's of that name gets a number."""
        entries = self.tables["verifier"].setdefault("function", [])
        names = {entry["name"] for entry in entries} | TAKEN
        if "tools" in self.tables["task"]:  # its workers judge too, and are given no object of this program
            given = named_file(given, "reward")
        called = None if isinstance(given, str) else InProcessFunction.of(given)
        own = called.name if called else re.split("[:.]", str(given))[-1]
        name = next(n for k in range(1, 100) if (n := own if k == 1 else f"{own}_{k}") not in names)
        if called:
            called = InProcessFunction.of(called.call, name)
            self.held.setdefault("verifier.function", {})[name] = called
        entries.append({"function": called.function if called else given, "name": name})
        return name
