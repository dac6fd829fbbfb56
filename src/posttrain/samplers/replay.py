"""What samplers did, done again in one thread: the same steps in the same company, by the same weights."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch

from posttrain.process.machine import as_before
from posttrain.samplers.protocol import FinishedGroup, GroupRequest, Work
from posttrain.samplers.snapshots import Snapshot
from posttrain.samplers.worker import Did, RolloutWorker
from posttrain.types import Episode, RunError


class ReplaySampler:
    """Workers that follow the log of what others did (see protocol.Sampler).

    Each does what its log says before a step of its engine, and waits where that needs a group or weights
    that are not there yet. What was done in truth needed nothing that came later, so one can always go on.
    threads: of each worker; the learner has those that it had before.
    """

    restarted = 0
    """A run in which one was cannot be replayed."""

    def __init__(self, workers: Sequence[RolloutWorker], logs: Sequence[Iterable[Did]], threads: int) -> None:
        self.workers, self.logs, self.threads = workers, [deque(log) for log in logs], threads
        self._requests: dict[int, GroupRequest] = {}
        self._examined: dict[int, GroupRequest] = {}
        self._snapshots: dict[int, Snapshot] = {}
        self._late: list[FinishedGroup] = []

    @property
    def oldest_version(self) -> int:
        """The newest version: when slots were given back is in the log of who was admitted."""
        return max(self._snapshots, default=-1)

    @property
    def reading(self) -> set[int]:
        """Versions that a worker has still to take."""
        return {int(did[2]) for log in self.logs for did in log if did[0] == "take"}

    def admit(self, requests: Sequence[GroupRequest]) -> None:
        """Keeps these until a worker is to begin them."""
        self._requests |= {each.number: each for each in requests}

    def publish(self, snapshot: Snapshot) -> None:
        """Keeps the weights until all who took them have."""
        self._snapshots[snapshot.version] = snapshot

    def poll(self, timeout_s: float) -> list[FinishedGroup]:
        """The groups that are finished after one more step of each worker that can make one."""
        done, self._late = self._late, []
        if not timeout_s:
            return done
        with as_before():
            torch.set_num_threads(self.threads)
            moved = [self._moved(n, done) for n in range(len(self.workers))]
        if not any(moved) and not done:
            raise RunError("replay", "the record of what samplers did does not fit this run")
        return done

    def evaluate(
        self, requests: Sequence[GroupRequest], on_progress: Callable[[int], None]
    ) -> dict[int, list[Episode]]:
        """The episodes of these groups, by number."""
        self._examined = {each.number: each for each in requests}
        found: dict[int, list[Episode]] = {}
        late: list[FinishedGroup] = []
        while len(found) < len(requests):
            late += self.poll(1.0)
            for worker in self.workers:
                found |= worker.pop_evaluated()
            on_progress(len(found))
        self._late += late
        return found

    def unfinished(self) -> list[GroupRequest]:
        """Nothing that a checkpoint should hold: a replay is made again from its beginning."""
        return list(self._requests.values())

    def work(self) -> list[Work]:
        """What each worker has done."""
        return [worker.work() for worker in self.workers]

    def close(self) -> None:
        """Ends the processes of verifiers and environments."""
        for worker in self.workers:
            worker.rollouts.close()

    def _moved(self, n: int, done: list[FinishedGroup]) -> bool:
        """Whether worker n could do anything: what its log says next, or a step of its engine."""
        worker, log = self.workers[n], self.logs[n]
        while log and log[0][1] == worker.rollouts.steps:
            what, _, *which = log[0]
            numbers = [int(each) for each in which]
            if what == "take":
                if numbers[0] not in self._snapshots:
                    return False
                worker.load_snapshot(self._snapshots[numbers[0]])
            elif what == "examine":
                if any(number not in self._examined for number in numbers):
                    return False
                worker.examine([self._examined.pop(number) for number in numbers])
            else:
                if any(number not in self._requests for number in numbers):
                    return False
                worker.open([self._requests[number] for number in numbers])
            log.popleft()
        if not worker.rollouts.busy:
            return False
        done += worker.step()
        return True
