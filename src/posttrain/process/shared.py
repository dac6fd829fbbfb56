"""Call a function in the process that the workers of a pool share, which loads what is too large for them."""

import math
import pickle
import socket
from collections.abc import Callable
from typing import Any

from posttrain.process import worker
from posttrain.process.worker import HEADER, JOB, STARTED, STATUS, frame, receive
from posttrain.process.workers import Failed, Returned, read_outcome


def call_in_shared_process(call: Callable[..., Any], *args: Any) -> Returned | Failed:
    """Run a picklable call in the shared process, and return its value or the failure.

    The calls of all workers run one after the other, in a process without a memory limit. If it ends during a
    call, that call fails, and the next one starts it again. It is killed when the deadline of the worker ends
    whose call it runs. Outside of workers the function is called directly, and its exceptions are raised.
    """
    if worker.SHARED is None:
        return Returned(call(*args))
    calls, serial = worker.SHARED
    body = pickle.dumps(("", call, args))
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            socket.send_fds(calls, [STATUS.pack(serial)], [theirs.fileno()])
        answer = _exchange(ours, frame(JOB, 0, 0.0, body))
    if answer is None:
        return Failed("died", "the process that the workers share ended, for example out of memory")
    return answer


def _exchange(channel: socket.socket, request: bytes) -> Returned | Failed | None:
    """Send a job and return its outcome, or None if the process ends first."""
    try:
        channel.sendall(request)
        while (header := receive(channel, HEADER.size)) is not None:
            length, _, kind, seconds = HEADER.unpack(header)
            body = receive(channel, length)
            if body is None:
                break
            if kind != STARTED:
                return read_outcome(kind, seconds, body, math.inf)
    except ConnectionError:
        pass
    return None
