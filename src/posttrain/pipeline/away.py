"""What a fresh process does with a function of the user's; apart, as it then imports nothing heavy."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.base.usercode import cause, load_named
from posttrain.errors import UserError


def bind(name: str, said: str, options: Mapping[str, Any]) -> None:
    """UserError if the function of that name cannot be called with a directory and these options."""
    found = load_named(name)
    if not callable(found):
        raise UserError("", f"{said} is no function")
    try:
        signature = inspect.signature(found)
    except ValueError:  # of a function that is not written in Python nothing is known
        return
    try:
        signature.bind(Path(), **options)
    except TypeError as error:
        fix = f"it is {name.rpartition(':')[2]}{signature}"
        raise UserError("options", f"{said} cannot be called: {error}", fix) from None


def call(name: str, said: str, directory: str, options: Mapping[str, Any]) -> None:
    """Calls it; UserError whatever it raises."""
    try:
        load_named(name)(Path(directory), **options)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # the function may even call sys.exit
        raise UserError("", f"{said} fails: {cause(error)}") from None
