"""Check and call a user's function in a fresh process, which therefore imports nothing heavy from here."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.base.usercode import cause, load_named
from posttrain.errors import UserError


def check_call(name: str, label: str, options: Mapping[str, Any]) -> None:
    """Raise UserError if the function of that name cannot be called with a directory and these options.

    label: the function in messages.
    """
    function = load_named(name)
    if not callable(function):
        raise UserError("", f"{label} is not a function")
    try:
        signature = inspect.signature(function)
    except ValueError:  # functions that are not written in Python may have no signature
        return
    try:
        signature.bind(Path(), **options)
    except TypeError as error:
        fix = f"it is {name.rpartition(':')[2]}{signature}"
        raise UserError("options", f"{label} cannot be called: {error}", fix) from None


def call(name: str, label: str, directory: str, options: Mapping[str, Any]) -> None:
    """Call the function of that name; raise UserError for whatever it raises."""
    try:
        load_named(name)(Path(directory), **options)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # the function may even call sys.exit
        raise UserError("", f"{label} fails: {cause(error)}") from None
