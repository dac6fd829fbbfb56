"""The two ways in which a command ends in one line, and words of such lines; they import no library."""

import signal
from contextlib import suppress


class UserError(Exception):
    """A mistake in what the user gave: one line that says what, where, why and how to mend it.

    The command line prints the line alone and exits with 2.

    >>> str(UserError("unknown key 'lrr'", where="run.toml:7", mend="did you mean 'lr'?"))
    "run.toml:7: unknown key 'lrr'; did you mean 'lr'?"
    """

    def __init__(self, what: str, *, where: str = "", mend: str = "") -> None:
        self.what, self.where, self.mend = what, where, mend
        line = f"{where}: {what}" if where else what
        super().__init__(f"{line}; {mend}" if mend else line)


class RunError(Exception):
    """A run that had to stop: the first cause, then what was kept. The command line exits with 1."""


def how_it_ended(code: int) -> str:
    """What the return code of a process says, below 0 for a signal.

    >>> how_it_ended(-9), how_it_ended(-35), how_it_ended(3)
    ('SIGKILL', 'signal 35', 'exit status 3')
    """
    if code >= 0:
        return f"exit status {code}"
    with suppress(ValueError):  # a real-time signal has no name
        return signal.Signals(-code).name
    return f"signal {-code}"


def counted(count: int, noun: str, plural: str = "") -> str:
    """So many of a thing; without a plural the noun has an s.

    >>> counted(1, "epoch"), counted(0, "epoch"), counted(2, "minibatch", "minibatches")
    ('1 epoch', '0 epochs', '2 minibatches')
    """
    return f"{count} {noun if count == 1 else plural or f'{noun}s'}"
