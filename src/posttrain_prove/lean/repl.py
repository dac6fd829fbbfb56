"""Lean kept warm: the community's REPL, with the header loaded once, and what it says of each tactic.

The protocol is JSON both ways, one object and then a blank line. Environments and proof states are
numbers that never change their meaning: each submission starts from the header's environment, so
nothing that one has declared is there for the next. Nothing is ever accepted on the word of this
process; it only finds failures early and says how far a script came.

    ask    waits for    one answer, until the time given is used up; then the process is ended

How near an unfinished proof is to its end is measured as for Coq: the potential of a state falls with
its rank, the least of RUNGS that closes all of its goals. It depends on the state alone.
"""

import atexit
import json
import os
import selectors
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.types import RunError
from posttrain.verifiers.sandbox import Box, Live
from posttrain_prove.coq.progress import WORST, potential
from posttrain_prove.lean.script import Tactic
from posttrain_prove.lean.source import CHECK, foul

_MOST_WAIT = 20.0
"""Waiting for a processor is excused up to this many times the time given."""
_MOST_ANSWER = 1 << 24
_MOST_ASKED = 2000
"""Questions after which a process is replaced: it keeps every environment and state it has named."""
_MOST_WARM = 4
_HAND = "rfl | trivial | assumption | contradiction"
_SEARCH = f"{_HAND} | decide | omega | simp_all"
RUNGS = tuple(
    f"set_option maxHeartbeats 40000 in all_goals (intros; first | {tactics})"
    for tactics in (_HAND, _SEARCH, f"{_SEARCH} | aesop | linarith | ring | norm_num")
)
"""What closes all goals of a state of rank 1, 2 and 3; Lean without Mathlib knows the first two."""


class ReplError(Exception):
    """A process of no more use: it is late, has ended, or answers with something that is no answer."""

    def __init__(self, why: str, *, late: bool = False) -> None:
        super().__init__(why)
        self.late = late


