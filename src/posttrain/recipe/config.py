"""From TOML to a recipe, with every mistake named by file and line.

reader.py reads the tables, and rules.py says which keys nothing would read as the others are.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from posttrain.base.reader import Where as Where
from posttrain.base.reader import key_of
from posttrain.base.reader import parsed as parsed
from posttrain.base.usercode import beside, file_of
from posttrain.errors import OVERRIDE
from posttrain.methods.build import strangers
from posttrain.methods.table import line
from posttrain.recipe.document import document as document
from posttrain.recipe.document import override as override
from posttrain.recipe.document import put as put
from posttrain.recipe.recipe import Recipe
from posttrain.recipe.rules import Context, check
from posttrain.types import UserError

OWN = (("method",), ("rollout", "select"), ("task", "own", "function"), ("curriculum", "kind"))
"""Where a recipe may name code of one's own that the training itself runs."""
CALLED = (("task", "tools", "functions"), ("verifier", "function", "function"))
"""Where it may name functions that other processes call; those of a program are in code/ too."""
NO_RECIPES = {
    "verifier": ("a verifier alone", "posttrain verify, prefer and revise read it"),
    "prompt": ("a rubric", "name it as verifier.judge.rubric"),
    "principle": ("a constitution", "name it as verifier.judge.constitution"),
}
"""What a file without a model, a method and a task is, by a key that it has, and where it is read."""


@dataclasses.dataclass(frozen=True)
class LoadedRecipe:
    """A recipe as it was read; UserError for a table or a key that nothing would read."""

    recipe: Recipe
    tables: dict[str, Any]
    """The same as plain tables, overrides included."""
    where: "Where"

    def __post_init__(self) -> None:
        with self.located():
            check(Context(self.recipe, line(self.recipe.method["name"]), self.tables), unread=True)

    @contextmanager
    def located(self) -> Iterator[None]:
        """Within it an error names the file and line of its key, as `locate` finds them."""
        try:
            yield
        except UserError as error:
            raise self.locate(error) from None

    def locate(self, error: UserError) -> UserError:
        """The error with the file and line of the key that it names, if it names one of the recipe's."""
        key = error.key.split(".")
        if error.key and key[0] in {key_of(f.name) for f in dataclasses.fields(Recipe)}:
            return error.at(self.where(key))
        return error


def read(
    path: Path, overrides: Sequence[str] = (), place: Callable[[str], str] = lambda text: f"{OVERRIDE}{text}"
) -> LoadedRecipe:
    """Read the recipe of a file, with `a.b=value` overrides on top.

    Raises UserError for anything that cannot be used as it stands, at its file and line, or at an override,
    which `place` names.
    """
    tables, content = document(path)
    if "stage" in tables:
        raise UserError(str(path), "it is a pipeline", f"posttrain train {path} runs it")
    given: dict[str, str] = {}
    for text in overrides:
        key, value = override(text, place(text))
        put(tables, key, value, place(text))
        given[key] = place(text)
    other = next((found for key, found in NO_RECIPES.items() if key in tables), None)
    if other and not {"model", "method", "task"} & tables.keys():
        raise UserError(str(path), f"it is no recipe but {other[0]}", other[1])
    tables = renamed(tables, lambda name: beside(name, path.parent))
    tables = renamed(tables, lambda n: beside(n, path.parent) if n.startswith("code/") else n, CALLED)
    return from_tables(tables, Where(path, content, given))


def from_tables(tables: dict[str, Any], where: Where | None = None) -> LoadedRecipe:
    """The recipe of these tables, read as strictly as a file; UserError at a key, or where that stands."""
    where = where or Where()
    recipe = parsed(Recipe, tables, where, also=_of_methods)
    if not recipe.method.get("name"):
        raise UserError(where(["method"]), "the method's name is missing", 'name = "grpo"')
    return LoadedRecipe(recipe, tables, where)


def renamed(
    tables: Mapping[str, Any], change: Callable[[str], str], places: Sequence[Sequence[str]] = OWN
) -> dict[str, Any]:
    """The tables with each name of code of one's own changed that stands in these places.

    >>> renamed({"method": {"name": "grpo", "credit": "mine.py:best"}}, lambda name: f"code/{name}")
    {'method': {'name': 'grpo', 'credit': 'code/mine.py:best'}}
    """
    made = dict(tables)
    for place in places:
        table = made.get(place[0])
        if isinstance(table, Mapping):
            made[place[0]] = _renamed(table, place[1:], change)
    return made


def _renamed(value: Any, place: Sequence[str], change: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        chosen = place[:1] or value
        return {k: _renamed(v, place[1:], change) if k in chosen else v for k, v in value.items()}
    if isinstance(value, list):
        return [_renamed(each, place, change) for each in value]
    return change(value) if isinstance(value, str) and not place and file_of(value) else value


def own_files(tables: Mapping[str, Any]) -> list[Path]:
    """The files of one's own that the training itself runs, each once."""
    names: list[str] = []
    renamed(tables, lambda name: names.append(name) or name)  # type: ignore[func-returns-value]
    return list(dict.fromkeys(file for name in names if (file := file_of(name))))


def named_files(value: Any) -> list[Path]:
    """The files of all functions that a recipe names, each once."""
    if isinstance(value, Mapping | list | tuple):
        parts = value.values() if isinstance(value, Mapping) else value
        return list(dict.fromkeys(file for part in parts for file in named_files(part)))
    file = file_of(value) if isinstance(value, str) else None
    return [file.resolve()] if file else []


def _of_methods(tables: Mapping[str, Any]) -> Mapping[tuple[str, ...], str]:
    """Options that the method would not read, with what each may have meant."""
    options = dict(tables.get("method", {}))
    with suppress(UserError):  # a choice that is wrong as well comes next
        return {("method", k): hint for k, hint in strangers(options.pop("name", ""), options).items()}
    return {}
