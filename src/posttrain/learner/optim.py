"""The optimiser: AdamW or Muon on float32 master weights, gradient clipping, and learning-rate schedules.

If the model computes in bfloat16, its weights are rounded masters: gradients are summed and
steps are taken in float32, and the rounding error is stored in addition to the weights. Otherwise rounding
would lose a step of 1e-6 on a weight of 1.

The moments of AdamW can be stored in 8 bits (moments.py).

Source: Muon, Jordan et al. 2024, kellerjordan.github.io/posts/muon; its rate for AdamW's settings, Liu et al.
2025, arXiv:2502.16982, section 2.2.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from weakref import ref

import torch
from torch import nn
from torch.optim.adamw import adamw

from posttrain.learner import kernels, moments
from posttrain.learner.ranks import ALONE, Ranks
from posttrain.learner.shards import computing_device, copies, local, shard_like, whole
from posttrain.models.fingerprint import NamedTensors
from posttrain.models.rounding import dither


@dataclass(frozen=True, kw_only=True)
class Optim:
    """AdamW or Muon, and the schedule. The defaults are PyTorch's, except the learning rate and the decay."""

    name: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """adamw_8bit: AdamW with both moments stored in 8 bits (block-wise dynamic quantisation), except those of
    vectors and of matrices of fewer than 4096 numbers. muon: the matrices of layers and adapters move along
    their orthogonalised momentum, all other weights (embeddings, output head, norms, biases, heads of values)
    by AdamW. A matrix moves at 0.2 √(longer side) times lr, so a step has the root mean square of AdamW's,
    and lr and weight_decay suit both."""
    lr: float = 1e-6
    """Peak learning rate, reached after the warm-up."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.95
    """Muon's decay rate of the running mean of gradients, of Nesterov's kind."""
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    """The gradient is scaled down to this 2-norm when it is longer; 0 never scales."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Rate after the warm-up: constant, or falling towards min_lr_ratio · lr, one step after the last."""
    warmup_steps: int = 0
    """Optimiser steps over which the rate rises linearly from lr/(warmup_steps + 1)."""
    min_lr_ratio: float = 0.0

    def __post_init__(self) -> None:
        if not (self.lr >= 0 and math.isfinite(self.lr)):
            raise ValueError(f"lr must be 0 or more, not {self.lr}")
        if not all(0 <= b < 1 for b in self.betas):
            raise ValueError(f"betas must lie in [0, 1), not {self.betas}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must lie in [0, 1), not {self.momentum}")
        if self.eps <= 0:
            raise ValueError(f"eps must be above 0, not {self.eps}")
        for name in ("weight_decay", "max_grad_norm", "warmup_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ValueError(f"min_lr_ratio must lie in [0, 1], not {self.min_lr_ratio}")


def learning_rate(config: Optim, step: int, total: int) -> float:
    """Return the rate of optimiser step `step` (from 0) of a run of `total` steps.

    >>> config = Optim(lr=1.0, schedule="linear", warmup_steps=1)
    >>> [learning_rate(config, s, 5) for s in range(5)]
    [0.5, 1.0, 0.75, 0.5, 0.25]
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.lr
    falling_steps = max(total - config.warmup_steps, 1)
    progress = min(max((step - config.warmup_steps) / falling_steps, 0.0), 1.0)
    share = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * share)


MOMENTS = ("exp_avg", "exp_avg_sq")
"""PyTorch's names of AdamW's moments: the means of the gradient and of its square."""
MOMENTUM = "momentum_buffer"
"""PyTorch's name of Muon's one moment: the mean of the gradient."""
_ABSMAX = tuple(f"{key}_{moments.ABSMAX}" for key in MOMENTS)
"""Names of the sizes of the blocks of 8-bit moments."""
_PIECE = 1 << 19
"""Numbers that AdamW steps at a time on a CPU."""


class Master:
    """The float32 numbers behind a parameter, the sum of their gradients, and the optimiser's moments.

    A parameter in float32 (or float64), or a rank's share, is its own master. A parameter in bfloat16
    holds the rounded master, and `rest` the 16 bits by which their bit patterns differ: 4 bytes a number
    and not 6. A master in the middle between two numbers of bfloat16 changes in its last bit, because the
    difference would need a 17th bit.
    """

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name, self.parameter = name, parameter
        self.rest: torch.Tensor | None = None
        self.state: dict[str, torch.Tensor] = {}
        """AdamW's moments and its number of steps, or Muon's momentum; empty before the first step. Moments
        in 8 bits are codes, with the sizes of their blocks."""
        self._sum: torch.Tensor | None = None
        if not parameter.is_contiguous():  # pieces are rows, and moments from a file are contiguous
            parameter.data = parameter.data.contiguous()
        if parameter.dtype not in (torch.float32, torch.float64):
            if parameter.dtype != torch.bfloat16:
                raise ValueError(f"{name} is {parameter.dtype}: train in bfloat16 or float32")
            weight = parameter.detach()
            self.rest = torch.empty_like(weight, dtype=torch.int16)
            kernels.part(dither(name, weight), weight, self.rest)
            self._sum_gradients(parameter)

    @property
    def grad(self) -> torch.Tensor | None:
        """The sum of the gradients, in the master's dtype; None without a gradient."""
        return self.parameter.grad if self.rest is None else self._sum

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if self.rest is None:
            self.parameter.grad = value
        else:
            self._sum = value

    def _sum_gradients(self, parameter: nn.Parameter) -> None:
        """Add each microbatch's gradient to the sum, in float32, as soon as it is complete."""
        reference = ref(self)  # weak: the hook must not keep the master alive

        def add(parameter: nn.Parameter) -> None:
            assert parameter.grad is not None
            if master := reference():
                grad, total = parameter.grad, master._sum
                master._sum = grad.float() if total is None else total.add_(grad)
                parameter.grad = None

        parameter.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]

    def zeros(self) -> torch.Tensor:
        """Return zeros in the parameter's shape and the master's dtype."""
        return torch.zeros_like(self.parameter, dtype=None if self.rest is None else torch.float32)

    def numbers(self) -> torch.Tensor:
        """Return the master's numbers: the parameter itself, or a copy if the parameter is rounded."""
        weight = self.parameter.detach()
        return weight if self.rest is None else kernels.join(weight, self.rest)

    @torch.no_grad()
    def set(self, numbers: torch.Tensor) -> None:
        """Set the master to these numbers and the parameter to their rounding."""
        if self.rest is None:
            self.parameter.copy_(numbers)
        else:
            copy = torch.empty_like(self.rest, dtype=torch.float32)
            kernels.part(copy.copy_(numbers), self.parameter, self.rest)  # copy_ raises for another shape

    @property
    def is_packed(self) -> bool:
        """True if the moments are stored in 8 bits."""
        return _ABSMAX[0] in self.state

    def pieces(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield parameter, gradient, rest if any and moments of some rows of this rank's share at a time."""
        assert self.grad is not None
        columns = {"parameter": self.parameter.detach(), "grad": self.grad}
        columns |= {"rest": self.rest} if self.rest is not None else {}
        columns |= {key: x for key, x in self.state.items() if key != "step"}
        rows = {key: x.view(1) if x.ndim == 0 else local(x) for key, x in columns.items()}
        weight = rows["parameter"]
        # Small pieces stay in a core's cache; on a GPU they cost launches, and moments of large ones memory.
        bits = 0 if weight.device.type == "cpu" else 5 if self.is_packed else 7
        step = max(1, (_PIECE << bits) * len(weight) // max(weight.numel(), 1))
        for start in range(0, len(weight), step):
            yield {key: x[start : start + step] for key, x in rows.items()}


class MasterWeights:
    """The masters of trainable parameters, and the sum of their gradients over ranks."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], ranks: Ranks = ALONE) -> None:
        self.ranks = ranks
        self.masters = [Master(name, parameter) for name, parameter in parameters]

    @torch.no_grad()
    def add_up(self) -> None:
        """Replace gradients by their sums over ranks; FSDP2 has already summed those of shares."""
        replicated = [m for m in self.masters if local(m.parameter) is m.parameter]
        if self.ranks.size == 1 or not replicated:
            return
        # A rank without rows has no gradients; a parameter without a gradient on any rank keeps None.
        has_grad = self.ranks.max(torch.tensor([m.grad is not None for m in replicated], dtype=torch.uint8))
        masters = [m for m, has in zip(replicated, has_grad.tolist(), strict=True) if has]
        for m in masters:
            m.grad = m.zeros() if m.grad is None else m.grad
        self.ranks.add([m.grad for m in masters if m.grad is not None])

    @torch.no_grad()
    def clip(self, max_norm: float) -> float:
        """Scale the gradient down to at most max_norm (0: no bound); return its 2-norm before."""
        grads = [m.grad for m in self.masters if m.grad is not None]
        shares: dict[int, list[torch.Tensor]] = {}
        for grad in grads:
            if local(grad) is not grad:
                shares.setdefault(copies(grad), []).append(local(grad))
        replicated = [g for g in grads if local(g) is g]
        norm = float(nn.utils.get_total_norm(replicated)) if replicated else 0.0
        for count, some in shares.items():
            squares = self.ranks.sum(nn.utils.get_total_norm(some).double().square())
            norm = math.sqrt(norm**2 + float(squares) / count)
        if max_norm and norm > max_norm:
            torch._foreach_mul_(
                [*replicated, *(g for some in shares.values() for g in some)], max_norm / norm
            )
        return norm

    def named_masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, numbers) of each master; a bfloat16 parameter's numbers exist one at a time."""
        return ((m.name, m.numbers()) for m in self.masters)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the masters by name; for bfloat16 weights that is a copy of 4 bytes a number."""
        return dict(self.named_masters())

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Set the masters to those of these names, with shares gathered; KeyError if one is missing."""
        for m in self.masters:
            m.set(shard_like(tensors[m.name], m.parameter))

    def zero_grad(self) -> None:
        """Discard the gradients and free their memory."""
        for m in self.masters:
            m.grad = None


def hidden_matrices(model: nn.Module) -> frozenset[nn.Parameter]:
    """Return the weights that Muon moves: matrices, and stacks of matrices (experts).

    Left to AdamW are embeddings and the output head, with an adapter on it, whose rows belong to tokens and
    get gradients of very different sizes, and matrices of one row or column (a head of values), which are
    vectors. What a model stores as one matrix (query, key and value in GPT-2) is one.
    """
    by_token: set[nn.Parameter] = set()
    for module in model.modules():
        head: Any = getattr(module, "get_output_embeddings", lambda: None)()
        embedding = module if isinstance(module, nn.Embedding) else None
        for part in (head, embedding):
            by_token |= set(part.parameters()) if part is not None else set()
    # Biases of experts are matrices too, a row for each expert.
    weights = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    return frozenset(p for p in weights if p.ndim in (2, 3) and min(p.shape[-2:]) > 1 and p not in by_token)


class OptimizedWeights:
    """Parameters with their masters, and the optimiser; `matrices`: those that Muon moves if it is named."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        config: Optim,
        ranks: Ranks = ALONE,
        matrices: frozenset[nn.Parameter] = frozenset(),
    ) -> None:
        self.config, self.masters = config, MasterWeights(parameters, ranks)
        by_muon = (m.name for m in self.masters.masters if m.parameter in matrices)
        self._by_muon = frozenset(by_muon if config.name == "muon" else ())

    @classmethod
    def of(cls, module: nn.Module, config: Optim, ranks: Ranks) -> "OptimizedWeights":
        """Return a module's parameters that are trained, with their optimiser."""
        trainable = ((name, p) for name, p in module.named_parameters() if p.requires_grad)
        return cls(trainable, config, ranks, hidden_matrices(module))

    def clip(self) -> float:
        """Sum the gradient over ranks and scale it down to max_grad_norm; return its 2-norm before."""
        self.masters.add_up()
        return self.masters.clip(self.config.max_grad_norm)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Make one step at this rate and discard the gradients.

        Matrices decay, vectors (norms, biases) do not.
        """
        moving = [m for m in self.masters.masters if m.grad is not None]
        for m in moving:
            m.state = m.state or self._start(m)
        if by_muon := [m for m in moving if m.name in self._by_muon]:
            with self.masters.ranks.waiting("whole matrices"):
                for m in by_muon:
                    self._muon(rate, m)
        moving = [m for m in moving if m.name not in self._by_muon]
        for matrices, decay in ((True, self.config.weight_decay), (False, 0.0)):
            masters = [m for m in moving if (m.parameter.ndim > 1) == matrices]
            rows = [
                tuple(local(x) for x in (m.parameter, m.grad, *(m.state[key] for key in (*MOMENTS, "step"))))
                for m in masters
                if m.grad is not None and m.rest is None and not m.is_packed
            ]
            if rows:
                self._adamw(rate, decay, rows)
            for m in masters:
                if m.rest is not None or m.is_packed:
                    self._adamw_in_pieces(rate, decay, m)
        self.masters.zero_grad()

    def _adamw_in_pieces(self, rate: float, decay: float, m: Master) -> None:
        """Move a master whose numbers or moments are stored in fewer bits than it moves in."""
        books = dict(zip(MOMENTS, (True, False), strict=True)) if m.is_packed else {}
        for piece in m.pieces():
            weight, grad, rest = piece["parameter"], piece["grad"], piece.get("rest")
            numbers = weight if rest is None else kernels.join(weight, rest)
            wide = {key: piece[key] for key in MOMENTS}
            for key, signed in books.items():
                codes, absmax = piece[key], piece[f"{key}_{moments.ABSMAX}"]
                wide[key] = moments.dequantise(codes, absmax, grad.dtype, signed=signed)
            self._adamw(rate, decay, [(numbers, grad, *wide.values(), m.state["step"].clone())])
            for key, signed in books.items():
                codes, absmax = moments.quantise(wide[key], signed=signed)
                piece[key].copy_(codes)
                piece[f"{key}_{moments.ABSMAX}"].copy_(absmax)
            if rest is not None:
                kernels.part(numbers, weight, rest)
        m.state["step"] += 1

    def _start(self, m: Master) -> dict[str, torch.Tensor]:
        """Return the state before the first step, sharded like the parameter."""
        if m.name in self._by_muon:
            return {MOMENTUM: m.zeros()}
        weight = m.parameter.detach()
        state = {"step": torch.zeros((), dtype=torch.float32, device=weight.device)}
        if self.config.name != "adamw_8bit" or not moments.is_quantised(weight.shape):
            return state | {key: m.zeros() for key in MOMENTS}
        block = weight.flatten(1)[:, : moments.blocks(weight.shape)]
        state |= {key: torch.zeros_like(weight, dtype=torch.uint8) for key in MOMENTS}
        return state | {key: torch.zeros_like(block, dtype=torch.float32) for key in _ABSMAX}

    def _muon(self, rate: float, m: Master) -> None:
        """Make a step of torch's Muon on a matrix, or on each matrix of a stack.

        Shards are gathered, because a part of a matrix has other singular vectors: every rank moves the whole
        matrix as one process does, and keeps its share.
        """
        assert m.grad is not None
        shape, device = m.parameter.shape[-2:], computing_device(m.parameter)
        numbers, momentum, grad = (whole(x).to(device) for x in (m.numbers(), m.state[MOMENTUM], m.grad))
        matrices = list(zip(*(x.view(-1, *shape) for x in (numbers, momentum, grad)), strict=True))
        muon = torch.optim.Muon(
            [weight for weight, _, _ in matrices],
            lr=rate,
            weight_decay=self.config.weight_decay,
            momentum=self.config.momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        for weight, mean, gradient in matrices:
            weight.grad = gradient
            muon.state[weight][MOMENTUM] = mean
        muon.step()  # type: ignore[no-untyped-call]
        m.set(shard_like(numbers, m.parameter))
        m.state[MOMENTUM] = shard_like(momentum, m.parameter)

    def _adamw(self, rate: float, decay: float, rows: Sequence[tuple[Any, ...]]) -> None:
        """Update all but the gradient of each row (numbers, gradient, two moments, step) in place."""
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

    def named_tensors(self) -> tuple[NamedTensors, NamedTensors]:
        """Return (name, tensor) of the masters, and of moments and step counts ("<parameter>/<moment>")."""
        state = ((f"{m.name}/{key}", x) for m in self.masters.masters for key, x in m.state.items())
        return self.masters.named_masters(), state

    def tensors(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return named_tensors() by name, all at once."""
        masters, state = self.named_tensors()
        return dict(masters), dict(state)

    def restore(self, masters: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> None:
        """Restore the result of tensors(); KeyError if it is of another model or optimiser."""
        self.masters.restore(masters)
        unknown = set(state)
        for m in self.masters.masters:
            start, m.state = self._start(m), {}
            names = {key: f"{m.name}/{key}" for key in start}
            unknown -= set(names.values())
            for key, like in start.items() if names[next(iter(start))] in state else ():
                m.state[key] = shard_like(state[names[key]], like).to(like.device, copy=True)
        if unknown:
            raise KeyError(f"optimiser state of an unknown parameter: {min(unknown)}")
