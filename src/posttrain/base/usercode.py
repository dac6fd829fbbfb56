"""Load code that the user names in a recipe, inspect it, and describe its exceptions in one line.

Rewards and environments are never loaded in the process that trains: their imports could change torch or the
standard library there. Their signatures are read by another process (process/interpreter.py). A method, tasks
and a selection are part of the training and are loaded in its process. Functions that a program passes as
objects (docs/python.md) are in its process already, and are called there.
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
"""Characters of an exception that are logged."""
MEMORY = "memory:"
"""Prefix of names of objects that exist only in the program that started the run."""


def cause(error: BaseException) -> str:
    """Return the type of an exception and the first line of its text, at most 300 characters.

    >>> cause(KeyError("unit"))
    "KeyError: 'unit'"
    >>> cause(ValueError())
    'ValueError'
    """
    kind = type(error).__name__
    try:
        text = str(error)
    except Exception:  # a user's exception may fail to print itself
        text = ""
    first = text.strip().splitlines()[0] if text.strip() else ""
    line = (f"{kind}: {first}" if first else kind)[:MOST_OF_A_CAUSE]
    return line.encode("utf-8", "replace").decode()  # half a surrogate pair could not be printed


def refuse_memory(name: str, fix: str) -> None:
    """Raise UserError if a name is of an object in the memory of the program that started the run."""
    if name.startswith(MEMORY):
        problem = f"{name.removeprefix(MEMORY)!r} was an object of the program that started the run"
        raise UserError("", problem, fix)


def signature(name: str) -> dict[str, Any]:
    """Return the type and the parameters of the object called "module:attribute", as plain data.

    type: the name of its type, or "class". callable: a bool. parameters: (name, kind, has a default, source
    text) each, or None if Python cannot read them. Raises UserError as `load_named` does.

    >>> signature("posttrain.base.usercode:cause")["parameters"]
    [['error', 'POSITIONAL_OR_KEYWORD', False, 'error: BaseException']]
    """
    return signature_of(load_named(name))


def signature_of(value: Any) -> dict[str, Any]:
    """Return the same as `signature` for the object itself."""
    parameters: list[list[Any]] | None = None
    with suppress(TypeError, ValueError):
        parameters = [
            [p.name, p.kind.name, p.default is not p.empty, str(p)]
            for p in inspect.signature(value).parameters.values()
        ]
    return {
        "type": "class" if isinstance(value, type) else type(value).__name__,
        "callable": callable(value),
        "parameters": parameters,
    }


def load_edited(name: str, key: str) -> Any:
    """Load as `load_named` does, but again if the file, or one that it imports, has changed.

    key: the key of the recipe that has this name, for errors.
    """
    file = file_of(name)
    loaded = sys.modules.get(_module_name(file)) if file else None
    try:
        if file and loaded and file.is_file() and vars(loaded)["STAMP"] != _stamp(file):
            del sys.modules[_module_name(file)]
            _unload_neighbours(file, _FOLDERS)
        return _load(name)
    except UserError as error:
        raise error.at(key, keep=True) from None


def file_of(name: str) -> Path | None:
    """Return the file of "path/to/file.py:attribute"; None for a name of another form."""
    place, colon, attribute = name.rpartition(":")
    return Path(place).expanduser() if colon and attribute and place.endswith(".py") else None


def how_to_name_function(file: Path) -> str:
    """Return a fix for a name without its function: the functions of the file, or file.py:NAME."""
    try:
        body = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        body = []
    functions = [n.name for n in body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    names = [name for name in functions if not name.startswith("_")] or ["NAME"]
    return f"name the function: {' or '.join(f'{file}:{name}' for name in names[:5])}"


def beside(name: str, directory: Path) -> str:
    """Return the name with an absolute path: of the file in `directory`, or else in the working directory."""
    file = file_of(name)
    there = next((p for p in (directory / file, file) if p.is_file()), None) if file else None
    return f"{there.resolve()}:{name.rpartition(':')[2]}" if there else name


def imported_files(file: Path) -> list[Path]:
    """Return a file and the files in its directory that it imports, directly or indirectly."""
    files, pending = dict[Path, None](), [file]
    while pending:
        here = pending.pop()
        files[here] = None
        try:
            tree = ast.parse(here.read_bytes())
        except (OSError, SyntaxError, ValueError):  # loading the file reports this with its place
            continue
        nodes = list(ast.walk(tree))
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
        neighbours = (here.with_name(f"{name.partition('.')[0]}.py") for name in names)
        pending += [path for path in neighbours if path.is_file() and path not in files]
    return list(files)


@lru_cache(maxsize=256)
def load_named(name: str) -> Any:
    """Return the object called "module:attribute" or "path/to/file.py:attribute".

    Modules are searched in the working directory, too, after all installed ones. A file is loaded once, and
    can import the files in its directory. Raises UserError if the name has another form, or if the module or
    the attribute does not exist.

    >>> load_named("math:sqrt")(9)
    3.0
    """
    return _load(name)


def _load(name: str) -> Any:
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        raise UserError(name, "names nothing", "write 'module:name' or 'path/to/file.py:name'")
    module = _load_file(place, name) if place.endswith(".py") else _load_module(place, name)
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            hint = did_you_mean(part, [k for k in vars(module) if not k.startswith("_")])
            raise UserError(name, f"{place} has no {attribute!r}", hint)
        value = getattr(value, part)
    return value


def _load_module(place: str, name: str) -> ModuleType:
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
        raise _import_error(place, name, error) from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module may even call sys.exit while it is imported
        raise _import_error(place, name, error) from None


def _load_file(place: str, name: str) -> ModuleType:
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        beside = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        fix = (
            did_you_mean(path.name, beside)
            or "a path is relative to the working directory, or to the recipe's"
        )
        raise UserError(name, f"there is no file {path}", fix)
    module_name = _module_name(path)
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise UserError(name, f"{place} cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.parent)
    _unload_neighbours(path, _FOLDERS - {folder})
    if folder in _FOLDERS or folder not in sys.path:
        # Behind installed packages, before the folders of earlier files: a file imports its own neighbours.
        _FOLDERS.add(folder)
        earlier = [place for place in sys.path if place in _FOLDERS and place != folder]
        sys.path[:] = [place for place in sys.path if place not in _FOLDERS] + [folder, *earlier]
    vars(module)["STAMP"] = _stamp(path)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        del sys.modules[module_name]
        raise
    except BaseException as error:
        del sys.modules[module_name]
        raise _import_error(place, name, error) from None
    return module


_FOLDERS = set[str]()
"""Folders of loaded files that were not on sys.path before."""


def _unload_neighbours(file: Path, folders: Container[str]) -> None:
    """Unload the modules that a file imports from its directory, if that is one of `folders`."""
    for neighbour in imported_files(file)[1:]:
        loaded = getattr(sys.modules.get(neighbour.stem), "__file__", None)
        if loaded and str(Path(loaded).parent) in folders:
            del sys.modules[neighbour.stem]


def _module_name(file: Path) -> str:
    """Return the name of a file's module: the same in every process, so that its objects can be pickled."""
    return f"posttrain_user_{hashlib.blake2b(str(file.resolve()).encode(), digest_size=8).hexdigest()}"


def _stamp(file: Path) -> list[tuple[int, int]]:
    """Return the time and the size of a file and its neighbours, by which a change is detected."""
    return [(stat.st_mtime_ns, stat.st_size) for stat in (path.stat() for path in imported_files(file))]


def _import_error(place: str, name: str, error: BaseException) -> UserError:
    """Return the error for a failed import, with the line of the user's own file that raised it, if any."""
    if isinstance(error, SyntaxError) and error.filename:
        at = f" at {Path(error.filename).name}:{error.lineno}"
    else:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
        outside = [f for f in frames if f.filename != __file__]
        at = f" at {Path(outside[-1].filename).name}:{outside[-1].lineno}" if outside else ""
    return UserError(name, f"{place} fails while it is imported{at}: {cause(error)}")
