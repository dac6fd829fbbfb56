"""A worker behind a connection: in a thread, or in a process that can be killed.

    serve     consumes       messages of the learner: groups, weights, questions, the end
              waits for      the next message, if the worker has nothing to do
              unblocked by   the end of the connection: no sampler outlives its learner

A message is a tuple (kind, *arguments).

    from the learner   admit(requests)  offer(snapshot)  evaluate(requests)  unfinished()  sleep()  close()
    from the worker    ready()  live(number)   finished(groups)  evaluated(episodes by number)
                       unfinished(requests)  asleep()  work(Work)  refused(reason)  failed(reason, traceback)

The worker sends `work` once a second from the loop that steps the engine, so one that hangs sends none.
"""

import faulthandler
import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from posttrain.base.usercode import cause
from posttrain.errors import describe_exit
from posttrain.process.child import Child
from posttrain.rollout.worker import RolloutWorker
from posttrain.types import RunError

BEAT_S = 1.0
"""Seconds between two `work` messages."""
END_S = 5.0
"""Seconds that a worker has to end by itself before it is killed."""

MakeWorker = Callable[[], RolloutWorker]
"""Makes the worker where it runs; must be picklable."""
Message = tuple[Any, ...]


class WorkerServer:
    """Call a worker's methods for the messages received, and collect the messages to send."""

    def __init__(self, worker: RolloutWorker) -> None:
        self.worker = worker
        self._last_beat = 0.0
        self.out: list[Message] = [("ready",)]

    def handle(self, message: Message) -> None:
        kind, *arguments = message
        if kind == "unfinished":
            self.out.append((kind, self.worker.unfinished()))
        else:
            getattr(self.worker, kind)(*arguments)
        if kind == "sleep":
            self.out.append(("asleep",))

    def turn(self) -> None:
        """Let the worker make one turn, and report the result."""
        number = self.worker.live
        try:
            groups = self.worker.turn()
        except (EOFError, ConnectionError) as error:  # raised by a verifier, say, not by our connection
            raise RuntimeError(cause(error)) from error
        if self.worker.live != number:
            self.out.append(("live", self.worker.live))
        if groups:
            self.out.append(("finished", groups))
        if evaluated := self.worker.pop_evaluated():
            self.out.append(("evaluated", evaluated))
        if time.monotonic() - self._last_beat > BEAT_S or groups:
            self._last_beat = time.monotonic()
            self.out.append(("work", self.worker.work()))

    def pop_messages(self) -> list[Message]:
        """Return the messages to send, each once."""
        out, self.out = self.out, []
        return out


class WorkerConnection(Protocol):
    """The worker's end of a connection; multiprocessing's Connection implements it."""

    def send(self, message: Message, /) -> None:
        """Send a message. Raises OSError if the other end is closed."""
        ...

    def poll(self, timeout_s: float, /) -> bool:
        """Return whether a message is available, waiting up to `timeout_s` for one."""
        ...

    def recv(self) -> Message:
        """Return the next message. Raises EOFError once the other end is closed."""
        ...

    def close(self) -> None: ...


def serve(connection: WorkerConnection, make: MakeWorker) -> None:
    """Make a worker and serve it until the learner sends "close" or is gone; report what it raises."""
    server: WorkerServer | None = None
    try:
        try:
            server = WorkerServer(make())
            while True:
                for message in server.pop_messages():
                    connection.send(message)
                if connection.poll(BEAT_S if server.worker.idle else 0.0):
                    message = connection.recv()
                    if message[0] == "close":
                        return
                    server.handle(message)
                    del message  # a reference to an offer would keep its weights in memory
                server.turn()
        except (EOFError, ConnectionError):
            return
        except BaseException as error:
            with suppress(OSError):
                for message in server.pop_messages() if server else []:
                    connection.send(message)
                if server and isinstance(error, RunError):
                    # Not "failed": the offered weights are wrong, so a restarted worker would refuse them.
                    connection.send(("refused", str(error)))
                connection.send(("failed", cause(error), "".join(traceback.format_exception(error))))
    finally:
        if server:
            server.worker.rollouts.close()
        connection.close()


# ---------------------------------------------------------------------- the learner's side


class Channel(Protocol):
    """The learner's end of the connection to one worker, which it starts and ends."""

    bytes: int
    """Bytes sent and received over a network, without weights."""

    def send(self, message: Message) -> None:
        """Send a message without waiting until it has been read."""
        ...

    def receive(self) -> list[Message]:
        """Return the messages that have arrived. Raises EOFError once no more can."""
        ...

    def wait(self, others: Sequence[Any], timeout_s: float) -> None:
        """Wait up to `timeout_s` until this channel or one of `others`, of the same class, has a message."""
        ...

    def stack(self) -> str:
        """Return the worker's stack, the last call first; "" if it is not available."""
        ...

    def end(self) -> str:
        """End the worker, by force if it does not end within END_S, and return how it ended."""
        ...


_NEWS = threading.Condition()
"""Guards the inboxes of all channels; notified when a message arrives on any channel."""


