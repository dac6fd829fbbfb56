"""A client of the Model Context Protocol over the pipes of a process: JSON-RPC, one message a line.

    request   writes        the request, and answers to what the server asks meanwhile
              waits for     its answer, at most so many seconds; what is on stderr is read and let go
              unblocked by  the deadline, the end of the process, or of its stdout

Lines that are no message, and notifications, are passed over. A line longer than MOST_OF_A_LINE is never
held: it is read to its end, and stands for the answer that is waited for.
"""

import json
import os
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from posttrain.errors import how_it_ended
from posttrain.process.interpreter import AWAY_ENV
from posttrain.process.tree import end_with_parent, kill_tree

VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
"""Of the protocol, the newest first; what is used of it is the same in all."""
MOST_OF_A_LINE = 4 << 20
"""Bytes of a message that is read."""
_MOST_ANSWERS = 1 << 20
"""Bytes of answers that wait for a server that asks and does not read; more are not given."""
_MOST_PAGES = 100
_PART = 1 << 16
_LAST = 4096
_END_S = 2.0
_NO_SUCH_METHOD = -32601


class Broken(Exception):  # noqa: N818  no error of ours
    """A server that cannot go on, and must be closed: it has ended (died), or is late (timeout)."""

    def __init__(self, label: str, reason: str) -> None:
        self.label, self.reason = label, reason
        super().__init__(reason)


class Refused(Exception):  # noqa: N818  no error of ours
    """A request that the server answers with an error."""


class TooLong(Exception):  # noqa: N818  no error of ours
    """An answer that is longer than what is read."""


class Connection:
    """A server's process and its pipes.

    It stays in our group of processes, and ends with this process where that is a worker. Broken if it
    cannot be started.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        try:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env={**os.environ, **env},
                preexec_fn=end_with_parent if _in_worker() else None,
            )
        except (OSError, ValueError) as error:
            raise Broken("died", str(error)) from None
        streams = (self._process.stdin, self._process.stdout, self._process.stderr)
        self._in, self._out, self._errors = (stream for stream in streams if stream is not None)
        for stream in (self._in, self._out, self._errors):
            os.set_blocking(stream.fileno(), False)
        self._open: dict[int, IO[bytes]] = {each.fileno(): each for each in (self._out, self._errors)}
        self._outbox, self._line, self._last = bytearray(), bytearray(), b""
        self._long, self._number = False, 0
        self._messages: deque[Any] = deque()

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def initialise(self, deadline_s: float) -> Mapping[str, Any]:
        """What the server says of itself; Broken where it speaks no version of ours."""
        ours = {
            "protocolVersion": VERSIONS[0],
            "capabilities": {},
            "clientInfo": {"name": "posttrain", "version": "1"},
        }
        said = self.request("initialize", ours, deadline_s)
        if (version := said.get("protocolVersion")) not in VERSIONS:
            known = ", ".join(VERSIONS)
            raise Broken("died", f"it speaks version {str(version)[:40]!r} of the protocol, not {known}")
        self._post({"method": "notifications/initialized"})
        return said

    def pages(self, method: str, key: str, deadline_s: float) -> Iterator[Any]:
        """What all pages of a list hold under this key, in order."""
        cursor: dict[str, Any] = {}
        for _ in range(_MOST_PAGES):
            page = self.request(method, cursor, deadline_s)
            entries = page.get(key)
            yield from entries if isinstance(entries, list) else ()
            if not (following := page.get("nextCursor")):
                return
            cursor = {"cursor": following}
        raise Broken("died", f"its answer to {method} has more than {_MOST_PAGES} pages")

    def request(self, method: str, params: Mapping[str, Any], deadline_s: float) -> Mapping[str, Any]:
        """The result of a request; Refused, TooLong or Broken where there is none."""
        self._number += 1
        self._post({"id": self._number, "method": method, "params": params})
        until = time.monotonic() + deadline_s
        while True:
            while self._messages:
                message = self._messages.popleft()
                if isinstance(message, TooLong):
                    raise message
                if isinstance(message, dict) and self._answers(message):
                    result = message.get("result")
                    return result if isinstance(result, dict) else {}
            if (left := until - time.monotonic()) <= 0:
                raise Broken("timeout", f"no result within {deadline_s:g} s")
            self._exchange(left)

    def last_words(self) -> str:
        """The last line that the server wrote to stderr."""
        lines = self._last.decode("utf-8", "replace").split("\n")
        return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "")

    def close(self, grace_s: float = 0.0) -> None:
        """Ends the process and all below it; one that is asked to end may take some seconds."""
        self._in.close()
        if grace_s:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        if self.alive:
            kill_tree(self._process.pid)
            self._process.wait()
        self._out.close()
        self._errors.close()

    # ------------------------------------------------------------------ messages

    def _answers(self, message: Mapping[str, Any]) -> bool:
        """Whether this is the answer that is waited for; what the server asks is answered."""
        if "method" in message:
            if message.get("id") is not None and len(self._outbox) < _MOST_ANSWERS:
                refusal = {"error": {"code": _NO_SUCH_METHOD, "message": "the client does not do this"}}
                self._post(
                    {"id": message["id"], **({"result": {}} if message["method"] == "ping" else refusal)}
                )
            return False
        if message.get("id") != self._number:
            return False
        if (error := message.get("error")) is not None:
            raise Refused(str(error.get("message") if isinstance(error, dict) else error))
        return True

    def _post(self, message: Mapping[str, Any]) -> None:
        self._outbox += json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n"

    def _exchange(self, left_s: float) -> None:
        """Reads and writes what can be, after waiting for that if need be; Broken if nothing ever will."""
        if self._out.fileno() not in self._open:
            raise Broken("died", self._ending())
        poll = select.poll()
        for descriptor in self._open:
            poll.register(descriptor, select.POLLIN)
        if self._outbox:
            poll.register(self._in, select.POLLOUT)
        for descriptor, _ in poll.poll(left_s * 1000):
            if descriptor == self._in.fileno():
                try:
                    del self._outbox[: os.write(descriptor, self._outbox[:_PART])]
                except BlockingIOError:
                    continue
                except OSError:  # its stdout says the rest
                    self._outbox.clear()
                continue
            with suppress(BlockingIOError):
                part = os.read(descriptor, _PART)
                if not part:
                    del self._open[descriptor]
                self._read(descriptor, part)

    def _read(self, descriptor: int, part: bytes) -> None:
        if descriptor == self._errors.fileno():
            self._last = (self._last + part)[-_LAST:]
            return
        *lines, rest = part.split(b"\n")
        for line in lines:
            self._messages += [TooLong()] if self._long else _parsed(bytes(self._line) + line)
            self._line.clear()
            self._long = False
        self._line += rest
        if len(self._line) > MOST_OF_A_LINE:
            self._long = True
        if self._long:
            self._line.clear()

    def _ending(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        with suppress(OSError):
            self._last = (self._last + os.read(self._errors.fileno(), _PART))[-_LAST:]
        code = self._process.poll()
        if code is None:
            return "the server closed its stdout"
        return f"the server ended ({how_it_ended(code)})"


def _parsed(line: bytes) -> list[Any]:
    """The messages of a line, which may be a batch; none where it is no JSON."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return []
    return value if isinstance(value, list) else [value]


def _in_worker() -> bool:
    """Whether this process has one thread, and may so be copied at will."""
    return AWAY_ENV in os.environ and sys.platform == "linux"
