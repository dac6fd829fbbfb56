"""The program that runs in the sandbox for one call of `python` or `shell`.

It runs the earlier cells without output, then the new one. cells.py sends its text; posttrain cannot be
imported there. stdin is a JSON object: `language`, `seed`, `cells`, the last of which is new, and
`deadline_s`, the processor time of that cell. The output of the new cell, and in Python the value of a last
expression, goes to stdout. The exit status is 0, or RAISED if the cell raised.
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
    """Run a cell in the scope of the earlier ones, and print the value of a last expression."""
    tree = ast.parse(cell, "<cell>")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec", dont_inherit=True), SCOPE)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "<cell>", "eval", dont_inherit=True), SCOPE)
        if value is not None:
            print(repr(value))


def shell(cell: str) -> None:
    """Run a command in the working directory."""
    status = subprocess.run(["/bin/bash", "-c", cell], stdin=subprocess.DEVNULL, check=False).returncode
    if status:
        print(f"(exit status {status})")
        raise SystemExit(status)


def run_cell(run: "Callable[[str], None]", cell: str) -> "BaseException | None":
    """Return the exception of a cell, or None. Processes that the cell forks end here."""
    me = os.getpid()
    try:
        run(cell)
    except BaseException as error:
        return error
    finally:
        if os.getpid() != me:
            os._exit(0)
    return None


def describe(error: BaseException) -> str:
    """Return an exception in one line, with the line of the cell."""
    line, frame = getattr(error, "lineno", None), error.__traceback__
    while frame is not None:
        line = frame.tb_lineno if frame.tb_frame.f_code.co_filename == "<cell>" else line
        frame = frame.tb_next
    text = (str(getattr(error, "msg", error)).splitlines() or [""])[0][:300]
    return f"{type(error).__name__}{': ' * bool(text)}{text}" + (f" (line {line})" if line else "")


def main() -> None:
    """Run all cells; only the last one writes output."""
    job = json.load(sys.stdin)
    run = {"python": python, "shell": shell}[job["language"]]
    stdout, null = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    random.seed(job["seed"])
    for cell in job["cells"][:-1]:
        run_cell(run, cell)
    sys.stdout.flush()
    os.dup2(stdout, 1)
    os.dup2(stdout, 2)
    # The timer ends this process; a process that sleeps is killed from outside.
    signal.setitimer(signal.ITIMER_PROF, job["deadline_s"])
    error = run_cell(run, job["cells"][-1])
    if error is not None and not (run is shell and isinstance(error, SystemExit)):
        print(describe(error))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if error is None else RAISED)


if __name__ == "__main__":
    main()
