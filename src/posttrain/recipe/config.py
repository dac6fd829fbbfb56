"""From TOML to a recipe, with every mistake named by file and line.

reader.py reads the tables; what nothing would read, as the recipe's other choices are, is found here.
"""

import dataclasses
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from posttrain.base.nearest import did_you_mean
from posttrain.base.reader import Where as Where
from posttrain.base.reader import key_of
from posttrain.base.reader import parsed as parsed
from posttrain.base.usercode import beside, file_of
from posttrain.data.records import check_regular
from posttrain.methods.build import strangers
from posttrain.methods.table import label, line
from posttrain.recipe.recipe import OFFLINE_ONLY, ONLINE_ONLY, Recipe, unread
from posttrain.recipe.verifier import VERIFIERS, VerifierChoice
from posttrain.report.terminal import err
from posttrain.types import UserError
from posttrain.verifiers.protocol import Verifier

MOST_BYTES = 1 << 24
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
RENAMED = {"psi": "estimator"}
"""Keys of [method] as earlier versions called them, which are read for a release."""


@dataclasses.dataclass(frozen=True)
class LoadedRecipe:
    """A recipe as it was read."""

    recipe: Recipe
    tables: dict[str, Any]
    """The same as plain tables, overrides included."""
    where: "Where"
    bind: Callable[[Recipe], Recipe] = lambda recipe: recipe
    """Puts what only a program holds into a recipe that was read from tables."""

    @contextmanager
    def located(self) -> Iterator[None]:
        """Within it an error names the file and line of its key, as `locate` finds them."""
        try:
            yield
        except UserError as error:
            raise self.locate(error) from None

    def locate(self, error: UserError) -> UserError:
        """The error with the file and line of the key that it names, if it names one of the recipe's."""
        key = error.where.split(".")
        if error.where and key[0] in {key_of(f.name) for f in dataclasses.fields(Recipe)}:
            return UserError(error.what, where=self.where(key), mend=error.mend)
        return error


