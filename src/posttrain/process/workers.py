"""Call functions in a pool of worker processes, each call with a deadline.

`Workers` keeps a constant number of processes. A call that raises, never ends, kills its process or takes
too much memory becomes a `Failed`; its process is replaced, and other calls are not affected. Nothing here
blocks except `poll`, for at most its timeout.
"""

import math
import os
import pickle
import resource
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from posttrain.base.usercode import cause
from posttrain.process.nursery import Nursery
from posttrain.process.worker import CROWDED, HEADER, JOB, RETURNED, STARTED, frame
from posttrain.types import UserError

_MAX_FRAME_BYTES = 1 << 28
_WORKER_BYTES = 1 << 25
"""Memory that each worker uses, at least: pages that it writes are no longer shared."""


@dataclass(frozen=True, slots=True)
class Returned:
    value: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """Why a call returned nothing: raised, timeout or died."""

    label: str
    reason: str
    seconds: float = 0.0


@dataclass(slots=True)
class _Job:
    ticket: int
    body: bytes
    deadline_s: float
    attempts: int = 0


@dataclass(slots=True, eq=False)
class _Worker:
    serial: int
    channel: socket.socket
    nursery: Nursery
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytes = b""
    job: _Job | None = None
    started: bool = False
    crowded: bool = False
    """Its calls have left too many processes."""
    limit: float = math.inf
    """Deadline of its job, on the monotonic clock."""


