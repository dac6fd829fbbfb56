"""A worker in the loop's own thread: each `poll` is one step of its engine."""

from collections.abc import Callable, Sequence

from posttrain.samplers.protocol import FinishedGroup, GroupRequest, Work
from posttrain.samplers.snapshots import Snapshot
from posttrain.samplers.worker import RolloutWorker
from posttrain.types import Episode


class LocalSampler:
    """A sampler in this thread (see protocol.Sampler).

    steps: weights are taken when the engine has made so many steps since they were published, or has nothing
    to do; as if an update took as long as that. So what is drawn by which weights is the same in every run.
    """

    restarted = 0
    """It ends with the loop."""

    def __init__(self, worker: RolloutWorker, *, steps: int = 0) -> None:
        self.worker, self.steps = worker, steps
        self._published_at = 0
        self._late: list[FinishedGroup] = []

    @property
    def oldest_version(self) -> int:
        """The version that the worker draws from."""
        return self.worker.live

    @property
    def reading(self) -> set[int]:
        """Versions that it may still have to read."""
        return {self.worker.offered}

    def admit(self, requests: Sequence[GroupRequest]) -> None:
        self.worker.admit(requests)

    def poll(self, timeout_s: float) -> list[FinishedGroup]:
        """The groups that are finished after one more step, or after weights were taken instead.

        Without any time it takes no step.
        """
        if self._late or not timeout_s:
            late, self._late = self._late, []
            return late
        made = self.worker.rollouts.steps - self._published_at
        return self.worker.turn(swaps=made >= self.steps or not self.worker.playing)

    def publish(self, snapshot: Snapshot) -> None:
        """Offers weights; where nothing is being played they are taken at once."""
        self.worker.offer(snapshot)
        self._published_at = self.worker.rollouts.steps
        while not self.worker.playing and self.worker.offered >= 0:
            self.worker.turn()

    def evaluate(
        self, requests: Sequence[GroupRequest], on_progress: Callable[[int], None]
    ) -> dict[int, list[Episode]]:
        """The episodes of these groups, by number."""
        found: dict[int, list[Episode]] = {}
        self.worker.evaluate(requests)
        while len(found) < len(requests):
            self._late += self.worker.turn()
            found |= self.worker.pop_evaluated()
            on_progress(len(found))
        return found

    def unfinished(self) -> list[GroupRequest]:
        """What is still being played, with every token drawn so far."""
        return self.worker.unfinished()

    def work(self) -> list[Work]:
        """What the worker has done."""
        return [self.worker.work()]

    def close(self) -> None:
        """Ends the processes of verifiers and environments."""
        self.worker.rollouts.close()
