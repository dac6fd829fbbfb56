"""Low-rank adapters through peft: h = W x + (α/r) B A x, with B = 0 at the start.

The only file that imports peft. The sampler is given the merged weights; what is saved is an
ordinary peft adapter.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

ADAPTER = "default"


@dataclass(frozen=True, kw_only=True)
class Lora:
    """A low-rank adapter, as peft names its numbers."""

    rank: int = 0
    """r; 0 trains every weight instead."""
    alpha: float = 32.0
    """The update is scaled by alpha / rank (rslora: alpha / √rank)."""
    targets: tuple[str, ...] = ()
    """Names of the matrices to adapt (q_proj, v_proj ...); empty: every linear layer but the output head."""
    rslora: bool = False
    dora: bool = False

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"rank must be 0 (off) or more, not {self.rank}")
        if self.alpha <= 0:
            raise ValueError(f"alpha must be above 0, not {self.alpha}")


def add_adapter(model: PreTrainedModel, config: Lora, seed: int) -> PeftModel:
    """The model with a fresh adapter as its only trainable weights.

    Raises ValueError when a target names no matrix of the model.
    """
    lora = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=0.0,  # the trained policy would be another one than the sampled, at random
        target_modules=list(config.targets) or "all-linear",
        use_rslora=config.rslora,
        use_dora=config.dora,
        task_type="CAUSAL_LM",
    )
    # A's random start comes from the global generator: seeded here, and put back after.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(model, lora)


def parameters(config: Any, lora: Lora) -> int:
    """Weights that the adapter adds to a model of this configuration, without building one in memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        adapted = add_adapter(model, lora, seed=0)
    return sum(p.numel() for p in adapted.parameters() if p.requires_grad)


@torch.no_grad()
def merged(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's weights under the names they have without an adapter, its update added in.

    Without any adapter these are the parameters themselves.
    """
    if not isinstance(model, PeftModel):
        yield from model.named_parameters()
        return
    base = model.get_base_model()
    adapted = {name: m for name, m in base.named_modules() if isinstance(m, LoraLayer)}
    for name, parameter in base.named_parameters():
        owner, _, kind = name.rpartition(".base_layer.")
        if owner in adapted:
            yield f"{owner}.{kind}", _merged_weight(adapted[owner]) if kind == "weight" else parameter
        elif not any(name.startswith(f"{a}.lora_") for a in adapted):
            yield name, parameter


def _merged_weight(layer: LoraLayer) -> torch.Tensor:
    weight = layer.get_base_layer().weight
    delta = layer.get_delta_weight(ADAPTER)
    out = weight.float() + delta.float()
    if layer.use_dora.get(ADAPTER):
        magnitude = layer.lora_magnitude_vector[ADAPTER].weight.float()
        out = out * (magnitude / out.norm(dim=1))[:, None]
    result: torch.Tensor = out.to(weight.dtype)
    return result


def save_adapter(model: PeftModel, out: Path) -> None:
    """Writes the adapter as peft's own files, loadable with PeftModel.from_pretrained."""
    model.save_pretrained(str(out), safe_serialization=True)


def with_saved_adapter(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The model with the adapter that save_adapter wrote merged into its weights."""
    loaded: PreTrainedModel = PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
    return loaded


def base(model: nn.Module) -> PreTrainedModel:
    """The transformers model under an adapter, or the model itself."""
    found: PreTrainedModel = model.get_base_model() if isinstance(model, PeftModel) else model
    return found


def without_adapter(model: nn.Module) -> AbstractContextManager[None]:
    """A context in which the model computes as it did before it was given an adapter.

    Raises ValueError for a model without one.
    """
    if not isinstance(model, PeftModel):
        raise ValueError("the model has no adapter to leave out")
    context: AbstractContextManager[None] = model.disable_adapter()
    return context