class Repl:
    """One process, and the number of the environment in which the header is loaded."""

    def __init__(self, live: Live, header: str, seconds: float) -> None:
        assert live.process.stdin is not None
        assert live.process.stdout is not None
        self._live, self._stdin, self._stdout = live, live.process.stdin, live.process.stdout
        self._inbox = b""
        self.asked = 0
        os.set_blocking(self._stdin.fileno(), False)
        os.set_blocking(self._stdout.fileno(), False)
        loaded = self.ask({"cmd": header}, seconds)
        wrong = complaint(loaded)
        if wrong or not isinstance(loaded.get("env"), int):
            raise RunError("load the header in the REPL", str(wrong or loaded))
        self.header: int = loaded["env"]

    def ask(self, question: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Its answer. Raises ReplError."""
        self.asked += 1
        outbox = json.dumps(question, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n"
        begun = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            selector.register(self._stdin, selectors.EVENT_WRITE)
            while (answer := self._answer()) is None:
                left = begun + seconds - time.monotonic()
                if left <= 0 and left + min(self._live.waited_s(), _MOST_WAIT * seconds) <= 0:
                    raise ReplError("no answer in time", late=True)
                for key, _ in selector.select(min(0.5, max(left, 0.05))):
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
        part = os.read(self._stdout.fileno(), 1 << 16)
        if not part:
            raise ReplError("it ended")
        self._inbox += part
        if len(self._inbox) > _MOST_ANSWER:
            raise ReplError("it floods")

    def _write(self, outbox: bytes) -> bytes:
        try:
            return outbox[os.write(self._stdin.fileno(), outbox[: 1 << 16]) :]
        except BlockingIOError:
            return outbox
        except OSError:
            raise ReplError("it ended") from None


def complaint(answer: Mapping[str, Any]) -> str:
    """What is wrong according to an answer: its first error, or that a hole is left in it; "" if nothing.

    >>> complaint({"proofState": 3, "goals": [], "proofStatus": "Incomplete: contains sorry"})
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


@dataclass(frozen=True)
class ScriptProgress:
    """How far a script came: after the statement, and after each tactic that succeeded."""

    goals: tuple[int, ...]
    """Goals that are left."""
    potentials: tuple[float, ...]
    error: str = ""
    """Why the tactic after those failed; "" if none did."""
    finish: str = ""
    """What closes the goals that are left, so far as it is known."""

    @property
    def failing(self) -> int | None:
        """The index of the first tactic that fails, from 0; None if none does."""
        return len(self.goals) - 1 if self.error else None


def steps(repl: Repl, name: str, form: str, script: Sequence[Tactic], seconds: float) -> ScriptProgress:
    """What each tactic makes of the statement, up to the first that fails. Raises ReplError."""
    until = time.monotonic() + seconds
    opened = repl.ask({"cmd": f"theorem {name}{form} := by sorry", "env": repl.header}, seconds)
    try:
        [hole] = opened["sorries"]
        state, left = int(hole["proofState"]), 1
    except (KeyError, TypeError, ValueError):
        raise ReplError(f"the statement opens no proof: {complaint(opened) or opened}") from None
    first, finish = _rank(repl, state, left, until)
    goals, found, wrong = [left], [potential(first, first)], ""
    for tactic in script:
        word = foul(tactic.text)[1]
        if word or not left:
            wrong = f"{word} is no proof" if word else "no goals are left"
            break
        answer = repl.ask({"tactic": tactic.text, "proofState": state}, _until(until))
        wrong = complaint(answer)
        if wrong:
            break
        try:
            state, left = int(answer["proofState"]), len(answer["goals"])
        except (KeyError, TypeError, ValueError):
            raise ReplError(f"no proof state in {answer}") from None
        rank, finish = _rank(repl, state, left, until)
        goals.append(left)
        found.append(potential(rank, first))
    return ScriptProgress(tuple(goals), tuple(found), wrong, finish)


def pinned(repl: Repl, name: str, form: str, declared: str, seconds: float) -> bool:
    """Whether a development, which has this up to its theorem's `by`, states what the task does."""
    if not declared:
        return True
    opened = repl.ask({"cmd": f"{declared} sorry", "env": repl.header}, seconds)
    if complaint(opened) or not isinstance(opened.get("env"), int):
        return False
    return not complaint(
        repl.ask({"cmd": f"theorem {CHECK}{form} := @{name}", "env": opened["env"]}, seconds)
    )


def _rank(repl: Repl, state: int, goals: int, until: float) -> tuple[int, str]:
    """The lowest rung that closes every goal of a state, and its tactic; WORST if none does."""
    if goals == 0:
        return 0, ""
    for rank, rung in enumerate(RUNGS, 1):
        answer = repl.ask({"tactic": rung, "proofState": state}, _until(until))
        if not complaint(answer) and answer.get("goals") == []:
            return rank, rung
    return WORST, ""


def _until(end: float) -> float:
    return max(end - time.monotonic(), 0.1)


_warm: OrderedDict[tuple[object, ...], Repl] = OrderedDict()
_owner = 0


def warm(box: Box, command: tuple[str, ...], header: str, seconds: float) -> Repl:
    """The process that has this header loaded; started if there is none. Raises ReplError, RunError."""
    global _owner
    if _owner != os.getpid():  # processes of the one that we were forked from are not ours
        _warm.clear()
        _owner = os.getpid()
        atexit.register(end_all)
    key = (box.level, box.limits, command, header)
    repl = _warm.pop(key, None)
    if repl is not None and repl.asked > _MOST_ASKED:
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


def end(repl: Repl) -> None:
    """Ends a process, which is then not handed out again."""
    for key in [key for key, kept in _warm.items() if kept is repl]:
        del _warm[key]
    repl.close()


def end_all() -> None:
    """Ends the processes of this one."""
    while _warm:
        _warm.popitem()[1].close()
