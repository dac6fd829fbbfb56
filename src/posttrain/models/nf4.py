"""4-bit weights: linear layers that store NormalFloat numbers and dequantise them for each product.

A weight is cut into blocks of 64 numbers. Of each, the size of the largest is stored in float32, and 4 bits a
number: which of 16 values, times that size, is nearest. Format and values are those of bitsandbytes' "nf4"
without a second quantisation. Source: QLoRA, Dettmers et al. 2023, arXiv:2305.14314, section 3.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import nn
from torch.nn.functional import embedding, linear, pad

BLOCK = 64
"""Numbers that share one size."""
BITS = 4 + 32 / BLOCK
"""Bits that a weight takes."""
VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Quantiles of a normal distribution, with 0 among them, scaled to ±1."""


def quantise(weight: torch.Tensor) -> tuple[UInt8[torch.Tensor, "n"], Float[torch.Tensor, "b"]]:
    """Return the indices of a weight's numbers, two a byte, and the size of each block.

    The first number of a pair is in the upper four bits. What lacks to whole blocks counts as 0.

    >>> indices, size = quantise(torch.tensor([2.0, -2.0, 0.1, 0.0]))
    >>> indices[:2].tolist(), size.tolist()
    ([240, 135], [2.0])
    """
    flat = weight.detach().to(torch.promote_types(weight.dtype, torch.float32)).flatten()
    blocks = pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    size = blocks.abs().amax(1)
    values = torch.tensor(VALUES, dtype=torch.float32, device=flat.device)
    between = (values[1:] + values[:-1]) / 2
    indices = torch.bucketize((blocks / size.clamp_min(1e-30)[:, None]).float(), between, out_int32=True)
    pairs = indices.flatten()[: len(flat) + len(flat) % 2].view(-1, 2)
    return (pairs[:, 0] * 16 + pairs[:, 1]).to(torch.uint8), size.float()


def dequantise(
    indices: UInt8[torch.Tensor, "n"],
    size: Float[torch.Tensor, "b"],
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the weight that `quantise` stored: value times size, computed in float32.

    >>> dequantise(*quantise(torch.tensor([2.0, -2.0, 0.1, 0.0])), (2, 2), torch.float32)
    tensor([[ 2.0000, -2.0000],
            [ 0.1592,  0.0000]])
    """
    numbers = embedding(indices.int(), _pairs(indices.device)).flatten()
    rest = len(numbers) % BLOCK
    blocks = numbers[: len(numbers) - rest].view(-1, BLOCK)
    blocks.mul_(size[: len(blocks), None])
    numbers[len(numbers) - rest :].mul_(size[-1])
    count = torch.Size(shape).numel()
    return numbers[:count].to(dtype).view(shape)


@cache
def _pairs(device: torch.device) -> Float[torch.Tensor, "256 2"]:
    """Return the two values of each byte."""
    values = torch.tensor(VALUES, dtype=torch.float32, device=device)  # whatever the default dtype is
    return torch.stack([values.repeat_interleave(16), values.repeat(16)], 1)


class NF4Linear(nn.Linear):
    """A frozen linear layer of 4-bit weights; `weight` is dequantised at each use."""

    indices: torch.Tensor
    size: torch.Tensor
    dtype: torch.dtype

    @staticmethod
    def replace(module: nn.Linear) -> None:
        """Turn a layer into one of these, in place, so that hooks and names stay."""
        weight = module.weight
        indices, size = quantise(weight)
        del module.weight
        module.register_buffer("indices", indices, persistent=False)
        module.register_buffer("size", size, persistent=False)
        module.__class__ = NF4Linear
        module.dtype = weight.dtype  # type: ignore[assignment]  # of the layer that it is now
        module.requires_grad_(False)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The numbers of the weight, [out_features, in_features] in `dtype`."""
        return dequantise(self.indices, self.size, (self.out_features, self.in_features), self.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return W x + b, and keep no W for the backward pass."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            return linear(x, self.weight, self.bias)
        # Of rows, as with a bias PyTorch returns a view of more dimensions, which may not change in place.
        product: torch.Tensor = _Product.apply(x.flatten(0, -2), self)  # type: ignore[no-untyped-call]
        return product.view(*x.shape[:-1], self.out_features)


class _Product(torch.autograd.Function):
    """A product with a packed weight, which the backward pass dequantises again in place of keeping it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: NF4Linear) -> torch.Tensor:
        ctx.layer = layer
        return linear(x, layer.weight, layer.bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient @ ctx.layer.weight, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: None) -> torch.Tensor:
        return linear(tangent, ctx.layer.weight)


def layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the layers that are packed, by name: each linear layer but the output head."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    return {n: m for n, m in model.named_modules() if type(m) is nn.Linear and m is not head}


@torch.no_grad()
def pack(model: nn.Module) -> None:
    """Store the linear layers of a model in 4 bits; it then trains nothing but an adapter."""
    for module in layers(model).values():
        NF4Linear.replace(module)


@torch.no_grad()
def round_trip(model: nn.Module) -> None:
    """Give the linear layers of a model the numbers that 4 bits hold, in its own dtype."""
    for module in layers(model).values():
        module.weight.copy_(stored(module.weight))


def stored(weight: torch.Tensor) -> torch.Tensor:
    """Return the numbers that 4 bits hold of a weight, in its own dtype."""
    return dequantise(*quantise(weight), tuple(weight.shape), weight.dtype)


def named_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of a model and its packed weights, by the names of unpacked ones."""
    for owner, module in model.named_modules():
        if isinstance(module, NF4Linear):
            yield f"{owner}.weight", module.weight
    yield from model.named_parameters()
