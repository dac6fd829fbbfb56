"""The child's side of `workers`: the nursery process, which forks workers, and a worker's loop.

The nursery is a fresh Python process that imports what every verdict needs (posttrain.types, and so numpy
but not torch) and never starts a thread, so that forking it is safe and takes milliseconds. It is the
parent of every worker: it kills them on request, reaps them, and reports how they ended. When the other
end of its control socket closes, it kills every worker and ends.

Control messages are one letter and a serial number: "F" comes with the worker's end of a socket pair, and
forks a worker that serves it; "K" kills and reaps one, and is answered with its wait status. A worker leads
its own session, so that a kill reaches the processes it has started. Processes that have left the session
become children of the nursery when their parents end, and end with it.

The workers of a nursery share one more process, for what is too large to load in every worker. It has no
memory limit, and is forked when a worker first calls it (`shared.py`), and again after it has ended. Calls
wait in a socket pair of the nursery, so those that have not begun outlive it.
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
from collections.abc import Callable
from contextlib import suppress
from functools import partial

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
IDLE = 0
"""Reported by the shared process between calls; serial numbers of workers begin at 1."""

JOB, STARTED, CROWDED, RETURNED, FAILED = b"J", b"S", b"C", b"R", b"E"
MOST_CHILDREN = 256
"""Children that calls may leave behind, alive or not; a worker with more reports it, and is replaced."""


def frame(kind: bytes, job: int, number: float, body: bytes = b"") -> bytes:
    """Return a message between a pool and a worker."""
    return HEADER.pack(len(body), job, kind, number) + body


def threads_of(count: int) -> dict[str, str]:
    """Return the environment in which numerical libraries use `count` threads."""
    return dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(count))


SHARED: tuple[socket.socket, int] | None = None
"""In a worker: the socket on which the shared process gets calls, and the worker's serial number."""


@adopt_orphans()
def nursery(control_fd: int, memory_mb: int, threads: int) -> None:
    """Fork and kill workers by the messages of the control socket, until it closes.

    memory_mb: the memory limit of a worker; threads: of the process that the workers share.
    """
    parent = os.getppid()
    control = socket.socket(fileno=control_fd)
    control.sendall(STATUS.pack(HELLO))
    alive: dict[int, int] = {}
    shared = _SharedProcess(control, threads)
    try:
        while True:
            readable, _, _ = select.select([control, shared.channel], [], [], 1.0)
            if os.getppid() != parent:  # a fork of the parent may keep the socket open
                return
            if shared.channel in readable:
                shared.attend()
            if not readable:
                for stray in _children() - {*alive.values(), shared.pid}:
                    os.waitpid(stray, os.WNOHANG)
            if control not in readable:
                continue
            message, descriptors, _, _ = socket.recv_fds(control, CONTROL.size, 1)
            if len(message) < CONTROL.size:
                return
            order, serial = CONTROL.unpack(message)
            if order == b"F":
                pid = _fork(control, partial(_serve_pool, descriptors[0], shared, serial), memory_mb)
                os.close(descriptors[0])  # without a worker, the pool sees its end
                if pid is not None:
                    alive[serial] = pid
            else:
                status = _end(alive.pop(serial, None))
                shared.abandon(serial)
                control.sendall(STATUS.pack(status))
    finally:
        shared.end()
        for pid in alive.values():
            _end(pid)
        while strays := _children():  # each that ends leaves its children to the nursery
            for pid in strays:
                _end(pid)


