"""Libraries of others, imported in worker processes where they are needed, so that nothing of ours moves.

Some draw from the global `random` as they are imported or used, set variables of the environment, or warn
about themselves.
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
"""The extra that installs each which is called otherwise."""


def there(name: str) -> bool:
    """Whether it is installed; nothing is imported."""
    return importlib.util.find_spec(name) is not None


def require(name: str, where: str) -> None:
    """UserError, at this key, if it is not installed."""
    if not there(name):
        fix = f"pip install 'posttrain[{EXTRAS.get(name, name)}]'"
        raise UserError(where, f"the library {name} is not installed", fix)


@contextmanager
def unmoved() -> Iterator[None]:
    """Puts back what its body does to `random`, numpy's state, the environment and the filters of warnings.

    Nothing warns in the body.

    >>> random.seed(1)
    >>> with unmoved():
    ...     _ = random.random()
    >>> random.random() == random.Random(1).random()
    True
    """
    drawn, environ = random.getstate(), dict(os.environ)
    numpy = sys.modules.get("numpy")
    numbers = numpy.random.get_state() if numpy else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(drawn)
        if numpy:
            numpy.random.set_state(numbers)
        if dict(os.environ) != environ:
            os.environ.clear()
            os.environ.update(environ)


def library(name: str) -> ModuleType:
    """The library, imported so that nothing moves."""
    with unmoved():
        return importlib.import_module(name)
