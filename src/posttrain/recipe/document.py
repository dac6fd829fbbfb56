"""Read a TOML file into tables, and apply `key=value` overrides to them."""

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.base.name_hints import did_you_mean
from posttrain.base.usercode import beside, file_of
from posttrain.data.records import check_regular
from posttrain.models.checkpoint import split_run
from posttrain.recipe.catalogue import catalogue
from posttrain.types import UserError

MOST_BYTES = 1 << 24
DIRECTORY = "Working directory"
"""Line of a run's config.toml: the directory of its relative paths of data, code, templates and rubrics."""
TRAINING_CODE = (
    ("method",),
    ("rollout", "select"),
    ("task", "own", "function"),
    ("eval", "task", "own", "function"),
    ("curriculum", "kind"),
)
"""Keys that may name the user's code that the training process runs; a run keeps a copy in code/."""
CALLED_CODE = (
    ("task", "tools", "functions"),
    ("verifier", "function", "function"),
    ("task", "verifier", "function", "function"),
    ("eval", "task", "verifier", "function", "function"),
    ("eval", "task", "tools", "functions"),
)
"""Keys that may name the user's functions that other processes call. Those that come from a Python program
are in code/, too."""
DATA_FILES = tuple(
    (*table, name, "path")
    for table in (("task",), ("eval", "task"))
    for name in ("data", "held_out", "text", "held_out_text")
)
"""Keys that name files of records or text."""
TEMPLATE_FILE = ("model", "chat_template")
"""The key that may name a file of a chat template."""
PLAYING_CODE = (("task", "env", "factory"), ("task", "agent", "function"), ("eval", "task", "env", "factory"))
"""Keys that name the user's code that plays tasks."""
JUDGE_FILES = tuple(
    (*table, "verifier", "judge", key)
    for table in ((), ("task",), ("eval", "task"))
    for key in ("rubric", "constitution")
)
"""Keys that may name files of a judge."""


def is_run(path: Path) -> bool:
    """Return whether a path is the directory of a run, or a checkpoint of one, as RUN@best or RUN@UPDATE."""
    run, _ = split_run(path)
    return run.is_dir() and (run / "config.toml").exists()


def read_toml(path: Path) -> tuple[dict[str, Any], str]:
    """Return the tables and the text of a TOML file. Raises UserError, with the line, if it is not valid."""
    text = _text(path)
    try:
        return tomllib.loads(text), text
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"\(at line (\d+), column \d+\)", str(error))
        key = f"{path}:{line[1]}" if line else f"{path}:{text.count(chr(10)) + 1}"
        raise UserError(key, f"is not TOML: {str(error).split(' (at')[0]}") from None
    except ValueError:  # Python's limit on the digits of a number
        raise UserError(str(path), "holds a number of thousands of digits") from None
    except RecursionError:
        raise UserError(str(path), "is nested too deeply") from None


def _text(path: Path) -> str:
    if path.is_dir():
        raise UserError(str(path), "is a directory", "name the .toml file in it")
    check_regular(path, str(path))
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UserError(str(path), "is larger than any recipe")
        return path.read_text(encoding="utf-8-sig")  # some editors write a byte order mark
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n") + 1
        byte = f"byte 0x{error.object[error.start]:02x}"
        raise UserError(f"{path}:{number}", f"is not UTF-8 ({byte})", "save it as UTF-8") from None
    except FileNotFoundError:
        files = [file.name for file in path.parent.glob("*.toml")] if path.parent.exists() else []
        near = did_you_mean(path.name, files) or did_you_mean(path.as_posix(), catalogue())
        fix = near or "posttrain recipes lists those that come with posttrain"
        raise UserError(str(path), "there is no such recipe", fix) from None
    except (OSError, ValueError) as error:
        raise UserError(str(path), f"cannot be read: {error}") from None


