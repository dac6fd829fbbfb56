"""A client of the Model Context Protocol over the pipes of a process: JSON-RPC, one message a line.

    request   writes        the request, and answers to what the server asks meanwhile
              waits for     its answer, at most so many seconds; what is on stderr is read and let go
              unblocked by  the deadline, the end of the process, or of its stdout

Lines that are no message, and notifications, are passed over. A line longer than MOST_OF_A_LINE is never
held: it is read to its end, and stands for the answer that is waited for.
"""

import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from posttrain.errors import how_it_ended
from posttrain.process.child import Child
from posttrain.process.interpreter import AWAY_ENV

VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
"""Of the protocol, the newest first; what is used of it is the same in all."""
MOST_OF_A_LINE = 4 << 20
"""Bytes of a message that is read."""
_MOST_ANSWERS = 1 << 20
"""Bytes of answers that wait for a server that asks and does not read; more are not given."""
_MOST_PAGES = 100
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
            self._child = Child(
                command,
                session=False,
                with_parent=_in_worker(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, **env},
            )
        except (OSError, ValueError) as error:
            raise Broken("died", str(error)) from None
        self._line, self._long, self._number = bytearray(), False, 0
        self._messages: deque[Any] = deque()

    @property
    def alive(self) -> bool:
        return self._child.code is None

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
        return self._child.last_words()[:200]

    def close(self, grace_s: float = 0.0) -> None:
        """Ends the process and all below it; one that is asked to end may take some seconds."""
        self._child.close(grace_s)

    # ------------------------------------------------------------------ messages

    def _answers(self, message: Mapping[str, Any]) -> bool:
        """Whether this is the answer that is waited for; what the server asks is answered."""
        if "method" in message:
            if message.get("id") is not None and self._child.pending < _MOST_ANSWERS:
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
        self._child.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")

    def _exchange(self, left_s: float) -> None:
        """Reads and writes what can be, after waiting for that if need be; Broken if nothing ever will."""
        if not self._child.is_open(1):
            raise Broken("died", self._ending())
        for stream, part in self._child.exchange(left_s):
            if stream == 1:
                self._read(part)

    def _read(self, part: bytes) -> None:
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
        code = self._child.wait(_END_S)
        self._child.exchange(0.0)
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
