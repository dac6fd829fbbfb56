"""The optimiser: AdamW on float32 master weights, gradient clipping, and learning-rate schedules.

Where the model computes in bfloat16 its weights are masters that were rounded: gradients are summed and
steps are taken in float32, and what rounding took off is kept beside the weights. A step of 1e-6 on a
weight of 1 would otherwise be lost in it.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from weakref import ref

import torch
from torch import nn
from torch.optim.adamw import adamw

from posttrain.learner import kernels
from posttrain.learner.ranks import ALONE, Ranks
from posttrain.learner.shards import as_held, local
from posttrain.models.rounding import dither


@dataclass(frozen=True, kw_only=True)
class Optim:
    """AdamW and its schedule. The defaults are those of PyTorch but for the learning rate and the decay."""

    lr: float = 1e-6
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    """The gradient is scaled down to this 2-norm when it is longer; 0 never scales."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: stay, or fall towards min_lr_ratio · lr, reached one step behind the last."""
    warmup_steps: int = 0
    """Optimiser steps in which the rate rises linearly from lr/(warmup_steps + 1)."""
    min_lr_ratio: float = 0.0

    def __post_init__(self) -> None:
        if not (self.lr >= 0 and math.isfinite(self.lr)):
            raise ValueError(f"lr must be 0 or more, not {self.lr}")
        if not all(0 <= b < 1 for b in self.betas):
            raise ValueError(f"betas must lie in [0, 1), not {self.betas}")
        if self.eps <= 0:
            raise ValueError(f"eps must be above 0, not {self.eps}")
        for name in ("weight_decay", "max_grad_norm", "warmup_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ValueError(f"min_lr_ratio must lie in [0, 1], not {self.min_lr_ratio}")


def learning_rate(config: Optim, step: int, total: int) -> float:
    """The rate of optimiser step `step` (from 0) of a run of `total` steps.

    >>> config = Optim(lr=1.0, schedule="linear", warmup_steps=1)
    >>> [learning_rate(config, s, 5) for s in range(5)]
    [0.5, 1.0, 0.75, 0.5, 0.25]
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.lr
    left = max(total - config.warmup_steps, 1)
    done = min(max((step - config.warmup_steps) / left, 0.0), 1.0)
    share = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * share)


MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's means of the gradient and of its square, as PyTorch calls them."""
_PIECE = 1 << 19
"""Numbers that are stepped at a time on a processor."""


class Master:
    """The float32 numbers behind a parameter, the sum of their gradients, and AdamW's moments of them.

    A parameter in float32 (or float64), and a rank's share of one, is its own master. Of one in bfloat16 its
    numbers are kept, which are the master's rounded, and for each the 16 bits by which the patterns of both
    differ (`rest`): 4 bytes in all, and not 6. A master in the middle between two numbers of bfloat16 moves
    by its last bit, as that difference would need a 17th.
    """

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name, self.parameter = name, parameter
        self.rest: torch.Tensor | None = None
        self.state: dict[str, torch.Tensor] = {}
        """AdamW's: the moments, and the steps made; empty before the first."""
        self._sum: torch.Tensor | None = None
        if not parameter.is_contiguous():  # a piece is some rows, and moments from a file lie so
            parameter.data = parameter.data.contiguous()
        if parameter.dtype not in (torch.float32, torch.float64):
            if parameter.dtype != torch.bfloat16:
                raise ValueError(f"{name} is {parameter.dtype}: train in bfloat16 or float32")
            weight = parameter.detach()
            self.rest = torch.empty_like(weight, dtype=torch.int16)
            kernels.part(dither(name, weight), weight, self.rest)
            self._watch(parameter)

    @property
    def grad(self) -> torch.Tensor | None:
        """The sum of the gradients, in the master's dtype; None where there was none."""
        return self.parameter.grad if self.rest is None else self._sum

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        """Puts another sum in its place."""
        if self.rest is None:
            self.parameter.grad = value
        else:
            self._sum = value

    def _watch(self, parameter: nn.Parameter) -> None:
        """One microbatch's gradient is added to the sum, in float32, as soon as it is complete."""
        master = ref(self)  # who gives it up has the weights freed, and gradients to themselves

        def add(parameter: nn.Parameter) -> None:
            assert parameter.grad is not None
            if found := master():
                grad, held = parameter.grad, found._sum
                found._sum = grad.float() if held is None else held.add_(grad)
                parameter.grad = None

        parameter.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]

    def zeros(self) -> torch.Tensor:
        """As many as the parameter has numbers, in the master's dtype."""
        return torch.zeros_like(self.parameter, dtype=None if self.rest is None else torch.float32)

    def numbers(self) -> torch.Tensor:
        """The master itself: a copy, where the parameter is no master."""
        weight = self.parameter.detach()
        return weight if self.rest is None else kernels.join(weight, self.rest)

    @torch.no_grad()
    def set(self, numbers: torch.Tensor) -> None:
        """Takes these for the master's, and rounds them into the parameter."""
        if self.rest is None:
            self.parameter.copy_(numbers)
        else:
            room = torch.empty_like(self.rest, dtype=torch.float32)
            kernels.part(room.copy_(numbers), self.parameter, self.rest)  # an error where shapes do not fit

    def pieces(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """(parameter, rest, gradient, its two moments) of one in bfloat16, so many rows at a time."""
        columns = (self.parameter.detach(), self.rest, self.grad, *(self.state[key] for key in MOMENTS))
        # What a core computes with stays in its cache; a GPU is kept waiting by small pieces.
        most = _PIECE if self.parameter.device.type == "cpu" else _PIECE << 7
        rows = [x.view(1) if x.ndim == 0 else x for x in columns if x is not None]
        step = max(1, most * len(rows[0]) // max(self.parameter.numel(), 1))
        for start in range(0, len(rows[0]), step):
            yield tuple(x[start : start + step] for x in rows)


class MasterWeights:
    """The masters of the trainable parameters."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], ranks: Ranks = ALONE) -> None:
        self.ranks = ranks
        self.masters = [Master(name, parameter) for name, parameter in named]

    @torch.no_grad()
    def add_up(self) -> None:
        """Gradients become their sums over ranks; those of shares are already."""
        alike = [m for m in self.masters if local(m.parameter) is m.parameter]
        if self.ranks.size == 1 or not alike:
            return
        # A rank without rows has none, and what no rank has a gradient of stays without.
        has = self.ranks.max(torch.tensor([m.grad is not None for m in alike], dtype=torch.uint8))
        having = [m for m, any_has in zip(alike, has.tolist(), strict=True) if any_has]
        for m in having:
            m.grad = m.zeros() if m.grad is None else m.grad
        self.ranks.add([m.grad for m in having if m.grad is not None])

    @torch.no_grad()
    def clip(self, max_norm: float) -> float:
        """The gradient's 2-norm before it is scaled down to at most max_norm (0: left alone)."""
        grads = [m.grad for m in self.masters if m.grad is not None]
        shares = [local(g) for g in grads if local(g) is not g]
        alike = [g for g in grads if local(g) is g]
        norm = float(nn.utils.get_total_norm(alike)) if alike else 0.0
        if shares:
            squares = self.ranks.sum(nn.utils.get_total_norm(shares).double().square())
            norm = math.sqrt(norm**2 + float(squares))
        if max_norm and norm > max_norm:
            torch._foreach_mul_([*alike, *shares], max_norm / norm)
        return norm

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, numbers) of each, one after the other."""
        return ((m.name, m.numbers()) for m in self.masters)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The masters by name; 4 bytes a number where weights are bfloat16."""
        return dict(self.named())

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Puts back what tensors() gave, of shares the whole. KeyError if one is missing."""
        for m in self.masters:
            m.set(as_held(tensors[m.name], m.parameter))

    def zero_grad(self) -> None:
        """Forgets the gradients and frees their memory."""
        for m in self.masters:
            m.grad = None


class OptimizedWeights:
    """Parameters with what moves them: their masters, AdamW, and the configuration of both."""

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], config: Optim, ranks: Ranks = ALONE
    ) -> None:
        self.config, self.masters = config, MasterWeights(named, ranks)

    def clip(self) -> float:
        """The 2-norm of the gradient, summed over ranks, before it is scaled down to the bound."""
        self.masters.add_up()
        return self.masters.clip(self.config.max_grad_norm)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One step of AdamW at this rate; matrices decay, vectors (norms, biases) do not.

        The gradients are then forgotten.
        """
        moving = [m for m in self.masters.masters if m.grad is not None]
        for m in moving:
            if not m.state:
                step = torch.zeros((), dtype=torch.float32, device=m.parameter.device)
                m.state = {"step": step} | {key: m.zeros() for key in MOMENTS}
        for matrices, decay in ((True, self.config.weight_decay), (False, 0.0)):
            here = [m for m in moving if (m.parameter.ndim > 1) == matrices]
            if whole := [m for m in here if m.rest is None]:
                columns = [
                    (m.parameter, m.grad, *(m.state[key] for key in (*MOMENTS, "step"))) for m in whole
                ]
                self._adamw(rate, decay, columns)
            for m in here:
                if m.rest is None:
                    continue
                for weight, rest, *others in m.pieces():
                    numbers = kernels.join(weight, rest)
                    self._adamw(rate, decay, [(numbers, *others, m.state["step"].clone())])
                    kernels.part(numbers, weight, rest)
                m.state["step"] += 1
        self.masters.zero_grad()

    def _adamw(self, rate: float, decay: float, rows: Sequence[tuple[Any, ...]]) -> None:
        """Of each row (numbers, gradient, two moments, step) all but the gradient move."""
        numbers, grads, means, squares, steps = map(list, zip(*rows, strict=True))
        adamw(
            *(numbers, grads, means, squares, [], steps),
            fused=True,
            amsgrad=False,
            maximize=False,
            beta1=self.config.betas[0],
            beta2=self.config.betas[1],
            lr=rate,
            weight_decay=decay,
            eps=self.config.eps,
        )

    def tensors(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """(the masters by name, the optimiser's moments and step counts by "<parameter>/<moment>")."""
        moments = {f"{m.name}/{key}": x for m in self.masters.masters for key, x in m.state.items()}
        return self.masters.tensors(), moments

    def restore(self, masters: Mapping[str, torch.Tensor], moments: Mapping[str, torch.Tensor]) -> None:
        """Puts back what tensors() gave; KeyError if they are of another model."""
        self.masters.restore(masters)
        known = {f"{m.name}/{key}" for m in self.masters.masters for key in ("step", *MOMENTS)}
        for m in self.masters.masters:
            m.state = {}
            if f"{m.name}/step" in moments:
                found = {key: moments[f"{m.name}/{key}"] for key in MOMENTS}
                m.state = {key: as_held(x, m.parameter).clone() for key, x in found.items()}
                m.state["step"] = moments[f"{m.name}/step"].to(m.parameter.device, copy=True)
        if unknown := set(moments) - known:
            raise KeyError(f"optimiser state of an unknown parameter: {min(unknown)}")
