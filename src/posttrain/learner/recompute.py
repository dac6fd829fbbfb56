"""Recomputation of activations in the backward pass, to save memory.

Gradients have the same bits as without it, except where kernels.py replaces norms and gates.
"""

import ctypes
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from posttrain.learner import kernels, pieces
from posttrain.models.attention import use_layouts

_GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def prepare(
    policy: PreTrainedModel,
    bodies: Sequence[PreTrainedModel],
    references: Sequence[PreTrainedModel | None],
    *,
    checkpointing: bool,
    twice: bool,
    compiles: bool = False,
) -> None:
    """Make models attend through layouts, and set up the recomputation of the policy and the critics' bodies.

    compiles: torch.compile makes the pieces between matrix products. twice: gradients are differentiated
    again, which rules recomputation out. References are set up like the policy, so that equal weights give
    equal outputs.
    """
    others = [model for model in references if model is not None]
    for model in (policy, *others):
        use_layouts(model)
    if checkpointing:
        for model in (policy, *bodies):
            compute_again(model)
    if compiles:
        for model in (policy, *bodies, *others):
            compile_pieces(model)
    elif not (checkpointing or twice):
        for model in (policy, *bodies, *others):
            keep_less(model)


def compile_pieces(model: nn.Module) -> None:
    """Make norms, gated layers and rotations compute by pieces.py, and save no more than with keep_less."""
    module: Any
    for module in model.modules():
        kind: Any = pieces.plain(type(module))
        if _is_norm(module):
            module.__class__ = _compiled_norm(kind, pieces.norm(module))
        elif _is_gated(module) and not [*module.act_fn.parameters()]:
            module.__class__ = _gated(kind, pieces.gate(module.act_fn))
        elif kernels.has_rotation(kind):
            module.__class__ = kernels.rotating(kind, pieces.rotation(kernels.rotation_of(kind)))


def keep_less(model: nn.Module) -> None:
    """Make norms save only their input, and gated feed-forward layers only the outputs of their two matrices.

    The other tensors that they would save (norms in float32) are recomputed without matrix products, by
    kernels.py if there are kernels. Under `recomputing` their outputs, the inputs of matrix products, are
    recomputed too. Modules are recognised by their parts, and for a kernel by their results; others stay as
    they are. So do norms in float32 without kernels: they save little more, and their gradients would
    be summed in another order. Not for gradients that are differentiated again.
    """
    example = next(model.parameters())  # of the dtype that all compute in; packed weights are bytes
    for module in model.modules():
        kind: Any = type(module)
        if _is_norm(module):
            epsilon = _epsilon(module)
            if epsilon is not None:
                module.__class__ = _compiled_norm(kind, _kernel_norm(epsilon))
            elif module.weight.dtype.itemsize == 2:
                module.__class__ = _norm(kind)
        elif _is_gated(module):
            module.__class__ = _gated(kind)
        elif kernels.can_rotate(kind, example):
            module.__class__ = kernels.rotating(kind)


