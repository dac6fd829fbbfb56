"""Models of experts: their stacked weights, and their routers' choices, which can be noted and replayed.

A router scores all E experts of a layer for each token, and takes the k with the highest scores:

    scores [T, E] → torch.topk → experts [T, k] and their scores, which weigh the experts' outputs

A sampler and a learner compute a router's scores with different kernels, and a difference in the last bit may
send a token to another expert. With the sampler's choices replayed (`Routers.given`) the learner scores the
same experts by its own weights, and the gradient reaches the router through these scores.

Source: router replay (R3), Ma et al. 2025, arXiv:2510.11370.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Int
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

UNKNOWN = -1
"""In place of an expert's number, where no choice is known: the router chooses by itself."""
Routes = Int[torch.Tensor, "L N k"]
"""The experts of each of N tokens in each of L layers with a router, int16."""
_ROUTERS = "_posttrain_routers"


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


def expert_count(model: nn.Module) -> int:
    """Return the number of experts of a layer, the greatest common divisor if layers differ; 0 without."""
    return math.gcd(*(int(module.num_experts) for module in stacks(model)))  # type: ignore[arg-type]


def experts_weights(model: PreTrainedModel) -> int:
    """Return the number of weights in stacks of experts."""
    return sum(p.numel() for module in stacks(model) for p in module.parameters())


class Routers:
    """The routers of a model, in the order of its layers.

    `given` replaces the choices of all passes, and of their recomputations, until it is set again. With
    `notes`, each pass leaves its choices in `taken`. Raises ValueError for a model without routers.
    """

    def __init__(self, model: nn.Module, *, notes: bool = False) -> None:
        self.notes = notes
        self.given: Routes | None = None
        blocks, self.top_k = _blocks(model), router_choices(model)
        if not self.top_k:
            raise ValueError(f"{type(model).__name__} has no routers whose choices can be replayed")
        self._taken: list[torch.Tensor | None] = [None] * len(blocks)
        for layer, (block, experts) in enumerate(blocks):
            mode = _Choosing(self, layer, experts)
            block.register_forward_pre_hook(mode.begin)
            block.register_forward_hook(mode.end, always_call=True)

    def __len__(self) -> int:
        return len(self._taken)

    def taken(self) -> Routes:
        """Return the choices of the last pass."""
        return torch.stack([choices for choices in self._taken if choices is not None])

    def choose(self, layer: int, best: torch.Tensor) -> torch.Tensor:
        """Return the experts to take, [..., k], where the router would take the `best`."""
        choices = best
        if self.given is not None:
            replayed = self.given[layer].to(best).view_as(best)
            choices = replayed.where(replayed != UNKNOWN, best)
        if self.notes:
            self._taken[layer] = choices.reshape(-1, self.top_k).short()
        return choices


def replay(model: nn.Module, routes: Routes | None) -> None:
    """Let a model's routers choose these experts from its next pass on; None: those that score highest."""
    routers: Routers | None = getattr(model, _ROUTERS, None)
    if routers is None and routes is not None:
        routers = Routers(model)
        setattr(model, _ROUTERS, routers)
    if routers is not None:
        routers.given = routes


def fill_routes(routes: Routes, count: int) -> Routes:
    """Return the choices with `count` further tokens, of which none is known."""
    return nn.functional.pad(routes, (0, 0, 0, count), value=UNKNOWN)


def router_choices(model: nn.Module) -> int:
    """Return how many experts the routers choose for a token; 0 if that cannot be replayed.

    Without routers, or with several numbers. Nor where only experts of the best groups have scores
    (DeepSeek-V2's group_limited_greedy): one of another group would be weighed by 0.
    """
    numbers = set()
    for block, _ in _blocks(model):
        masks = any(getattr(m, "topk_method", "") == "group_limited_greedy" for m in block.modules())
        sizes = (n for m in block.modules() if isinstance(n := getattr(m, "top_k", None), int))
        numbers.add(0 if masks else next(sizes, 0))
    return numbers.pop() if len(numbers) == 1 else 0


def expert_layers(model: nn.Module) -> list[int]:
    """Return the numbers of the decoder layers that have experts."""
    names = {id(module): name for name, module in model.named_modules()}
    return [
        next(int(part) for part in names[id(block)].split(".") if part.isdigit())
        for block, _ in _blocks(model)
    ]


def _blocks(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """Return the modules that route tokens to experts, with the number of their experts."""
    owners = {id(child): module for module in model.modules() for child in module.children()}
    return [(owners[id(experts)], int(experts.num_experts)) for experts in stacks(model)]  # type: ignore[arg-type]


class _Choosing(TorchFunctionMode):
    """Within a block, let `Routers.choose` decide in place of torch.topk over the block's experts.

    Routers differ in how they score, and scale the scores that they have chosen; all choose with torch.topk.
    Where it also finds the best of a group that has all experts, what it returns changes nothing.
    """

    def __init__(self, routers: Routers, layer: int, experts: int) -> None:
        super().__init__()
        self.routers, self.layer, self.experts = routers, layer, experts

    def begin(self, module: nn.Module, arguments: Any) -> None:
        """Enter the mode before a block's forward."""
        if self.routers.notes or self.routers.given is not None:
            self.__enter__()  # type: ignore[no-untyped-call]

    def end(self, module: nn.Module, arguments: Any, output: Any) -> None:
        """Leave it after a block's forward, after an error too."""
        if self.routers.notes or self.routers.given is not None:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return out
        scores = args[0]
        if scores.shape[-1] != self.experts or out.indices.shape[-1] != self.routers.top_k:
            return out
        choices = self.routers.choose(self.layer, out.indices)
        return torch.return_types.topk((scores.gather(-1, choices), choices))
