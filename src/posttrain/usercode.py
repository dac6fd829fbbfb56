"""Code that the user names in a config: finding it, and putting what it raises into one line."""

import hashlib
import importlib
import importlib.util
import sys
import traceback
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from posttrain.nearest import did_you_mean
from posttrain.types import UserError

MOST_OF_A_CAUSE = 300


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


@lru_cache(maxsize=256)
def load_named(name: str) -> Any:
    """The object called "module:attribute" or "path/to/file.py:attribute".

    Modules are also looked for in the working directory, after every installed one. A file is
    loaded once, and its own directory is made importable for its neighbours. Raises UserError
    if the name has another form, or if the module or the attribute cannot be had.

    >>> load_named("math:sqrt")(9)
    3.0
    """
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        raise UserError("names nothing", where=name, mend="write 'module:name' or 'path/to/file.py:name'")
    module = _file(place, name) if place.endswith(".py") else _module(place, name)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            hint = did_you_mean(part, [k for k in vars(module) if not k.startswith("_")])
            raise UserError(f"{place} has no {attribute!r}", where=name, mend=hint)
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
                f"there is no module {place!r}",
                where=name,
                mend="it must be installed or lie in the working directory; a file is named 'file.py:name'",
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
        mend = did_you_mean(path.name, beside) or "a path is taken from the working directory"
        raise UserError(f"there is no file {path}", where=name, mend=mend)
    # The same name in every process, so that objects of this module can be sent between them.
    key = f"posttrain_user_{hashlib.blake2b(str(path).encode(), digest_size=8).hexdigest()}"
    if key in sys.modules:
        return sys.modules[key]
    spec = importlib.util.spec_from_file_location(key, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{place} cannot be loaded as Python", where=name)
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
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


def _broken(place: str, name: str, error: BaseException) -> UserError:
    """The error with the line of the user's own file that raised it, where there is one."""
    if isinstance(error, SyntaxError) and error.filename:
        at = f" at {Path(error.filename).name}:{error.lineno}"
    else:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
        outside = [f for f in frames if f.filename != __file__]
        at = f" at {Path(outside[-1].filename).name}:{outside[-1].lineno}" if outside else ""
    return UserError(f"{place} fails while it is imported{at}: {cause(error)}", where=name)
