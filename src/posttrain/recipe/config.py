"""Read a recipe from TOML, and name every mistake by file and line.

base/table_reader.py turns the tables into objects; rules.py refuses keys that no component reads under the
recipe's other settings.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from posttrain.base.table_reader import Where as Where
from posttrain.base.table_reader import key_of
from posttrain.base.table_reader import parse as parse
from posttrain.base.usercode import beside, file_of
from posttrain.errors import OVERRIDE
from posttrain.methods.build import unread_options
from posttrain.methods.table import line
from posttrain.recipe.catalogue import find_recipe
from posttrain.recipe.document import CALLED_CODE as CALLED_CODE
from posttrain.recipe.document import TRAINING_CODE as TRAINING_CODE
from posttrain.recipe.document import parse_override as parse_override
from posttrain.recipe.document import put as put
from posttrain.recipe.document import read_toml as read_toml
from posttrain.recipe.document import recorded_directory, with_nearby_files
from posttrain.recipe.document import rename_code as rename_code
from posttrain.recipe.recipe import Recipe
from posttrain.recipe.rule import Context
from posttrain.recipe.rules import check
from posttrain.types import UserError

OTHER_FILES = {
    "verifier": ("a verifier alone", "posttrain verify, prefer and revise read it"),
    "prompt": ("a rubric", "name it as verifier.judge.rubric"),
    "principle": ("a constitution", "name it as verifier.judge.constitution"),
}
"""By a key of a file without model, method and task: what that file is, and where it is read instead."""


@dataclasses.dataclass(frozen=True)
class LoadedRecipe:
    """A recipe with the tables that it was read from.

    Raises UserError for a table or a key that no component would read.
    """

    recipe: Recipe
    tables: dict[str, Any]
    """The tables of the file, overrides included; from Python, with objects as values."""
    where: "Where"
    """Finds the file and line of a key."""

    def __post_init__(self) -> None:
        with self.located():
            table_line, tasks = line(self.recipe.method["name"]), self.tables.get("task")
            tables = tasks if isinstance(tasks, list | tuple) else [tasks]
            for number, table in enumerate(tables):
                with in_source(number, len(tables)):
                    recipe = self.recipe.take_source(number)
                    keys = {**self.tables, "task": table}
                    check(Context(recipe, table_line, keys, sources=self.recipe.task), unread=True)

    @contextmanager
    def located(self) -> Iterator[None]:
        """Add file and line, by `locate`, to a UserError that is raised inside the with block."""
        try:
            yield
        except UserError as error:
            raise self.locate(error) from None

    def locate(self, error: UserError) -> UserError:
        """Return the error at the file and line of its key, or unchanged if that is not a key of a recipe."""
        key = error.key.split(".")
        if error.key and key[0] in {key_of(f.name) for f in dataclasses.fields(Recipe)}:
            return error.at(self.where(key))
        return error


@contextmanager
def in_source(number: int, count: int, table: str = "task") -> Iterator[None]:
    """Add the number of one of several [[task]] tables to the key of a UserError in the with block.

    table: the array that it belongs to, if that is not [[task]].
    """
    try:
        yield
    except UserError as error:
        first, _, rest = error.key.partition(".")
        rest = "verifier" if error.key == "verifier" else rest if first == "task" else ""
        if (count == 1 and table == "task") or (error.key and not rest):
            raise
        raise error.at(f"{table}.{number}.{rest}".rstrip(".")) from None


def read(
    path: Path, overrides: Sequence[str] = (), place: Callable[[str], str] = lambda text: f"{OVERRIDE}{text}"
) -> LoadedRecipe:
    """Read a recipe file and apply `a.b=value` overrides.

    place: returns the name of an override in errors. Raises UserError for the first mistake, at its file and
    line or at its override.
    """
    path = find_recipe(path)
    tables, text = read_toml(path)
    if "stage" in tables:
        raise UserError(str(path), "it is a pipeline", f"posttrain train {path} runs it")
    tables = with_nearby_files(tables, path.parent)
    if directory := recorded_directory(text):
        tables = with_nearby_files(tables, directory)
    places = apply_overrides(tables, overrides, place)
    other = next((file for key, file in OTHER_FILES.items() if key in tables), None)
    if other and not {"model", "method", "task"} & tables.keys():
        raise UserError(str(path), f"it is no recipe but {other[0]}", other[1])
    tables = rename_code(tables, lambda name: beside(name, path.parent))
    # Only the recipe that a run keeps names functions in code/, relative to itself.
    tables = rename_code(
        tables, lambda name: beside(name, path.parent) if name.startswith("code/") else name, CALLED_CODE
    )
    return from_tables(tables, Where(path, text, places))


def apply_overrides(
    tables: dict[str, Any],
    overrides: Sequence[str],
    place: Callable[[str], str] = lambda text: f"{OVERRIDE}{text}",
) -> dict[str, str]:
    """Set the keys of `a.b=value` overrides in the tables; return the name of each override by its key."""
    places: dict[str, str] = {}
    for assignment in overrides:
        key, value = parse_override(assignment, place(assignment))
        put(tables, key, value, place(assignment))
        places[key] = place(assignment)
    return places


def from_tables(tables: dict[str, Any], where: Where | None = None) -> LoadedRecipe:
    """Read a recipe from tables, as strictly as from a file. Raises UserError at the place of a mistake."""
    where = where or Where()
    recipe = parse(Recipe, tables, where, more_unread=_unread_method_options)
    if not recipe.method.get("name"):
        raise UserError(where(["method"]), "the method's name is missing", 'name = "grpo"')
    return LoadedRecipe(recipe, tables, where)


def find_training_files(tables: Mapping[str, Any]) -> list[Path]:
    """Return the user's files that the training process runs, each once."""
    names: list[str] = []
    rename_code(tables, lambda name: names.append(name) or name)  # type: ignore[func-returns-value]
    return list(dict.fromkeys(file for name in names if (file := file_of(name))))


def find_code_files(value: Any) -> list[Path]:
    """Return the file of each "file.py:name" anywhere in the tables, each once."""
    if isinstance(value, Mapping | list | tuple):
        parts = value.values() if isinstance(value, Mapping) else value
        return list(dict.fromkeys(file for part in parts for file in find_code_files(part)))
    file = file_of(value) if isinstance(value, str) else None
    return [file.resolve()] if file else []


def _unread_method_options(tables: Mapping[str, Any]) -> Mapping[tuple[str, ...], str]:
    """Return the options that the method does not read, each with the name that was probably meant."""
    options = dict(tables.get("method", {}))
    with suppress(UserError):  # a wrong value of another option is reported when the method is built
        return {("method", k): hint for k, hint in unread_options(options.pop("name", ""), options).items()}
    return {}
