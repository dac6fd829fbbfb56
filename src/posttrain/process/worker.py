"""The other side of `workers`: a nursery process that forks workers, and what a worker does.

The nursery is a fresh Python process that has imported what every verdict needs (posttrain.types, and
so numpy but not torch) and never starts a thread, so that forking it is safe and takes milliseconds. It
is the parent of every worker: it kills them when asked, reaps them, and tells how they ended. It
ends when the other end of its control socket closes, and takes every worker with it.

Control messages are one letter and a serial number: "F" comes with the worker's end of a
socket pair and forks a worker that serves it; "K" kills and reaps one, and is answered with its
wait status. A worker leads its own session, so that a kill reaches the processes it has started. Those
that have left the session become children of the nursery when their parents end, and end with it.
"""

import hashlib
import os
import pickle
import random
import select
import socket
import struct
import sys
import time

import posttrain.types  # noqa: F401  imported here once rather than in every worker
from posttrain.base.usercode import cause
from posttrain.process.coroutines import close_loops
from posttrain.process.tree import adopting, isolate, kill_session

CONTROL = struct.Struct("!cq")
STATUS = struct.Struct("!q")
HEADER = struct.Struct("!QQcd")
"""Length of the body, number of the job, kind, and the time started or the seconds taken."""
HELLO = 7
NEVER_STARTED = -1

JOB, STARTED, CROWDED, RETURNED, FAILED = b"J", b"S", b"C", b"R", b"E"
MOST_CHILDREN = 256
"""Children that calls may leave behind, living or not; a worker with more says so, and is replaced."""


def frame(kind: bytes, job: int, number: float, body: bytes = b"") -> bytes:
    """A message between a pool and a worker."""
    return HEADER.pack(len(body), job, kind, number) + body


@adopting()
def nursery(control_fd: int, memory_mb: int) -> None:
    """Forks and kills workers as the control socket asks, until it closes."""
    parent = os.getppid()
    control = socket.socket(fileno=control_fd)
    control.sendall(STATUS.pack(HELLO))
    alive: dict[int, int] = {}
    try:
        while True:
            readable, _, _ = select.select([control], [], [], 1.0)
            if os.getppid() != parent:  # a forked copy of our parent may keep the socket open
                return
            if not readable:
                for stray in _children() - set(alive.values()):
                    os.waitpid(stray, os.WNOHANG)
                continue
            message, descriptors, _, _ = socket.recv_fds(control, CONTROL.size, 1)
            if len(message) < CONTROL.size:
                return
            order, serial = CONTROL.unpack(message)
            if order == b"F":
                pid = _fork(control, descriptors[0], memory_mb)
                if pid is not None:
                    alive[serial] = pid
            else:
                control.sendall(STATUS.pack(_end(alive.pop(serial, None))))
    finally:
        for pid in alive.values():
            _end(pid)
        while strays := _children():  # whoever ends leaves us its own
            for pid in strays:
                _end(pid)


def _children() -> set[int]:
    """Processes that this one has started, or that were left to it; none where the system does not tell."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as listed:
            return set(map(int, listed.read().split()))
    except OSError:
        return set()


def _end(pid: int | None) -> int:
    """The wait status of a worker after it and its session have been killed."""
    if pid is None:
        return NEVER_STARTED
    kill_session(pid)
    return os.waitpid(pid, 0)[1]


def _fork(control: socket.socket, descriptor: int, memory_mb: int) -> int | None:
    """The process number of a new worker; None if the system allows no more."""
    nursery_pid = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        os.close(descriptor)  # our parent sees a worker that is gone
        return None
    if pid:
        os.close(descriptor)
        return pid
    try:
        control.close()
        isolate(memory_mb)
        if sys.platform == "linux" and os.getppid() != nursery_pid:  # it has ended already, unseen by us
            os._exit(0)
        serve(socket.socket(fileno=descriptor))
        close_loops()
    finally:
        os._exit(0)


def serve(channel: socket.socket) -> None:
    """Does the jobs that arrive on a channel, one after the other, until it closes."""
    me = os.getpid()
    while (header := _receive(channel, HEADER.size)) is not None:
        length, job, _, _ = HEADER.unpack(header)
        body = _receive(channel, length)
        if body is None:
            return
        answer = _perform(channel, job, body)
        if os.getpid() != me:  # user code has forked and let its copy return
            os._exit(0)
        if len(_children()) > MOST_CHILDREN:
            channel.sendall(frame(CROWDED, job, 0.0))
        channel.sendall(answer)


def _perform(channel: socket.socket, job: int, body: bytes) -> bytes:
    """The frame that answers a job. Unpickling it loads what it needs, before the clock starts."""
    try:
        key, call, args = pickle.loads(body)
    except BaseException as error:
        return _failed(job, 0.0, error)
    _seed(key)
    channel.sendall(frame(STARTED, job, time.monotonic()))
    begin = time.monotonic()
    try:
        value = call(*args)
        seconds = time.monotonic() - begin
        return frame(RETURNED, job, seconds, pickle.dumps(value))
    except BaseException as error:  # sys.exit and KeyboardInterrupt in user code as well
        return _failed(job, time.monotonic() - begin, error)


def _failed(job: int, seconds: float, error: BaseException) -> bytes:
    return frame(FAILED, job, seconds, cause(error).encode("utf-8", "replace"))


def _seed(key: str) -> None:
    """Makes what user code draws depend on the job and not on the worker."""
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    random.seed(digest)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(int.from_bytes(digest[:4], "big"))


def _receive(channel: socket.socket, length: int) -> bytes | None:
    """Exactly that many bytes; None if the channel closes before."""
    parts = bytearray()
    while len(parts) < length:
        part = channel.recv(min(length - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)
