"""Code that the user names in a config: finding it, looking at it, and what it raises in one line.

Rewards and environments are never loaded in the process that trains: whatever they do as they are imported,
to torch or to the standard library, would be done to the training. What must be known of them is `asked` of
a process of its own (process/interpreter.py). A method, tasks and a selection are part of the training, and
are loaded in it. Functions that a program holds (docs/python.md) are in its process already, and are called
there.
"""

import ast
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Container
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from posttrain.base.name_hints import did_you_mean
from posttrain.errors import UserError

MOST_OF_A_CAUSE = 300
MEMORY = "memory:"
"""Begins the name of what only a program holds that started a run; nobody else can have it."""


def cause(error: BaseException) -> str:
    """The kind of an exception and the first line of what it says, never longer than 300 characters.

    >>> cause(KeyError("unit"))
    "KeyError: 'unit'"
    >>> cause(ValueError())
    'ValueError'
    """
    kind = type(error).__name__
    try:
        said = str(error)
    except Exception:  # a user's exception may fail to print itself
        said = ""
    first = said.strip().splitlines()[0] if said.strip() else ""
    line = (f"{kind}: {first}" if first else kind)[:MOST_OF_A_CAUSE]
    return line.encode("utf-8", "replace").decode()  # half a surrogate pair could not be printed


def refuse_memory(name: str, fix: str) -> None:
    """UserError for the name of something that only the program held which started the run."""
    if name.startswith(MEMORY):
        problem = (
            f"{name.removeprefix(MEMORY)!r} was held by the program that started the run, and is not here"
        )
        raise UserError("", problem, fix)


def signature(name: str) -> dict[str, Any]:
    """What must be known of the object called "module:attribute" to call it, as plain data.

    type: its type's name, or "class"; callable; parameters: (name, kind, has a default, as text) each, or
    None where they cannot be read. Raises UserError as `load_named` does.

    >>> signature("posttrain.base.usercode:cause")["parameters"]
    [['error', 'POSITIONAL_OR_KEYWORD', False, 'error: BaseException']]
    """
    return signature_of(load_named(name))


def signature_of(found: Any) -> dict[str, Any]:
    """The same of the object itself."""
    parameters: list[list[Any]] | None = None
    with suppress(TypeError, ValueError):
        parameters = [
            [p.name, p.kind.name, p.default is not p.empty, str(p)]
            for p in inspect.signature(found).parameters.values()
        ]
    return {
        "type": "class" if isinstance(found, type) else type(found).__name__,
        "callable": callable(found),
        "parameters": parameters,
    }


def load_edited(name: str, key: str) -> Any:
    """The same as load_named, but a file that has changed, or one that it imports, is loaded again.

    key: of the recipe, that has this name, where errors are.
    """
    file = file_of(name)
    loaded = sys.modules.get(_key(file)) if file else None
    try:
        if file and loaded and file.is_file() and vars(loaded)["STAMP"] != _stamp(file):
            del sys.modules[_key(file)]
            _forget(file, _FOLDERS)
        return _found(name)
    except UserError as error:
        raise error.at(key, keep=True) from None


def file_of(name: str) -> Path | None:
    """The file of "path/to/file.py:attribute"; None for what is no such name."""
    place, colon, attribute = name.rpartition(":")
    return Path(place).expanduser() if colon and attribute and place.endswith(".py") else None


def beside(name: str, directory: Path) -> str:
    """The name with the whole path of its file: in this directory, or else in the working one."""
    file = file_of(name)
    there = next((p for p in (directory / file, file) if p.is_file()), None) if file else None
    return f"{there.resolve()}:{name.rpartition(':')[2]}" if there else name


