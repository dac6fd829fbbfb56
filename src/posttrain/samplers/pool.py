"""Several workers as one sampler: groups are dealt by their number, and none is lost with a worker."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from posttrain.samplers.protocol import FinishedGroup, GroupRequest, Work
from posttrain.samplers.remote import Channel, Message
from posttrain.samplers.snapshots import Snapshot
from posttrain.types import Episode, RunError

_POLL_S = 0.2


@dataclass(eq=False)
class _Worker:
    """What is known of one worker."""

    name: str
    channel: Channel
    playing: dict[int, GroupRequest] = field(default_factory=dict)
    keeps: dict[int, GroupRequest] = field(default_factory=dict)
    """Finished, while their episodes are still with it."""
    examining: dict[int, GroupRequest] = field(default_factory=dict)
    live: int = -1
    sent: int = -1
    """The version it was offered last; until it has taken that one it is offered no other."""
    ready: bool = False
    asked: bool = False
    """Whether it is to say what it has not finished."""
    heard: float = field(default_factory=time.monotonic)
    work: Work = field(default_factory=Work)

    @property
    def awaited(self) -> bool:
        """Whether there is anything that it owes us."""
        owes = self.playing or self.examining or self.asked
        return bool(owes or not self.ready or self.sent != self.live)


class SamplerPool:
    """Workers behind channels, as one sampler (see protocol.Sampler).

    start: starts a worker of this number. One that dies, fails, or gives no sign of life for `deadline_s` is
    ended and started again, `max_restarts` times for all of them together; what it was playing is played
    again from its prompts, which leads to the same answers under the same weights.
    """

    def __init__(
        self,
        start: Callable[[int], Channel],
        count: int,
        *,
        deadline_s: float = 600.0,
        max_restarts: int = 2,
    ) -> None:
        self._start, self.deadline_s, self.max_restarts = start, deadline_s, max_restarts
        self.workers = [self._start_worker(number) for number in range(count)]
        self.restarts: list[str] = []
        """Why each worker that had to be started again was."""
        self._newest: Snapshot | None = None
        self._waiting: list[GroupRequest] = []
        """Of an evaluation, for workers that hold the newest weights."""
        self._late: list[FinishedGroup] = []
        self._seen: dict[int, list[Episode]] = {}
        self._left: list[GroupRequest] = []

    def _start_worker(self, number: int) -> _Worker:
        return _Worker(f"sampler {number}", self._start(number))

    @property
    def oldest_version(self) -> int:
        """The least version that a worker draws from. One that is starting takes the one it was sent first.

        While it starts others may take newer ones; what is admitted then it still draws by that one.
        """
        if not self.workers:
            return self._newest.version if self._newest else -1
        return min(w.live if w.live >= 0 else w.sent for w in self.workers)

    @property
    def restarted(self) -> int:
        """How many workers had to be started again."""
        return len(self.restarts)

    @property
    def reading(self) -> set[int]:
        """Versions that a worker may still have to read."""
        return {w.sent for w in self.workers if w.sent != w.live}

    def admit(self, requests: Sequence[GroupRequest]) -> None:
        """Deals these to the workers."""
        for n, worker in enumerate(self.workers):
            mine = [each for each in requests if each.number % len(self.workers) == n]
            if mine:
                worker.playing |= {each.number: each for each in mine}
                self._send(worker, ("admit", mine))

    def release(self, numbers: Sequence[int]) -> None:
        """The episodes of these groups need not be kept any longer."""
        for worker in self.workers:
            if mine := [number for number in numbers if worker.keeps.pop(number, None)]:
                self._send(worker, ("release", mine))

    def poll(self, timeout_s: float) -> list[FinishedGroup]:
        """The groups that have been finished; waits so long for the first.

        Raises RunError for weights that were refused, and when more workers ended than may be started again.
        """
        self._listen(0.0 if self._late else timeout_s)
        done, self._late = self._late, []
        return done

    def _listen(self, timeout_s: float) -> None:
        """Takes in what the workers say, waiting so long for the first word."""
        if not self.workers:
            return
        first, *others = (worker.channel for worker in self.workers)
        first.wait(others, timeout_s)
        for n in range(len(self.workers)):
            self._hear(n)

    def publish(self, snapshot: Snapshot) -> None:
        """Offers the weights to all; each is sent the newest once it has taken what it was sent before."""
        self._newest = snapshot
        for worker in self.workers:
            self._offer(worker)

    def evaluate(
        self, requests: Sequence[GroupRequest], on_progress: Callable[[int], None]
    ) -> dict[int, list[Episode]]:
        """The episodes of these groups, by number, each by the newest weights."""
        self._waiting = list(requests)
        self._deal_evaluation()
        while len(self._seen) < len(requests):
            self._listen(_POLL_S)
            on_progress(len(self._seen))
        found, self._seen = self._seen, {}
        return found

    def unfinished(self) -> list[GroupRequest]:
        """What is still being played, with every token drawn so far, in the order of numbers."""
        self._left = []
        for worker in self.workers:
            worker.asked = True
            self._send(worker, ("unfinished",))
        while any(worker.asked for worker in self.workers):
            self._listen(_POLL_S)
        return sorted(self._left, key=lambda each: each.number)

    def work(self) -> list[Work]:
        """What each worker has done, as it says once a second."""
        self._listen(0.0)
        return [worker.work for worker in self.workers]

    def close(self) -> None:
        """Ends all workers, whatever they are doing."""
        for worker in self.workers:
            self._send(worker, ("close",))
        for worker in self.workers:
            worker.channel.end()
        self._newest = None

    # ------------------------------------------------------------------ one worker

    def _send(self, worker: _Worker, message: Message) -> None:
        if not worker.awaited:
            worker.heard = time.monotonic()
        worker.channel.send(message)

    def _offer(self, worker: _Worker) -> None:
        if self._newest and worker.sent == worker.live < self._newest.version:
            self._send(worker, ("offer", self._newest))
            worker.sent = self._newest.version

    def _deal_evaluation(self) -> None:
        """Gives what waits to be evaluated to the workers, once all of them hold the newest weights."""
        newest = self._newest.version if self._newest else -1
        if not self._waiting or any(worker.live != newest for worker in self.workers):
            return
        for n, worker in enumerate(self.workers):
            mine = self._waiting[n :: len(self.workers)]
            if mine:
                worker.examining |= {each.number: each for each in mine}
                self._send(worker, ("evaluate", mine))
        self._waiting = []

    def _hear(self, n: int) -> None:
        worker = self.workers[n]
        try:
            messages = worker.channel.receive()
        except EOFError:
            self._again(n, "")
            return
        for kind, *given in messages:
            worker.heard = time.monotonic()
            if kind == "failed":
                self._again(n, str(given[0]))
                return
            getattr(self, f"_{kind}")(worker, *given)
        if worker.awaited and time.monotonic() - worker.heard > self.deadline_s:
            doing = [line.strip() for line in worker.channel.stack().splitlines() if "File" in line]
            shown = f"; it is at {doing[0]}" if doing else ""
            self._again(n, f"gave no sign of life for {self.deadline_s:g} s{shown}")

    def _ready(self, worker: _Worker) -> None:
        worker.ready = True

    def _live(self, worker: _Worker, version: int) -> None:
        worker.live = version
        self._offer(worker)
        self._deal_evaluation()

    def _finished(self, worker: _Worker, done: Sequence[FinishedGroup]) -> None:
        for each in done:
            if request := worker.playing.pop(each.number, None):
                self._late.append(each)
                if each.place:
                    worker.keeps[each.number] = request

    def _examined(self, worker: _Worker, found: dict[int, list[Episode]]) -> None:
        for number in found:
            worker.examining.pop(number, None)
        self._seen |= found

    def _unfinished(self, worker: _Worker, left: Sequence[GroupRequest]) -> None:
        worker.asked = False
        self._left += left

    def _work(self, worker: _Worker, work: Work) -> None:
        worker.work = replace(work, bytes=worker.channel.bytes)

    def _refused(self, worker: _Worker, why: str) -> None:
        raise RunError(worker.name, why)

    def _again(self, n: int, why: str) -> None:
        """Ends a worker and starts another in its place, which goes on with what it had."""
        old = self.workers[n]
        how = old.channel.end()
        self.restarts.append(f"{old.name}: {why or how}")
        if len(self.restarts) > self.max_restarts:
            first = self.restarts[0]
            raise RunError(
                "sample", f"{len(self.restarts)} samplers ended unasked, the first of them {first}"
            )
        new = self.workers[n] = self._start_worker(n)
        self._offer(new)
        self._late += [FinishedGroup(number=number, lost=True) for number in old.keeps]
        if old.playing or old.keeps:
            left = sorted((old.keeps | old.playing).items())
            new.playing = {n: replace(each, begun=()) for n, each in left}
            self._send(new, ("admit", list(new.playing.values())))
        if old.asked:
            self._left += list(new.playing.values())
        elif any(worker.asked for worker in self.workers):  # it has said only what it was still playing
            self._left += [new.playing[number] for number in old.keeps]
        self._waiting += old.examining.values()
