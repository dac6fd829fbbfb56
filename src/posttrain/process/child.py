"""Run a program in a child process: exchange data under a deadline, and kill its whole process tree."""

import math
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Self

from posttrain.process.tree import end_with_parent, kill_tree

_PART = 1 << 16
_LAST = 1 << 16
_LOOK_S = 0.05
"""Seconds until the end of a program is noticed while another process holds its pipes open."""
_DRAINS = 64
"""Reads from the pipes of an ended program; they hold at most a megabyte."""


class Child:
    """A program that runs until it ends by itself, or until `close` kills it and the processes it started.

    session: start it in a session of its own. Ctrl-C then does not reach it, and `close` kills that session;
    processes that leave the session, such as a nursery, must end themselves. Without, `close` kills the tree
    of processes below it.

    Raises OSError if it cannot be started.

    >>> with Child(["cat"], session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
    ...     child.communicate(b"hello", deadline_s=60.0), child.code
    (b'hello', 0)
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        session: bool,
        with_parent: bool = False,
        stdin: int = subprocess.DEVNULL,
        stdout: int | IO[bytes] = subprocess.DEVNULL,
        stderr: int | IO[bytes] | None = subprocess.DEVNULL,
        pass_fds: Sequence[int] = (),
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
    ) -> None:
        """with_parent: the kernel kills it when this process ends; this process must have one thread."""
        self._process = subprocess.Popen(
            list(argv),
            bufsize=0,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=pass_fds,
            env=env,
            cwd=cwd,
            start_new_session=session,
            preexec_fn=end_with_parent if with_parent else None,
        )
        self._session = session
        self._outbox = bytearray()
        self.errors = bytearray()
        """The last bytes read from its stderr."""
        self._reads: dict[int, int] = {}
        """The stream, 1 or 2, of each open pipe by its descriptor."""
        for number, stream in enumerate((self._process.stdin, self._process.stdout, self._process.stderr)):
            if stream is not None:
                os.set_blocking(stream.fileno(), False)
                if number:
                    self._reads[stream.fileno()] = number

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Exit status, -n if signal n ended it, None while it runs."""
        return self._process.poll()

    @property
    def pending(self) -> int:
        """Bytes that the program has not yet read from its stdin."""
        return len(self._outbox)

    def is_open(self, stream: int | None = None) -> bool:
        """Return whether stdout (1) or stderr (2), or by default either, is still open."""
        return bool(self._reads) if stream is None else stream in self._reads.values()

    def last_words(self) -> str:
        """Return the last line of `errors`."""
        return last_line(self.errors)

    def write(self, data: bytes) -> None:
        """Queue data that `exchange` writes to its stdin."""
        self._outbox += data

    def exchange(self, timeout_s: float) -> list[tuple[int, bytes]]:
        """Wait until a pipe is ready, then read and write once; return (1 or 2, bytes) of streams read."""
        poll = select.poll()
        for descriptor in self._reads:
            poll.register(descriptor, select.POLLIN)
        if self._outbox and self._process.stdin is not None:
            poll.register(self._process.stdin, select.POLLOUT)
        parts = []
        for descriptor, _ in poll.poll(None if timeout_s == math.inf else timeout_s * 1000):
            if (stream := self._reads.get(descriptor)) is None:
                self._write(descriptor)
                continue
            with suppress(BlockingIOError):
                if part := os.read(descriptor, _PART):
                    parts.append((stream, part))
                else:
                    del self._reads[descriptor]
        for stream, part in parts:
            if stream == 2:
                self.errors += part
                del self.errors[:-_LAST]
        return parts

    def communicate(self, data: bytes = b"", *, deadline_s: float = math.inf) -> bytes:
        """Write `data` and close its stdin; return its stdout once it has ended.

        Does not wait for other processes that hold its pipes open. Raises TimeoutError at the deadline.
        """
        until = time.monotonic() + deadline_s
        self.write(data)
        written = bytearray()
        while self.code is None:
            if (seconds := until - time.monotonic()) <= 0:
                raise TimeoutError(f"no end within {deadline_s:g} s")
            if not self._outbox and self._process.stdin is not None:
                self._process.stdin.close()
            if self._outbox or self._reads:
                written += _of_stdout(self.exchange(min(seconds, _LOOK_S)))
            else:
                self.wait(seconds)
        for _ in range(_DRAINS):
            if not (parts := self.exchange(0.0)):
                break
            written += _of_stdout(parts)
        return bytes(written)

    def wait(self, timeout_s: float = math.inf) -> int | None:
        """Return its exit status, or None if it still runs after `timeout_s`."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(None if timeout_s == math.inf else timeout_s)
        return None

    def send_signal(self, number: int) -> None:
        """Send the program a signal, unless it has ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the program and the processes it started."""
        if self._session:
            with suppress(OSError):  # it has ended
                os.killpg(self.pid, signal.SIGKILL)
        elif self.code is None:
            kill_tree(self.pid)

    def close(self, grace_s: float = 0.0) -> int:
        """Close its stdin, kill it if it does not end within `grace_s`, and return its exit status."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        if grace_s:
            self.wait(grace_s)
        self.kill()
        code = self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        self._reads.clear()
        return code

    def _write(self, descriptor: int) -> None:
        try:
            del self._outbox[: os.write(descriptor, self._outbox[:_PART])]
        except BlockingIOError:
            pass
        except OSError:  # it has closed its stdin
            self._outbox.clear()


def _of_stdout(parts: Sequence[tuple[int, bytes]]) -> bytes:
    return b"".join(part for stream, part in parts if stream == 1)


def last_line(output: bytes | bytearray) -> str:
    """Return the last line that is not blank, without blanks around it.

    >>> last_line(b"one\\n two \\n\\n"), last_line(b"")
    ('two', '')
    """
    return "".join(output.decode("utf-8", "replace").strip().splitlines()[-1:]).strip()
