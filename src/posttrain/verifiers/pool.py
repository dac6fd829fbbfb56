"""Verdicts, of verifiers that may raise, hang or die."""

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

_NEVER_S = 3600.0
_REMEMBERED = 10_000


def judged(verifier: Verifier, task: Task, response: str) -> Verdict:
    """The verdict; a failed one if the verifier raises or returns anything but a verdict."""
    return _several(lambda: [verifier(task, response)], 1)[0]


def judged_all(verifier: Verifier, pairs: Sequence[tuple[Task, str]]) -> list[Verdict]:
    """The verdicts of a verifier that judges several responses at once; all failed if it raises."""
    return _several(lambda: verifier.judge_all(pairs), len(pairs))


def judged_group(verifier: Verifier, group: Group) -> list[Verdict]:
    """The verdicts of a verifier that compares the responses to a task; all failed if it raises."""
    return _several(lambda: verifier.judge_group(group), len(group.responses))


def _several(judge: Callable[[], list[Verdict]], count: int) -> list[Verdict]:
    begin = time.monotonic()
    try:
        verdicts = [_sound(verdict) for verdict in judge()]
        if len(verdicts) != count:
            raise ValueError(f"{len(verdicts)} verdicts were returned for {count} responses")
    except (Exception, SystemExit) as error:  # a function may even call sys.exit
        verdicts = [Verdict(score=None, label="raised", reason=cause(error))] * count
    seconds = (time.monotonic() - begin) / max(1, count)
    return [replace(verdict, seconds=seconds) for verdict in verdicts]


def _sound(verdict: Any) -> Verdict:
    if isinstance(verdict, Verdict):
        return sound(verdict)
    reason = f"the verifier returned {type(verdict).__name__}, not a Verdict"
    return Verdict(score=None, label="raised", reason=reason)


@dataclass(slots=True)
class _Asked:
    """A verdict running, and everybody who waits for it."""

    verifier: Verifier
    task: Task
    response: str
    tickets: list[int] = field(default_factory=list)
    lasting: bool = True
    """Whether the same response to the same task would be given the same verdict at any time."""


