"""A worker behind a connection: in a thread, or in a process that may be killed.

    serve     consumes       messages: groups, weights, questions, the end
              waits for      nothing but the next message, when it has nothing to do
              unblocked by   the other side's end: a learner that is gone leaves no sampler behind

A message is a tuple of its kind and what belongs to it. From the learner: admit, offer, evaluate, unfinished,
close. From the worker: ready, live, finished, examined, unfinished, work (once a second, from the loop
that steps the engine: who hangs sends none), refused and failed.
"""

import faulthandler
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
from posttrain.errors import how_it_ended
from posttrain.process.child import Child
from posttrain.samplers.worker import RolloutWorker
from posttrain.types import RunError

BEAT_S = 1.0
"""Between two signs of life."""
END_S = 5.0
"""In which a worker that was told to end may do so by itself."""

Make = Callable[[], RolloutWorker]
"""What makes the worker, where it is to be. It can be pickled."""
Message = tuple[Any, ...]


class Server:
    """The worker's side: what it is told goes in, what there is to tell comes out."""

    def __init__(self, worker: RolloutWorker) -> None:
        self.worker = worker
        self._beat = 0.0
        self.out: list[Message] = [("ready",)]

    def handle(self, message: Message) -> None:
        kind, *given = message
        if kind == "unfinished":
            self.out.append((kind, self.worker.unfinished()))
        else:
            getattr(self.worker, kind)(*given)

    def turn(self) -> None:
        """Lets the worker do one thing."""
        before = self.worker.live
        try:
            done = self.worker.turn()
        except (EOFError, ConnectionError) as error:  # of a verifier, say: the learner is not gone
            raise RuntimeError(cause(error)) from error
        if self.worker.live != before:
            self.out.append(("live", self.worker.live))
        if done:
            self.out.append(("finished", done))
        if examined := self.worker.pop_evaluated():
            self.out.append(("examined", examined))
        if time.monotonic() - self._beat > BEAT_S or done:
            self._beat = time.monotonic()
            self.out.append(("work", self.worker.work()))

    def take(self) -> list[Message]:
        """What there is to tell; each message is handed out once."""
        out, self.out = self.out, []
        return out


class Line(Protocol):
    """The worker's end of a connection, as multiprocessing's Connection is one."""

    def send(self, message: Message, /) -> None:
        """Sends it; OSError if nobody is there."""
        ...

    def poll(self, timeout_s: float, /) -> bool:
        """Whether there is a message; waits so long for one."""
        ...

    def recv(self) -> Message:
        """The next message; EOFError once no other will come."""
        ...

    def close(self) -> None: ...


def serve(connection: Line, make: Make) -> None:
    """Serves until the other side says that it is enough, or is gone."""
    server: Server | None = None
    try:
        try:
            server = Server(make())
            while True:
                for message in server.take():
                    connection.send(message)
                if connection.poll(BEAT_S if server.worker.idle else 0.0):
                    message = connection.recv()
                    if message[0] == "close":
                        return
                    server.handle(message)
                    del message  # weights that it offers are let go of once they are taken
                server.turn()
        except (EOFError, ConnectionError):
            return
        except BaseException as error:
            with suppress(OSError):
                for message in server.take() if server else []:
                    connection.send(message)
                if server and isinstance(error, RunError):
                    # What it held before it holds still, if only what it was sent is damaged.
                    connection.send(("refused", str(error)))
                connection.send(("failed", cause(error), "".join(traceback.format_exception(error))))
    finally:
        if server:
            server.worker.rollouts.close()
        connection.close()


# ---------------------------------------------------------------------- the learner's side


class Channel(Protocol):
    """How a learner reaches one worker."""

    bytes: int
    """Sent and received over a network, weights aside."""

    def send(self, message: Message) -> None:
        """Sends it, without waiting until it has been read."""
        ...

    def receive(self) -> list[Message]:
        """What has arrived; EOFError once nothing more can."""
        ...

    def wait(self, others: Sequence[Any], timeout_s: float) -> None:
        """Until this one or another of its kind has something, or so long."""
        ...

    def stack(self) -> str:
        """What the worker is doing, for one that hangs; empty if nobody can tell."""
        ...

    def end(self) -> str:
        """Ends it, by force if need be; how it ended."""
        ...


_NEWS = threading.Condition()
"""Held while what has arrived on any connection is looked at."""


