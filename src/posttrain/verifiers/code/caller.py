"""Call a function of a submission, each time in a new box, so that it cannot count its calls."""

import secrets
from collections.abc import Sequence
from typing import Any

from posttrain.verifiers.code import decoding
from posttrain.verifiers.code.talk import START_S, ProgramEndedError, receive, send, start
from posttrain.verifiers.sandbox import Box, Live
from posttrain.verifiers.sandbox.live import Clock


class Caller:
    """Load a submission in a new box for each call.

    Calls after the first `fresh` share one box, in which each call runs in a fork of the process that has
    loaded the submission; after a call that broke the box it is loaded again. With `typed` the submission
    may use List, Optional and the like without importing them.
    """

    def __init__(
        self,
        sources: Sequence[str],
        entry_point: str,
        box: Box,
        fresh: int | None = None,
        *,
        typed: bool = False,
    ) -> None:
        self.sources, self.entry_point, self.box, self.fresh = list(sources), entry_point, box, fresh
        self.typed = typed
        self.calls = 0
        self.spent_s = 0.0
        """Seconds that the calls have taken so far, without loading."""
        self._live: Live | None = None
        self._unloadable: ProgramEndedError | None = None

    def call(self, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the value, or the exception of the program, as plain data. Raises Ended without either."""
        if self._unloadable is not None:
            raise self._unloadable
        if self.fresh is None or self.calls <= self.fresh:
            self.close()
        self.calls += 1
        try:
            return self._call(args, kwargs)
        except decoding.Unplain as error:
            raise ProgramEndedError(
                "WRONG", f"it returned something that is no plain data: {error}"
            ) from None
        except decoding.Garbled:
            self.close()
            raise ProgramEndedError("FORBIDDEN", "it wrote on the grader's channel") from None
        except ProgramEndedError:
            memory = self._live is not None and self._live.out_of_memory()
            self.close()
            if memory:
                raise ProgramEndedError("MEMORY", "it used too much memory") from None
            raise

    def close(self) -> None:
        if self._live is not None:
            self._live.close()
            self._live = None

    def _call(self, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        live = self._live or self._load()
        nonce = secrets.token_hex(8)
        send(live, {"nonce": nonce, "args": args, "kwargs": kwargs})
        answer: dict[str, Any] | None = None
        while True:
            message = self._next(live, nonce, calling=True)
            if message[0] == "ended":
                if answer is None:
                    raise ProgramEndedError("RUNTIME_ERROR", "the call ended its process without a value")
                if "unplain" in answer:
                    raise decoding.Unplain(answer["unplain"])
                return answer
            if answer is not None:
                raise decoding.Garbled("a second answer")
            answer = _answer(message)

    def _load(self) -> Live:
        live = self._live = start(self.box, "harness.py")
        nonce = secrets.token_hex(8)
        job = {"kind": "call", "sources": self.sources, "entry_point": self.entry_point, "nonce": nonce}
        send(live, job | {"typed": self.typed})
        message = self._next(live, nonce, START_S)
        if message[0] == "ready":  # the time limit counts from here
            message = self._next(live, nonce)
        if message[0] == "loaded":
            return live
        self._unloadable = ProgramEndedError(*outcome(message))
        raise self._unloadable

    def _next(self, live: Live, nonce: str, more_s: float = 0.0, *, calling: bool = False) -> list[Any]:
        clock = Clock(live, self.box.limits.wall_s + more_s)
        message = decoding.message(receive(live, self.box.limits.output_bytes, clock))
        self.spent_s += clock.used() if calling else 0.0
        if len(message) < 2 or message[1] != nonce:
            raise decoding.Garbled("another nonce")
        return message


def outcome(message: list[Any]) -> tuple[str, str]:
    """Return the label and the reason for a submission that does not compile, or that raised.

    >>> outcome(["raised", "ab", ["s", "4b"], ["s", "27"], ["s", ""]])
    ('RUNTIME_ERROR', "K: '")
    """
    try:
        if message[0] == "uncompiled":
            return "COMPILE_ERROR", decoding.line(decoding.decode(message[2]))
        return class_of(_answer(message))
    except (IndexError, decoding.Unplain):
        raise decoding.Garbled("not expected now") from None


def class_of(answer: dict[str, Any]) -> tuple[str, str]:
    """Return the label and the reason for an exception of the submission."""
    label = {"MemoryError": "MEMORY", "PermissionError": "FORBIDDEN"}.get(answer["raised"], "RUNTIME_ERROR")
    return label, decoding.line(f"{answer['raised']}: {answer['said']}")


def _answer(message: list[Any]) -> dict[str, Any]:
    """Convert a message on a call to the form in which the examiner gets it."""
    try:
        if message[0] == "returned" and len(message) == 3:
            return {"value": decoding.decode(message[2])}
    except decoding.Unplain as error:
        return {"unplain": str(error)}
    if message[0] == "raised" and len(message) == 5:
        name, text, builtin = map(decoding.decode, message[2:])
        if isinstance(name, str) and isinstance(text, str) and isinstance(builtin, str):
            return {"raised": name, "said": text, "builtin": builtin}
    raise decoding.Garbled("not expected now")
