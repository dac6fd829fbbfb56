"""Layers that carry a state from token to token, gated delta nets (Qwen3.5, Qwen3-Next), by a layout.

Such a layer reads a sequence from its first token on. A layout says where each sequence of a pass begins, and
stores the states of those that go on; the layer's numbers are transformers' own.
"""

import logging
from functools import cache
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import nn

Hidden = Float[torch.Tensor, "R T D"]
States = tuple[torch.Tensor, torch.Tensor]
"""Of R sequences: the latest inputs of the convolution, [R, channels, width], and the sums over keys and
values, [R, heads, key size, value size]."""


class Reads(Protocol):
    """A layer of this kind, as a layout calls it."""

    def __call__(
        self, hidden: Hidden, states: States | None = None, *, keeps: bool = False
    ) -> tuple[Hidden, States | None]:
        """Return what the layer makes of R sequences, and the states after them if it keeps them.

        states: those after the tokens before, of which there are none for None; then T is 1. The first of
        them is replaced in place.
        """
        ...


class _Cache:
    """What these layers use of a cache of transformers: the states of one layer."""

    record_past = False

    def __init__(self, states: States | None) -> None:
        self.states: dict[str, torch.Tensor] = {}
        if states is not None:
            self.states = dict(zip(("conv", "recurrent"), states, strict=True))

    @property
    def layers(self) -> "_Cache":
        return self

    def __getitem__(self, number: int) -> "_Cache":
        """Return the states of the layer, whatever its number in the model."""
        return self

    @property
    def conv_states(self) -> list[torch.Tensor]:
        return [self.states["conv"]]

    @property
    def recurrent_states(self) -> list[torch.Tensor]:
        return [self.states["recurrent"]]

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return "recurrent" in self.states

    def update_conv_state(
        self, inputs: torch.Tensor, *_: Any, conv_kernel_size: int, **__: Any
    ) -> torch.Tensor:
        """Store the latest inputs of a sequence that begins, after zeros if it is short, and return all."""
        padded = nn.functional.pad(inputs, (max(0, conv_kernel_size - inputs.shape[-1]), 0))
        self.states["conv"] = padded[..., -conv_kernel_size:].clone()
        return padded

    def update_recurrent_state(self, state: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        self.states["recurrent"] = state
        return state


def layers_with_state(model: nn.Module) -> list[nn.Module]:
    """Return the layers of the model that are gated delta nets, in order."""
    return [module for module in model.modules() if type(module).__name__.endswith("GatedDeltaNet")]


def delegate(model: nn.Module) -> None:
    """Make the model's gated delta nets read as the layout of their pass says."""
    layers = layers_with_state(model)
    if layers and not torch.cuda.is_available():  # transformers would advise packages that need one
        logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)
    for layer in layers:
        kind: Any = type(layer)
        layer.__class__ = _delegated(kind)


@cache
def _delegated(kind: Any) -> Any:
    if hasattr(kind, "reads"):
        return kind

    def reads(
        self: Any, hidden: Hidden, states: States | None = None, *, keeps: bool = False
    ) -> tuple[Hidden, States | None]:
        store = _Cache(states) if keeps or states is not None else None
        out = kind.forward(self, hidden, cache_params=store)
        return out, None if store is None else (store.states["conv"], store.states["recurrent"])

    def forward(self: Any, hidden_states: Hidden, *args: Any, layout: Any = None, **others: Any) -> Hidden:
        if layout is None:
            plain: Hidden = kind.forward(self, hidden_states, *args, **others)
            return plain
        if others.get("attention_mask") is not None:
            raise ValueError(f"{kind.__name__} makes an attention mask of its own")
        out: Hidden = layout.read(self.reads, hidden_states)
        return out

    return type(kind.__name__, (kind,), {"forward": forward, "reads": reads})
