"""Import optional libraries, in the worker processes that need them, without side effects on this process.

Some libraries draw from the global `random` when they are imported or used, set variables of the environment,
or warn about themselves.
"""

import importlib
import importlib.util
import os
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from posttrain.types import UserError

EXTRAS = {
    "reasoning_gym": "reasoning-gym",
    "verifiers": "verifiers-envs",
    "jsonschema": "verifiers",
    "sqlglot": "verifiers",
    "lark": "verifiers",
    "bm25s": "tools",
}
"""By library: the extra of posttrain that installs it, where its name is another."""


def is_installed(name: str) -> bool:
    """Return whether a library is installed, without importing it."""
    return importlib.util.find_spec(name) is not None


def require(name: str, where: str) -> None:
    """Raise UserError at the key `where` if a library is not installed."""
    if not is_installed(name):
        fix = f"pip install 'posttrain[{EXTRAS.get(name, name)}]'"
        raise UserError(where, f"the library {name} is not installed", fix)


@contextmanager
def preserve_globals() -> Iterator[None]:
    """Restore `random`, the state of numpy, the environment and the filters of warnings at the end.

    Warnings in the body are suppressed.

    >>> random.seed(1)
    >>> with preserve_globals():
    ...     _ = random.random()
    >>> random.random() == random.Random(1).random()
    True
    """
    random_state, environ = random.getstate(), dict(os.environ)
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(random_state)
        if numpy:
            numpy.random.set_state(numpy_state)
        if dict(os.environ) != environ:
            os.environ.clear()
            os.environ.update(environ)


def library(name: str) -> ModuleType:
    """Import a library without its side effects on global state."""
    with preserve_globals():
        return importlib.import_module(name)
