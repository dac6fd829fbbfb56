"""New weights from the learner to whoever samples, with what proves that they arrived."""

from collections.abc import Iterator

import torch

from posttrain.engines.protocol import Engine
from posttrain.learner.learner import Learner
from posttrain.rollout.protocol import Sampler
from posttrain.rollout.snapshots import (
    DRAWN,
    LearnerWeights,
    Snapshot,
    WeightStore,
    incarnation,
    load_snapshot,
)

TOLERANCE = {torch.bfloat16: 0.5, torch.float16: 0.1, torch.float32: 0.01, torch.float64: 0.01}
"""How far the two sides' log-probabilities of one token may lie apart, in nats: rounding of their type
through different kernels. A wrong or stale tensor moves them by far more."""


def sync_weights(learner: Learner, engine: Engine, version: int, canary: list[int]) -> str:
    """The digest of the weights that an engine in this thread now draws from, which has nothing to answer.

    RunError if they are not the learner's (see rollout/snapshots.py: load_snapshot).
    """
    publisher = Publisher(learner, canary)
    snapshot = publisher.snapshot(version)
    load_snapshot(engine, snapshot)
    return snapshot.place.digest


class Publisher:
    """Publishes a learner's weights, in the type in which it computes.

    canary: tokens of a prompt. store: memory in which each version is put; without one a version is the
    learner's own tensors, which must be taken before it learns on.
    """

    def __init__(self, learner: Learner, canary: list[int], store: WeightStore | None = None) -> None:
        self.learner, self.store, self.run = learner, store, incarnation()
        # One token again and again: an engine that can be told what to draw can be told that. Of the canary's
        # the one that is likeliest so, as improbable tokens are told apart by the rounding of their logits.
        rows = [[*canary, *[token] * DRAWN] for token in dict.fromkeys(canary)]
        self.row = max(rows, key=lambda row: min(learner.canary(row)[-DRAWN:]))

    def publish(self, sampler: Sampler) -> None:
        """Offers the weights of now to a sampler, under the number of updates that they have seen."""
        version = self.learner.update_count
        if self.store:
            self.store.retain(sampler.reading)
        sampler.publish(self.snapshot(version))

    def snapshot(self, version: int) -> Snapshot:
        """The weights of now, with the learner's log-probabilities of the canary."""
        return Snapshot(
            version=version,
            run=self.run,
            place=self.store.put(version, self._weights) if self.store else LearnerWeights(self._weights),
            canary=tuple(self.row),
            logps=tuple(self.learner.canary(self.row)),
            tolerance=TOLERANCE[self.learner.compute_dtype],
        )

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        dtype = self.learner.compute_dtype
        for name, tensor in self.learner.weights():
            yield name, tensor.detach().to(dtype)

    def close(self) -> None:
        if self.store:
            self.store.close()
