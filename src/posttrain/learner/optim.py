"""The optimiser: AdamW on float32 master weights, gradient clipping, and learning-rate schedules.

Where the model computes in bfloat16 its weights are a rounded copy: gradients are summed and
steps are taken in float32, and the copy is refreshed after each step. A step of 1e-6 on a weight
of 1 would otherwise be lost in rounding.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

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


class MasterWeights:
    """Float32 copies of the trainable parameters that compute in less, and the sums of their gradients.

    A parameter that is float32 (or float64) already is its own master, and so is a rank's share of one.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], ranks: Ranks = ALONE) -> None:
        self.ranks = ranks
        self.names: list[str] = []
        self.masters: list[torch.Tensor] = []
        self._rounded: list[tuple[nn.Parameter, torch.Tensor]] = []
        for name, parameter in named:
            self.names.append(name)
            if parameter.dtype in (torch.float32, torch.float64):
                self.masters.append(parameter)
                continue
            master = dither(name, parameter.detach())
            self.masters.append(master)
            self._rounded.append((parameter, master))
            # One microbatch's gradient is added to the sum, in float32, as soon as it is complete.
            parameter.register_post_accumulate_grad_hook(_add_to(master))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def add_up(self) -> None:
        """Gradients become their sums over ranks; those of shares are already."""
        alike = [m for m in self.masters if local(m) is m]
        if self.ranks.size == 1 or not alike:
            return
        # A rank without rows has none, and what no rank has a gradient of stays without.
        has = self.ranks.max(torch.tensor([m.grad is not None for m in alike], dtype=torch.uint8))
        having = [m for m, any_has in zip(alike, has.tolist(), strict=True) if any_has]
        for m in having:
            m.grad = torch.zeros_like(m) if m.grad is None else m.grad
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

    @torch.no_grad()
    def publish(self) -> None:
        """Rounds the masters into the weights that compute."""
        if self._rounded:
            # A few launches on a GPU rather than one for each tensor; the bits are the same.
            torch._foreach_copy_([p for p, _ in self._rounded], [master for _, master in self._rounded])

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, master) of each."""
        return zip(self.names, self.masters, strict=True)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The masters by name."""
        return {name: m.detach() for name, m in self.named()}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Puts back what tensors() gave, of shares the whole; publishes. KeyError if one is missing."""
        for name, master in zip(self.names, self.masters, strict=True):
            master.copy_(as_held(tensors[name], master))
        self.publish()

    def zero_grad(self) -> None:
        """Forgets the gradients and frees their memory."""
        for m in self.masters:
            m.grad = None


def _add_to(master: torch.Tensor) -> Any:
    def hook(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad += parameter.grad
        parameter.grad = None

    return hook


def adamw(config: Optim, weights: MasterWeights) -> torch.optim.AdamW:
    """AdamW over the masters; matrices decay, vectors (norms, biases) do not."""
    matrices = [m for m in weights.masters if m.ndim > 1]
    vectors = [m for m in weights.masters if m.ndim <= 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )


class OptimizedWeights:
    """Parameters with what moves them: their masters, AdamW, and the configuration of both."""

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], config: Optim, ranks: Ranks = ALONE
    ) -> None:
        self.config, self.masters = config, MasterWeights(named, ranks)
        self.optimizer = adamw(config, self.masters)

    def clip(self) -> float:
        """The 2-norm of the gradient, summed over ranks, before it is scaled down to the bound."""
        self.masters.add_up()
        return self.masters.clip(self.config.max_grad_norm)

    def step(self, rate: float) -> None:
        """One step of AdamW at this rate; the gradients are then forgotten."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.masters.publish()
        self.masters.zero_grad()

    def tensors(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """(the masters by name, the optimiser's moments and step counts by "<parameter>/<moment>")."""
        name_of = {id(m): n for n, m in zip(self.masters.names, self.masters.masters, strict=True)}
        moments = {
            f"{name_of[id(p)]}/{key}": value
            for p, state in self.optimizer.state.items()
            for key, value in state.items()
        }
        return self.masters.tensors(), moments

    def restore(self, masters: Mapping[str, torch.Tensor], moments: Mapping[str, torch.Tensor]) -> None:
        """Puts back what tensors() gave; KeyError if they are of another model."""
        self.masters.restore(masters)
        keys = ("step", "exp_avg", "exp_avg_sq")
        for name, master in zip(self.masters.names, self.masters.masters, strict=True):
            self.optimizer.state.pop(master, None)
            if f"{name}/step" in moments:
                found = {k: moments[f"{name}/{k}"] for k in keys}
                held = {k: as_held(found[k], master).clone() for k in keys[1:]}
                self.optimizer.state[master] = {"step": found["step"].to(master.device, copy=True), **held}
        known = {f"{name}/{k}" for name in self.masters.names for k in keys}
        if unknown := set(moments) - known:
            raise KeyError(f"optimiser state of an unknown parameter: {min(unknown)}")