class _SharedProcess:
    """The nursery's side of the process that its workers share."""

    def __init__(self, control: socket.socket, threads: int) -> None:
        self._control, self._threads = control, threads
        self.calls, self._queue = socket.socketpair()
        """Workers send a serial number and a socket for each call, which the process takes from the queue."""
        self.pid: int | None = None
        self._reports: socket.socket | None = None
        self._caller = IDLE

    @property
    def channel(self) -> socket.socket:
        """The socket to wait for: the next report of the process, or the first call if it does not run."""
        return self._reports or self._queue

    def attend(self) -> None:
        """Start the process, or read whose call it runs; it may also have ended."""
        if self._reports is None:
            self._start()
        elif reports := self._reports.recv(STATUS.size << 10):
            [self._caller] = STATUS.unpack(reports[-STATUS.size :])
        else:
            self.end()

    def abandon(self, serial: int) -> None:
        """End the process if it runs a call of this worker, which has been killed: the call may never end.

        A call of that worker that has not begun is not run, because its socket is closed.
        """
        while self._reports and select.select([self._reports], [], [], 0.0)[0]:
            self.attend()
        if self._caller == serial:
            self.end()

    def end(self) -> None:
        """Kill the process, if it runs."""
        if self._reports is not None:
            _end(self.pid)
            self._reports.close()
        self.pid, self._reports, self._caller = None, None, IDLE

    def leave(self) -> None:
        """Close what a worker must not read: calls of other workers, and reports of the process."""
        self._queue.close()
        if self._reports is not None:
            self._reports.close()

    def _start(self) -> None:
        self._reports, theirs = socket.socketpair()
        with theirs:
            self.pid = _fork(self._control, partial(self._serve, theirs), None)
        if self.pid is None:  # the waiting worker sees the end of its call
            self._reports.close()
            self._reports = None
            for descriptor in socket.recv_fds(self._queue, STATUS.size, 1)[1]:
                os.close(descriptor)

    def _serve(self, reports: socket.socket) -> None:
        """Run the calls of the workers in the shared process, one after the other."""
        self.calls.close()
        os.environ |= threads_of(self._threads)  # PyTorch is imported with the first call
        while caller := self._receive_caller():
            serial, channel = caller
            reports.sendall(serial)
            answer = b""
            with channel:
                with suppress(OSError):  # the worker has been killed
                    if job := _receive_job(channel):
                        answer = _perform(channel, *job)
                reports.sendall(STATUS.pack(IDLE))
                with suppress(OSError):
                    channel.sendall(answer)

    def _receive_caller(self) -> tuple[bytes, socket.socket] | None:
        """Return the next worker's serial number, as reported, and its socket; None if no worker is left."""
        serial, descriptors, _, _ = socket.recv_fds(self._queue, STATUS.size, 1)
        return (serial, socket.socket(fileno=descriptors[0])) if descriptors else None


def _children() -> set[int]:
    """Return the children of this process, adopted ones included; none if the system does not list them."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as listed:
            return set(map(int, listed.read().split()))
    except OSError:
        return set()


def _end(pid: int | None) -> int:
    """Kill a process of the nursery and its session, and return its wait status."""
    if pid is None:
        return NEVER_STARTED
    kill_session(pid)
    return os.waitpid(pid, 0)[1]


def _fork(control: socket.socket, serve: Callable[[], None], memory_mb: int | None) -> int | None:
    """Fork a process that serves until it ends, and return its id; None if the system allows no more.

    memory_mb: its memory limit; None for no limit.
    """
    nursery_pid = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        return None
    if pid:
        return pid
    try:
        control.close()
        isolate(memory_mb)
        if sys.platform == "linux" and os.getppid() != nursery_pid:  # too late for end_with_parent
            os._exit(0)
        serve()
        close_loops()
    finally:
        os._exit(0)


def _serve_pool(descriptor: int, shared: _SharedProcess, serial: int) -> None:
    """Do the jobs of the pool as the worker with this serial number."""
    global SHARED
    shared.leave()
    SHARED = shared.calls, serial
    serve(socket.socket(fileno=descriptor))


def serve(channel: socket.socket) -> None:
    """Do the jobs that arrive on a channel, one after the other, until it closes."""
    me = os.getpid()
    while (received := _receive_job(channel)) is not None:
        job, body = received
        answer = _perform(channel, job, body)
        if os.getpid() != me:  # a process that user code has forked returns here
            os._exit(0)
        if len(_children()) > MOST_CHILDREN:
            channel.sendall(frame(CROWDED, job, 0.0))
        channel.sendall(answer)


def _receive_job(channel: socket.socket) -> tuple[int, bytes] | None:
    """Return the number and the body of the next job, or None if the channel closes first."""
    if (header := receive(channel, HEADER.size)) is None:
        return None
    length, job, _, _ = HEADER.unpack(header)
    body = receive(channel, length)
    return None if body is None else (job, body)


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
