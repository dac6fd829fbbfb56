"""The child's side of `workers`: the nursery process, which forks workers, and a worker's loop.

The nursery is a fresh Python process that imports what every verdict needs (posttrain.types, and so numpy
but not torch) and never starts a thread, so that forking it is safe and takes milliseconds. It is the
parent of every worker: it kills them on request, reaps them, and reports how they ended. When the other
end of its control socket closes, it kills every worker and ends.

Control messages are one letter and a serial number: "F" comes with the worker's end of a socket pair, and
forks a worker that serves it; "K" kills and reaps one, and is answered with its wait status. A worker leads
its own session, so that a kill reaches the processes it has started. Processes that have left the session
become children of the nursery when their parents end, and end with it.
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
from posttrain.process.tree import adopt_orphans, isolate, kill_session

CONTROL = struct.Struct("!cq")
STATUS = struct.Struct("!q")
HEADER = struct.Struct("!QQcd")
"""Length of the body, number of the job, kind, and the start time or the duration in seconds."""
HELLO = 7
NEVER_STARTED = -1

JOB, STARTED, CROWDED, RETURNED, FAILED = b"J", b"S", b"C", b"R", b"E"
MOST_CHILDREN = 256
"""Children that calls may leave behind, alive or not; a worker with more reports it, and is replaced."""


def frame(kind: bytes, job: int, number: float, body: bytes = b"") -> bytes:
    """Return a message between a pool and a worker."""
    return HEADER.pack(len(body), job, kind, number) + body


@adopt_orphans()
def nursery(control_fd: int, memory_mb: int) -> None:
    """Fork and kill workers by the messages of the control socket, until it closes."""
    parent = os.getppid()
    control = socket.socket(fileno=control_fd)
    control.sendall(STATUS.pack(HELLO))
    alive: dict[int, int] = {}
    try:
        while True:
            readable, _, _ = select.select([control], [], [], 1.0)
            if os.getppid() != parent:  # a fork of the parent may keep the socket open
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
        while strays := _children():  # each that ends leaves its children to the nursery
            for pid in strays:
                _end(pid)


def _children() -> set[int]:
    """Return the children of this process, adopted ones included; none if the system does not list them."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as listed:
            return set(map(int, listed.read().split()))
    except OSError:
        return set()


def _end(pid: int | None) -> int:
    """Kill a worker and its session, and return its wait status."""
    if pid is None:
        return NEVER_STARTED
    kill_session(pid)
    return os.waitpid(pid, 0)[1]


def _fork(control: socket.socket, descriptor: int, memory_mb: int) -> int | None:
    """Fork a worker, and return its process id, or None if the system allows no more processes."""
    nursery_pid = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        os.close(descriptor)  # the pool sees the end of the worker
        return None
    if pid:
        os.close(descriptor)
        return pid
    try:
        control.close()
        isolate(memory_mb)
        if sys.platform == "linux" and os.getppid() != nursery_pid:  # too late for end_with_parent
            os._exit(0)
        serve(socket.socket(fileno=descriptor))
        close_loops()
    finally:
        os._exit(0)


def serve(channel: socket.socket) -> None:
    """Do the jobs that arrive on a channel, one after the other, until it closes."""
    me = os.getpid()
    while (header := receive(channel, HEADER.size)) is not None:
        length, job, _, _ = HEADER.unpack(header)
        body = receive(channel, length)
        if body is None:
            return
        answer = _perform(channel, job, body)
        if os.getpid() != me:  # a process that user code has forked returns here
            os._exit(0)
        if len(_children()) > MOST_CHILDREN:
            channel.sendall(frame(CROWDED, job, 0.0))
        channel.sendall(answer)


def _perform(channel: socket.socket, job: int, body: bytes) -> bytes:
    """Do a job, and return its answer as a frame; unpickling imports modules before the clock starts."""
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
    """Seed random and numpy by the job's key, so that results do not depend on the worker."""
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    random.seed(digest)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(int.from_bytes(digest[:4], "big"))


def receive(channel: socket.socket, length: int) -> bytes | None:
    """Return exactly `length` bytes, or None if the channel closes first."""
    parts = bytearray()
    while len(parts) < length:
        part = channel.recv(min(length - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)
