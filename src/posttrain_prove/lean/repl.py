"""A warm Lean: the community's REPL with the header loaded once, and its reply to each tactic.

The protocol is JSON both ways, one object and then a blank line. Numbers of environments and proof states
never change their meaning: each submission starts from the header's environment, so declarations of one are
not available to the next. No verdict of success rests on this process; it finds failures early and measures
how far a script came.

    ask    waits for    one answer, until the time limit; then the caller ends the process

Progress is measured as for Coq: the potential of a state falls with its rank, the least of RUNGS that closes
all of its goals. It depends on the state alone.
"""

import atexit
import json
import os
import selectors
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.types import RunError
from posttrain.verifiers.sandbox import Box, Live
from posttrain_prove.coq.progress import WORST, potential
from posttrain_prove.lean.progress import RUNGS, ScriptProgress
from posttrain_prove.lean.script import Tactic
from posttrain_prove.lean.source import CHECK, find_forbidden

_MOST_WAIT = 20.0
"""Time spent waiting for a processor does not count, up to this many times the limit."""
_MOST_ANSWER = 1 << 24
_MOST_ASKED = 2000
"""Questions after which a process is replaced: it keeps every environment and state in memory."""
_MOST_WARM = 4


class ReplError(Exception):
    """The process is of no more use: it is late, has ended, or sent something that is not an answer."""

    def __init__(self, why: str, *, late: bool = False) -> None:
        super().__init__(why)
        self.late = late


