"""Call a function in a forked copy of this process, and kill every process that the call has started.

A call may raise, hang, die, exhaust memory, write without end or start processes; its outcome is one line.
"""

import math
import os
import select
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import NoReturn

from posttrain.base.usercode import cause
from posttrain.errors import RunError, describe_exit
from posttrain.process.tree import adopt_orphans, below, isolate, kill_session
from posttrain.process.workers import Failed, Returned

MOST_PROCESSES = 64
"""Processes of a call at most, itself included."""
_LOOK_S = 0.02
_END_S = 10.0


def call_in_fork(
    call: Callable[[], str],
    *,
    kind: str,
    most_bytes: int,
    deadline_s: float = math.inf,
    memory_mb: int | None = None,
) -> Returned | Failed:
    """Return the text that a call returns, cut to `most_bytes` of UTF-8, or why it returned nothing.

    kind: a noun for the call, in reasons and errors.

    Raises RunError if this process cannot be forked, or a process of the call cannot be killed. This process
    must have one thread, and start no other process meanwhile.
    """
    with adopt_orphans():  # orphans of the call become children of this process
        before = _descendants()
        reader, writer = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(reader)
            os.close(writer)
            raise RunError(f"start a {kind}", str(error)) from None
        if not pid:
            _run_child(call, memory_mb, writer)
        os.close(writer)
        try:
            written = _read(reader, pid, kind, 1 + most_bytes, deadline_s)
        finally:
            os.close(reader)
            status = _kill(pid, kind, before)
    if isinstance(written, Failed):
        return written
    mark, text = written[:1], written[1:].decode("utf-8", "replace")
    if mark == b"+":
        return Returned(text)
    if mark == b"-":
        return Failed("raised", text)
    how = describe_exit(os.waitstatus_to_exitcode(status))
    return Failed("died", f"the {kind} ended its process ({how})")


def _run_child(call: Callable[[], str], memory_mb: int | None, writer: int) -> NoReturn:
    """Make the call in the child, and write its value or error to the pipe."""
    try:
        isolate(memory_mb)
        os.dup2(writer, 3)
        os.closerange(4, 4096)
        try:
            body = b"+" + call().encode("utf-8", "replace")
        except BaseException as error:  # sys.exit too
            body = b"-" + cause(error).encode("utf-8", "replace")
        view = memoryview(len(body).to_bytes(8, "big") + body)
        while len(view):
            view = view[os.write(3, view) :]
    finally:
        os._exit(0)


def _read(reader: int, pid: int, kind: str, most: int, deadline_s: float) -> bytes | Failed:
    """Return the bytes that the child writes, at most `most`, or why there are none."""
    data, until = bytearray(), time.monotonic() + deadline_s
    while len(data) < 8 + min(most, int.from_bytes(data[:8], "big") if len(data) >= 8 else most):
        seconds = until - time.monotonic()
        if seconds <= 0:
            return Failed("timeout", f"no result within {deadline_s:g} s")
        if len(below(pid)) > MOST_PROCESSES:
            return Failed("died", f"the {kind} started more than {MOST_PROCESSES} processes")
        if select.select([reader], [], [], min(seconds, _LOOK_S))[0]:
            part = os.read(reader, 8 + most - len(data))
            if not part:  # every writer has ended
                break
            data += part
    return bytes(data[8:])


def _kill(pid: int, kind: str, before: set[int]) -> int:
    """Kill the child and all its descendants, and return its wait status; raise RunError if that fails."""
    until, status, quiet = time.monotonic() + _END_S, 0, 0
    alive = {pid}
    while quiet < 2:  # one look may miss a process whose parent is just ending
        for process in alive:
            kill_session(process)
            with suppress(ChildProcessError):
                wait_status = os.waitpid(process, 0)[1]
                status = wait_status if process == pid else status
        if time.monotonic() > until:
            raise RunError(f"end a {kind}", "it keeps starting processes, and cannot be ended")
        alive = _descendants(before)
        quiet = 0 if alive else quiet + 1
    return status


def _descendants(besides: Collection[int] = ()) -> set[int]:
    """Return the descendants of this process, except `besides` and theirs."""
    return set(below(os.getpid(), besides)[1:])