def read(path: Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """The recipe of a file, with `a.b=value` overrides on top.

    Raises UserError, with file and line or the override, for anything that cannot be used as it stands.
    """
    tables, text = document(path)
    if "stage" in tables:
        raise UserError("it is a pipeline", where=str(path), mend=f"posttrain pipeline {path} runs it")
    given: dict[str, str] = {}
    for each in overrides:
        key, value = override(each)
        put(tables, key, value, each)
        given[key] = f"--set {each}"
    other = next((found for key, found in NO_RECIPES.items() if key in tables), None)
    if other and not {"model", "method", "task"} & tables.keys():
        raise UserError(f"it is no recipe but {other[0]}", where=str(path), mend=other[1])
    tables = renamed(tables, lambda name: beside(name, path.parent))
    tables = renamed(tables, lambda n: beside(n, path.parent) if n.startswith("code/") else n, CALLED)
    return from_tables(tables, Where(path, text, given))


def from_tables(tables: dict[str, Any], where: Where | None = None) -> LoadedRecipe:
    """The recipe of these tables, read as strictly as a file; UserError at a key, or where that stands."""
    where, tables = where or Where(), _present(tables)
    found = LoadedRecipe(parsed(Recipe, tables, where, also=_of_methods), tables, where)
    with found.located():
        _check_read(found)
    return found


def _present(tables: dict[str, Any]) -> dict[str, Any]:
    """The tables with the names of today; a line for each that an earlier version called otherwise."""
    method = tables.get("method")
    if not isinstance(method, Mapping) or not RENAMED.keys() & method.keys():
        return tables
    for key in RENAMED.keys() & method.keys():
        err.print(f"method.{key} is called method.{RENAMED[key]} now")
    return tables | {"method": {RENAMED.get(key, key): value for key, value in method.items()}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Judging:
    """A recipe's verifiers and nothing else."""

    verifier: VerifierChoice


def read_verifier(chosen: str, overrides: Sequence[str] = ()) -> Verifier:
    """A verifier by its name, with `option=value` overrides; or that of a recipe; or a module:function.

    Raises UserError for an unknown name or option, and for what the verifier itself refuses.
    """
    path, text, tables = Path(chosen).expanduser(), "", {}
    if chosen.endswith(".toml"):
        found, text = document(path)
        tables = {"verifier": found.get("verifier", {})}
        prefix = "verifier"
    elif chosen in VERIFIERS:
        tables, prefix = {"verifier": {chosen: {}}}, f"verifier.{chosen}"
    elif ":" in chosen:
        tables, prefix = {"verifier": {"function": {"function": chosen}}}, "verifier.function"
    else:
        others = f"there are {', '.join(VERIFIERS)}; or name a recipe or a function"
        raise UserError(f"there is no verifier {chosen!r}", mend=did_you_mean(chosen, VERIFIERS) or others)
    given: dict[str, str] = {}
    for each in overrides:
        key, value = override(each)
        key = key if key.startswith("verifier.") else f"{prefix}.{key}"
        put(tables, key, value, each)
        given[key] = f"--set {each}"
    verifier: Verifier | None = parsed(_Judging, tables, Where(path, text, given)).verifier.build()
    if verifier is None:
        raise UserError("it names no verifier", where=chosen, mend="add for example [verifier.number]")
    return verifier


def document(path: Path) -> tuple[dict[str, Any], str]:
    """The tables of a TOML file, and its text; UserError, with the line, if it cannot be read."""
    text = _text(path)
    try:
        return tomllib.loads(text), text
    except tomllib.TOMLDecodeError as error:
        at = re.search(r"\(at line (\d+), column \d+\)", str(error))
        where = f"{path}:{at[1]}" if at else f"{path}:{text.count(chr(10)) + 1}"
        raise UserError(f"is not TOML: {str(error).split(' (at')[0]}", where=where) from None
    except ValueError:  # which Python says of numbers alone
        raise UserError("holds a number of thousands of digits", where=str(path)) from None
    except RecursionError:
        raise UserError("is nested too deeply", where=str(path)) from None


def _text(path: Path) -> str:
    if path.is_dir():
        raise UserError("is a directory", where=str(path), mend="name the .toml file in it")
    check_regular(path, str(path))
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UserError("is larger than any recipe", where=str(path))
        return path.read_text(encoding="utf-8-sig")  # some editors begin with a byte order mark
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n") + 1
        found = f"byte 0x{error.object[error.start]:02x}"
        raise UserError(
            f"is not UTF-8 ({found})", where=f"{path}:{number}", mend="save it as UTF-8"
        ) from None
    except FileNotFoundError:
        near = did_you_mean(
            path.name, [p.name for p in path.parent.glob("*.toml")] if path.parent.exists() else []
        )
        raise UserError("there is no such recipe", where=str(path), mend=near) from None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot be read: {error}", where=str(path)) from None


def override(text: str) -> tuple[str, Any]:
    """(key, value); no value, as in "task.data.split=", takes the key out."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UserError(f"{text!r} sets nothing", where="--set", mend="write section.key=value")
    if not value.strip():
        return key.strip(), None
    try:
        return key.strip(), tomllib.loads(f"x = {value.strip()}")["x"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()
    except ValueError:
        raise UserError("is a number of thousands of digits", where=f"--set {key.strip()}") from None


def put(tables: dict[str, Any], key: str, value: Any, override: str) -> None:
    """Sets a key of the tables, or takes it out if the value is None; UserError if neither can be done."""
    *path, last = key.split(".")
    here: Any = tables
    if value is None and not _has(tables, key.split(".")):
        raise UserError(f"takes out nothing: there is no {key!r}", where=f"--set {override}")
    for name in path:
        here = here.setdefault(name, {})
        if not isinstance(here, dict):
            raise UserError(f"{name!r} is a value, not a table", where=f"--set {override}")
    if value is None:
        del here[last]
    else:
        here[last] = value


def _has(tables: Any, loc: Sequence[str]) -> bool:
    for name in loc:
        if not isinstance(tables, Mapping) or name not in tables:
            return False
        tables = tables[name]
    return True


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


def _check_read(found: LoadedRecipe) -> None:
    """UserError for a table or a key that nothing would read, as the other choices are."""
    name = found.recipe.method.get("name")
    if not isinstance(name, str):
        raise UserError("the method's name is missing", where="method", mend='name = "grpo"')
    loop = line(name).loop
    for table in ONLINE_ONLY if loop == "offline" else OFFLINE_ONLY:
        if table in found.tables:
            raise UserError(
                f"[{table}] is never read: {label(name)} runs in the {loop} loop",
                where=table,
                mend="leave the table out",
            )
    for key, why in unread(found.recipe, loop, line(name).learns).items():
        if _has(found.tables, key.split(".")):
            raise UserError(f"is never read: {why}", where=key, mend="leave it out")
