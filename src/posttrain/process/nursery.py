"""The parent's side of the nursery, the process that forks workers."""

import json
import os
import socket
import sys
import tempfile
from pathlib import Path

from posttrain.errors import describe_exit
from posttrain.process.child import Child, last_line
from posttrain.process.interpreter import AWAY_ENV
from posttrain.process.worker import CONTROL, NEVER_STARTED, STATUS, receive, threads_of
from posttrain.types import RunError

_NURSERY = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from posttrain.process.worker import nursery
nursery(*map(int, sys.argv[2:]))
"""
_ANSWER_S = 120.0


class Nursery:
    """A running nursery process, and the parent's end of its control socket.

    workers: their number, and the most threads of the process that they share.
    """

    def __init__(self, memory_mb: int, workers: int) -> None:
        self._control, theirs = socket.socketpair()
        self._control.settimeout(_ANSWER_S)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        self._greeted = False
        self._closed = False
        # An empty entry means the working directory.
        path = json.dumps([entry or str(Path.cwd()) for entry in sys.path])
        threads = min(workers, _processors())
        with theirs:
            self._child = Child(
                [sys.executable, "-c", _NURSERY, path, *map(str, (theirs.fileno(), memory_mb, threads))],
                session=True,
                pass_fds=(theirs.fileno(),),
                stderr=self._errors,
                env={"PYTHONHASHSEED": "0", **os.environ, **threads_of(1), AWAY_ENV: "1"},
            )

    def fork(self, serial: int, channel: socket.socket) -> None:
        """Ask for a worker that serves this channel."""
        try:
            socket.send_fds(self._control, [CONTROL.pack(b"F", serial)], [channel.fileno()])
        except ConnectionError:
            self._explain()

    def end(self, serial: int) -> str:
        """Kill a worker, and return how it ended; raise ConnectionError if the nursery is gone."""
        if self._closed:
            raise ConnectionError("closed")
        try:
            self._control.sendall(CONTROL.pack(b"K", serial))
            if not self._greeted:
                self._answer()
                self._greeted = True
            return _ending(self._answer())
        except TimeoutError:
            raise ConnectionError("no answer") from None
        except ConnectionError:
            self._explain()
            raise

    def close(self) -> None:
        """End the nursery and its workers."""
        if self._closed:
            return
        self._closed = True
        self._control.close()
        self._child.close(grace_s=_ANSWER_S)
        self._errors.close()

    def _answer(self) -> int:
        data = receive(self._control, STATUS.size)
        if data is None:
            raise ConnectionError("closed")
        return int(STATUS.unpack(data)[0])

    def _explain(self) -> None:
        """Raise RunError with the last line of the nursery's stderr, if it never started."""
        if self._greeted:
            return
        self._errors.seek(0)
        if line := last_line(self._errors.read()):
            raise RunError("start worker processes", line)


def _processors() -> int:
    """Return the processors that this process may use: its share of the machine's among the ranks there.

    OMP_NUM_THREADS bounds it, but for the 1 that torchrun sets where it was not set.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    share = max(1, count // int(ranks)) if ranks.isdecimal() and int(ranks) > 1 else count
    bound = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if not bound.isdecimal() or int(bound) < 1 or (bound == "1" and share < count):
        return share
    return min(share, int(bound))


def _ending(status: int) -> str:
    """Describe a wait status.

    >>> _ending(11), _ending(3 << 8)
    ('the worker was killed by SIGSEGV', 'the worker ended with exit status 3')
    """
    if status == NEVER_STARTED:
        return "the worker could not be started"
    code = os.waitstatus_to_exitcode(status)
    return f"the worker {'was killed by' if code < 0 else 'ended with'} {describe_exit(code)}"