class _Connected:
    """What is alike for a thread and a process.

    Two threads read and write, so that neither side ever waits for the other to do so: a sampler whose
    finished groups fill a pipe would stand still while the learner trains, and a learner would hang with a
    sampler that reads no more.
    """

    bytes = 0

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._inbox: deque[Message] = deque()
        self._outbox: SimpleQueue[Message | None] = SimpleQueue()
        self._over = False
        self._fault = ""
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._listen, self._speak)]
        for each in self._threads:
            each.start()

    def _listen(self) -> None:
        try:
            while True:
                message = self.connection.recv()
                with _NEWS:
                    self._inbox.append(message)
                    _NEWS.notify_all()
        except (EOFError, OSError):
            self._ends("")
        except Exception as error:
            self._ends(f"what a sampler sent cannot be read: {cause(error)}")

    def _speak(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                self.connection.send(message)
        except OSError:
            pass  # it is found dead when it is heard next
        except Exception as error:
            self._ends(f"what a sampler is to be sent cannot be pickled: {cause(error)}")

    def _ends(self, fault: str) -> None:
        with _NEWS:
            self._over, self._fault = True, self._fault or fault
            _NEWS.notify_all()

    def send(self, message: Message) -> None:
        """Sends it, sooner or later."""
        self._outbox.put(message)

    def receive(self) -> list[Message]:
        """What has arrived; EOFError once nothing more can, RunError for what cannot be sent or read."""
        with _NEWS:
            found = list(self._inbox)
            self._inbox.clear()
            if self._fault:
                raise RunError("talk to a sampler", self._fault)
            if not found and self._over:
                raise EOFError
        return found

    def wait(self, others: Sequence["_Connected"], timeout_s: float) -> None:
        """Until this one or another has something, or so long."""
        with _NEWS:
            _NEWS.wait_for(lambda: any(each._inbox or each._over for each in (self, *others)), timeout_s)

    def _closed(self) -> None:
        """Ends the threads of a connection whose other side is gone."""
        self._outbox.put(None)
        for each in self._threads:
            each.join(END_S)
        self.connection.close()


class ThreadChannel(_Connected):
    """A worker in a thread of this process."""

    def __init__(self, make: Make) -> None:
        ours, theirs = Pipe()
        super().__init__(ours)
        self._thread = threading.Thread(target=serve, args=(theirs, make), daemon=True)
        self._thread.start()

    def stack(self) -> str:
        """Where the thread is, the last call first."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(reversed(traceback.format_stack(frame))) if frame else ""

    def end(self) -> str:
        """Asks it to end. A thread that hangs cannot be killed, and is left."""
        self.send(("close",))
        self._thread.join(END_S)
        if self._thread.is_alive():
            return "its thread hangs, and cannot be killed; with async.place = 'process' it could"
        self._closed()
        return "its thread ended"


class ProcessChannel(_Connected):
    """A worker in a process of its own, which shares nothing with this one but weights in shared memory."""

    def __init__(self, make: Make, log: Path) -> None:
        """log: where what it prints goes."""
        ours, theirs = socket.socketpair()
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out, theirs:
            self._child = Child(
                [sys.executable, "-P", "-m", "posttrain.samplers.remote", str(theirs.fileno()), str(log)],
                session=True,  # Ctrl-C is for the learner, which ends it
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
        """What it was doing, as it leaves it in its log, the last call first."""
        size = self._log.stat().st_size
        with suppress(OSError):
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(0.5)
        left = self._log.read_bytes()[size:].decode(errors="replace")
        return left.rpartition("Current thread")[2]  # the others only wait

    def end(self) -> str:
        """Ends it and what it has started; how it ended."""
        self.send(("close",))
        code = self._child.close(grace_s=END_S)
        self._closed()
        return f"{'killed by' if code < 0 else 'its process ended with'} {how_it_ended(code)}"

    def kill(self) -> None:
        self._child.kill()


def _main() -> None:
    """The process of a worker: what makes it comes first over the connection."""
    number, log = int(sys.argv[1]), sys.argv[2]
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)  # sent to all of a group: the learner ends this when it is done
    with Path(log).open("a") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        connection = Connection(number)
        try:
            [make] = connection.recv()
        except (EOFError, OSError):
            return
        except Exception as error:
            connection.send(("failed", cause(error), "".join(traceback.format_exception(error))))
            return
        serve(connection, make)


if __name__ == "__main__":
    _main()
