"""Manage a program that runs in a box: its time, its output and its end.

Clock    measures the time in which a box could run; waiting for a processor does not count, so that
         verdicts do not depend on the load of the machine
attend   reads a program's output until it ends, runs out of time, or writes too much
Live     is the running program; `close` kills it and every process that it started
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
"""Longest time between two looks at the clock of a box."""
_END_S = 5.0
"""Time in which the supervisor should end, or bubblewrap stop, before it is killed."""
_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


USED: set[int] = set()
"""User ids of this process's open boxes."""


@dataclass
class Holdings:
    """Resources of a box in addition to its process; `release` frees them."""

    channel: socket.socket | None = None
    lifeline: int | None = None
    """Descriptor; when it is closed, the supervisor in the box kills everything."""
    workdir: Path | None = None
    group: cgroup.Cgroup | None = None
    uid: int | None = None
    """User id that only this box has; None unless this process is root."""

    def end_supervisor(self) -> None:
        """Tell the supervisor, if there is one, to end."""
        if self.lifeline is not None:
            os.close(self.lifeline)
            self.lifeline = None

    def release(self) -> None:
        """Free all resources. The process must have ended."""
        self.end_supervisor()
        if self.uid is not None:
            if self.workdir is not None:  # no PID namespace ends its processes
                _kill_all_of(self.uid)
            USED.discard(self.uid)
        if self.channel is not None:
            self.channel.close()
        if self.workdir is not None:
            remove_tree(self.workdir)
        if self.group is not None:
            self.group.remove()


class Live:
    """A program that runs in a box until `close` kills it and every process that it started."""

    def __init__(self, process: subprocess.Popen[bytes], holdings: Holdings) -> None:
        self.process = process
        self.channel = holdings.channel
        self.started_at = time.monotonic()
        self._holdings = holdings
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def waited_s(self) -> float:
        """Return the longest time in seconds that one of its threads has waited for a processor."""
        return max((queued for _, queued in scheduled(self.process.pid).values()), default=0.0)

    def out_of_memory(self) -> bool:
        """Return whether the kernel killed a process in the box because memory ran out."""
        return self._holdings.group is not None and self._holdings.group.ran_out()

    def close(self) -> None:
        """Kill what still runs, and free the resources of the box."""
        if self._closed:
            return
        self._closed = True
        if self._holdings.lifeline is not None:
            self._holdings.end_supervisor()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=_END_S)
        if self.process.poll() is None:
            # A bubblewrap that is killed while it creates namespaces would leave its child waiting in them.
            # At weaker levels the program may trace its supervisor, which then never stops.
            kill_tree(self.process.pid, stop_s=_END_S if self._holdings.workdir is None else 0.0)
            self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        self._holdings.release()


class Clock:
    """Measure how long a box has run, not counting time in which other programs had the processor.

    Time that the box's own processes take from each other counts, so that together they compute no longer
    than they could on an idle machine.
    """

    def __init__(self, live: Live, wall_s: float) -> None:
        self._pid, self._wall_s = live.process.pid, wall_s
        self._interval_s = min(_LOOK_S, wall_s / 4)
        self._start = self._last_look = time.monotonic()
        self._next_look = self._start + self._interval_s
        self._scheduled = scheduled(self._pid)
        self._ran_s = self._excused_s = 0.0

    def left(self) -> float:
        """Return the seconds until `late` should be asked again."""
        return max(0.0, self._next_look - time.monotonic())

    def late(self) -> bool:
        """Return whether the box has used up its time."""
        if time.monotonic() < self._next_look:
            return False
        used = self.used()
        elapsed = self._last_look - self._start
        if elapsed >= self._wall_s and (
            used >= self._wall_s
            or self._ran_s >= _CORES * self._wall_s
            or elapsed >= _MOST_WAIT * self._wall_s
        ):
            return True
        self._next_look = self._last_look + max(0.005, min(self._interval_s, self._wall_s - used))
        return False

    def used(self) -> float:
        """Return the seconds of its time that the box has used."""
        now = time.monotonic()
        threads = scheduled(self._pid)
        waited = 0.0
        for task, (ran, queued) in threads.items():
            ran_before, queued_before = self._scheduled.get(task, (0.0, 0.0))
            self._ran_s += max(0.0, ran - ran_before)
            waited = max(waited, queued - queued_before)
        self._excused_s += min(waited, now - self._last_look)
        self._scheduled, self._last_look = {**self._scheduled, **threads}, now
        return now - self._start - self._excused_s


