"""Count the floating-point operations of a model's passes (FLOPs), in closed form.

    forward    2 N W + 2 M H + 2 (D_k + D_v) heads · pairs
    backward   2 N W + 2 N W' + 2 M H + 2 M H' + twice that of pairs

N packed tokens, M with logits; W weights of matrices that multiply a token, only those of active experts,
W' the trained ones; H and H' the same of the output head; pairs of a token and one that it sees,
itself included, over all layers. So a prompt that rows share counts once. What is computed twice to save
memory does not count (checkpointing, chunks of the head, prompts that layers with a state read for each row),
nor do norms, activations, softmax, a critic's head, and second runs of one layer (hrm_text). An adapter
counts too where the model runs without it.

Source: the count of arXiv:2204.02311 (PaLM), appendix B, with the pairs that causal attention needs.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import nn

from posttrain.models.attention import RECURRENT, key_heads_of
from posttrain.models.nf4 import NF4Linear

_ACTIVE = ("num_experts_per_tok", "top_k_experts", "moe_top_k", "moe_topk", "moe_k")
"""Names under which configurations have the number of experts of a token."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names under which they have the number of all."""
_EXPERT = re.compile(r"\bexperts\.\d")
"""Path of an expert that is a module of its own; others are stacks of matrices."""


@dataclass(frozen=True)
class ModelFlops:
    """The sizes of a model's products; a pass has 2 operations for each multiplication."""

    weights: float
    """W; NaN if a configuration does not say how many experts are active."""
    trained: float
    head: float
    head_trained: float
    pairs: Mapping[int | None, float]
    """Multiplications for a pair of tokens, of all heads and all attention layers that have this window."""
    state: float = 0.0
    """Multiplications for a token of layers with a state, weights aside."""

    @staticmethod
    def of(model: Any) -> "ModelFlops":
        """Read the sizes of a model, with its adapter; its weights are trained if they need gradients."""
        config = model.config.get_text_config()
        kinds = list(getattr(config, "layer_types", None) or ())
        pairs: Counter[int | None] = Counter()
        for number, layer in enumerate(config.per_layer_config):
            window = getattr(layer, "sliding_window", None)
            if kinds and kinds[number] != "sliding_attention":
                window = None
            if not kinds or kinds[number] != RECURRENT:
                pairs[window] += _pair(layer)
        state = 0.0
        if recurrent := kinds.count(RECURRENT):
            values = config.linear_num_value_heads * config.linear_value_head_dim
            state = 3.0 * recurrent * values * config.linear_key_head_dim  # read, write, read again
        head = model.get_output_embeddings()
        head_weights = (0.0, 0.0) if head is None else _weights(head, config)
        return ModelFlops(*_weights(model.get_decoder(), config), *head_weights, pairs, state)

    def of_pass(self, positions: Int[torch.Tensor, "N"], logits: int, *, learns: bool) -> float:
        """Return the operations of a pass over packed tokens, with its backward pass if it learns.

        positions: of the tokens in their rows; logits: the number of tokens whose logits are computed.
        """
        pairs = sum(products * seen(positions, window) for window, products in self.pairs.items())
        tokens = len(positions)
        forward = tokens * (self.weights + self.state) + logits * self.head + pairs
        if not learns:
            return 2 * forward
        backward = tokens * (self.weights + 2 * self.state + self.trained)
        return 2 * (forward + backward + logits * (self.head + self.head_trained) + 2 * pairs)


def seen(positions: Int[torch.Tensor, "N"], window: int | None) -> int:
    """Return the number of pairs of a token and one that it sees, of packed tokens.

    >>> seen(torch.tensor([0, 1, 2, 2]), None), seen(torch.tensor([0, 1, 2, 2]), 2)
    (9, 7)
    """
    counts = positions + 1
    return int((counts if window is None else counts.clamp(max=window)).sum())


def _pair(layer: Any) -> int:
    """Return the multiplications for a pair of tokens in an attention layer of this configuration."""
    _, size = key_heads_of(layer)
    key, value = (getattr(layer, name, None) or size for name in ("qk_head_dim", "v_head_dim"))
    return int(layer.num_attention_heads * (key + value))


def _weights(module: nn.Module, config: Any) -> tuple[float, float]:
    """Return the weights of a module's matrices that multiply a token, and of those the trained ones."""
    weights = trained = 0.0
    active, experts = (_first(config, names) for names in (_ACTIVE, _EXPERTS))
    for path, child in module.named_modules():
        if isinstance(child, NF4Linear):
            weights += child.in_features * child.out_features
        for name, p in child.named_parameters(recurse=False):
            if isinstance(child, nn.Embedding) or p.ndim < 2 or name.endswith("bias"):
                continue
            stacked = p.ndim == 3 and not isinstance(child, nn.Conv1d)
            count = p.numel() * (active / experts if stacked or _EXPERT.search(path) else 1.0)
            weights += count
            trained += count * p.requires_grad
    return weights, trained


def _first(config: Any, names: Sequence[str]) -> float:
    """Return the number that a configuration has under one of these names; NaN without one."""
    return next((float(value) for name in names if (value := getattr(config, name, None))), math.nan)
