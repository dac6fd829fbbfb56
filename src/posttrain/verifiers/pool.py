"""Run verifiers that may raise, hang or crash, and return a verdict in every case."""

import hashlib
import pickle
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from posttrain.base.usercode import cause
from posttrain.base.verdict import sound
from posttrain.process.workers import Failed, Workers
from posttrain.types import Task, UserError, Verdict
from posttrain.verifiers.protocol import Group, Verifier

_FOREVER_S = 3600.0
_MOST_CACHED = 10_000


def judge_safely(verifier: Verifier, task: Task, response: str) -> Verdict:
    """Judge one response. The verdict is a failed one if the verifier raises or returns no Verdict."""
    return _judge_timed(lambda: [verifier(task, response)], 1)[0]


def judge_all_safely(verifier: Verifier, pairs: Sequence[tuple[Task, str]]) -> list[Verdict]:
    """Judge several responses in one call of `judge_all`. All verdicts are failed if it raises."""
    return _judge_timed(lambda: verifier.judge_all(pairs), len(pairs))


def judge_group_safely(verifier: Verifier, group: Group) -> list[Verdict]:
    """Judge the responses to one task in one call of `judge_group`. All verdicts are failed if it raises."""
    return _judge_timed(lambda: verifier.judge_group(group), len(group.responses))


def _judge_timed(judge: Callable[[], list[Verdict]], count: int) -> list[Verdict]:
    begin = time.monotonic()
    try:
        verdicts = [_as_verdict(verdict) for verdict in judge()]
        if len(verdicts) != count:
            raise ValueError(f"{len(verdicts)} verdicts were returned for {count} responses")
    except (Exception, SystemExit) as error:  # a reward function may call sys.exit
        verdicts = [Verdict(score=None, label="raised", reason=cause(error))] * count
    seconds = (time.monotonic() - begin) / max(1, count)
    return [replace(verdict, seconds=seconds) for verdict in verdicts]


def _as_verdict(verdict: Any) -> Verdict:
    if isinstance(verdict, Verdict):
        return sound(verdict)
    reason = f"the verifier returned {type(verdict).__name__}, not a Verdict"
    return Verdict(score=None, label="raised", reason=reason)


@dataclass(slots=True)
class _Pending:
    """A pending verdict, with the tickets that wait for it."""

    verifier: Verifier
    task: Task
    response: str
    tickets: list[int] = field(default_factory=list)
    reusable: bool = True
    """Whether the verdict depends on nothing but the task and the response, so that it may be cached."""


