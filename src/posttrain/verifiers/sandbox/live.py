"""A program that runs in a box: how long it may, what it says, and its end.

Clock    time in which a box could run: waiting for a processor that others use does not count,
         so that the verdict on a loaded machine is that on a quiet one
attend   what a program writes until it ends, is late, or writes too much
Live     the program itself; `close` ends it and all that it has started
"""

import os
import selectors
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, Self

from posttrain.process.tree import below, kill_tree
from posttrain.verifiers.sandbox import cgroup, host

_MOST_WAIT = 20.0
"""A program gets at most this many times its wall time, however loaded the machine is."""
_LOOK_S = 0.25
_END_S = 5.0
_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


USED: set[int] = set()
"""Users that boxes of this process have now."""


@dataclass
class Holdings:
    """What a box is made of besides its process, and what is given back at its end."""

    channel: socket.socket | None = None
    lifeline: int | None = None
    """The supervisor in the box ends everything when this is closed."""
    workdir: Path | None = None
    group: cgroup.Cgroup | None = None
    uid: int | None = None
    """The user of this box alone, where we are root."""

    def let_go(self) -> None:
        """Tells the supervisor to end; nothing where there is none."""
        if self.lifeline is not None:
            os.close(self.lifeline)
            self.lifeline = None

    def release(self) -> None:
        """Gives everything back, once nothing runs any more."""
        self.let_go()
        if self.uid is not None:
            if self.workdir is not None:  # no PID namespace holds its processes
                _end_all_of(self.uid)
            USED.discard(self.uid)
        if self.channel is not None:
            self.channel.close()
        if self.workdir is not None:
            remove_tree(self.workdir)
        if self.group is not None:
            self.group.remove()


class Live:
    """A program that runs in a box, until `close` ends it and all it has started."""

    def __init__(self, process: subprocess.Popen[bytes], holdings: Holdings) -> None:
        self.process = process
        self.channel = holdings.channel
        self.begun = time.monotonic()
        self._holdings = holdings
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def waited_s(self) -> float:
        """Seconds in which the program wanted a processor and had none."""
        return max((queued for _, queued in scheduled(self.process.pid).values()), default=0.0)

    def out_of_memory(self) -> bool:
        """Whether the kernel killed something in it for want of memory."""
        return self._holdings.group is not None and self._holdings.group.ran_out()

    def close(self) -> None:
        """Kills what still runs, and removes what the box was made of."""
        if self._closed:
            return
        self._closed = True
        if self._holdings.lifeline is not None:
            self._holdings.let_go()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=_END_S)
        if self.process.poll() is None:
            # A bubblewrap that is killed while it makes its namespaces would leave its child waiting in them.
            # At weaker levels the program may trace what holds it, which then never stops.
            kill_tree(self.process.pid, stop_s=_END_S if self._holdings.workdir is None else 0.0)
            self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        self._holdings.release()


class Clock:
    """How long a box has run, not counting time in which others had the processor.

    What the processes of a box take from each other counts, since together they may compute no
    longer than they could on a machine of their own.
    """

    def __init__(self, live: Live, wall_s: float) -> None:
        self._pid, self._wall_s = live.process.pid, wall_s
        self._every = min(_LOOK_S, wall_s / 4)
        self._begun = self._looked = time.monotonic()
        self._next = self._begun + self._every
        self._seen = scheduled(self._pid)
        self._ran = self._excused = 0.0

    def left(self) -> float:
        """Seconds after which it is worth asking again whether the box is late."""
        return max(0.0, self._next - time.monotonic())

    def late(self) -> bool:
        """Whether the box has had its time."""
        if time.monotonic() < self._next:
            return False
        used = self.used()
        elapsed = self._looked - self._begun
        if elapsed >= self._wall_s and (
            used >= self._wall_s or self._ran >= _CORES * self._wall_s or elapsed >= _MOST_WAIT * self._wall_s
        ):
            return True
        self._next = self._looked + max(0.005, min(self._every, self._wall_s - used))
        return False

    def used(self) -> float:
        """Seconds of its time that have passed."""
        now = time.monotonic()
        seen = scheduled(self._pid)
        waited = 0.0
        for task, (ran, queued) in seen.items():
            ran_before, queued_before = self._seen.get(task, (0.0, 0.0))
            self._ran += max(0.0, ran - ran_before)
            waited = max(waited, queued - queued_before)
        self._excused += min(waited, now - self._looked)
        self._seen, self._looked = {**self._seen, **seen}, now
        return now - self._begun - self._excused