class _PipeChannel:
    """Common part of the channels to a thread and to a process.

    One thread reads and one writes, so neither side blocks on the other: without the reader, finished groups
    would fill the pipe and stop the sampler while the learner trains; without the writer, the learner would
    hang with a sampler that no longer reads.
    """

    bytes = 0

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._inbox: deque[Message] = deque()
        self._outbox: SimpleQueue[Message | None] = SimpleQueue()
        self._over = False
        self._fault = ""
        self._threads = [
            threading.Thread(target=loop, daemon=True) for loop in (self._read_messages, self._write_messages)
        ]
        for thread in self._threads:
            thread.start()

    def _read_messages(self) -> None:
        try:
            while True:
                message = self.connection.recv()
                with _NEWS:
                    self._inbox.append(message)
                    _NEWS.notify_all()
        except (EOFError, OSError):
            self._mark_over("")
        except Exception as error:
            self._mark_over(f"what a sampler sent cannot be read: {cause(error)}")

    def _write_messages(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                self.connection.send(message)
        except OSError:
            pass  # the reading thread reports the end
        except Exception as error:
            self._mark_over(f"what a sampler is to be sent cannot be pickled: {cause(error)}")

    def _mark_over(self, fault: str) -> None:
        with _NEWS:
            self._over, self._fault = True, self._fault or fault
            _NEWS.notify_all()

    def send(self, message: Message) -> None:
        """Queue a message for the writing thread."""
        self._outbox.put(message)

    def receive(self) -> list[Message]:
        """Return the messages that have arrived.

        Raises EOFError once no more can arrive, RunError if a message cannot be sent or read.
        """
        with _NEWS:
            messages = list(self._inbox)
            self._inbox.clear()
            if self._fault:
                raise RunError("talk to a sampler", self._fault)
            if not messages and self._over:
                raise EOFError
        return messages

    def wait(self, others: Sequence["_PipeChannel"], timeout_s: float) -> None:
        """Wait up to `timeout_s` until this channel or one of `others` has a message or is over."""
        with _NEWS:
            _NEWS.wait_for(lambda: any(c._inbox or c._over for c in (self, *others)), timeout_s)

    def _close_connection(self) -> None:
        """End the two threads and close our end; the other end must be closed already."""
        self._outbox.put(None)
        for thread in self._threads:
            thread.join(END_S)
        self.connection.close()


class ThreadChannel(_PipeChannel):
    """A worker in a thread of this process."""

    def __init__(self, make: MakeWorker) -> None:
        ours, theirs = Pipe()
        super().__init__(ours)
        self._thread = threading.Thread(target=serve, args=(theirs, make), daemon=True)
        self._thread.start()

    def stack(self) -> str:
        """Return the thread's stack, the last call first."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(reversed(traceback.format_stack(frame))) if frame else ""

    def end(self) -> str:
        """Ask the thread to end and return how it did; one that hangs is left running."""
        self.send(("close",))
        self._thread.join(END_S)
        if self._thread.is_alive():
            return "its thread hangs, and cannot be killed; with async.place = 'process' it could"
        self._close_connection()
        return "its thread ended"


class ProcessChannel(_PipeChannel):
    """A worker in a process of its own; all that it shares with this one is weights in shared memory."""

    def __init__(self, make: MakeWorker, log: Path) -> None:
        """log: file that receives the output of the process."""
        ours, theirs = socket.socketpair()
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out, theirs:
            self._child = Child(
                [sys.executable, "-P", "-m", "posttrain.rollout.remote", str(theirs.fileno()), str(log)],
                session=True,  # Ctrl-C reaches the learner alone, which ends this process
                pass_fds=[theirs.fileno()],
                stdout=out,
                stderr=out,
            )
        super().__init__(Connection(ours.detach()))
        self.send((make,))

    @property
    def pid(self) -> int:
        return self._child.pid

    def stack(self) -> str:
        """Return the stack that faulthandler writes to the log, the last call first."""
        size = self._log.stat().st_size
        with suppress(OSError):
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(0.5)
        dump = self._log.read_bytes()[size:].decode(errors="replace")
        return dump.rpartition("Current thread")[2]  # the other threads only wait

    def end(self) -> str:
        """End the process and all that it has started, and return how it ended."""
        self.send(("close",))
        code = self._child.close(grace_s=END_S)
        self._close_connection()
        return f"{'killed by' if code < 0 else 'its process ended with'} {describe_exit(code)}"

    def kill(self) -> None:
        self._child.kill()


def _main() -> None:
    """Serve a worker in this process; the connection's first message is the function that makes it."""
    gc.disable()  # while libraries are imported, as in posttrain.__main__
    descriptor, log = int(sys.argv[1]), sys.argv[2]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a process group receives both; the learner ends this process
    with Path(log).open("a") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        connection = Connection(descriptor)
        try:
            [make] = connection.recv()
        except (EOFError, OSError):
            return
        except Exception as error:
            connection.send(("failed", cause(error), "".join(traceback.format_exception(error))))
            return
        gc.freeze()
        gc.enable()
        serve(connection, make)


if __name__ == "__main__":
    _main()
