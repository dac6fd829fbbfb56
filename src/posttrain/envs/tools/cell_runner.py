"""What runs in a box for one call of `python` or `shell`: earlier cells unseen, then the new one.

Its text is sent there; nothing of posttrain can be imported. On stdin is a JSON object: `language`, `seed`,
`cells`, of which the last is new, and `deadline_s`, the processor time of that. What the new one writes, and
in Python the value of a last expression, is on stdout. The status is 0, or RAISED if it raised.
"""

import ast
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

RAISED = 77
SCOPE: "dict[str, Any]" = {"__name__": "__main__"}


def python(cell: str) -> None:
    """Runs a cell in what earlier ones have left, and prints the value of a last expression."""
    tree = ast.parse(cell, "<cell>")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec", dont_inherit=True), SCOPE)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "<cell>", "eval", dont_inherit=True), SCOPE)
        if value is not None:
            print(repr(value))


def shell(cell: str) -> None:
    """Runs a command in the working directory."""
    status = subprocess.run(["/bin/bash", "-c", cell], stdin=subprocess.DEVNULL, check=False).returncode
    if status:
        print(f"(exit status {status})")
        raise SystemExit(status)


def attempted(run: "Callable[[str], None]", cell: str) -> "BaseException | None":
    """What a cell raises; a copy of this process that the cell has made ends with it."""
    me = os.getpid()
    try:
        run(cell)
    except BaseException as error:
        return error
    finally:
        if os.getpid() != me:
            os._exit(0)
    return None


def fault(error: BaseException) -> str:
    """What was raised, in one line, with the line of the cell."""
    line, frame = getattr(error, "lineno", None), error.__traceback__
    while frame is not None:
        line = frame.tb_lineno if frame.tb_frame.f_code.co_filename == "<cell>" else line
        frame = frame.tb_next
    said = (str(getattr(error, "msg", error)).splitlines() or [""])[0][:300]
    return f"{type(error).__name__}{': ' * bool(said)}{said}" + (f" (line {line})" if line else "")


def main() -> None:
    """All cells, of which the last is seen."""
    job = json.load(sys.stdin)
    run = {"python": python, "shell": shell}[job["language"]]
    seen, null = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    random.seed(job["seed"])
    for cell in job["cells"][:-1]:
        attempted(run, cell)
    sys.stdout.flush()
    os.dup2(seen, 1)
    os.dup2(seen, 2)
    signal.setitimer(
        signal.ITIMER_PROF, job["deadline_s"]
    )  # ends this process; one that sleeps is ended outside
    error = attempted(run, job["cells"][-1])
    if error is not None and not (run is shell and isinstance(error, SystemExit)):
        print(fault(error))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if error is None else RAISED)


if __name__ == "__main__":
    main()
