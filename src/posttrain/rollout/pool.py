"""Several workers as one sampler: its groups are dealt among them by their numbers.

A worker that dies is restarted, and receives its unfinished groups again.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from posttrain.rollout.protocol import FinishedGroup, GroupRequest, Work
from posttrain.rollout.remote import Channel, Message
from posttrain.rollout.snapshots import Snapshot
from posttrain.types import Episode, RunError

_POLL_S = 0.2


@dataclass(eq=False)
class _WorkerRecord:
    """The learner's record of one worker."""

    name: str
    channel: Channel
    playing: dict[int, GroupRequest] = field(default_factory=dict)
    """Admitted groups that are not finished, by number."""
    storing: dict[int, GroupRequest] = field(default_factory=dict)
    """Finished groups whose episodes the worker still stores."""
    evaluating: dict[int, GroupRequest] = field(default_factory=dict)
    live: int = -1
    """Number of the weights that it samples with (see Snapshot)."""
    offered: int = -1
    """Number of the weights offered last; the next are offered once these are live."""
    ready: bool = False
    reports_unfinished: bool = False
    """Whether its answer to "unfinished" is pending."""
    falls_asleep: bool = False
    """Whether its answer to "sleep" is pending."""
    last_message_at: float = field(default_factory=time.monotonic)
    """Its last sign of life, on the monotonic clock; also when it was last given work while idle."""
    work: Work = field(default_factory=Work)

    @property
    def is_busy(self) -> bool:
        """Whether a message of the worker is still to come; only then its silence is a fault."""
        pending = self.playing or self.evaluating or self.reports_unfinished or self.falls_asleep
        return bool(pending or not self.ready or self.offered != self.live)


