"""Call a function in a fresh Python process, to which user code may do anything."""

import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posttrain.base.usercode import cause
from posttrain.errors import UserError, how_it_ended
from posttrain.process.child import Child

ASKED_S = 120.0
"""Seconds that code of the user's has to be imported and looked at."""
AWAY_ENV = "POSTTRAIN_AWAY"
"""Set in processes that user code may do anything to, where `asked` calls directly."""
_AWAY = "from posttrain.process.interpreter import _answer; _answer()"


def asked(call: Callable[..., Any], *args: Any, name: str, endless: bool = False) -> Any:
    """What call(*args) returns, made in a fresh process, which has ASKED_S seconds unless it is endless.

    call: a function at the top of a module of ours; arguments and value are plain data, as JSON has them.
    name: of the user's code, for errors. What an endless call prints goes to stderr.

    Raises UserError where the call does, and for a call that takes too long or whose process ends.
    """
    if AWAY_ENV in os.environ:
        return call(*args)
    path = [entry or str(Path.cwd()) for entry in sys.path]
    try:
        order = json.dumps([path, call.__module__, call.__qualname__, args], allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(name, f"what it is given is not plain data: {error}") from None
    with tempfile.TemporaryFile() as answer:
        child = Child(
            [sys.executable, "-c", _AWAY.replace("_answer()", f"_answer({answer.fileno()})")],
            session=True,
            stdin=subprocess.PIPE,
            stdout=2 if endless else subprocess.DEVNULL,
            stderr=None if endless else subprocess.DEVNULL,
            pass_fds=(answer.fileno(),),
            env={"PYTHONHASHSEED": "0", **os.environ, AWAY_ENV: "1", "PYTHONPATH": os.pathsep.join(path)},
        )
        try:
            child.communicate(order.encode(), deadline_s=math.inf if endless else ASKED_S)
        except TimeoutError:
            fix = "leave only definitions at the top of the file"
            raise UserError(name, f"it is not loaded within {ASKED_S:g} s", fix) from None
        finally:
            code = child.close()
        answer.seek(0)
        told = answer.read()
    if not told:
        raise UserError(name, f"it ends the process that it is loaded in: {how_it_ended(code)}")
    good, value = json.loads(told)
    if not good:
        raise UserError(*value)
    return value


def _answer(descriptor: int) -> None:
    """Reads an order of `asked` from standard input, and leaves the answer in this file."""
    dumps = json.dumps  # user code may do anything to the module
    path, module, function, args = json.loads(sys.stdin.read())
    sys.path[:] = path
    try:
        answer = [True, getattr(importlib.import_module(module), function)(*args)]
    except UserError as error:
        answer = [False, [error.key, error.problem, error.fix]]
    except BaseException as error:  # the code may even call sys.exit
        answer = [False, ["", cause(error), ""]]
    os.write(descriptor, dumps(answer).encode("utf-8", "replace"))
    os._exit(0)
