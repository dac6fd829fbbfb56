"""What the backward pass keeps, and what it computes again. Gradients are the same bits in any case, but
where kernels.py has norms and gates."""

import ctypes
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from posttrain.learner import kernels
from posttrain.models.attention import use_layouts

_GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def prepare(
    policy: PreTrainedModel,
    bodies: Sequence[PreTrainedModel],
    reference: PreTrainedModel | None,
    *,
    checkpointing: bool,
    twice: bool,
) -> None:
    """Makes models attend through layouts, and the trained ones, with critics' bodies, keep what they should.

    twice: gradients are differentiated again. A reference computes as the policy does, so that both say the
    same with the same weights.
    """
    others = [] if reference is None else [reference]
    for each in (policy, *others):
        use_layouts(each)
    if checkpointing:
        for each in (policy, *bodies):
            compute_again(each)
    elif not twice:
        for each in (policy, *bodies, *others):
            keep_less(each)


def keep_less(model: nn.Module) -> None:
    """Makes norms keep their input alone, and gated feed-forward layers what their two products gave.

    What they would keep besides, norms in float32, is computed again without any product of matrices, by
    kernels.py where there are kernels; and so, under `recomputing`, is what they give to a product. A
    module is known by what it consists of, and for a kernel by what it says; one that computes otherwise
    is left as it is, as are norms in float32 where there are no kernels: they keep little more, and their
    gradients would be added in another order. Not for what is differentiated twice.
    """
    for module in model.modules():
        kind: Any = type(module)
        children, weights = dict(module.named_children()), dict(module.named_parameters(recurse=False))
        if kind.__name__.endswith("RMSNorm") and list(weights) == ["weight"] and not children:
            epsilon = _epsilon(module)
            if epsilon is not None:
                module.__class__ = _compiled_norm(kind, epsilon)
            elif weights["weight"].dtype.itemsize == 2:
                module.__class__ = _norm(kind)
        elif set(children) == _GATED and _is_gated(module):
            module.__class__ = _gated(kind)
        elif kernels.can_rotate(kind, list(module.parameters())):
            module.__class__ = kernels.rotating(kind)


class _NormAgain(torch.autograd.Function):
    """A module of one weight whose forward pass is done again by the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, kind: type[nn.Module], module: nn.Module, x: torch.Tensor, weight: torch.Tensor
    ) -> Any:
        """kind.forward(module, x), which reads the weight by itself."""
        ctx.save_for_backward(x)
        ctx.kind, ctx.module = kind, module
        return kind.forward(module, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        """The gradients, each where it is wanted."""
        needs = ctx.needs_input_grad[2:]
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_(needs[0])
            out = ctx.kind.forward(ctx.module, x)
        wanted = [t for t, need in zip((x, ctx.module.weight), needs, strict=True) if need]
        found = iter(torch.autograd.grad(out, wanted, grads))
        return None, None, *(next(found) if need else None for need in needs)


@cache
def _norm(kind: Any) -> Any:
    def forward(self: Any, hidden: torch.Tensor) -> Any:
        if not torch.is_grad_enabled():
            return kind.forward(self, hidden)
        return _NormAgain.apply(kind, self, hidden, self.weight)  # type: ignore[no-untyped-call]

    return type(kind.__name__, (kind,), {"forward": forward})


@cache
def _compiled_norm(kind: Any, epsilon: float) -> Any:
    def forward(self: Any, hidden: torch.Tensor) -> Any:
        weight, given = self.weight.detach(), hidden.detach()
        return _made_by(
            lambda: kernels.norm(given, weight, epsilon), kernels.norm(hidden, self.weight, epsilon)
        )

    return type(kind.__name__, (kind,), {"forward": forward})


def _epsilon(module: Any) -> float | None:
    """The norm's, if kernels.norm computes what it does, tried on some numbers; else None."""
    weight, epsilon = module.weight, getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(epsilon, float) or not kernels.suits(weight):
        return None
    x = torch.linspace(-3, 2, 2 * len(weight)).square().to(weight).reshape(1, 2, -1)
    with torch.no_grad():
        near = 2**-7 if weight.dtype == torch.bfloat16 else 1e-5
        same = torch.allclose(kernels.norm(x, weight, epsilon), module(x), rtol=near, atol=0)
    return epsilon if same else None