class SamplerPool:
    """Workers behind channels, as one sampler (see protocol.Sampler).

    start: start the worker of this number. stride: it gets every stride-th group of a run, as one of several
    ranks does. A worker that dies, fails, or sends nothing for `deadline_s` is ended and started again, at
    most `max_restarts` times for all workers together. Its groups are played again from their prompts, with
    the same answers if the weights are the same.
    """

    def __init__(
        self,
        start: Callable[[int], Channel],
        count: int,
        *,
        stride: int = 1,
        deadline_s: float = 600.0,
        max_restarts: int = 2,
    ) -> None:
        self._start, self.stride = start, stride
        self.deadline_s, self.max_restarts = deadline_s, max_restarts
        self.workers = [self._start_worker(number) for number in range(count)]
        self.restarts: list[str] = []
        """Name of each restarted worker and the reason, in order."""
        self._newest: Snapshot | None = None
        self._sleeps = False
        """Whether workers sleep, or fall asleep, until weights are published."""
        self._unsent: list[GroupRequest] = []
        """Requests of an evaluation that are not sent yet."""
        self._undelivered: list[FinishedGroup] = []
        """Finished groups, which the next `poll` returns."""
        self._evaluated: dict[int, list[Episode]] = {}
        self._unfinished: list[GroupRequest] = []

    def _start_worker(self, number: int) -> _WorkerRecord:
        return _WorkerRecord(f"sampler {number}", self._start(number))

    @property
    def oldest_version(self) -> int:
        """Least number of weights with which a worker samples, or will sample once it has started.

        A starting worker loads the weights that it was offered first, even if others have newer ones by then.
        """
        if not self.workers:
            return self._newest.number if self._newest and not self._sleeps else -1
        return min(w.live if w.live >= 0 else w.offered for w in self.workers)

    @property
    def restarted(self) -> int:
        return len(self.restarts)

    @property
    def reading(self) -> set[int]:
        """Numbers of the weights that a worker has been offered and has not loaded."""
        return {w.offered for w in self.workers if w.offered != w.live}

    def admit(self, requests: Sequence[GroupRequest]) -> None:
        """Send each request to the worker of its number."""
        for n, worker in enumerate(self.workers):
            dealt = [r for r in requests if r.number // self.stride % len(self.workers) == n]
            if dealt:
                worker.playing |= {request.number: request for request in dealt}
                self._send(worker, ("admit", dealt))

    def release(self, numbers: Sequence[int]) -> None:
        """Let workers drop the stored episodes of these groups."""
        for worker in self.workers:
            if stored := [number for number in numbers if worker.storing.pop(number, None)]:
                self._send(worker, ("release", stored))

    def poll(self, timeout_s: float) -> list[FinishedGroup]:
        """Return the finished groups, waiting up to `timeout_s` for a message.

        Raises RunError if a worker refuses weights, or if more workers end than may be restarted.
        """
        self._receive(0.0 if self._undelivered else timeout_s)
        groups, self._undelivered = self._undelivered, []
        return groups

    def _receive(self, timeout_s: float) -> None:
        """Handle the messages of all workers, waiting up to `timeout_s` for the first."""
        if not self.workers:
            return
        first, *others = (worker.channel for worker in self.workers)
        first.wait(others, timeout_s)
        for n in range(len(self.workers)):
            self._receive_from(n)

    def publish(self, snapshot: Snapshot) -> None:
        """Offer weights to all workers, to one that is still loading others as soon as it is done.

        Without workers iterate over them once, like the only worker of another rank: gathering is collective.
        """
        self._newest, self._sleeps = snapshot, False
        if not self.workers:
            for _ in snapshot.place.open():
                pass
        for worker in self.workers:
            self._offer(worker)

    def sleep(self) -> None:
        """Free the memory of engines until weights are published; wait until it is free."""
        self._sleeps = True
        for worker in self.workers:
            self._send_to_sleep(worker)
        while any(worker.falls_asleep for worker in self.workers):
            self._receive(_POLL_S)

    def evaluate(
        self, requests: Sequence[GroupRequest], on_progress: Callable[[int], None]
    ) -> dict[int, list[Episode]]:
        """Play these groups with the newest weights and return their episodes by number."""
        self._unsent = list(requests)
        self._send_evaluation()
        while len(self._evaluated) < len(requests):
            self._receive(_POLL_S)
            on_progress(len(self._evaluated))
        groups, self._evaluated = self._evaluated, {}
        return groups

    def unfinished(self) -> list[GroupRequest]:
        """Return the groups that are not finished, with the tokens sampled so far, ordered by number."""
        self._unfinished = []
        for worker in self.workers:
            worker.reports_unfinished = True
            self._send(worker, ("unfinished",))
        while any(worker.reports_unfinished for worker in self.workers):
            self._receive(_POLL_S)
        return sorted(self._unfinished, key=lambda request: request.number)

    def work(self) -> list[Work]:
        """Return the work of each worker, as it last reported (once a second)."""
        self._receive(0.0)
        return [worker.work for worker in self.workers]

    def close(self) -> None:
        """End all workers at once, without waiting for running groups."""
        for worker in self.workers:
            self._send(worker, ("close",))
        for worker in self.workers:
            worker.channel.end()
        self._newest = None

    # ------------------------------------------------------------------ one worker

    def _send(self, worker: _WorkerRecord, message: Message) -> None:
        if not worker.is_busy:
            worker.last_message_at = time.monotonic()
        worker.channel.send(message)

    def _offer(self, worker: _WorkerRecord) -> None:
        if self._newest and worker.offered == worker.live < self._newest.number:
            self._send(worker, ("offer", self._newest))
            worker.offered = self._newest.number

    def _send_to_sleep(self, worker: _WorkerRecord) -> None:
        self._send(worker, ("sleep",))
        worker.falls_asleep = True

    def _send_evaluation(self) -> None:
        """Deal the requests of an evaluation to the workers, once all workers have the newest weights."""
        newest = self._newest.number if self._newest else -1
        if not self._unsent or any(worker.live != newest for worker in self.workers):
            return
        for n, worker in enumerate(self.workers):
            dealt = self._unsent[n :: len(self.workers)]
            if dealt:
                worker.evaluating |= {request.number: request for request in dealt}
                self._send(worker, ("evaluate", dealt))
        self._unsent = []

    def _receive_from(self, n: int) -> None:
        """Handle the messages of one worker; restart it if it has ended, failed or is silent."""
        worker = self.workers[n]
        try:
            messages = worker.channel.receive()
        except EOFError:
            self._restart(n, "")
            return
        for kind, *arguments in messages:
            worker.last_message_at = time.monotonic()
            if kind == "failed":
                self._restart(n, str(arguments[0]))
                return
            getattr(self, f"_on_{kind}")(worker, *arguments)
        if worker.is_busy and time.monotonic() - worker.last_message_at > self.deadline_s:
            frames = [line.strip() for line in worker.channel.stack().splitlines() if "File" in line]
            place = f"; it is at {frames[0]}" if frames else ""
            self._restart(n, f"gave no sign of life for {self.deadline_s:g} s{place}")

    def _on_ready(self, worker: _WorkerRecord) -> None:
        worker.ready = True

    def _on_live(self, worker: _WorkerRecord, number: int) -> None:
        worker.live = number
        self._offer(worker)
        self._send_evaluation()

    def _on_finished(self, worker: _WorkerRecord, groups: Sequence[FinishedGroup]) -> None:
        for group in groups:
            if request := worker.playing.pop(group.number, None):
                self._undelivered.append(group)
                if group.place:
                    worker.storing[group.number] = request

    def _on_evaluated(self, worker: _WorkerRecord, groups: dict[int, list[Episode]]) -> None:
        for number in groups:
            worker.evaluating.pop(number, None)
        self._evaluated |= groups

    def _on_unfinished(self, worker: _WorkerRecord, requests: Sequence[GroupRequest]) -> None:
        worker.reports_unfinished = False
        self._unfinished += requests

    def _on_asleep(self, worker: _WorkerRecord) -> None:
        worker.falls_asleep = False
        worker.live = worker.offered = -1  # it needs weights, the same ones too

    def _on_work(self, worker: _WorkerRecord, work: Work) -> None:
        worker.work = replace(work, bytes=worker.channel.bytes)

    def _on_refused(self, worker: _WorkerRecord, reason: str) -> None:
        raise RunError(worker.name, reason)

    def _restart(self, n: int, reason: str) -> None:
        """End a worker and start another in its place, with its groups and its part of an evaluation.

        reason: "" if the channel knows it.
        """
        old = self.workers[n]
        end_reason = old.channel.end()
        self.restarts.append(f"{old.name}: {reason or end_reason}")
        if len(self.restarts) > self.max_restarts:
            first = self.restarts[0]
            raise RunError(
                "sample", f"{len(self.restarts)} samplers ended unasked, the first of them {first}"
            )
        new = self.workers[n] = self._start_worker(n)
        if self._sleeps:  # the learner needs the memory
            self._send_to_sleep(new)
        else:
            self._offer(new)
        self._undelivered += [FinishedGroup(number=number, lost=True) for number in old.storing]
        if old.playing or old.storing:
            requests = sorted((old.storing | old.playing).items())
            new.playing = {number: replace(request, begun=()) for number, request in requests}
            self._send(new, ("admit", list(new.playing.values())))
        if old.reports_unfinished:
            self._unfinished += list(new.playing.values())
        elif any(worker.reports_unfinished for worker in self.workers):
            # The old worker has reported what it was playing, and not what it stored.
            self._unfinished += [new.playing[number] for number in old.storing]
        self._unsent += old.evaluating.values()
