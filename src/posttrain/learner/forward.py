"""One microbatch through the model: what it says of every trained token."""

import ctypes
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
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
from posttrain.types import Batch, Outputs, PerToken, RunError

Recompute = Literal["none", "selective", "full"]
"""Which activations the backward pass computes again: none, what costs little, or all of a layer."""
PRODUCTS = frozenset({"mm", "addmm", "addmm_", "bmm", "baddbmm", "_grouped_mm"})


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
    value, heads = (None, None) if critic is None else _values(packed, batch, critic, hidden)
    return Outputs(column(packed, batch, picked), column(packed, batch, entropies), value, heads)


def scored(
    model: PreTrainedModel, batch: Batch, temperature: float, budget: int, critic: CriticModel | None = None
) -> Outputs:
    """The same of all rows, microbatch by microbatch, without gradients."""
    logp, entropy, value = (torch.zeros_like(batch.logp_gen) for _ in range(3))
    with torch.no_grad():
        for rows in microbatches(batch, budget):
            out = forward(model, batch.rows(torch.tensor(rows)), temperature, critic)
            logp[rows], entropy[rows] = out.logp.to(logp), out.entropy.to(entropy)
            if out.value is not None:
                value[rows] = out.value.to(value)
    return Outputs(logp=logp, entropy=entropy, value=None if critic is None else value)


def valued(model: PreTrainedModel, batch: Batch, budget: int, critic: CriticModel) -> PerToken:
    """V at every trained token of all rows, where nobody asks for log-probabilities."""
    out = torch.zeros_like(batch.logp_gen)
    with torch.no_grad():
        for rows in microbatches(batch, budget):
            out[rows] = values(model, batch.rows(torch.tensor(rows)), critic).to(out)
    return out


def values(model: PreTrainedModel, batch: Batch, critic: CriticModel) -> PerToken:
    """V at every trained token, without the output head, nor the policy if the critic is not on it."""
    packed = pack(batch)
    hidden = trained_states(model, packed) if critic.body is None else None
    return _values(packed, batch, critic, hidden)[0]


def _values(
    packed: Pack, batch: Batch, critic: CriticModel, hidden: Float[torch.Tensor, "M D"] | None
) -> tuple[PerToken, Float[torch.Tensor, "H B T"] | None]:
    """V, and of an ensemble of heads each one's, whose mean V is."""
    each = torch.stack([column(packed, batch, one) for one in critic(packed, hidden).unbind(-1)])
    return (each[0], None) if len(each) == 1 else (each.mean(0), each)


def column(packed: Pack, batch: Batch, values: Float[torch.Tensor, "M"]) -> PerToken:
    """Numbers of a pack's trained tokens where they belong in the batch, 0 elsewhere."""
    values = values.cpu()
    return values.new_zeros(batch.mask.shape).index_put((packed.row, packed.column), values)


def compute_again(model: PreTrainedModel, what: Recompute, *, adapter: bool = False) -> None:
    """Makes the backward pass compute activations again; the gradients are the same bits.

    An adapter adds its part to what a product gave, in place: what was kept of it is then the sum, and stays
    so, for the addition is a product as well and is not done twice.
    """
    how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if what == "selective":
        how["context_fn"] = partial(
            create_selective_checkpoint_contexts, _kept, allow_cache_entry_mutation=adapter
        )
    model.gradient_checkpointing_enable(how)
    for module in model.modules():
        # transformers checkpoints in training mode only; what a layer consists of stays without dropout.
        module.training = getattr(module, "gradient_checkpointing", False)
        if module.training:
            # Some layers (OPT's) apply it themselves, at a rate that is their attribute.
            rates = [k for k, v in vars(module).items() if "drop" in k and isinstance(v, float)]
            for name in rates:
                setattr(module, name, 0.0)


def _kept(_context: SelectiveCheckpointContext, op: Any, *args: Any, **_: Any) -> CheckpointPolicy:
    """Products of matrices and attention are kept; norms, rotations and gates cost little to repeat."""
    name = op.overloadpacket.__name__
    if name in PRODUCTS or "scaled_dot_product" in name:
        return CheckpointPolicy.MUST_SAVE
    if op._schema.is_mutable and args[0].is_floating_point():
        # What was kept may lie in the same memory, and would then not be what it was.
        raise RunError(
            f"this architecture changes numbers in place ({name}): "
            "set steps.gradient_checkpointing to 'full', or to 'none'"
        )
    return CheckpointPolicy.PREFER_RECOMPUTE


def give_back(device: torch.device) -> None:
    """Hands free memory of the processor to the system; `runtime.process.settle` has glibc keep it for speed.

    Activations of many sizes leave holes in its heap that outweigh what is not kept of them.
    """
    if device.type == "cpu":
        with suppress(OSError, AttributeError):  # not glibc: nothing is kept
            ctypes.CDLL(None).malloc_trim(0)