def with_neighbours(file: Path) -> list[Path]:
    """A file, and the files beside it that it imports, directly or through others."""
    found, left = dict[Path, None](), [file]
    while left:
        here = left.pop()
        found[here] = None
        try:
            tree = ast.parse(here.read_bytes())
        except (OSError, SyntaxError, ValueError):  # which loading it will say better
            continue
        nodes = list(ast.walk(tree))
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
        beside_it = (here.with_name(f"{name.partition('.')[0]}.py") for name in names)
        left += [path for path in beside_it if path.is_file() and path not in found]
    return list(found)


@lru_cache(maxsize=256)
def load_named(name: str) -> Any:
    """The object called "module:attribute" or "path/to/file.py:attribute".

    Modules are also looked for in the working directory, after every installed one. A file is
    loaded once, and its own directory is made importable for its neighbours. Raises UserError
    if the name has another form, or if the module or the attribute cannot be had.

    >>> load_named("math:sqrt")(9)
    3.0
    """
    return _found(name)


def _found(name: str) -> Any:
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        raise UserError(name, "names nothing", "write 'module:name' or 'path/to/file.py:name'")
    module = _file(place, name) if place.endswith(".py") else _module(place, name)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            hint = did_you_mean(part, [k for k in vars(module) if not k.startswith("_")])
            raise UserError(name, f"{place} has no {attribute!r}", hint)
        found = getattr(found, part)
    return found


def _module(place: str, name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(error.name + ".")):
            raise UserError(
                name,
                f"there is no module {place!r}",
                "it must be installed or lie in the working directory; a file is named 'file.py:name'",
            ) from None
        raise _broken(place, name, error) from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module may even call sys.exit while it is imported
        raise _broken(place, name, error) from None


def _file(place: str, name: str) -> ModuleType:
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        beside = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        fix = did_you_mean(path.name, beside) or "a path is taken from the working directory"
        raise UserError(name, f"there is no file {path}", fix)
    key = _key(path)
    if key in sys.modules:
        return sys.modules[key]
    spec = importlib.util.spec_from_file_location(key, path)
    if spec is None or spec.loader is None:
        raise UserError(name, f"{place} cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.parent)
    _forget(path, _FOLDERS - {folder})
    if folder in _FOLDERS or folder not in sys.path:
        # Behind what is installed, and before where earlier files lie: a file finds its own neighbours.
        _FOLDERS.add(folder)
        earlier = [place for place in sys.path if place in _FOLDERS and place != folder]
        sys.path[:] = [place for place in sys.path if place not in _FOLDERS] + [folder, *earlier]
    vars(module)["STAMP"] = _stamp(path)
    sys.modules[key] = module
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        del sys.modules[key]
        raise
    except BaseException as error:
        del sys.modules[key]
        raise _broken(place, name, error) from None
    return module


_FOLDERS = set[str]()
"""Where files lie that were loaded, and that were not on the path before."""


def _forget(file: Path, folders: Container[str]) -> None:
    """Unloads what a file imports from beside it, if that came from one of these folders."""
    for beside_it in with_neighbours(file)[1:]:
        loaded = getattr(sys.modules.get(beside_it.stem), "__file__", None)
        if loaded and str(Path(loaded).parent) in folders:
            del sys.modules[beside_it.stem]


def _key(file: Path) -> str:
    """The same in every process, so that objects of this module can be sent between them."""
    return f"posttrain_user_{hashlib.blake2b(str(file.resolve()).encode(), digest_size=8).hexdigest()}"


def _stamp(file: Path) -> list[tuple[int, int]]:
    return [(stat.st_mtime_ns, stat.st_size) for stat in (path.stat() for path in with_neighbours(file))]


def _broken(place: str, name: str, error: BaseException) -> UserError:
    """The error with the line of the user's own file that raised it, where there is one."""
    if isinstance(error, SyntaxError) and error.filename:
        at = f" at {Path(error.filename).name}:{error.lineno}"
    else:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
        outside = [f for f in frames if f.filename != __file__]
        at = f" at {Path(outside[-1].filename).name}:{outside[-1].lineno}" if outside else ""
    return UserError(name, f"{place} fails while it is imported{at}: {cause(error)}")
