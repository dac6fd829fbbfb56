"""Call a function in a fresh Python process, so that user code cannot harm this one."""

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
from posttrain.errors import UserError, describe_exit
from posttrain.process.child import Child

ASKED_S = 120.0
"""Seconds for importing and inspecting user code."""
AWAY_ENV = "POSTTRAIN_AWAY"
"""Set in processes that run user code; there `asked` calls the function directly."""
_AWAY = "from posttrain.process.interpreter import _answer; _answer()"


def call_in_fresh_process(call: Callable[..., Any], *args: Any, name: str, endless: bool = False) -> Any:
    """Return call(*args), run in a fresh process within ASKED_S seconds, or without a limit if `endless`.

    call: a function at the top of a module of posttrain; its arguments and value are JSON data.
    name: the user's code in errors. endless: also send what the call prints to stderr.

    Raises UserError if the call does, if it takes too long, or if its process ends.
    """
    if AWAY_ENV in os.environ:
        return call(*args)
    path = [entry or str(Path.cwd()) for entry in sys.path]
    try:
        request = json.dumps([path, call.__module__, call.__qualname__, args], allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(name, f"its arguments are not plain data: {error}") from None
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
            child.communicate(request.encode(), deadline_s=math.inf if endless else ASKED_S)
        except TimeoutError:
            fix = "leave only definitions at the top of the file"
            raise UserError(name, f"it is not loaded within {ASKED_S:g} s", fix) from None
        finally:
            code = child.close()
        answer.seek(0)
        reply = answer.read()
    if not reply:
        raise UserError(name, f"it ends the process that it is loaded in: {describe_exit(code)}")
    succeeded, value = json.loads(reply)
    if not succeeded:
        raise UserError(*value)
    return value


def _answer(descriptor: int) -> None:
    """Read a request of `asked` from standard input, call, and write the answer to this file."""
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
