"""A worker in the loop's own thread: each `poll` is one step of its engine."""

from collections.abc import Callable, Sequence

from posttrain.rollout.protocol import FinishedGroup, GroupRequest, Work
from posttrain.rollout.snapshots import Snapshot
from posttrain.rollout.worker import RolloutWorker
from posttrain.types import Episode


class LocalSampler:
    """A sampler in this thread (see protocol.Sampler).

    steps: load published weights this many engine steps after they were published, or once nothing is being
    played, as if an update took that long. Which weights sample a token is then the same in every run.
    """

    restarted = 0
    """Always 0: a worker in this thread cannot be restarted."""

    def __init__(self, worker: RolloutWorker, *, steps: int = 0) -> None:
        self.worker, self.steps = worker, steps
        self._published_at = 0
        self._undelivered: list[FinishedGroup] = []

    @property
    def oldest_version(self) -> int:
        """Number of the weights that the worker samples with."""
        return self.worker.live

    @property
    def reading(self) -> set[int]:
        """Numbers of the weights that the worker has still to load."""
        return {self.worker.offered}

    def admit(self, requests: Sequence[GroupRequest]) -> None:
        self.worker.admit(requests)

    def release(self, numbers: Sequence[int]) -> None:
        """Do nothing: `poll` returns the episodes, and none are stored."""

    def poll(self, timeout_s: float) -> list[FinishedGroup]:
        """Make one step, or load weights instead, and return the groups that are finished.

        With timeout_s = 0 make no step, and return groups that finished during an evaluation.
        """
        if self._undelivered or not timeout_s:
            groups, self._undelivered = self._undelivered, []
            return groups
        steps = self.worker.rollouts.steps - self._published_at
        return self.worker.turn(swaps=steps >= self.steps or not self.worker.playing)

    def publish(self, snapshot: Snapshot) -> None:
        """Offer weights to the worker; if nothing is being played, load them now."""
        self.worker.offer(snapshot)
        self._published_at = self.worker.rollouts.steps
        while not self.worker.playing and self.worker.offered >= 0:
            self.worker.turn()

    def sleep(self) -> None:
        self.worker.sleep()

    def evaluate(
        self, requests: Sequence[GroupRequest], on_progress: Callable[[int], None]
    ) -> dict[int, list[Episode]]:
        """Play these groups, and no others, and return their episodes by number."""
        groups: dict[int, list[Episode]] = {}
        self.worker.evaluate(requests)
        while len(groups) < len(requests):
            self._undelivered += self.worker.turn()
            groups |= self.worker.pop_evaluated()
            on_progress(len(groups))
        return groups

    def unfinished(self) -> list[GroupRequest]:
        """Return the groups that are not finished, with the tokens sampled so far."""
        return self.worker.unfinished()

    def work(self) -> list[Work]:
        return [self.worker.work()]

    def close(self) -> None:
        """End the engine and the processes of verifiers and environments."""
        self.worker.rollouts.close()
