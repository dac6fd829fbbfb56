"""One microbatch through the model: what it says of every trained token."""

import ctypes
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel

from posttrain.attention import output_head
from posttrain.learner.critic import CriticModel
from posttrain.learner.neftune import Noise, noisy
from posttrain.learner.pack import Pack, microbatches, pack, trained_states
from posttrain.math import tokens
from posttrain.types import Batch, Outputs, PerToken

Recompute = Literal[False, True, "selective"]
"""Which activations the backward pass computes again: none, all of a layer, or what costs little."""


def forward(
    model: PreTrainedModel,
    batch: Batch,
    temperature: float,
    critic: CriticModel | None = None,
    noise: Noise | None = None,
) -> Outputs:
    """log π, entropy and V at every trained token of these rows, with gradients where they are on.

    Rows are packed, the output head runs only where a token is trained, and [B, T, V] never exists.
    """
    # The noise of a prompt is its group's own, so that groups have no beginning in common.
    packed = pack(batch, stem=noise is None)
    with noisy(model, packed, batch, noise):
        hidden = trained_states(model, packed)
    picked, entropies = tokens.pick_from_hidden(
        hidden,
        output_head(model),
        packed.target.to(hidden.device),
        temperature,
        vocabulary=model.get_output_embeddings().weight.shape[0],
    )
    return Outputs(
        logp=column(packed, batch, picked),
        entropy=column(packed, batch, entropies),
        value=None if critic is None else column(packed, batch, critic(packed, hidden)),
    )


def scored(
    model: PreTrainedModel, batch: Batch, temperature: float, budget: int, critic: CriticModel | None = None
) -> Outputs:
    """The same of all rows, microbatch by microbatch, without gradients."""
    logp, entropy, value = (torch.zeros_like(batch.reward) for _ in range(3))
    with torch.no_grad():
        for rows in microbatches(batch, budget):
            out = forward(model, batch.rows(torch.tensor(rows)), temperature, critic)
            logp[rows], entropy[rows] = out.logp.to(logp), out.entropy.to(entropy)
            if out.value is not None:
                value[rows] = out.value.to(value)
    return Outputs(logp=logp, entropy=entropy, value=None if critic is None else value)


def valued(model: PreTrainedModel, batch: Batch, budget: int, critic: CriticModel) -> PerToken:
    """V at every trained token of all rows, where nobody asks for log-probabilities."""
    out = torch.zeros_like(batch.reward)
    with torch.no_grad():
        for rows in microbatches(batch, budget):
            out[rows] = values(model, batch.rows(torch.tensor(rows)), critic).to(out)
    return out


def values(model: PreTrainedModel, batch: Batch, critic: CriticModel) -> PerToken:
    """V at every trained token, without the output head, nor the policy if the critic is not on it."""
    packed = pack(batch)
    hidden = trained_states(model, packed) if critic.body is None else None
    return column(packed, batch, critic(packed, hidden))


def column(packed: Pack, batch: Batch, values: Float[torch.Tensor, "M"]) -> PerToken:
    """Numbers of a pack's trained tokens where they belong in the batch, 0 elsewhere."""
    values = values.cpu()
    return values.new_zeros(batch.mask.shape).index_put((packed.row, packed.column), values)


def compute_again(model: PreTrainedModel, what: Recompute, *, adapter: bool) -> None:
    """Makes the backward pass compute activations again, without dropout; the gradients are the same bits.

    An adapter adds its part to what a product gave, in place: what was kept of it is then the sum, and stays
    so, for the addition is a product as well and is not done twice.
    """
    how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if what == "selective":
        how["context_fn"] = partial(
            create_selective_checkpoint_contexts, _kept, allow_cache_entry_mutation=adapter
        )
    model.gradient_checkpointing_enable(how)
    model.train()  # transformers checkpoints in training mode only
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if model.device.type == "cpu":
        # Else the holes that activations of many sizes leave in glibc's heap outweigh what is not kept.
        model.get_decoder().register_forward_pre_hook(lambda *_: _give_back())
        model.get_decoder().register_forward_hook(lambda *_: _give_back())


def _give_back() -> None:
    """Hands what is free to the system; `runtime.process.settle` tells glibc to keep it for speed."""
    with suppress(OSError, AttributeError):  # not glibc: nothing is kept
        ctypes.CDLL(None).malloc_trim(0)


def _kept(_context: SelectiveCheckpointContext, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    """Products of matrices and attention are kept; norms, rotations and gates cost little to repeat."""
    dear = any(word in str(op) for word in ("mm", "linear", "dot_product"))
    return CheckpointPolicy.MUST_SAVE if dear else CheckpointPolicy.PREFER_RECOMPUTE
