"""Sharded weights: torch's FSDP2, and helpers for tensors that may be sharded.

Shares are of float32 masters. A pass gathers them in the dtype that the model computes in, gradients are
summed over ranks in float32, and AdamW moves each rank's own share: weights, gradients and moments take
1/ranks of the memory on each rank. A trained adapter is small and stays complete on every rank.

Source: ZeRO, Rajbhandari et al. 2019, arXiv:1910.02054; FSDP2 is torch.distributed.fsdp.fully_shard.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from posttrain.learner.experts import ExpertRanks, make_mesh
from posttrain.learner.forward import Net
from posttrain.learner.ranks import Parallel
from posttrain.models.experts import stacks
from posttrain.models.rounding import dither
from posttrain.models.slices import Rows, take_rows


def shard(nets: Sequence[Net], settings: Parallel, size: int, *, adapter: bool) -> None:
    """Shard every weight of the nets over the ranks, except an adapter's.

    Trained weights become float32 masters, with the numbers of a single process. Of weights that are still in
    files (models/slices.py) each rank then reads its own rows.
    """
    device, replicas = next(nets[0].parameters()).device, settings.replicas
    if size > replicas > 1:
        shape = replicas, size // replicas
        mesh = make_mesh(device, shape, ("replicate", "shard"), settings.deadline_s)
    else:
        mesh = init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
    experts = ExpertRanks.of(size, device, settings)
    for net in nets:
        _shard(net, settings, mesh, experts, device, adapter=adapter)


def _shard(
    net: Net,
    settings: Parallel,
    mesh: DeviceMesh,
    experts: ExpertRanks | None,
    device: torch.device,
    *,
    adapter: bool,
) -> None:
    unread = take_rows(net)
    replicated = {p for p in net.parameters() if adapter and p.requires_grad}
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if settings.cpu_offload else OffloadPolicy()
    computes = net.policy.get_input_embeddings().weight.dtype
    parts = [net.policy, *([net.critic] if net.critic is not None else [])]
    names = {p: name for part in parts for name, p in part.named_parameters() if p not in replicated}
    options: dict[str, Any] = {
        "mesh": mesh,
        "ignored_params": replicated,
        "offload_policy": offload,
        "mp_policy": _precision(computes),
    }
    if experts:
        for module in stacks(net):
            _to_masters(module, names)
            experts.hold(module)
            shares = {**options, "mesh": experts.mesh["shard"]}
            fully_shard(module, reshard_after_forward=settings.reshard_after_forward, **shares)
    for module in _layers(net):
        _to_masters(module, names)
        fully_shard(module, reshard_after_forward=settings.reshard_after_forward, **options)
    if net.critic is not None:
        # The head computes in float32.
        fully_shard(net.critic.head, **{**options, "mp_policy": _precision(net.critic.head.weight.dtype)})
    _to_masters(net, names)
    fully_shard(net, reshard_after_forward=settings.reshard_after_forward, **options)
    for sharded in sharded_modules(net):
        # Sums, not means: each token's weight already contains the divisor.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    if unread:
        _read_rows(net, unread, torch.device("cpu") if settings.cpu_offload else device)


def _precision(computes: torch.dtype) -> MixedPrecisionPolicy:
    wide = torch.promote_types(computes, torch.float32)
    return MixedPrecisionPolicy(param_dtype=computes, reduce_dtype=wide, cast_forward_inputs=False)


def _layers(net: Net) -> Iterator[nn.Module]:
    """Yield the layers that are gathered one at a time, inner ones first."""
    for model in (net.policy, None if net.critic is None else net.critic.body):
        names = set(getattr(model, "_no_split_modules", None) or ())
        layers = [m for m in (model.modules() if model is not None else ()) if type(m).__name__ in names]
        yield from reversed(layers)


def _to_masters(module: nn.Module, names: Mapping[nn.Parameter, str]) -> None:
    """Replace trained weights by dithered float32 masters (models/rounding.py)."""
    for parameter in module.parameters():
        if parameter.requires_grad and parameter in names and parameter.dtype.itemsize < 4:
            unread = parameter.is_meta
            parameter.data = parameter.float() if unread else dither(names[parameter], parameter.data)


@torch.no_grad()
def _read_rows(net: Net, unread: Mapping[str, Rows], device: torch.device) -> None:
    """Read this rank's rows of sharded weights into memory on this device; trained ones become masters."""
    starts = {name: _first_row(p) for name, p in net.named_parameters() if name in unread}
    net._apply(  # type: ignore[no-untyped-call]
        lambda x: torch.empty_like(x, device=device) if x.is_meta else x
    )
    for name, parameter in net.named_parameters():
        share = local(parameter)
        if name not in unread or not share.numel():
            continue
        first = starts[name]
        rows = unread[name](first, first + len(share)).to(computing_device(parameter))
        if rows.dtype != share.dtype:
            part_name = name.partition(".")[2]  # within the policy or the critic, as _to_masters names it
            rows = dither(part_name, rows, first * rows[0].numel())
        share.copy_(rows)


def _first_row(x: torch.Tensor) -> int:
    """Return the number of the first row of this rank's share, which is as long as torch.chunk makes it.

    Of experts FSDP2 shards each rank's share, so the last dimension of the mesh is the first to cut.
    """
    if not isinstance(x, DTensor):
        return 0
    first, rows = 0, len(x)
    for dim in reversed(range(len(x.placements))):
        if not x.placements[dim].is_replicate():
            share = -(-rows // x.device_mesh.size(dim))
            before = min(rows, x.device_mesh.get_local_rank(dim) * share)
            first, rows = first + before, min(share, rows - before)
    return first


def sharded_modules(net: nn.Module) -> list[FSDPModule]:
    """Return the modules whose weights are sharded; none if every rank holds all weights."""
    return [module for module in net.modules() if isinstance(module, FSDPModule)]


def local(x: torch.Tensor) -> torch.Tensor:
    """Return this rank's share of a tensor, in the same memory; a tensor without shards itself."""
    return x.to_local() if isinstance(x, DTensor) else x


def whole(x: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a sharded one, in messages of all ranks; a tensor without shards itself."""
    if not isinstance(x, DTensor):
        return x
    for dim in range(len(x.placements) - 1):  # one at a time: PyTorch warns of more
        if not x.placements[dim].is_replicate():
            x = x.redistribute(placements=[*x.placements[:dim], Replicate(), *x.placements[dim + 1 :]])
    return x.full_tensor()


def copies(x: torch.Tensor) -> int:
    """Return how many ranks hold the same share of a sharded tensor."""
    assert isinstance(x, DTensor)
    return math.prod(x.device_mesh.size(n) for n, p in enumerate(x.placements) if p.is_replicate())


def computing_device(x: torch.Tensor) -> torch.device:
    """Return the device that computes with a tensor; with cpu_offload its shares are kept on another."""
    return torch.device(x.device_mesh.device_type) if isinstance(x, DTensor) else x.device


def shard_like(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a full tensor, which every rank has, sharded like `like` and on its device."""
    if not isinstance(like, DTensor):
        return x.to(like.device)
    sharded = distribute_tensor(x.detach(), like.device_mesh, like.placements, src_data_rank=None)
    # With cpu_offload shares are not on the mesh's device, where DTensor.from_local would move them back.
    out = torch.empty_like(like.detach())
    local(out).copy_(local(sharded))
    return out
