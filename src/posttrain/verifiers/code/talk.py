"""Talking with interpreters that wait in boxes: each is used for one program and then ended."""

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
"""Interpreters that wait, for each kind of box."""
_KINDS = 6
"""Kinds of boxes for which some wait; those of the kind used longest ago are ended first."""
START_S = 5.0
"""Seconds to compile a program, beside its own time."""
_UP_S = 60.0
_Kind = tuple[Box, str]
_warm: dict[_Kind, deque[Live]] = {}


class Ended(Exception):  # noqa: N818
    """A box said nothing more: how it ended, as a class and a reason."""

    def __init__(self, label: str, reason: str) -> None:
        super().__init__(reason)
        self.label, self.reason = label, reason


@functools.cache
def _program(name: str) -> bytes:
    wire = ("posttrain.verifiers.code.wire", (_HERE / "wire.py").read_text())
    body = marshal.dumps([wire, ("__main__", (_HERE / name).read_text())], 2)
    return len(body).to_bytes(8, "big") + body


def start(box: Box, name: str) -> Live:
    """An interpreter in a fresh box, started a while ago if one waits; each is used once.

    RunError if it does not come up.
    """
    kind = (box, name)
    waiting = _warm[kind] = _warm.pop(kind, deque())
    while len(_warm) > _KINDS:
        _end(_warm.pop(next(iter(_warm))))
    while len(waiting) <= _WARM:
        waiting.append(_start(box, name))
    live = waiting.popleft()
    try:
        if receive(live, 1 << 10, Clock(live, _UP_S)) == b'["here"]':
            return live
        why = "it says something else"
    except Ended as ended:
        why = ended.reason
    if live.process.stderr is not None:
        os.set_blocking(live.process.stderr.fileno(), False)
        why = (live.process.stderr.read(1 << 16) or b"").decode("utf-8", "replace").strip() or why
    live.close()
    raise RunError("start an interpreter in its box", why.splitlines()[-1])


def _start(box: Box, name: str) -> Live:
    live = box.start(channel=True, stderr=subprocess.PIPE, pipes=False)
    assert live.channel is not None
    with suppress(OSError):  # `start` says why
        live.channel.sendall(_program(name))
    return live


def _end(waiting: deque[Live]) -> None:
    while waiting:
        waiting.pop().close()


@atexit.register
def end_all() -> None:
    """Ends the interpreters that wait."""
    for waiting in _warm.values():
        _end(waiting)


def send(live: Live, job: dict[str, Any]) -> None:
    """Sends a job to a box; Ended if nobody takes it."""
    body = marshal.dumps(job, 2)
    assert live.channel is not None
    live.channel.settimeout(_UP_S)
    try:
        live.channel.sendall(len(body).to_bytes(8, "big") + body)
    except OSError:
        raise Ended("RUNTIME_ERROR", "the program ended its process") from None


def receive(live: Live, most: int, clock: Clock) -> bytes:
    """One message from a box; Ended if it is too long, too late, or the box is gone."""
    assert live.channel is not None
    data = bytearray()
    wanted = 8
    live.channel.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(live.channel, selectors.EVENT_READ)
        while len(data) < wanted:
            if not selector.select(clock.left()):
                if clock.late():
                    raise Ended("TIMEOUT", "it did not end in time")
                continue
            try:
                part = live.channel.recv(min(1 << 20, wanted - len(data)))
            except OSError:
                part = b""
            if not part:
                raise Ended("RUNTIME_ERROR", "the program ended its process")
            data += part
            if len(data) == 8 and wanted == 8:
                length = int.from_bytes(data, "big")
                if length > 4 * most + 4096:  # text is up to four times as long as what it writes
                    raise Ended("OUTPUT_LIMIT", "it returned too much")
                wanted = 8 + length
            if len(data) < wanted and clock.late():
                raise Ended("TIMEOUT", "it did not end in time")
    return bytes(data[8:])