def _is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm by the root mean square with one weight, by its name and parts."""
    weights = [name for name, _ in module.named_parameters(recurse=False)]
    alone = not [*module.children(), *module.buffers(recurse=False)]
    return alone and type(module).__name__.endswith("RMSNorm") and weights == ["weight"]


class _NormAgain(torch.autograd.Function):
    """A module with one weight whose forward pass is repeated in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, kind: type[nn.Module], module: nn.Module, x: torch.Tensor, weight: torch.Tensor
    ) -> Any:
        """Return kind.forward(module, x); `weight` is an argument only to get its gradient."""
        ctx.save_for_backward(x)
        ctx.kind, ctx.module = kind, module
        return kind.forward(module, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        needs = ctx.needs_input_grad[2:]
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_(needs[0])
            out = ctx.kind.forward(ctx.module, x)
        inputs = [t for t, need in zip((x, ctx.module.weight), needs, strict=True) if need]
        gradients = iter(torch.autograd.grad(out, inputs, grads))
        return None, None, *(next(gradients) if need else None for need in needs)


@cache
def _norm(kind: Any) -> Any:
    def forward(self: Any, hidden: torch.Tensor) -> Any:
        if not torch.is_grad_enabled():
            return kind.forward(self, hidden)
        return _NormAgain.apply(kind, self, hidden, self.weight)  # type: ignore[no-untyped-call]

    return type(kind.__name__, (kind,), {"forward": forward, "replaces": kind})


@cache
def _kernel_norm(epsilon: float) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return partial(kernels.norm, epsilon=epsilon)


@cache
def _compiled_norm(kind: Any, norm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Any:
    """Return a subclass of a norm that computes by a function of numbers and weights."""

    def forward(self: Any, hidden: torch.Tensor) -> Any:
        weight, x = self.weight.detach(), hidden.detach()
        return _recomputable(lambda: norm(x, weight), norm(hidden, self.weight))

    return type(kind.__name__, (kind,), {"forward": forward, "replaces": kind})


def _epsilon(module: Any) -> float | None:
    """Return the norm's ε if kernels.norm agrees with the module on example numbers, else None."""
    weight, epsilon = module.weight, getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(epsilon, float) or not kernels.suits(weight):
        return None
    x = torch.linspace(-3, 2, 2 * len(weight)).square().to(weight).reshape(1, 2, -1)
    with torch.no_grad():
        near = 2**-7 if weight.dtype == torch.bfloat16 else 1e-5
        same = torch.allclose(kernels.norm(x, weight, epsilon), module(x), rtol=near, atol=0)
    return epsilon if same else None


@cache
def _gated(kind: Any, piece: Callable[..., torch.Tensor] | None = None) -> Any:
    """Return a subclass of a gated feed-forward layer; piece: what computes act(gate) · up."""

    def forward(self: Any, x: torch.Tensor) -> Any:
        product = piece
        if product is None and kernels.suits(x) and isinstance(self.act_fn, SiLUActivation | nn.SiLU):
            product = kernels.gate
        if not (product or torch.is_grad_enabled()):
            return kind.forward(self, x)
        gate, up = self.gate_proj(x), self.up_proj(x)
        inputs = gate.detach(), up.detach()
        if product:
            return self.down_proj(_recomputable(lambda: product(*inputs), product(gate, up)))
        again = _GatedAgain(self.act_fn, *inputs)
        active = _recomputable(again.active, self.act_fn(gate))
        return self.down_proj(_recomputable(again.product, active * up))

    return type(kind.__name__, (kind,), {"forward": forward, "replaces": kind})


class _GatedAgain:
    """act(gate) and its product with `up`; `product` keeps act(gate) for `active`, which is called next."""

    def __init__(self, act: Callable[..., Any], gate: torch.Tensor, up: torch.Tensor) -> None:
        self._act, self._gate, self._up = act, gate, up
        self._active: torch.Tensor | None = None

    def product(self) -> torch.Tensor:
        self._active = self._act(self._gate)
        return self._active * self._up

    def active(self) -> torch.Tensor:
        active, self._active = self._active, None
        return self._act(self._gate) if active is None else active


_Compute = Callable[[], torch.Tensor]
_recomputations: dict[int, tuple[tuple[int, int], _Compute]] = {}
"""For the address of each live recomputable tensor: its identity, and the function that computes it again."""


def _identity(x: torch.Tensor) -> tuple[int, int]:
    """Return a tensor's size and version; a change in place changes the version."""
    return x.numel(), x._version


def _recomputable(compute: _Compute, x: torch.Tensor) -> torch.Tensor:
    """Register a tensor to be recomputed in the backward pass under `recomputing`, and return it."""
    address = x.data_ptr()
    if x.requires_grad and address:  # 0: an empty tensor, or one without memory of its own
        _recomputations[address] = _identity(x), compute
        weakref.finalize(x, _recomputations.pop, address, None)
    return x


def recomputing() -> saved_tensors_hooks:
    """Return a context in which the outputs of norms and gates are not saved: see keep_less.

    The latest result is kept, because several matrix products read the same tensor one after the other.
    """
    latest: list[Any] = [None, None]

    def pack(x: torch.Tensor) -> Any:
        identity, compute = _recomputations.get(x.data_ptr(), (None, None))
        # A view in another order, such as a transposed one, has the same numbers at other places.
        return (compute, x.shape) if identity == _identity(x) and x.is_contiguous() else x

    def unpack(saved: Any) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        compute, shape = saved
        if latest[0] is not compute:
            with torch.no_grad():
                latest[:] = compute, compute()
        out: torch.Tensor = latest[1].reshape(shape)
        return out

    return saved_tensors_hooks(pack, unpack)


def _is_gated(module: Any) -> bool:
    """Return whether a module has these parts, and computes down(act(gate(x)) * up(x)) on example numbers."""
    if {name for name, _ in module.named_children()} != _GATED:
        return False
    weight = getattr(module.gate_proj, "weight", None)
    if weight is None or weight.device.type == "meta":
        return False
    width = getattr(module.gate_proj, "in_features", weight.shape[-1])
    x = torch.linspace(-1, 1, 2 * width).to(weight).reshape(1, 2, width)
    with torch.no_grad():
        out = module.down_proj(module.act_fn(module.gate_proj(x)) * module.up_proj(x))
        return bool(torch.equal(out, module(x)))


def compute_again(model: PreTrainedModel) -> None:
    """Make the backward pass recompute all activations of a layer; the gradients have the same bits."""
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    for module in model.modules():
        # transformers checkpoints in training mode only; a layer's children stay in evaluation mode.
        module.training = getattr(module, "gradient_checkpointing", False)
        if module.training:
            # Some layers (OPT's) apply dropout themselves, at a rate that is their attribute.
            rates = [k for k, v in vars(module).items() if "drop" in k and isinstance(v, float)]
            for name in rates:
                setattr(module, name, 0.0)


def give_back(device: torch.device) -> None:
    """Return free heap memory to the system; `process.machine.configure` makes glibc keep it.

    Activations of many sizes leave holes in the heap that are larger than the memory that recomputing saves.
    """
    if device.type == "cpu":
        with suppress(OSError, AttributeError):  # a C library other than glibc does not keep it
            ctypes.CDLL(None).malloc_trim(0)