def attend(
    live: Live,
    streams: Mapping[str, IO[bytes] | None],
    stdin: bytes,
    most: Mapping[str, int],
    wall_s: float,
) -> tuple[dict[str, bytes], Literal["exit", "timeout", "output"]]:
    """Write stdin and read each stream until the program ends, is late, or writes more than `most` bytes.

    The end of the process counts and not the end of the streams: children may keep them open, and a program
    that closes them may continue.
    """
    outputs = {name: bytearray() for name in streams}
    clock = Clock(live, wall_s)
    view = memoryview(stdin)
    with (
        selectors.DefaultSelector() as selector,
        os.fdopen(os.pidfd_open(live.process.pid), "rb") as process_end,
    ):
        selector.register(process_end, selectors.EVENT_READ)
        for name, stream in streams.items():
            if stream is not None:
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_READ, name)
        pipe = live.process.stdin
        if pipe is not None:
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_WRITE)
        while True:
            has_ended = False
            for key, _ in selector.select(clock.left()):
                if key.fileobj is process_end:
                    has_ended = True
                elif key.fileobj is pipe and pipe is not None:
                    view = _write_stdin(key.fd, view)
                    if not len(view):
                        selector.unregister(pipe)
                        pipe.close()
                elif not _read_available(key.fd, outputs[key.data], 1 << 16):
                    selector.unregister(key.fileobj)
            if has_ended:
                for key in list(selector.get_map().values()):
                    if key.data is not None:
                        _read_available(key.fd, outputs[key.data], most[key.data] + 1)
            if any(len(output) > most[name] for name, output in outputs.items()):
                return {name: bytes(output[: most[name]]) for name, output in outputs.items()}, "output"
            if has_ended or clock.late():
                return {k: bytes(v) for k, v in outputs.items()}, "exit" if has_ended else "timeout"


def _write_stdin(fd: int, view: memoryview) -> memoryview:
    """Write some of a program's stdin and return the rest; empty if the program closed it."""
    if not len(view):
        return view
    try:
        return view[os.write(fd, view[: 1 << 16]) :]
    except BlockingIOError:
        return view
    except OSError:
        return view[:0]


def _read_available(fd: int, data: bytearray, most: int) -> bool:
    """Append up to about `most` available bytes of a stream to `data`; return False at its end."""
    with suppress(BlockingIOError):
        while most > 0:
            part = os.read(fd, min(most, 1 << 16))
            if not part:
                return False
            data += part
            most -= len(part)
    return True


def scheduled(pid: int) -> dict[int, tuple[float, float]]:
    """Return (seconds run, seconds waited to run) of each thread of a process and of its descendants."""
    times: dict[int, tuple[float, float]] = {}
    for process in below(pid):
        with suppress(OSError):
            for task in os.listdir(f"/proc/{process}/task"):
                with suppress(OSError, ValueError), open(f"/proc/{process}/task/{task}/schedstat") as file:
                    ran, queued, _ = map(int, file.read().split())
                    times[int(task)] = ran / 1e9, queued / 1e9
    return times


def remove_tree(directory: Path) -> None:
    """Remove a directory of any depth and with any permissions; ignore what cannot be removed."""
    with suppress(OSError, RecursionError):
        shutil.rmtree(directory)
        return
    for command in (["rm", "-rf"], ["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        if directory.exists():
            with suppress(OSError):
                subprocess.run([*command, "--", directory], capture_output=True, check=False)


def _kill_all_of(uid: int) -> None:
    """Kill every process of a user id that only one box has."""
    with suppress(OSError):
        subprocess.run([*host.as_user(uid), "/bin/sh", "-c", "kill -9 -1"], capture_output=True, check=False)
