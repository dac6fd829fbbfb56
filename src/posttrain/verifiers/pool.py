"""Verdicts, of verifiers that may raise, hang or die."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from posttrain.types import Task, Verdict
from posttrain.usercode import cause
from posttrain.verifiers.protocol import Verifier
from posttrain.verifiers.workers import Failed, Returned, Workers

_NEVER_S = 3600.0


def judged(verifier: Verifier, task: Task, response: str) -> Verdict:
    """The verdict; a failed one if the verifier raises or returns anything but a verdict."""
    begin = time.monotonic()
    try:
        verdict: Any = verifier(task, response)
    except Exception as error:
        return Verdict(score=None, label="raised", reason=cause(error), seconds=time.monotonic() - begin)
    seconds = time.monotonic() - begin
    if not isinstance(verdict, Verdict):
        reason = f"the verifier returned {type(verdict).__name__}, not a Verdict"
        return Verdict(score=None, label="raised", reason=reason, seconds=seconds)
    if verdict.score is not None and not math.isfinite(verdict.score):
        reason = f"the score is {verdict.score}"
        return Verdict(score=None, label="not_a_number", reason=reason, seconds=seconds)
    return replace(verdict, seconds=seconds)


class Pool:
    """Judges responses: trusted verifiers at once in this process, all others in workers.

    Whatever a verifier does, each response gets a verdict within the deadline, and it is the
    same for any number of workers and any order.

    >>> from posttrain.verifiers.answers import Number
    >>> with Pool(workers=2, deadline_s=5.0) as pool:
    ...     [verdict] = pool.judge(Number(), [(Task(id="q", messages=(), answer="7"), "It is 7.")])
    >>> verdict.label
    'right'
    """

    def __init__(self, *, workers: int, deadline_s: float, memory_mb: int = 4096) -> None:
        self._workers = Workers(workers, deadline_s=deadline_s, memory_mb=memory_mb)
        self._tickets = 0
        self._sent: dict[int, int] = {}
        """Our ticket for each ticket of the workers."""
        self._finished: dict[int, Verdict] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(self, verifier: Verifier, task: Task, response: str) -> int:
        """A ticket for a verdict that `poll` brings; UserError if a worker cannot be sent the verifier."""
        if verifier.trusted:
            self._tickets += 1
            self._finished[self._tickets] = judged(verifier, task, response)
            return self._tickets
        sent = self._workers.submit(judged, verifier, task, response, key=f"{task.id}\0{response}")
        self._tickets += 1
        self._sent[sent] = self._tickets
        return self._tickets

    def poll(self, timeout_s: float = 0.0) -> list[tuple[int, Verdict]]:
        """The verdicts that have arrived; waits up to timeout_s for the first, if any is under way."""
        self._collect(0.0 if self._finished else timeout_s)
        finished, self._finished = self._finished, {}
        return list(finished.items())

    def judge(self, verifier: Verifier, pairs: Sequence[tuple[Task, str]]) -> list[Verdict]:
        """The verdict on each (task, response), in this order; waits for all of them."""
        tickets = [self.submit(verifier, task, response) for task, response in pairs]
        while any(ticket not in self._finished for ticket in tickets):
            self._collect(_NEVER_S)  # every call under way has its own deadline
        return [self._finished.pop(ticket) for ticket in tickets]

    def close(self) -> None:
        """Ends the workers; verdicts that have not been handed out are lost."""
        self._workers.close()

    def _collect(self, timeout_s: float) -> None:
        for sent, outcome in self._workers.poll(timeout_s):
            self._finished[self._sent.pop(sent)] = _verdict(outcome)


def _verdict(outcome: Returned | Failed) -> Verdict:
    if isinstance(outcome, Failed):
        return Verdict(score=None, label=outcome.label, reason=outcome.reason, seconds=outcome.seconds)
    verdict: Verdict = outcome.value
    return verdict
