"""The reference policy: the start of the run, or a moving average of the trained policy."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from string import Formatter

import torch
from transformers import PreTrainedModel

from posttrain.learner.shards import shard_like, whole
from posttrain.models.rounding import dither


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The policy that the trained one is compared with, and its refreshes."""

    path: str = ""
    """Model of the reference, in the form of model.path; empty takes the policy that the run starts from."""
    refresh_every: int = 0
    """Updates between refreshes; 0: none, the reference stays as it is."""
    keep: float = 0.0
    """Weight of the old reference in a refresh: 0 copies the policy, 0.99 follows it slowly."""
    hint: str = ""
    """Text after the question that the reference alone reads, such as "The answer is {answer}."; in braces a
    field of the task, `reason` (the verifier's, of this answer) or `sibling` (the best right answer
    among the others to the task). An answer for which one of these is missing is not trained."""

    top_k: int = 0
    """Compare whole distributions over the teacher's top_k likeliest tokens and one outcome for all others;
    0: over the whole vocabulary. The divergence is then at most the whole one: how the policy divides the
    rest is not taught."""
    url: str = ""
    """A server with the teacher, as http://host:8000: vLLM, or `posttrain serve`, with the model that path
    names there (empty: its first). No model is loaded, and top_k must be set, for vLLM up to its
    --max-logprobs, 20. It reads every answer, at temperature 1."""
    api_key_env: str = ""
    """Environment variable with the server's key; empty: no key is sent."""
    deadline_s: float = 300.0
    """Seconds within which the server must answer a request, further tries included."""

    def __post_init__(self) -> None:
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (the whole vocabulary) or more, not {self.top_k}")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, not {self.url!r}")
        if not 0 < self.deadline_s < 86_400:
            raise ValueError(f"deadline_s must be positive and under a day, not {self.deadline_s}")
        if self.refresh_every < 0:
            raise ValueError(f"refresh_every must be 0 (never) or more, not {self.refresh_every}")
        if not 0 <= self.keep < 1:
            raise ValueError(f"keep must lie in [0, 1), not {self.keep}")
        try:
            names = self.hint_fields
        except ValueError as error:
            raise ValueError(f"hint: {error}; write {{{{ and }}}} for braces") from None
        if not all(name.isidentifier() for name in names):
            raise ValueError(f"hint names {sorted(names)}: a field is a name in braces, and nothing else")

    @property
    def hint_fields(self) -> set[str]:
        """Names in the braces of `hint`."""
        return {name for _, name, _, _ in Formatter().parse(self.hint) if name is not None}


class Follower:
    """Update a reference model to the moving average of the trained weights.

    The average is float32, because rounding to bfloat16 would lose a step of 1 % towards a weight.
    """

    def __init__(self, model: PreTrainedModel, config: Reference) -> None:
        self.model, self.config = model, config
        # Dithered before it is sharded, so that ranks have the numbers of a single process.
        self.average = {name: shard_like(dither(name, whole(p)), p) for name, p in model.named_parameters()}

    def after(self, update: int, masters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Average these weights into the reference if a refresh is due after this update."""
        if update % self.config.refresh_every:
            return
        for name, master in masters:
            self.average[name].lerp_(master.to(self.average[name]), 1 - self.config.keep)
        self._publish()

    @torch.no_grad()
    def restore(self, average: Mapping[str, torch.Tensor]) -> None:
        """Restore an average and round it into the model; KeyError if a tensor is missing."""
        for name, tensor in self.average.items():
            tensor.copy_(shard_like(average[name], tensor))
        self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        for name, p in self.model.named_parameters():
            p.copy_(self.average[name])