@cache
def _gated(kind: Any) -> Any:
    def forward(self: Any, x: torch.Tensor) -> Any:
        compiled = kernels.suits(x) and isinstance(self.act_fn, SiLUActivation | nn.SiLU)
        if not (compiled or torch.is_grad_enabled()):
            return kind.forward(self, x)
        gate, up = self.gate_proj(x), self.up_proj(x)
        kept = gate.detach(), up.detach()
        if compiled:
            return self.down_proj(_made_by(lambda: kernels.gate(*kept), kernels.gate(gate, up)))
        again = _GatedAgain(self.act_fn, *kept)
        active = _made_by(again.active, self.act_fn(gate))
        return self.down_proj(_made_by(again.product, active * up))

    return type(kind.__name__, (kind,), {"forward": forward})


class _GatedAgain:
    """act(gate) and its product with `up`, which the backward pass asks for in the other order."""

    def __init__(self, act: Callable[..., Any], gate: torch.Tensor, up: torch.Tensor) -> None:
        self._act, self._gate, self._up = act, gate, up
        self._made: torch.Tensor | None = None

    def product(self) -> torch.Tensor:
        self._made = self._act(self._gate)
        return self._made * self._up

    def active(self) -> torch.Tensor:
        made, self._made = self._made, None
        return self._act(self._gate) if made is None else made


_Again = Callable[[], torch.Tensor]
_again: dict[int, tuple[tuple[int, int], _Again]] = {}
"""By where a tensor lies, while it is there: what it is, and how it is made again."""


def _what(x: torch.Tensor) -> tuple[int, int]:
    """Its size, and how often it was changed in place: one that was changed is not what was made."""
    return x.numel(), x._version


def _made_by(again: _Again, made: torch.Tensor) -> torch.Tensor:
    """The tensor, which under `recomputing` is not kept for the backward pass, but made again."""
    place = made.data_ptr()
    if made.requires_grad and place:  # 0: nothing, or a tensor that is none of PyTorch's own
        _again[place] = _what(made), again
        weakref.finalize(made, _again.pop, place, None)
    return made


def recomputing() -> saved_tensors_hooks:
    """Within it what norms and gates give is not kept: see keep_less.

    What was made last is held, as several products that read the same ask one after the other.
    """
    latest: list[Any] = [None, None]

    def pack(kept: torch.Tensor) -> Any:
        what, again = _again.get(kept.data_ptr(), (None, None))
        # A view in another order, such as a transposed one, holds the same numbers in other places.
        return (again, kept.shape) if what == _what(kept) and kept.is_contiguous() else kept

    def unpack(kept: Any) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        again, shape = kept
        if latest[0] is not again:
            with torch.no_grad():
                latest[:] = again, again()
        out: torch.Tensor = latest[1].reshape(shape)
        return out

    return saved_tensors_hooks(pack, unpack)


def _is_gated(module: Any) -> bool:
    """Whether it computes down(act(gate(x)) * up(x)), tried on some numbers."""
    weight = next(module.gate_proj.parameters())
    if weight.device.type == "meta":
        return False
    width = getattr(module.gate_proj, "in_features", weight.shape[-1])
    x = torch.linspace(-1, 1, 2 * width).to(weight).reshape(1, 2, width)
    with torch.no_grad():
        made = module.down_proj(module.act_fn(module.gate_proj(x)) * module.up_proj(x))
        return bool(torch.equal(made, module(x)))


def compute_again(model: PreTrainedModel) -> None:
    """Makes the backward pass compute a layer's activations again; the gradients are the same bits."""
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    for module in model.modules():
        # transformers checkpoints in training mode only; what a layer consists of stays without dropout.
        module.training = getattr(module, "gradient_checkpointing", False)
        if module.training:
            # Some layers (OPT's) apply it themselves, at a rate that is their attribute.
            rates = [k for k, v in vars(module).items() if "drop" in k and isinstance(v, float)]
            for name in rates:
                setattr(module, name, 0.0)


def give_back(device: torch.device) -> None:
    """Hands free memory of the processor to the system; `process.machine.configure` has glibc keep it.

    Activations of many sizes leave holes in its heap that outweigh what is not kept of them.
    """
    if device.type == "cpu":
        with suppress(OSError, AttributeError):  # not glibc: nothing is kept
            ctypes.CDLL(None).malloc_trim(0)
