"""Send new weights from the learner to samplers, with a proof that they arrived."""

from collections.abc import Callable

import torch
from torch import nn

from posttrain.engines.protocol import PeftAdapter
from posttrain.learner import lora
from posttrain.learner.learner import Learner
from posttrain.models.fingerprint import NamedTensors, digest
from posttrain.rollout.protocol import Sampler
from posttrain.rollout.snapshots import (
    DRAWN,
    LearnerWeights,
    Snapshot,
    WeightStore,
    incarnation,
)

TOLERANCE = {torch.bfloat16: 0.5, torch.float16: 0.1, torch.float32: 0.01, torch.float64: 0.01}
"""Largest difference of the two sides' log-probabilities of one token, in nats, from rounding in different
kernels. A wrong or stale tensor causes a far larger one."""


class Publisher:
    """Publish a learner's weights, in its compute dtype.

    canary: tokens of a prompt. store: memory for each version; without one a version is the learner's own
    tensors, which a sampler must load before the next update. unmerged: publish the adapter alone.
    """

    def __init__(
        self,
        learner: Learner,
        canary: list[int],
        store: WeightStore | None = None,
        *,
        unmerged: bool = False,
    ) -> None:
        self.learner, self.store, self.run = learner, store, incarnation()
        self._unmerged = unmerged
        self._adapter: PeftAdapter | None = None
        self.newest = self._steps = -1
        """Number of the weights that were published last, and the learner's steps before them."""
        # One token repeated, which any engine that can force a token can draw. Of the canary's tokens it is
        # the likeliest when repeated: rounding of logits changes improbable tokens most.
        rows = [[*canary, *[token] * DRAWN] for token in dict.fromkeys(canary)]
        self.row = max(rows, key=lambda row: min(learner.canary(row)[-DRAWN:]))

    @property
    def is_overtaken(self) -> bool:
        """True if the sampler reads the learner's own tensors, and they have moved since `publish`."""
        loan = self.learner.loan
        return loan is not None and loan.moves and self.learner.step_count != self._steps

    def publish(self, sampler: Sampler) -> None:
        """Offer the current weights to a sampler; their version is the number of updates."""
        version, self._steps = self.learner.update_count, self.learner.step_count
        self.newest = max(self.newest + 1, version) if self.learner.population else version
        if self.store:
            self.store.retain(sampler.reading)
        snapshot = self.snapshot(version, self.newest)
        if sampler.oldest_version < 0:  # it has no weights, at the start or as it sleeps, and needs memory
            torch.cuda.empty_cache()  # vLLM cannot take what PyTorch keeps for itself
            self.learner.ranks.gather(None, "memory")  # that of several ranks may be one server's
        sampler.publish(snapshot)

    def snapshot(self, version: int, number: int | None = None) -> Snapshot:
        """Return the current weights, with the learner's log-probabilities of the canary.

        number: see Snapshot; the version if it is left out.
        """
        number = version if number is None else number
        lent = self.learner.loan.tensors if self.learner.loan else ()
        return Snapshot(
            version=version,
            number=number,
            run=self.run,
            place=self.store.put(number, self._weights)
            if self.store
            else LearnerWeights(self._weights, lent),
            canary=tuple(self.row),
            logps=tuple(self.learner.canary(self.row)),
            adapter=self._describe_adapter() if self._unmerged else None,
            tolerance=TOLERANCE[self.learner.compute_dtype],
        )

    def _weights(self) -> NamedTensors:
        tensors = self._of_model(lora.adapter_tensors) if self._unmerged else self.learner.weights()
        return self._rounded(tensors)

    def _of_model(self, tensors: Callable[[nn.Module], NamedTensors]) -> NamedTensors:
        with self.learner.ranks.waiting("weights"):
            yield from tensors(self.learner.model)

    def _rounded(self, tensors: NamedTensors) -> NamedTensors:
        """Yield tensors in the dtype that samplers compute in."""
        return ((name, tensor.detach().to(self.learner.compute_dtype)) for name, tensor in tensors)

    def _describe_adapter(self) -> PeftAdapter:
        if self._adapter is None:  # the weights that it changes are the same in all versions
            base = digest(self._rounded(self._of_model(lora.frozen)))
            self._adapter = PeftAdapter(lora.adapter_config(self.learner.model), base)
        return self._adapter

    def close(self) -> None:
        if self.store:
            self.store.close()
