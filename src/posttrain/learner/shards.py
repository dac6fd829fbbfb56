"""Weights of which each rank holds a share: torch's FSDP2, and the few places that must know of it.

Shares are of float32 masters. A pass gathers them in the type that the model computes in, gradients are
added up over ranks in float32, and AdamW moves each rank's own share: weights, gradients and moments take one
rank's part of the memory. What is small and trained by itself (an adapter) stays whole on every rank.

Source: ZeRO, Rajbhandari et al. 2019, arXiv:1910.02054; FSDP2 is torch.distributed.fsdp.fully_shard.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from posttrain.learner.forward import Net
from posttrain.learner.ranks import Parallel
from posttrain.models.rounding import dither


def shard(net: Net, settings: Parallel, size: int, *, adapter: bool) -> None:
    """Leaves of each weight of the net this rank's share; of an adapter's none.

    What is trained becomes float32 masters before it is cut, the numbers that one process would have.
    """
    device = next(net.parameters()).device
    mesh = init_device_mesh(device.type, (size,))
    alike = {p for p in net.parameters() if adapter and p.requires_grad}
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if settings.cpu_offload else OffloadPolicy()
    computes = net.policy.get_input_embeddings().weight.dtype
    parts = [net.policy, *([net.critic] if net.critic is not None else [])]
    names = {p: name for part in parts for name, p in part.named_parameters() if p not in alike}
    how: dict[str, Any] = {
        "mesh": mesh,
        "ignored_params": alike,
        "offload_policy": offload,
        "mp_policy": _precision(computes),
    }
    for module in _pieces(net):
        _to_masters(module, names)
        fully_shard(module, reshard_after_forward=settings.reshard_after_forward, **how)
    if net.critic is not None:
        # The head computes in float32.
        fully_shard(net.critic.head, **{**how, "mp_policy": _precision(net.critic.head.weight.dtype)})
    _to_masters(net, names)
    fully_shard(net, reshard_after_forward=settings.reshard_after_forward, **how)
    for gathered in sharded_modules(net):
        # Sums, not means: each token's weight holds the divisor already.
        gathered.set_gradient_divide_factor(1.0)
        gathered.set_force_sum_reduction_for_comms(True)


def _precision(computes: torch.dtype) -> MixedPrecisionPolicy:
    wide = torch.promote_types(computes, torch.float32)
    return MixedPrecisionPolicy(param_dtype=computes, reduce_dtype=wide, cast_forward_inputs=False)


def _pieces(net: Net) -> Iterator[nn.Module]:
    """The layers, each of which is gathered by itself."""
    for model in (net.policy, None if net.critic is None else net.critic.body):
        names = set(getattr(model, "_no_split_modules", None) or ())
        found = [m for m in (model.modules() if model is not None else ()) if type(m).__name__ in names]
        yield from reversed(found)  # what lies in another one comes first


def _to_masters(module: nn.Module, names: Mapping[nn.Parameter, str]) -> None:
    """Trained weights in float32, spread as masters are (models/rounding.py), before they are cut."""
    for parameter in module.parameters():
        if parameter.requires_grad and parameter in names and parameter.dtype.itemsize < 4:
            parameter.data = dither(names[parameter], parameter.data)


def sharded_modules(net: nn.Module) -> list[FSDPModule]:
    """The modules of which each rank holds a share; none where every rank holds all."""
    return [module for module in net.modules() if isinstance(module, FSDPModule)]


def local(x: torch.Tensor) -> torch.Tensor:
    """This rank's share of a tensor, in the same memory; a whole tensor itself."""
    return x.to_local() if isinstance(x, DTensor) else x


def whole(x: torch.Tensor) -> torch.Tensor:
    """The tensor that the ranks have shares of: a message of all. A whole one itself."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def as_held(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A whole tensor that every rank has, as `like` is held: its share, or all of it; on the same device."""
    if not isinstance(like, DTensor):
        return x.to(like.device)
    found = distribute_tensor(x.detach(), like.device_mesh, like.placements, src_data_rank=None)
    # With cpu_offload shares are not on the mesh's device, where DTensor.from_local would move them back.
    held = torch.empty_like(like.detach())
    local(held).copy_(local(found))
    return held
