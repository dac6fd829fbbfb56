"""Exchange messages with interpreters in boxes. Each is used for one program; some are started in advance."""

import atexit
import functools
import marshal
import os
import selectors
import subprocess
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from posttrain.types import RunError
from posttrain.verifiers.sandbox import Box, Live
from posttrain.verifiers.sandbox.live import Clock

_HERE = Path(__file__).parent
_WARM = 2
"""Interpreters started in advance, for each kind of box."""
_KINDS = 6
"""Most kinds of boxes with interpreters in advance; those of the least recently used kind are ended first."""
START_S = 5.0
"""Seconds to compile a program, in addition to its time limit."""
_UP_S = 60.0
_Kind = tuple[Box, str]
_warm: dict[_Kind, deque[Live]] = {}


class ProgramEndedError(Exception):
    """The program in a box ended, or broke a limit; with the label and the reason of the outcome."""

    def __init__(self, label: str, reason: str) -> None:
        super().__init__(reason)
        self.label, self.reason = label, reason


@functools.cache
def _program(name: str) -> bytes:
    wire = ("posttrain.verifiers.code.wire", (_HERE / "wire.py").read_text())
    body = marshal.dumps([wire, ("__main__", (_HERE / name).read_text())], 2)
    return len(body).to_bytes(8, "big") + body


def start(box: Box, name: str) -> Live:
    """Return an unused interpreter in its own box, and start another in advance.

    Raises RunError if it does not start.
    """
    kind = (box, name)
    waiting = _warm[kind] = _warm.pop(kind, deque())
    while len(_warm) > _KINDS:
        _close_all(_warm.pop(next(iter(_warm))))
    while len(waiting) <= _WARM:
        waiting.append(_start(box, name))
    live = waiting.popleft()
    try:
        if receive(live, 1 << 10, Clock(live, _UP_S)) == b'["here"]':
            return live
        reason = "it says something else"
    except ProgramEndedError as ended:
        reason = ended.reason
    if live.process.stderr is not None:
        os.set_blocking(live.process.stderr.fileno(), False)
        reason = (live.process.stderr.read(1 << 16) or b"").decode("utf-8", "replace").strip() or reason
    live.close()
    raise RunError("start an interpreter in its box", reason.splitlines()[-1])


def _start(box: Box, name: str) -> Live:
    live = box.start(channel=True, stderr=subprocess.PIPE, pipes=False)
    assert live.channel is not None
    with suppress(OSError):  # `start` raises the error
        live.channel.sendall(_program(name))
    return live


def _close_all(waiting: deque[Live]) -> None:
    while waiting:
        waiting.pop().close()


@atexit.register
def end_all() -> None:
    """End the interpreters that were started in advance."""
    for waiting in _warm.values():
        _close_all(waiting)


def send(live: Live, job: dict[str, Any]) -> None:
    """Send a job to a box. Raises Ended if the box has closed the channel."""
    body = marshal.dumps(job, 2)
    assert live.channel is not None
    live.channel.settimeout(_UP_S)
    try:
        live.channel.sendall(len(body).to_bytes(8, "big") + body)
    except OSError:
        raise ProgramEndedError("RUNTIME_ERROR", "the program ended its process") from None


def receive(live: Live, most: int, clock: Clock) -> bytes:
    """Receive one message from a box. Raises Ended if it is too long or too late, or the box has ended."""
    assert live.channel is not None
    data = bytearray()
    size = 8
    live.channel.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(live.channel, selectors.EVENT_READ)
        while len(data) < size:
            if not selector.select(clock.left()):
                if clock.late():
                    raise ProgramEndedError("TIMEOUT", "it did not end in time")
                continue
            try:
                part = live.channel.recv(min(1 << 20, size - len(data)))
            except OSError:
                part = b""
            if not part:
                raise ProgramEndedError("RUNTIME_ERROR", "the program ended its process")
            data += part
            if len(data) == 8 and size == 8:
                length = int.from_bytes(data, "big")
                if length > 4 * most + 4096:  # a value as text is up to four times as long as the value
                    raise ProgramEndedError("OUTPUT_LIMIT", "it returned too much")
                size = 8 + length
            if len(data) < size and clock.late():
                raise ProgramEndedError("TIMEOUT", "it did not end in time")
    return bytes(data[8:])