class Repl:
    """One process, with the number of the environment in which the header is loaded."""

    def __init__(self, live: Live, header: str, seconds: float) -> None:
        assert live.process.stdin is not None
        assert live.process.stdout is not None
        self._live, self._stdin, self._stdout = live, live.process.stdin, live.process.stdout
        self._inbox = b""
        self.questions = 0
        os.set_blocking(self._stdin.fileno(), False)
        os.set_blocking(self._stdout.fileno(), False)
        answer = self.ask({"cmd": header}, seconds)
        error = find_complaint(answer)
        if error or not isinstance(answer.get("env"), int):
            raise RunError("load the header in the REPL", str(error or answer))
        self.header: int = answer["env"]

    def ask(self, question: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Send a question and return the answer. Raises ReplError."""
        self.questions += 1
        outbox = json.dumps(question, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n"
        start = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            selector.register(self._stdin, selectors.EVENT_WRITE)
            while (answer := self._answer()) is None:
                remaining = start + seconds - time.monotonic()
                if remaining <= 0 and remaining + min(self._live.waited_s(), _MOST_WAIT * seconds) <= 0:
                    raise ReplError("no answer in time", late=True)
                for key, _ in selector.select(min(0.5, max(remaining, 0.05))):
                    if key.fileobj is self._stdout:
                        self._read()
                    elif outbox:
                        outbox = self._write(outbox)
                    else:
                        selector.unregister(self._stdin)
        return answer

    def close(self) -> None:
        self._live.close()

    def _answer(self) -> dict[str, Any] | None:
        text, blank, rest = self._inbox.lstrip().partition(b"\n\n")
        if not blank:
            return None
        self._inbox = rest
        try:
            answer = json.loads(text)
        except ValueError:
            raise ReplError(f"no JSON: {text[:100]!r}") from None
        if not isinstance(answer, dict):
            raise ReplError(f"no object: {text[:100]!r}")
        return answer

    def _read(self) -> None:
        chunk = os.read(self._stdout.fileno(), 1 << 16)
        if not chunk:
            raise ReplError("it ended")
        self._inbox += chunk
        if len(self._inbox) > _MOST_ANSWER:
            raise ReplError("it floods")

    def _write(self, outbox: bytes) -> bytes:
        try:
            return outbox[os.write(self._stdin.fileno(), outbox[: 1 << 16]) :]
        except BlockingIOError:
            return outbox
        except OSError:
            raise ReplError("it ended") from None


def find_complaint(answer: Mapping[str, Any]) -> str:
    """Return the first error in an answer, or the hole that it leaves, or "".

    >>> find_complaint({"proofState": 3, "goals": [], "proofStatus": "Incomplete: contains sorry"})
    'Incomplete: contains sorry'
    """
    if "message" in answer:
        return str(answer["message"])
    for message in answer.get("messages", []):
        if message.get("severity") == "error":
            return str(message.get("data", "error"))
    status = str(answer.get("proofStatus", ""))
    if status.startswith("Error") or "sorry" in status:
        return status
    return "a hole is left" if "proofState" in answer and answer.get("sorries") else ""


def run_script(repl: Repl, name: str, form: str, script: Sequence[Tactic], seconds: float) -> ScriptProgress:
    """Run the tactics one by one, up to the first that fails. Raises ReplError."""
    deadline = time.monotonic() + seconds
    answer = repl.ask({"cmd": f"theorem {name}{form} := by sorry", "env": repl.header}, seconds)
    try:
        [hole] = answer["sorries"]
        state, open_goals = int(hole["proofState"]), 1
    except (KeyError, TypeError, ValueError):
        raise ReplError(f"the statement opens no proof: {find_complaint(answer) or answer}") from None
    first, finish = _rank_state(repl, state, open_goals, deadline)
    goals, potentials, error = [open_goals], [potential(first, first)], ""
    for tactic in script:
        word = find_forbidden(tactic.text)[1]
        if word or not open_goals:
            error = f"{word} is not a proof" if word else "no goals are left"
            break
        answer = repl.ask({"tactic": tactic.text, "proofState": state}, _seconds_until(deadline))
        error = find_complaint(answer)
        if error:
            break
        try:
            state, open_goals = int(answer["proofState"]), len(answer["goals"])
        except (KeyError, TypeError, ValueError):
            raise ReplError(f"no proof state in {answer}") from None
        rank, finish = _rank_state(repl, state, open_goals, deadline)
        goals.append(open_goals)
        potentials.append(potential(rank, first))
    return ScriptProgress(tuple(goals), tuple(potentials), error, finish)


def is_pinned(repl: Repl, name: str, form: str, declaration: str, seconds: float) -> bool:
    """Return whether a development, given up to its theorem's `by`, states what the task states."""
    if not declaration:
        return True
    answer = repl.ask({"cmd": f"{declaration} sorry", "env": repl.header}, seconds)
    if find_complaint(answer) or not isinstance(answer.get("env"), int):
        return False
    return not find_complaint(
        repl.ask({"cmd": f"theorem {CHECK}{form} := @{name}", "env": answer["env"]}, seconds)
    )


def _rank_state(repl: Repl, state: int, goals: int, deadline: float) -> tuple[int, str]:
    """Return the rank of a state, and the tactic of that rank; WORST if no rung closes every goal."""
    if goals == 0:
        return 0, ""
    for rank, rung in enumerate(RUNGS, 1):
        answer = repl.ask({"tactic": rung, "proofState": state}, _seconds_until(deadline))
        if not find_complaint(answer) and answer.get("goals") == []:
            return rank, rung
    return WORST, ""


def _seconds_until(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.1)


_warm: OrderedDict[tuple[object, ...], Repl] = OrderedDict()
_owner = 0


def take_warm(box: Box, command: tuple[str, ...], header: str, seconds: float) -> Repl:
    """Return the process that has this header loaded; start it if needed. Raises ReplError, RunError."""
    global _owner
    if _owner != os.getpid():  # a fork does not own its parent's processes
        _warm.clear()
        _owner = os.getpid()
        atexit.register(end_all)
    key = (box.level, box.limits, command, header)
    repl = _warm.pop(key, None)
    if repl is not None and repl.questions > _MOST_ASKED:
        repl.close()
        repl = None
    if repl is None:
        live = box.start(command)
        try:
            repl = Repl(live, header, seconds)
        except BaseException:
            live.close()
            raise
    _warm[key] = repl
    while len(_warm) > _MOST_WARM:
        _warm.popitem(last=False)[1].close()
    return repl


def end_repl(repl: Repl) -> None:
    """End a process and forget it."""
    for key in [key for key, warm_repl in _warm.items() if warm_repl is repl]:
        del _warm[key]
    repl.close()


def end_all() -> None:
    """End all warm processes of this process."""
    while _warm:
        _warm.popitem()[1].close()
