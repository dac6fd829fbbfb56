"""A critic: one number for each state, from the policy's hidden states or from a model of its own.

The head is a linear map that starts at 0, so the first advantages are those without a critic. It is stored
and computes in float32.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import nn
from transformers import PreTrainedModel

from posttrain.learner.pack import PackedTokens, trained_states
from posttrain.models.attention import use_layouts


@dataclass(frozen=True, kw_only=True)
class Critic:
    """Source of a method's values, and the optimiser's settings for it."""

    kind: Literal["shared", "own"] = "shared"
    """shared: a head on the policy's backbone, which learns from both losses (in a trust region from the
    policy's alone); own: a separate model."""
    path: str = ""
    """Model of an own critic's backbone, in the form of model.path; empty takes model.path."""
    lr: float = 1e-4
    """Peak learning rate of the head, or of the critic's own model with its head; the schedule is optim's."""
    max_grad_norm: float = 1.0
    """The critic's own gradient is scaled down to this 2-norm when it is longer; 0 never scales."""
    warmup: int = 0
    """Updates at the start of the run, fewer than it has, in which the critic alone learns. The policy stands
    still, and its optimiser and schedule begin after them. Source: value pretraining of VC-PPO,
    arXiv:2503.01491."""

    def __post_init__(self) -> None:
        for name in ("lr", "max_grad_norm", "warmup"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")
        if self.path and self.kind == "shared":
            raise ValueError("a shared critic has the policy's backbone, and reads no path")


class CriticModel(nn.Module):
    """V of states: a head on the policy's backbone, or on `body`.

    The head of a reward model is the same module, read at the end of an answer; it has a bias if
    transformers gives it one.
    """

    detached = False
    """True if the head's gradient ends at the policy's backbone."""

    def __init__(
        self, policy: PreTrainedModel, body: PreTrainedModel | None = None, *, bias: bool = True
    ) -> None:
        super().__init__()
        below = policy if body is None else body
        weight = below.get_input_embeddings().weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        size = below.config.get_text_config().hidden_size
        self.body = body
        self.head = nn.Linear(size, 1, bias=bias, dtype=wide, device=weight.device)
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)
        if body is not None:
            use_layouts(body)
            body.eval()
            # The body's output head never runs: without a gradient it needs no master and no moments.
            decoder = {id(p) for p in body.get_decoder().parameters()}
            for p in body.parameters():
                p.requires_grad_(id(p) in decoder)

    @torch.no_grad()
    def start_from(self, head: Mapping[str, torch.Tensor]) -> None:
        """Copy the weights of a reward model's saved head; tensors that `head` lacks stay as they are."""
        if "score.weight" in head:
            self.head.weight.copy_(head["score.weight"])
        if "score.bias" in head and self.head.bias is not None:
            self.head.bias.copy_(head["score.bias"])

    def forward(
        self, packed: PackedTokens, hidden: Float[torch.Tensor, "M D"] | None
    ) -> Float[torch.Tensor, "M"]:
        """Return V of the state before each trained token; `hidden` are the policy's states."""
        if self.body is not None:
            hidden = trained_states(self.body, packed, replays=False)
        assert hidden is not None
        if self.detached and self.body is None:
            hidden = hidden.detach()
        value: torch.Tensor = self.head(hidden.to(self.head.weight.dtype))
        return value[:, 0]