def attend(
    live: Live,
    streams: Mapping[str, IO[bytes] | None],
    stdin: bytes,
    most: Mapping[str, int],
    wall_s: float,
) -> tuple[dict[str, bytes], Literal["exit", "timeout", "output"]]:
    """What each stream brought until the program ended, was late, or wrote too much.

    A program that ends while something of its own holds the streams open has ended; one that closes
    them and goes on has not.
    """
    read = {name: bytearray() for name in streams}
    clock = Clock(live, wall_s)
    view = memoryview(stdin)
    with selectors.DefaultSelector() as selector, os.fdopen(os.pidfd_open(live.process.pid), "rb") as end:
        selector.register(end, selectors.EVENT_READ)
        for name, stream in streams.items():
            if stream is not None:
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_READ, name)
        pipe = live.process.stdin
        if pipe is not None:
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_WRITE)
        while True:
            ended = False
            for key, _ in selector.select(clock.left()):
                if key.fileobj is end:
                    ended = True
                elif key.fileobj is pipe and pipe is not None:
                    view = _write_stdin(key.fd, view)
                    if not len(view):
                        selector.unregister(pipe)
                        pipe.close()
                elif not _read_available(key.fd, read[key.data], 1 << 16):
                    selector.unregister(key.fileobj)
            if ended:
                for key in list(selector.get_map().values()):
                    if key.data is not None:
                        _read_available(key.fd, read[key.data], most[key.data] + 1)
            if any(len(found) > most[name] for name, found in read.items()):
                return {name: bytes(found[: most[name]]) for name, found in read.items()}, "output"
            if ended or clock.late():
                return {k: bytes(v) for k, v in read.items()}, "exit" if ended else "timeout"


def _write_stdin(fd: int, view: memoryview) -> memoryview:
    """What is left of a program's stdin; nothing if it has closed it."""
    if not len(view):
        return view
    try:
        return view[os.write(fd, view[: 1 << 16]) :]
    except BlockingIOError:
        return view
    except OSError:
        return view[:0]


def _read_available(fd: int, found: bytearray, most: int) -> bool:
    """Adds what a stream holds now, about `most` bytes of it; False at its end."""
    with suppress(BlockingIOError):
        while most > 0:
            part = os.read(fd, min(most, 1 << 16))
            if not part:
                return False
            found += part
            most -= len(part)
    return True


def scheduled(pid: int) -> dict[int, tuple[float, float]]:
    """For each thread of a process and of all below it the seconds it has run, and has waited to run."""
    found: dict[int, tuple[float, float]] = {}
    for process in below(pid):
        with suppress(OSError):
            for task in os.listdir(f"/proc/{process}/task"):
                with suppress(OSError, ValueError), open(f"/proc/{process}/task/{task}/schedstat") as file:
                    ran, queued, _ = map(int, file.read().split())
                    found[int(task)] = ran / 1e9, queued / 1e9
    return found


def remove_tree(directory: Path) -> None:
    """Removes a directory, however deep and however its rights are set; what cannot be removed stays."""
    with suppress(OSError, RecursionError):
        shutil.rmtree(directory)
        return
    for command in (["rm", "-rf"], ["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        if directory.exists():
            with suppress(OSError):
                subprocess.run([*command, "--", directory], capture_output=True, check=False)


def _end_all_of(uid: int) -> None:
    """Kills every process of a user that only one box has."""
    with suppress(OSError):
        subprocess.run([*host.as_user(uid), "/bin/sh", "-c", "kill -9 -1"], capture_output=True, check=False)