def parse_override(text: str, place: str) -> tuple[str, Any]:
    """Return (key, value) of "key=value". The value is TOML, or else text; None if it is empty.

    place: what a UserError names, such as "--set key=value".
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UserError(place, "sets nothing", "write section.key=value")
    if not value.strip():
        return key.strip(), None
    try:
        return key.strip(), tomllib.loads(f"x = {value.strip()}")["x"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()
    except ValueError:
        raise UserError(f"{place[:60]}...", "is a number of thousands of digits") from None


def put(tables: dict[str, Any], key: str, value: Any, place: str) -> None:
    """Set a dotted key of the tables, or remove it if the value is None.

    Raises UserError at `place` if the key lies in a value, or is to be removed and not set.
    """
    *path, last = key.split(".")
    table: Any = tables
    if value is None and not has(tables, key.split(".")):
        raise UserError(place, f"cannot remove {key!r}: it is not set")
    for number, name in enumerate(path):
        before = table
        table = _named(table, name) if isinstance(table, list) else table.setdefault(name, {})
        if table is None:
            is_name = not any(isinstance(item, Mapping) and name in item for item in before)
            rest = [*path[number + is_name :], last]
            raise _no_table(before, path[:number], ".".join(rest), place)
        if not isinstance(table, dict | list):
            raise UserError(place, f"{name!r} is a value, not a table")
    if isinstance(table, list):
        raise _no_table(table, path, last, place)
    if value is None:
        del table[last]
    else:
        table[last] = value


def _no_table(tables: list[Any], path: Sequence[str], rest: str, place: str) -> UserError:
    """Return the error for a key that names none of several tables.

    path: the keys of the array of tables. rest: the keys within one.
    """
    names = [str(t.get("name", n)) if isinstance(t, Mapping) else str(n) for n, t in enumerate(tables)]
    array = ".".join(path)
    if not names:
        return UserError(place, f"[[{array}]] has no tables", "write them into the recipe")
    return UserError(
        place, f"[[{array}]] has the tables {', '.join(names)}", f"name one, as {array}.{names[0]}.{rest}"
    )


def _named(tables: list[Any], name: str) -> Any:
    """Return the table of a list that has this name, or else this number; None without one."""
    table = next((t for t in tables if isinstance(t, Mapping) and t.get("name") == name), None)
    if table is None and name.isdecimal() and int(name) < len(tables):
        return tables[int(name)]
    return table


def has(tables: Any, loc: Sequence[str]) -> bool:
    """Return whether the tables hold a key at this path."""
    for name in loc:
        if isinstance(tables, list):
            tables = _named(tables, name)
            continue
        if not isinstance(tables, Mapping) or name not in tables:
            return False
        tables = tables[name]
    return True


# ---------------------------------------------------------------------- names of files


def with_nearby_files(tables: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the tables with whole paths of data, code and a judge's files that lie in the recipe's folder.

    Other relative paths are of the working directory, as those of overrides are.
    """

    def nearby(name: str) -> str:
        return str((folder / name).resolve()) if _is_nearby(Path(name), folder) else name

    def nearby_code(name: str) -> str:
        file = file_of(name)
        return beside(name, folder) if file is not None and _is_nearby(file, folder) else name

    def nearby_of(suffix: str) -> Callable[[str], str]:
        return lambda text: nearby(text) if text.endswith(suffix) else text

    tables = _rename_texts(tables, nearby, DATA_FILES)
    tables = _rename_texts(tables, nearby_of(".jinja"), [TEMPLATE_FILE])
    tables = _rename_texts(tables, nearby_of(".toml"), JUDGE_FILES)
    return rename_code(tables, nearby_code, CALLED_CODE + PLAYING_CODE)


def recorded_directory(text: str) -> Path | None:
    """Return the working directory of the run that keeps this recipe; None for a recipe of the user.

    >>> recorded_directory('[model]\\npath = "m"\\n\\n# Working directory: /home/me')
    PosixPath('/home/me')
    """
    match = re.search(rf"(?m)^# {DIRECTORY}: (.+)$", text)
    return Path(match[1]) if match else None


def _is_nearby(file: Path, folder: Path) -> bool:
    """Return whether a relative path is a file of this folder, and not one of the working directory too."""
    if file.is_absolute() or not (folder / file).exists():
        return False
    return not (file.exists() and file.samefile(folder / file))


def rename_code(
    tables: Mapping[str, Any], rename: Callable[[str], str], keys: Sequence[Sequence[str]] = TRAINING_CODE
) -> dict[str, Any]:
    """Return the tables with `rename` applied to each "file.py:name" under these keys.

    >>> rename_code({"method": {"name": "grpo", "credit": "mine.py:best"}}, lambda name: f"code/{name}")
    {'method': {'name': 'grpo', 'credit': 'code/mine.py:best'}}
    """
    return _rename_texts(tables, lambda text: rename(text) if file_of(text) else text, keys)


def _rename_texts(
    tables: Mapping[str, Any], rename: Callable[[str], str], keys: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Return the tables with `rename` applied to each text under these keys."""
    changed = dict(tables)
    for key in keys:
        table = changed.get(key[0])
        if isinstance(table, Mapping | list):
            changed[key[0]] = _rename_text(table, key[1:], rename)
    return changed


def _rename_text(value: Any, key: Sequence[str], rename: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        selected = key[:1] or value
        return {k: _rename_text(v, key[1:], rename) if k in selected else v for k, v in value.items()}
    if isinstance(value, list):
        return [_rename_text(item, key, rename) for item in value]
    return rename(value) if isinstance(value, str) and not key else value