class Pool:
    """Judge responses: trusted verifiers immediately in this process, all others in worker processes.

    Whatever a verifier does, each response gets a verdict within the deadline. Verdicts do not depend on the
    number of workers or on the order of submission. The same response to the same task is judged once:
    verdicts are cached by content, except failed ones and those of grouped verifiers.

    >>> from posttrain.verifiers.answers import Exact
    >>> with Pool(workers=2, deadline_s=5.0) as pool:
    ...     [verdict] = pool.judge(Exact(), [(Task(id="q", messages=(), answer="7"), "7")])
    >>> verdict.label
    'right'
    """

    def __init__(self, *, workers: int, deadline_s: float, memory_mb: int = 4096) -> None:
        self._workers = Workers(workers, deadline_s=deadline_s, memory_mb=memory_mb)
        self._deadline_s = deadline_s
        self._tickets = 0
        self._pending: dict[bytes, _Pending] = {}
        self._digests_by_ticket: dict[int, list[bytes]] = {}
        """For each ticket of the workers, the digests of its verdicts: several for a batch or a group."""
        self._batch: list[bytes] = []
        """Digests for the next batch, which is sent when it is full or when no other batch is running."""
        self._cached: OrderedDict[bytes, Verdict] = OrderedDict()
        self._finished: dict[int, Verdict] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def submit(self, verifier: Verifier, task: Task, response: str) -> int:
        """Return a ticket; `poll` brings its verdict. Raises UserError if the verifier cannot be pickled."""
        if verifier.grouped:
            return self.submit_group(verifier, Group(task=task, responses=(response,)))[0]
        self._tickets += 1
        ticket = self._tickets
        if verifier.trusted:
            self._finished[ticket] = judge_safely(verifier, task, response)
            return ticket
        digest = _digest(verifier, task, response)
        cached = self._cached.get(digest)
        if cached is not None:
            self._cached.move_to_end(digest)
            self._finished[ticket] = cached
            return ticket
        pending = self._pending.get(digest)
        if pending is None:
            pending = _Pending(verifier, task, response)
            if verifier.batch > 1:
                self._batch.append(digest)
            else:
                self._send(digest, pending)
            self._pending[digest] = pending
            if len(self._batch) >= verifier.batch > 1:
                self._send_batch()
        pending.tickets.append(ticket)
        return ticket

    def submit_group(self, verifier: Verifier, group: Group) -> list[int]:
        """Return a ticket for each response. A grouped verifier judges all responses in one call.

        The deadline of that call is the sum of the responses' own deadlines.
        """
        if not verifier.grouped:
            return [self.submit(verifier, group.task, response) for response in group.responses]
        size = len(group.responses)
        first, self._tickets = self._tickets + 1, self._tickets + size
        tickets = list(range(first, first + size))
        if verifier.trusted:
            self._finished.update(zip(tickets, judge_group_safely(verifier, group), strict=True))
            return tickets
        _digest(verifier, group)  # for its UserError, which names the verifier
        digests = [b"ticket%d" % ticket for ticket in tickets]  # never cached, so unique keys are enough
        for ticket, digest, response in zip(tickets, digests, group.responses, strict=True):
            self._pending[digest] = _Pending(verifier, group.task, response, [ticket], reusable=False)
        worker_ticket = self._workers.submit(
            judge_group_safely,
            verifier,
            group,
            key="\0".join((group.task.id, *group.responses)),
            deadline_s=size * (verifier.budget_s(group.task) or self._deadline_s),
        )
        self._digests_by_ticket[worker_ticket] = digests
        return tickets

    def poll(self, timeout_s: float = 0.0) -> list[tuple[int, Verdict]]:
        """Return (ticket, verdict) for all finished; wait up to timeout_s for the first if any is pending."""
        self._collect(0.0 if self._finished else timeout_s)
        finished, self._finished = self._finished, {}
        return list(finished.items())

    def judge(self, verifier: Verifier, pairs: Sequence[tuple[Task, str]]) -> list[Verdict]:
        """Judge each (task, response) and wait for all verdicts, which come back in this order.

        A grouped verifier gets the responses to the same task as one group.
        """
        groups: dict[int, list[int]] = {}
        for index, (task, _) in enumerate(pairs):
            groups.setdefault(id(task) if verifier.grouped else -index, []).append(index)
        ticket_of: dict[int, int] = {}
        for indices in groups.values():
            task = pairs[indices[0]][0]
            group = Group(task=task, responses=tuple(pairs[index][1] for index in indices))
            ticket_of.update(zip(indices, self.submit_group(verifier, group), strict=True))
        tickets = [ticket_of[index] for index in range(len(pairs))]
        while any(ticket not in self._finished for ticket in tickets):
            self._collect(_FOREVER_S)  # every pending call has its own deadline
        return [self._finished.pop(ticket) for ticket in tickets]

    def close(self) -> None:
        """End the workers. Verdicts that `poll` has not returned are lost."""
        self._workers.close()

    def _send(self, digest: bytes, pending: _Pending) -> None:
        worker_ticket = self._workers.submit(
            judge_safely,
            pending.verifier,
            pending.task,
            pending.response,
            key=f"{pending.task.id}\0{pending.response}",
            deadline_s=pending.verifier.budget_s(pending.task),
        )
        self._digests_by_ticket[worker_ticket] = [digest]

    def _send_batch(self) -> None:
        """Send one batch: the gathered responses that have the same verifier as the first one."""
        if not self._batch:
            return
        verifier = self._pending[self._batch[0]].verifier
        digests = [digest for digest in self._batch if self._pending[digest].verifier == verifier][
            : verifier.batch
        ]
        self._batch = [digest for digest in self._batch if digest not in set(digests)]
        pairs = [(self._pending[digest].task, self._pending[digest].response) for digest in digests]
        seconds = sum(verifier.budget_s(task) or self._deadline_s for task, _ in pairs)
        worker_ticket = self._workers.submit(
            judge_all_safely, verifier, pairs, key=verifier.name, deadline_s=seconds
        )
        self._digests_by_ticket[worker_ticket] = digests

    def _collect(self, timeout_s: float) -> None:
        if self._batch and not any(
            self._pending[digests[0]].verifier.batch > 1 for digests in self._digests_by_ticket.values()
        ):
            self._send_batch()
        for worker_ticket, outcome in self._workers.poll(timeout_s):
            digests = self._digests_by_ticket.pop(worker_ticket)
            if isinstance(outcome, Failed):
                failed = Verdict(
                    score=None, label=outcome.label, reason=outcome.reason, seconds=outcome.seconds
                )
                verdicts = [failed] * len(digests)
            else:
                verdicts = [outcome.value] if isinstance(outcome.value, Verdict) else outcome.value
            for digest, verdict in zip(digests, verdicts, strict=True):
                self._deliver(digest, verdict)

    def _deliver(self, digest: bytes, verdict: Verdict) -> None:
        pending = self._pending.pop(digest)
        for ticket in pending.tickets:
            self._finished[ticket] = verdict
        if pending.reusable and not verdict.failed:
            self._cached[digest] = verdict
            if len(self._cached) > _MOST_CACHED:
                self._cached.popitem(last=False)


def _digest(verifier: Verifier, *arguments: Task | Group | str) -> bytes:
    """Return a digest of everything that a verdict depends on. Raises UserError if it cannot be pickled."""
    try:
        body = pickle.dumps((verifier, *arguments))
    except Exception as error:
        raise UserError(
            "",
            f"{verifier.name!r} cannot be sent to a worker: {cause(error)}",
            "define it at the top of a module",
        ) from None
    return hashlib.blake2b(body, digest_size=16).digest()
