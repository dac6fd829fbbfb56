"""The reference policy: the start of the run, or a policy that follows the trained one at a distance."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from posttrain.learner.shards import as_held, whole
from posttrain.models.rounding import dither


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Which policy the trained one is held to, and when that follows it."""

    path: str = ""
    """Where it lies, as model.path; empty takes the policy that the run starts from."""
    refresh_every: int = 0
    """Updates between refreshes; 0 keeps the start of the run."""
    keep: float = 0.0
    """Share of itself that the reference keeps at a refresh: 0 copies the policy, 0.99 follows slowly."""

    def __post_init__(self) -> None:
        if self.refresh_every < 0:
            raise ValueError(f"refresh_every must be 0 (never) or more, not {self.refresh_every}")
        if not 0 <= self.keep < 1:
            raise ValueError(f"keep must lie in [0, 1), not {self.keep}")


class Follower:
    """Keeps a reference model at the moving average of the trained weights.

    The average is float32: a step of 1 % towards a weight is lost in the rounding of bfloat16.
    """

    def __init__(self, model: PreTrainedModel, config: Reference) -> None:
        self.model, self.config = model, config
        # Of a share: that share of what the whole would be spread to.
        self.average = {name: as_held(dither(name, whole(p)), p) for name, p in model.named_parameters()}

    def after(self, update: int, masters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Follows these weights, one at a time, if a refresh is due after this update."""
        if update % self.config.refresh_every:
            return
        for name, master in masters:
            self.average[name].lerp_(master.to(self.average[name]), 1 - self.config.keep)
        self._publish()

    @torch.no_grad()
    def restore(self, average: Mapping[str, torch.Tensor]) -> None:
        """Puts an average back, and rounds it into the model; KeyError if a tensor is missing."""
        for name, own in self.average.items():
            own.copy_(as_held(average[name], own))
        self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        for name, p in self.model.named_parameters():
            p.copy_(self.average[name])
