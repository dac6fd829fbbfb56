"""Expert parallelism: each rank of a group holds some experts of every layer, and tokens are sent to them.

Of E experts, rank c of n consecutive ones holds numbers c·E/n to (c+1)·E/n - 1. In a layer with experts it
sends each of its tokens, once for each expert that the router has chosen, to the rank that holds the expert,
and gets the expert's output back. It weighs and sums outputs itself, as transformers' own module does.

    [T, D] × k choices, by expert → all-to-all → this rank's experts → all-to-all → Σ score · output, [T, D]

The backward pass sends gradients along the same ways, so an expert's gradient on its rank is the sum over the
tokens of all ranks of the group. What holds the same experts in other groups is FSDP2's to shard and to sum.

Source: GShard, Lepikhin et al. 2020, arXiv:2006.16668.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import PreTrainedModel

from posttrain.learner.ranks import Parallel
from posttrain.types import UserError


def stacks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that hold all experts of a layer in stacked weights, [E, ...] each.

    They are the ones that transformers calls with tokens [T, D], chosen experts [T, k] and scores [T, k],
    and for which it has several implementations.
    """
    for module in model.modules():
        if hasattr(module, "is_transposed") and hasattr(module, "num_experts"):
            weights = [*module.parameters()]
            if weights and all(p.ndim > 1 and len(p) == module.num_experts for p in weights):
                yield module


def check_experts(size: int, ranks: int, policy: nn.Module, others: Sequence[nn.Module] = ()) -> None:
    """Raise UserError if `size` of the ranks cannot share the experts of these models.

    The others, such as a reference, may have none. A single rank ignores the size.
    """
    if 1 in (size, ranks):
        return
    if ranks % size:
        problem = f"{ranks} ranks are not a multiple of {size}"
        raise UserError("train.experts", problem, "set it to a divisor of the number of ranks")
    if not any(stacks(policy)):
        problem = f"{type(policy).__name__} has no stacks of experts that ranks could divide"
        raise UserError("train.experts", problem, "leave it out")
    for model in (policy, *others):
        for module in stacks(model):
            if int(module.num_experts) % size:  # type: ignore[arg-type]
                problem = f"the {module.num_experts} experts of a layer are not a multiple of {size}"
                raise UserError("train.experts", problem, f"set it to a divisor of {module.num_experts}")


def make_mesh(
    device: torch.device, shape: tuple[int, int], names: tuple[str, str], deadline_s: float
) -> DeviceMesh:
    """Return a mesh of all ranks whose groups wait `deadline_s` for one another.

    Those of init_device_mesh wait for PyTorch's default, 10 or 30 minutes.
    """
    ranks, limit, groups = torch.arange(math.prod(shape)).view(shape), timedelta(seconds=deadline_s), []
    for dim in (0, 1):
        for members in ranks.movedim(dim, 1).tolist():
            group = dist.new_group(members, timeout=limit)  # each rank takes part, in this order
            if dist.get_rank() in members:
                groups.append(group)
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=names)


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks that hold a layer's experts together, this one among them."""

    mesh: DeviceMesh
    """All ranks, [groups, ranks of a group], by the names "shard" and "experts"."""
    group: Any

    @staticmethod
    def of(size: int, device: torch.device, parallel: Parallel) -> "ExpertRanks | None":
        """Return this rank's group among `size` ranks, or None if each has the experts to itself."""
        n = parallel.experts
        if 1 in (n, size):
            return None
        mesh = make_mesh(device, (size // n, n), ("shard", "experts"), parallel.deadline_s)
        return ExpertRanks(mesh, mesh.get_group("experts"))

    def hold(self, module: nn.Module) -> None:
        """Leave this rank its share of the module's experts, and send tokens to those of other ranks.

        Weights become DTensors, of which FSDP2 may shard each rank's share over groups.
        """
        kind: Any = type(module)
        local = object.__new__(kind)
        count = int(module.num_experts) // self.mesh["experts"].size()  # type: ignore[arg-type]
        local.__dict__ = {**vars(module), "_parameters": {}, "num_experts": count}
        for name, p in list(module.named_parameters(recurse=False)):
            share = distribute_tensor(p.detach(), self.mesh["experts"], [Shard(0)], src_data_rank=None)
            setattr(module, name, nn.Parameter(share, requires_grad=p.requires_grad))
        vars(module)["_local"] = local, self.group
        module.__class__ = _dispatching(kind)


def expert_count(model: nn.Module) -> int:
    """Return the number of experts of a layer, the greatest common divisor if layers differ; 0 without."""
    return math.gcd(*(int(module.num_experts) for module in stacks(model)))  # type: ignore[arg-type]


def experts_weights(model: PreTrainedModel) -> int:
    """Return the number of weights in stacks of experts."""
    return sum(p.numel() for module in stacks(model) for p in module.parameters())


@cache
def _dispatching(kind: Any) -> Any:
    """Return the class of a module of experts that computes with those of all ranks of its group."""

    def forward(
        self: Any,
        hidden: Float[torch.Tensor, "T D"],
        indices: Int[torch.Tensor, "T k"],
        scores: Float[torch.Tensor, "T k"],
    ) -> Float[torch.Tensor, "T D"]:
        local, group = self._local
        T, k = indices.shape
        choice = indices.reshape(-1)
        order = choice.argsort(stable=True)
        counts = choice.new_zeros(self.num_experts).index_add_(0, choice, torch.ones_like(choice))
        counts = counts.view(-1, local.num_experts)  # [rank, its expert]
        incoming = _send(counts, [1] * len(counts), [1] * len(counts), group)
        sizes: list[list[int]] = torch.stack([counts.sum(1), incoming.sum(1)]).tolist()
        rows = _Exchange.apply(hidden[order // k], *sizes, group)  # type: ignore[no-untyped-call]
        expert = torch.arange(local.num_experts, device=rows.device).repeat(len(counts))
        expert = expert.repeat_interleave(incoming.flatten(), output_size=len(rows))
        if not len(rows):  # a weight without a gradient is one that FSDP2 would not sum
            rows, expert = nn.functional.pad(rows, (0, 0, 0, 1)), expert.new_zeros(1)
        weights = self.named_parameters(recurse=False)
        local._parameters = {name: weight.to_local() for name, weight in weights}
        out = kind.forward(local, rows, expert[:, None], scores.new_ones(len(rows), 1))
        local._parameters = {}
        out = _Exchange.apply(out[: sum(sizes[1])], *sizes[::-1], group)  # type: ignore[no-untyped-call]
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        weighted: torch.Tensor = out[place].view(T, k, -1) * scores[..., None]
        return weighted.sum(1).to(hidden.dtype)

    return type(kind.__name__, (kind,), {"forward": forward})


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sent: list[int], received: list[int], group: Any) -> torch.Tensor:
        ctx.back = received, sent, group
        return _send(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _send(grad, *ctx.back), None, None, None


def _send(x: torch.Tensor, sent: list[int], received: list[int], group: Any) -> torch.Tensor:
    """Send the first sent[0] rows of x to the first rank of the group, and so on; return what each sent."""
    x = x.contiguous()
    out = x.new_empty(sum(received), *x.shape[1:])
    # As bytes: gloo has no all-to-all of every dtype.
    dist.all_to_all_single(out.view(torch.uint8), x.view(torch.uint8), received, sent, group=group)
    return out