class Workers:
    """A constant number of worker processes, started at the first call.

    A call's deadline counts from when its arguments, and the modules they need, have been loaded; loading may
    take `start_s`. Calls must be picklable; `random` and numpy are seeded by the call's key: results do not
    depend on the number of workers or the order.

    >>> with Workers(1, deadline_s=5.0) as workers:
    ...     ticket = workers.submit(math.sqrt, 9.0)
    ...     [(number, outcome)] = workers.poll(timeout_s=60.0)
    >>> number == ticket, outcome.value
    (True, 3.0)
    """

    def __init__(
        self, count: int, *, deadline_s: float, start_s: float = 120.0, memory_mb: int = 4096
    ) -> None:
        if count < 1:
            raise ValueError(f"there must be at least one worker, not {count}")
        if not (0 < deadline_s < math.inf and 0 < start_s < math.inf):
            raise ValueError(f"deadlines must be positive, not {deadline_s} and {start_s}")
        if count > (most := most_workers()):
            problem = f"this machine has room for {most} worker processes, and {count} are asked for"
            raise UserError("rollout.workers", problem, "lower it; more than it has cores gain little")
        if memory_mb < 1:
            raise ValueError(f"memory_mb must be positive, not {memory_mb}")
        self._count, self._deadline_s, self._start_s, self._memory_mb = count, deadline_s, start_s, memory_mb
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        self._queue: deque[_Job] = deque()
        self._finished: list[tuple[int, Returned | Failed]] = []
        self._tickets = 0
        self._serials = 0
        self._nursery: Nursery | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def submit(
        self, call: Callable[..., Any], *args: Any, key: str = "", deadline_s: float | None = None
    ) -> int:
        """Queue a call and return its ticket; raise UserError if it cannot be sent to a process.

        deadline_s: replaces the deadline of the pool.
        """
        for value in (call, *args):
            kind = type(value)
            if kind.__module__ == "__main__":
                raise UserError(
                    "",
                    f"{kind.__name__} cannot be sent to a worker, as it is defined in the script that runs",
                    "move it into a module of its own",
                )
        try:
            body = pickle.dumps((key, call, args))
        except Exception as error:
            raise UserError(
                "", f"a call cannot be sent to a worker: {cause(error)}", "define it at the top of a module"
            ) from None
        self._tickets += 1
        self._queue.append(_Job(self._tickets, body, deadline_s or self._deadline_s))
        self._assign()
        return self._tickets

    def poll(self, timeout_s: float = 0.0) -> list[tuple[int, Returned | Failed]]:
        """Return the outcomes that have arrived; wait up to timeout_s for the first if a call is running."""
        until = time.monotonic() + timeout_s
        while True:
            self._assign()
            busy = [worker for worker in self._workers if worker.job is not None]
            now = time.monotonic()
            wait = 0.0
            if busy and not self._finished:
                wait = max(0.0, min(until, *(worker.limit for worker in busy)) - now)
            for key, events in self._selector.select(wait) if self._workers else []:
                self._attend(key.data, events)
            self._expire()
            if self._finished or not busy or time.monotonic() >= until:
                self._assign()
                finished, self._finished = self._finished, []
                return finished

    def close(self) -> None:
        """End every process; outcomes that `poll` has not returned are lost."""
        for worker in self._workers:
            worker.channel.close()
        self._workers, self._finished = [], []
        self._queue.clear()
        self._selector.close()
        if self._nursery is not None:
            self._nursery.close()
            self._nursery = None

    def _assign(self) -> None:
        """Send waiting jobs to idle workers, and start missing workers."""
        if not self._queue:
            return
        idle = sum(worker.job is None for worker in self._workers)
        for _ in range(min(self._count - len(self._workers), len(self._queue) - idle)):
            self._start()
        for worker in list(self._workers):
            if worker.job is None and self._queue:
                worker.job = self._queue.popleft()
                worker.job.attempts += 1
                worker.started, worker.limit = False, time.monotonic() + self._start_s
                worker.outbox = frame(JOB, worker.job.ticket, 0.0, worker.job.body)
                self._send(worker)

    def _start(self) -> None:
        """Fork a worker; this takes milliseconds and does not wait until it is ready."""
        if self._nursery is None:
            self._nursery = Nursery(self._memory_mb, self._count)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._serials += 1
        try:
            with theirs:
                self._nursery.fork(self._serials, theirs)
        except BaseException:
            ours.close()
            raise
        worker = _Worker(self._serials, ours, self._nursery)
        self._workers.append(worker)
        self._selector.register(ours, selectors.EVENT_READ, worker)

    def _attend(self, worker: _Worker, events: int) -> None:
        if worker not in self._workers:  # replaced by an earlier event
            return
        if events & selectors.EVENT_WRITE:
            self._send(worker)
        if events & selectors.EVENT_READ and worker in self._workers:
            try:
                data = worker.channel.recv(1 << 20)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            worker.inbox += data
            valid = self._read(worker)
            if not data or not valid:
                self._requeue_or_fail(worker)
            elif worker.crowded and worker.job is None:
                self._replace(worker)

    def _send(self, worker: _Worker) -> None:
        """Send as much of the job as the socket takes now, and select it for writing if some is left."""
        try:
            sent = worker.channel.send(worker.outbox) if worker.outbox else 0
        except BlockingIOError:
            sent = 0
        except ConnectionError:
            self._requeue_or_fail(worker)
            return
        worker.outbox = worker.outbox[sent:]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.outbox else 0)
        self._selector.modify(worker.channel, events, worker)

    def _read(self, worker: _Worker) -> bool:
        """Process the frames that a worker has sent; return False for one that is too long."""
        while len(worker.inbox) >= HEADER.size:
            length, ticket, kind, number = HEADER.unpack_from(worker.inbox)
            if length > _MAX_FRAME_BYTES:
                return False
            end = HEADER.size + length
            if len(worker.inbox) < end:
                return True
            body = bytes(worker.inbox[HEADER.size : end])
            del worker.inbox[:end]
            if worker.job is None or ticket != worker.job.ticket:
                continue
            if kind == STARTED:
                worker.started = True
                worker.limit = min(number, time.monotonic()) + worker.job.deadline_s
            elif kind == CROWDED:
                worker.crowded = True
            else:
                self._finish(worker, read_outcome(kind, number, body, worker.job.deadline_s))
        return True

    def _finish(self, worker: _Worker, outcome: Returned | Failed) -> None:
        if worker.job is not None:
            self._finished.append((worker.job.ticket, outcome))
        worker.job, worker.started, worker.limit = None, False, math.inf

    def _expire(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers):
            if worker.job is not None and now >= worker.limit:
                late = _late(worker.job.deadline_s, worker.job.deadline_s)
                unready = Failed("timeout", f"not loaded within {self._start_s:g} s", self._start_s)
                self._finish(worker, late if worker.started else unready)
                self._replace(worker)

    def _requeue_or_fail(self, worker: _Worker) -> None:
        """Replace a worker that has ended; its job fails, or is queued again if it had not begun."""
        how = self._replace(worker)
        job, worker.job = worker.job, None
        if job is None:
            return
        if not worker.started and job.attempts < 2:
            # A thread of an earlier call may have ended it.
            self._queue.appendleft(job)
        else:
            self._finished.append((job.ticket, Failed("died", how)))

    def _replace(self, worker: _Worker) -> str:
        """End a worker, start another in its place, and return how the first one ended."""
        self._selector.unregister(worker.channel)
        worker.channel.close()
        self._workers.remove(worker)
        try:
            how = worker.nursery.end(worker.serial)
        except ConnectionError:
            # The nursery itself is gone and its workers with it; the next job starts another.
            worker.nursery.close()
            if self._nursery is worker.nursery:
                self._nursery = None
            return "the process that starts workers was killed"
        self._start()
        return how


def most_workers() -> int:
    """Return how many workers fit by the limits of files and processes, and by the machine's memory."""
    limits = [resource.getrlimit(which)[0] for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    bounds = [limit // 2 for limit in limits if limit != resource.RLIM_INFINITY]
    return max(1, min([*bounds, memory // _WORKER_BYTES]))


def read_outcome(kind: bytes, seconds: float, body: bytes, deadline_s: float) -> Returned | Failed:
    """Return the outcome of a call from the frame that answers it."""
    if seconds > deadline_s:
        return _late(seconds, deadline_s)
    if kind != RETURNED:
        return Failed("raised", body.decode("utf-8", "replace"), seconds)
    try:
        return Returned(pickle.loads(body))
    except Exception as error:
        return Failed("raised", f"what it returned cannot be read: {cause(error)}", seconds)


def _late(seconds: float, deadline_s: float) -> Failed:
    return Failed("timeout", f"nothing within {deadline_s:g} s", seconds)
