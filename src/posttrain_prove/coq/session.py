"""Processes of `coqtop` that have loaded a header; each serves one submission and then ends.

take          waits for        the header to load in a process started at an earlier take
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
"""Time spent waiting for a processor does not count, up to this many times the session's time."""
_MOST_HEADERS = 4
"""Headers with waiting processes; those of the least recently used header are closed."""


Why = Literal["timeout", "output", "died"]


class EndedError(Exception):
    """The session can answer no more; `why` is the cause."""

    def __init__(self, why: Why) -> None:
        super().__init__(why)
        self.why = why


@dataclass(frozen=True, slots=True)
class CoqReply:
    """Coq's reaction to one sentence."""

    accepted: bool
    state: int
    """The number of the state after it; `BackTo` returns there."""
    proving: bool
    """Whether a proof is open after it."""
    output: str


class CoqSession:
    """One `coqtop` process, and the time it has left.

    After each sentence the session asks for a random name. What Coq prints before the answer to that may be
    anything; the last prompt before the answer is Coq's own and cannot be forged.
    """

    def __init__(self, live: Live, preamble: str, output_bytes: int) -> None:
        self._live, self._output_bytes = live, output_bytes
        self.secret = secrets.token_hex(8)
        """Part of the names that the verifier declares in it, so that no submission can name them."""
        self._inbox = b""
        self._start, self._seconds, self._deadline = 0.0, 0.0, 0.0
        self._state = -1
        self._first = secrets.token_hex(8)
        self._loaded: CoqReply | None = None
        stdin, stdout = live.process.stdin, live.process.stdout
        assert stdin is not None
        assert stdout is not None
        self._stdin, self._stdout = stdin, stdout
        os.set_blocking(stdin.fileno(), False)
        self._outbox = _encode_question(preamble, self._first)
        self._write()

    def allow(self, seconds: float) -> None:
        """Start the clock for the next sentences."""
        self._start, self._seconds = time.monotonic(), seconds
        self._deadline = self._start + seconds

    def load(self) -> CoqReply:
        """Return Coq's reply to the preamble. Raises EndedError like `say`."""
        if self._loaded is None:
            self._loaded = self._answer(self._first)
        return self._loaded

    def say(self, sentence: str) -> CoqReply:
        """Send a sentence. Raises EndedError if Coq ends, prints too much, or uses up its time."""
        nonce = secrets.token_hex(8)
        self._outbox = _encode_question(sentence, nonce)
        return self._answer(nonce)

    def say_all(self, sentences: Sequence[str]) -> list[CoqReply]:
        """Send sentences together: faster than `say`, but no basis for a verdict.

        What a tactic prints may look like a prompt. Raises EndedError("output") if there are more prompts
        than sentences.
        """
        nonce, before = secrets.token_hex(8), self._state
        self._outbox = _encode_question("\n".join(sentences), nonce)
        text = self._until_answered(nonce)
        prompts, answers, start = list(_PROMPT.finditer(text)), list[CoqReply](), 0
        if len(prompts) != len(sentences):
            raise EndedError("output")
        for prompt in prompts:
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
        prompt = _PROMPT.match(text, at) if at >= 0 else None
        if prompt is None:
            raise EndedError("died")
        state = int(prompt.group(1))
        return CoqReply(state != before, state, prompt.group(2) != b"", text[:at].decode("utf-8", "replace"))

    def _until_answered(self, nonce: str) -> bytes:
        """Return all that is printed before the answer to the nonce, and take over the state after it."""
        marker = _question_name(nonce)
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            if self._outbox:
                selector.register(self._stdin, selectors.EVENT_WRITE)
            while (at := self._inbox.find(marker)) < 0 or (end := self._inbox.find(_PROMPT_END, at)) < 0:
                for key, _ in selector.select(min(0.5, self._remaining())):
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

    def _remaining(self) -> float:
        """Return the seconds left, not counting those in which other processes had the processor."""
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            waited = min(self._live.waited_s(), _MOST_EXCUSED * self._seconds)
            remaining = self._start + self._seconds + waited - time.monotonic()
            if remaining < 0.01 * self._seconds:
                raise EndedError("timeout")
            self._deadline = time.monotonic() + remaining
        return remaining


@dataclass(frozen=True)
class Opening:
    """The start of a session: its box, its command, its files, and the preamble to load."""

    box: Box
    command: tuple[str, ...]
    files: tuple[tuple[str, bytes], ...]
    preamble: str

    def start(self) -> CoqSession:
        """Start a session, which loads the preamble in the background."""
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
    """Return an unused session, and start `keep` others that wait for the next submissions."""
    global _owner
    if _owner != os.getpid():  # a fork does not own its parent's sessions
        _waiting.clear()
        _owner = os.getpid()
        atexit.register(end_waiting)
    idle = _waiting.pop(opening, [])
    session = idle.pop(0) if idle else opening.start()
    if keep:
        while len(idle) < keep:
            idle.append(opening.start())
        _waiting[opening] = idle
    while len(_waiting) > _MOST_HEADERS:
        for unused in _waiting.popitem(last=False)[1]:
            unused.close()
    return session


def end_waiting() -> None:
    """End all waiting sessions and forget them."""
    while _waiting:
        for session in _waiting.popitem()[1]:
            with suppress(OSError):
                session.close()


def _encode_question(sentence: str, nonce: str) -> bytes:
    """Return a sentence and a question after it, whose answer shows that Coq has processed the sentence."""
    return sentence.encode("utf-8", "replace") + b"\nLocate " + _question_name(nonce) + b".\n"


def _question_name(nonce: str) -> bytes:
    return b"n" + nonce.encode()
