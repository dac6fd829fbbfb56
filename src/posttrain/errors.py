"""The two errors that end a command, as data, and the phrases that their messages share. Imports no library.

A `UserError` ends a command with exit status 2, a `RunError` with 1. Both name options as the command
line or as Python spells them (`Option`): the command line sets `SHELL`, a Python program leaves it.
"""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

SHELL = False
"""True in the process of the command line; `shell` sets it. Child processes do not inherit it."""


@contextmanager
def shell() -> Iterator[None]:
    """Spell options as on the command line."""
    global SHELL
    before, SHELL = SHELL, True
    try:
        yield
    finally:
        SHELL = before


@contextmanager
def interrupts() -> Iterator[None]:
    """Unwrap a KeyboardInterrupt: before Python 3.12 one in __set_name__ becomes a RuntimeError's cause."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__cause__, KeyboardInterrupt):
            raise error.__cause__ from None
        raise


class Option(NamedTuple):
    """An option, as the command line and as Python spell it.

    >>> f"give another {RUN_DIR}"
    'give another dir'
    >>> with shell(): f"give another {RUN_DIR}"
    'give another --run-dir'
    """

    shell: str
    python: str

    def __str__(self) -> str:
        return self.shell if SHELL else self.python

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


RUN_DIR = Option("--run-dir", "dir")
RESUME = Option("--resume", "resume=True")
REWARD = Option("--reward", "reward")
OVERRIDE = Option("--set ", "")
ADD_VERIFIER = Option("add for example [verifier.number]", "give reward=, as a function or 'number'")
NO_VERIFIER = Option("leave [verifier] out", "leave reward out")
_KEYWORDS = {
    "task.data": "data=",
    "task.held_out": "held_out=",
    "optim.lr": "lr=",
    "run.updates": "updates=",
    "[verifier]": "reward=",
    "verifier.function (reward= from Python)": "reward=",
    "the option --run-dir": "dir=",
    "the option --resume": "resume=True",
}
"""The Python keyword for a key of a recipe or an option of the command line."""


def spell_key(key: str) -> str:
    """Return a key as the command line spells it, or as Python does."""
    return str(Option(key, _KEYWORDS.get(key, key)))


def how_to_resume(run_dir: object) -> str:
    """Return the options that continue the run in this directory."""
    return str(Option(f"--resume --run-dir {run_dir}", f"dir='{run_dir}', resume=True"))


class UserError(Exception):
    """A mistake in the user's input: where it is, what is wrong, and one action that fixes it.

    key: a key of a recipe, a keyword or option, a file with its line, or "" where the caller adds one.
    problem: the value, and what was expected.

    >>> str(UserError("run.toml:7", "unknown key 'lrr'", "did you mean 'lr'?"))
    "run.toml:7: unknown key 'lrr'; did you mean 'lr'?"
    """

    def __init__(self, key: str, problem: str, fix: str = "") -> None:
        self.key, self.problem, self.fix = key, problem, fix
        super().__init__(key, problem, fix)  # pickle calls the class with these

    def __str__(self) -> str:
        line = f"{self.key}: {self.problem}" if self.key else self.problem
        return f"{line}; {self.fix}" if self.fix else line

    def at(self, key: str, *, keep: bool = False) -> "UserError":
        """Return the same mistake at another key; with `keep`, its present key precedes the problem."""
        prefix = f"{self.key}: " if keep and self.key not in ("", key) else ""
        return type(self)(key, f"{prefix}{self.problem}", self.fix)

    def moved(self, key: str, to: str) -> "UserError":
        """Return the mistake at the key `to` if it is at `key`, or else unchanged."""
        return self.at(to) if self.key == key else self


def refuse_windows() -> None:
    """Raise UserError on Windows, whose Python has neither fork nor locks of files."""
    if sys.platform == "win32":
        fix = "install it inside WSL (`wsl --install`), where it runs as on Linux"
        raise UserError("", "posttrain does not run on Windows", fix)


class UnreadKeyError(UserError):
    """A key of a recipe that nothing reads, given the recipe's other keys."""


class RunError(Exception):
    """A failure of a run: the operation that failed, its first cause, and what remains of the run.

    >>> str(RunError("optimiser step 3", "the loss is nan", "step_000002 is kept"))
    'optimiser step 3: the loss is nan; step_000002 is kept'
    """

    def __init__(self, operation: str, cause: str, kept: str = "") -> None:
        self.operation, self.cause, self.kept = operation, cause, kept
        super().__init__(operation, cause, kept)

    def __str__(self) -> str:
        line = f"{self.operation}: {self.cause}"
        return f"{line}; {self.kept}" if self.kept else line


def describe_exit(code: int) -> str:
    """Return the name of the signal that ended a process (a code below 0), or its exit status.

    >>> describe_exit(-9), describe_exit(-35), describe_exit(3)
    ('SIGKILL', 'signal 35', 'exit status 3')
    """
    if code >= 0:
        return f"exit status {code}"
    with suppress(ValueError):  # a real-time signal has no name
        return signal.Signals(-code).name
    return f"signal {-code}"


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return "n things"; the plural is by default the noun with an s.

    >>> counted(1, "epoch"), counted(0, "epoch"), counted(2, "minibatch", "minibatches")
    ('1 epoch', '0 epochs', '2 minibatches')
    """
    return f"{count} {noun if count == 1 else plural or f'{noun}s'}"