class Pool:
    """Judges responses: trusted verifiers at once in this process, all others in workers.

    Whatever a verifier does, each response gets a verdict within the deadline, and it is the
    same for any number of workers and any order. The same response to the same task is judged once:
    verdicts are remembered by content, but for failed ones, and for those of a verifier that compares the
    responses to a task.

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
        self._asked: dict[bytes, _Asked] = {}
        self._sent: dict[int, list[bytes]] = {}
        """What each ticket of the workers will answer; more than one where a model judges a batch."""
        self._gathered: list[bytes] = []
        """For the next batch, which goes when it is full or when no other is running."""
        self._remembered: OrderedDict[bytes, Verdict] = OrderedDict()
        self._finished: dict[int, Verdict] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def submit(self, verifier: Verifier, task: Task, response: str) -> int:
        """A ticket for a verdict that `poll` brings; UserError if a worker cannot be sent the verifier."""
        if verifier.grouped:
            return self.submit_group(verifier, Group(task=task, responses=(response,)))[0]
        self._tickets += 1
        ticket = self._tickets
        if verifier.trusted:
            self._finished[ticket] = judged(verifier, task, response)
            return ticket
        content = _content(verifier, task, response)
        known = self._remembered.get(content)
        if known is not None:
            self._remembered.move_to_end(content)
            self._finished[ticket] = known
            return ticket
        asked = self._asked.get(content)
        if asked is None:
            asked = _Asked(verifier, task, response)
            if verifier.batch > 1:
                self._gathered.append(content)
            else:
                self._send(content, asked)
            self._asked[content] = asked
            if len(self._gathered) >= verifier.batch > 1:
                self._send_batch()
        asked.tickets.append(ticket)
        return ticket

    def submit_group(self, verifier: Verifier, group: Group) -> list[int]:
        """A ticket for each response of the group; a verifier that compares them judges all in one call.

        The call has as many seconds as the verdicts on the responses would have one by one.
        """
        if not verifier.grouped:
            return [self.submit(verifier, group.task, response) for response in group.responses]
        size = len(group.responses)
        first, self._tickets = self._tickets + 1, self._tickets + size
        tickets = list(range(first, first + size))
        if verifier.trusted:
            self._finished.update(zip(tickets, judged_group(verifier, group), strict=True))
            return tickets
        _content(verifier, group)  # refuses what cannot be sent, by the verifier's name
        contents = [b"ticket%d" % ticket for ticket in tickets]
        for ticket, content, response in zip(tickets, contents, group.responses, strict=True):
            self._asked[content] = _Asked(verifier, group.task, response, [ticket], lasting=False)
        sent = self._workers.submit(
            judged_group,
            verifier,
            group,
            key="\0".join((group.task.id, *group.responses)),
            deadline_s=size * (verifier.budget_s(group.task) or self._deadline_s),
        )
        self._sent[sent] = contents
        return tickets

    def poll(self, timeout_s: float = 0.0) -> list[tuple[int, Verdict]]:
        """The verdicts that have arrived; waits up to timeout_s for the first, if any is running."""
        self._collect(0.0 if self._finished else timeout_s)
        finished, self._finished = self._finished, {}
        return list(finished.items())

    def judge(self, verifier: Verifier, pairs: Sequence[tuple[Task, str]]) -> list[Verdict]:
        """The verdict on each (task, response), in this order; waits for all of them.

        Responses to the same task are a group for a verifier that compares them.
        """
        groups: dict[int, list[int]] = {}
        for place, (task, _) in enumerate(pairs):
            groups.setdefault(id(task) if verifier.grouped else -place, []).append(place)
        given: dict[int, int] = {}
        for places in groups.values():
            task = pairs[places[0]][0]
            group = Group(task=task, responses=tuple(pairs[place][1] for place in places))
            given.update(zip(places, self.submit_group(verifier, group), strict=True))
        tickets = [given[place] for place in range(len(pairs))]
        while any(ticket not in self._finished for ticket in tickets):
            self._collect(_NEVER_S)  # every call running has its own deadline
        return [self._finished.pop(ticket) for ticket in tickets]

    def close(self) -> None:
        """Ends the workers; verdicts that have not been handed out are lost."""
        self._workers.close()

    def _send(self, content: bytes, asked: _Asked) -> None:
        sent = self._workers.submit(
            judged,
            asked.verifier,
            asked.task,
            asked.response,
            key=f"{asked.task.id}\0{asked.response}",
            deadline_s=asked.verifier.budget_s(asked.task),
        )
        self._sent[sent] = [content]

    def _send_batch(self) -> None:
        """Sends what has been gathered for the first one's verifier, as much as it takes at once."""
        if not self._gathered:
            return
        verifier = self._asked[self._gathered[0]].verifier
        mine = [c for c in self._gathered if self._asked[c].verifier == verifier][: verifier.batch]
        self._gathered = [c for c in self._gathered if c not in set(mine)]
        pairs = [(self._asked[c].task, self._asked[c].response) for c in mine]
        seconds = sum(verifier.budget_s(task) or self._deadline_s for task, _ in pairs)
        sent = self._workers.submit(judged_all, verifier, pairs, key=verifier.name, deadline_s=seconds)
        self._sent[sent] = mine

    def _collect(self, timeout_s: float) -> None:
        if self._gathered and not any(
            self._asked[sent[0]].verifier.batch > 1 for sent in self._sent.values()
        ):
            self._send_batch()
        for sent, outcome in self._workers.poll(timeout_s):
            contents = self._sent.pop(sent)
            if isinstance(outcome, Failed):
                failed = Verdict(
                    score=None, label=outcome.label, reason=outcome.reason, seconds=outcome.seconds
                )
                verdicts = [failed] * len(contents)
            else:
                verdicts = [outcome.value] if isinstance(outcome.value, Verdict) else outcome.value
            for content, verdict in zip(contents, verdicts, strict=True):
                self._deliver(content, verdict)

    def _deliver(self, content: bytes, verdict: Verdict) -> None:
        asked = self._asked.pop(content)
        for ticket in asked.tickets:
            self._finished[ticket] = verdict
        if asked.lasting and not verdict.failed:
            self._remembered[content] = verdict
            if len(self._remembered) > _REMEMBERED:
                self._remembered.popitem(last=False)


def _content(verifier: Verifier, *given: Task | Group | str) -> bytes:
    """A digest of everything that a verdict depends on."""
    try:
        body = pickle.dumps((verifier, *given))
    except Exception as error:
        raise UserError(
            "",
            f"{verifier.name!r} cannot be sent to a worker: {cause(error)}",
            "define it at the top of a module",
        ) from None
    return hashlib.blake2b(body, digest_size=16).digest()
