"""Processes of `coqtop` that have loaded a header, each of which serves one submission and is then ended.

take          waits for        the header to be loaded by a process started when the last was taken
Session.say   waits for        one answer, until the session's time is used up
"""

import atexit
import os
import re
import secrets
import selectors
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from posttrain.verifiers.sandbox import Box, Live

_PROMPT = re.compile(rb"<prompt>[^\n]* < (\d+) \|([^\n]*)\| \d+ < </prompt>")
_PROMPT_END = b"</prompt>"
_MOST_EXCUSED = 20.0
"""Waiting for a processor is excused up to this many times the time a session has."""
_MOST_HEADERS = 4
"""Headers for which processes are kept waiting; the one used longest ago makes room."""


Why = Literal["timeout", "output", "died"]


class EndedError(Exception):
    """A session that can answer no more, and why."""

    def __init__(self, why: Why) -> None:
        super().__init__(why)
        self.why = why


@dataclass(frozen=True, slots=True)
class CoqReply:
    """What Coq did with one sentence."""

    accepted: bool
    state: int
    """The number of the state after it, to which `BackTo` returns."""
    proving: bool
    """Whether a proof is open after it."""
    output: str


class CoqSession:
    """One `coqtop`, and the time it has left.

    After each sentence it is asked for a name made up at that moment. What it prints before it answers
    that may be anything; the last prompt before the answer is Coq's own, and cannot be forged.
    """

    def __init__(self, live: Live, preamble: str, output_bytes: int) -> None:
        self._live, self._output_bytes = live, output_bytes
        self.secret = secrets.token_hex(8)
        """Part of the names that we declare in it, so that no submission can name them."""
        self._inbox = b""
        self._begun, self._given, self._until = 0.0, 0.0, 0.0
        self._state = -1
        self._first = secrets.token_hex(8)
        self._loaded: CoqReply | None = None
        stdin, stdout = live.process.stdin, live.process.stdout
        assert stdin is not None
        assert stdout is not None
        self._stdin, self._stdout = stdin, stdout
        os.set_blocking(stdin.fileno(), False)
        self._outbox = _asked(preamble, self._first)
        self._write()

    def allow(self, seconds: float) -> None:
        """Starts the clock of what is said next."""
        self._begun, self._given = time.monotonic(), seconds
        self._until = self._begun + seconds

    def load(self) -> CoqReply:
        """What Coq says of the preamble; raises EndedError like `say`."""
        if self._loaded is None:
            self._loaded = self._answer(self._first)
        return self._loaded

    def say(self, sentence: str) -> CoqReply:
        """What Coq does with a sentence. Raises EndedError if it ends, floods, or uses its time up."""
        nonce = secrets.token_hex(8)
        self._outbox = _asked(sentence, nonce)
        return self._answer(nonce)

    def say_all(self, sentences: Sequence[str]) -> list[CoqReply]:
        """What Coq does with each of these, which are sent together: quicker, and no proof of anything.

        What a tactic prints may look like a prompt. Raises EndedError, "output", where there are others than
        Coq's own.
        """
        nonce, before = secrets.token_hex(8), self._state
        self._outbox = _asked("\n".join(sentences), nonce)
        text = self._until_answered(nonce)
        found, answers, start = list(_PROMPT.finditer(text)), list[CoqReply](), 0
        if len(found) != len(sentences):
            raise EndedError("output")
        for prompt in found:
            state, output = int(prompt.group(1)), text[start : prompt.start()].decode("utf-8", "replace")
            answers.append(CoqReply(state != before, state, prompt.group(2) != b"", output))
            before, start = state, prompt.end()
        return answers

    def close(self) -> None:
        self._live.close()

    def _answer(self, nonce: str) -> CoqReply:
        before = self._state
        text = self._until_answered(nonce)
        at = text.rfind(b"<prompt>")
        ours = _PROMPT.match(text, at) if at >= 0 else None
        if ours is None:
            raise EndedError("died")
        state = int(ours.group(1))
        return CoqReply(state != before, state, ours.group(2) != b"", text[:at].decode("utf-8", "replace"))

    def _until_answered(self, nonce: str) -> bytes:
        """All that is printed before the answer to our own question, whose state is then ours."""
        marker = _name(nonce)
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            if self._outbox:
                selector.register(self._stdin, selectors.EVENT_WRITE)
            while (at := self._inbox.find(marker)) < 0 or (end := self._inbox.find(_PROMPT_END, at)) < 0:
                for key, _ in selector.select(min(0.5, self._left())):
                    if key.fileobj is self._stdout:
                        self._read()
                    else:
                        self._write()
                        if not self._outbox:
                            selector.unregister(self._stdin)
        text, follows = self._inbox[:at], _PROMPT.search(self._inbox, at)
        if follows is None:
            raise EndedError("died")
        self._inbox = self._inbox[end + len(_PROMPT_END) :]
        self._state = int(follows.group(1))
        return text

    def _read(self) -> None:
        part = os.read(self._stdout.fileno(), 1 << 16)
        if not part:
            raise EndedError("died")
        self._inbox += part
        if len(self._inbox) > self._output_bytes:
            raise EndedError("output")

    def _write(self) -> None:
        try:
            sent = os.write(self._stdin.fileno(), self._outbox[: 1 << 16])
        except BlockingIOError:
            return
        except OSError:
            raise EndedError("died") from None
        self._outbox = self._outbox[sent:]

    def _left(self) -> float:
        """Seconds that are left of its time, in which those do not count when others had the processor."""
        left = self._until - time.monotonic()
        if left <= 0:
            waited = min(self._live.waited_s(), _MOST_EXCUSED * self._given)
            left = self._begun + self._given + waited - time.monotonic()
            if left < 0.01 * self._given:
                raise EndedError("timeout")
            self._until = time.monotonic() + left
        return left


@dataclass(frozen=True)
class Opening:
    """How a session starts: the box, the command, the files it finds, and what it loads first."""

    box: Box
    command: tuple[str, ...]
    files: tuple[tuple[str, bytes], ...]
    preamble: str

    def start(self) -> CoqSession:
        """A session that is loading the preamble."""
        live = self.box.start(self.command, files=dict(self.files))
        try:
            return CoqSession(live, self.preamble, self.box.limits.output_bytes)
        except BaseException:
            live.close()
            raise

    def __hash__(self) -> int:
        return hash((self.command, self.preamble))


_waiting: OrderedDict[Opening, list[CoqSession]] = OrderedDict()
_owner = 0


def take(opening: Opening, keep: int) -> CoqSession:
    """A session that nobody has used; `keep` others are started to wait for the next submissions."""
    global _owner
    if _owner != os.getpid():  # sessions of a process that we were forked from are not ours
        _waiting.clear()
        _owner = os.getpid()
        atexit.register(end_waiting)
    ready = _waiting.pop(opening, [])
    session = ready.pop(0) if ready else opening.start()
    if keep:
        while len(ready) < keep:
            ready.append(opening.start())
        _waiting[opening] = ready
    while len(_waiting) > _MOST_HEADERS:
        for old in _waiting.popitem(last=False)[1]:
            old.close()
    return session


def end_waiting() -> None:
    """Ends the sessions that wait, all of them."""
    while _waiting:
        for session in _waiting.popitem()[1]:
            with suppress(OSError):
                session.close()


def _asked(sentence: str, nonce: str) -> bytes:
    """A sentence, and the question by whose answer we know that Coq has done with it."""
    return sentence.encode("utf-8", "replace") + b"\nLocate " + _name(nonce) + b".\n"


def _name(nonce: str) -> bytes:
    return b"n" + nonce.encode()
