"""A curriculum as a bandit: arms are buckets of tasks, paid by how much they teach."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.curriculum.stream import Rates, Stream, check_same, dice
from posttrain.types import Task


class Bandit:
    """Choose among K buckets of tasks by Exp3.S; the reward is how undecided the policy is: r = 4 p (1 - p).

    p is the success rate of a group. r is 1 if half of the answers are right, and 0 if all or none are: then
    a method that compares answers learns nothing. With γ = explore and α = share,

        π_i = (1 - γ) w_i / Σw + γ/K              probability that the next task is from bucket i
        w_i ← w_i exp(γ r / (π_i K)) + e α/K Σw   for the bucket of the group that earned r
        w_j ← w_j + e α/K Σw                      for all others

    π_i is the probability at the time of the draw, which may be updates ago. Within a bucket every task comes
    once before any comes again.

    Source: Auer et al. 2002, "The nonstochastic multiarmed bandit problem"; as a curriculum in
    arXiv:1704.03003, where the reward is the progress of the loss.

    >>> buckets = [[Task(id="easy", messages=())], [Task(id="open", messages=())]]
    >>> bandit = Bandit(buckets, seed=0, explore=0.2, share=0.0)
    >>> metrics = bandit.observe([(buckets[0][0], 1.0), (buckets[1][0], 0.5)])
    >>> {name: round(chance, 4) for name, chance in metrics.items()}
    {'curriculum/bucket_0': 0.4601, 'curriculum/bucket_1': 0.5399}
    """

    def __init__(
        self, buckets: Sequence[Sequence[Task]], *, seed: int, explore: float = 0.2, share: float = 0.005
    ) -> None:
        self.seed, self.taken, self.explore, self.share = seed, 0, explore, share
        self._streams = [Stream(bucket, seed=seed) for bucket in buckets]
        self._bucket = {task.id: n for n, bucket in enumerate(buckets) for task in bucket}
        self._weights = [1.0 / len(buckets)] * len(buckets)
        self._draw_chances: dict[str, list[float]] = {}
        """Probability of its bucket at the draw, for each task whose group is unfinished."""

    def chances(self) -> list[float]:
        """Return π, the probability of each bucket."""
        explore, K, total = self.explore, len(self._weights), math.fsum(self._weights)
        return [(1 - explore) * w / total + explore / K for w in self._weights]

    def take(self) -> tuple[int, Task]:
        """Return (number of times it was taken before, task)."""
        mark = dice(f"bandit/{self.seed}/{self.taken}").random()
        self.taken += 1
        chances = self.chances()
        passed, bucket = 0.0, len(chances) - 1
        for n, chance in enumerate(chances):
            passed += chance
            if mark < passed:
                bucket = n
                break
        epoch, task = self._streams[bucket].take()
        self._draw_chances.setdefault(task.id, []).append(chances[bucket])
        return epoch, task

    def observe(self, rates: Rates) -> dict[str, float]:
        """Update the weights; return the new probability of each bucket as metrics."""
        chances, K = self.chances(), len(self._weights)
        for task, p in rates:
            bucket, waiting = self._bucket[task.id], self._draw_chances.get(task.id, [])
            chance = waiting.pop(0) if waiting else chances[bucket]
            if not waiting:
                self._draw_chances.pop(task.id, None)
            if p is None:
                continue
            gift = math.e * self.share / K * math.fsum(self._weights)
            growth = self.explore * 4 * p * (1 - p) / (chance * K)
            self._weights[bucket] *= math.exp(growth)
            total = math.fsum(self._weights) + K * gift
            self._weights = [(w + gift) / total for w in self._weights]
        return {f"curriculum/bucket_{n}": chance for n, chance in enumerate(self.chances())}

    def state(self) -> dict[str, Any]:
        """Return the weights, the tasks taken per bucket, and the probabilities of running tasks."""
        return {
            "weights": list(self._weights),
            "taken": [stream.taken for stream in self._streams],
            "drawn": {task: list(chances) for task, chances in self._draw_chances.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state that state() returned; raise UserError if it has another number of buckets."""
        check_same("buckets", len(state.get("weights", ())), len(self._weights))
        self._weights, self._draw_chances = list(state["weights"]), dict(state["drawn"])
        for stream, count in zip(self._streams, state["taken"], strict=True):
            stream.taken = count
