"""Compiled functions (train.cpp) for the work of a training step between its large matrix products.

    pick   log p(y) and the entropy of p = softmax(z / τ), whose gradients are in math/tokens.py
    norm   w · x / √(mean x² + ε)
    gate   silu(g) · u
    rotate x · cos + (-x₂, x₁) · sin of the halves x₁, x₂ of every head
    join   float32 numbers from bfloat16 and 16 bits more; `part` is the inverse (optim.py)

and attention (packed_attention.py). PyTorch reads these tensors a dozen times and keeps float32 copies; the
kernels read them once and keep them in their own type. They run for bfloat16 and float32 on a CPU, with Linux
and g++; elsewhere PyTorch computes the same. Their gradients cannot be differentiated again.
"""

import ctypes
import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from jaxtyping import Float
from torch.autograd.function import once_differentiable

from posttrain.math import tokens
from posttrain.models.attention import Heads
from posttrain.models.compiled import Library, library

_SOURCE = Path(__file__).with_name("train.cpp")
_ROTARY = "apply_rotary_pos_emb"
"""Name of the function that transformers' attentions call; each model's file has its own."""

ROUNDING = {torch.bfloat16: 0.02, torch.float32: 1e-5}
"""Tolerance between a kernel's and PyTorch's numbers, relative or absolute, by dtype."""

_POINTER, _INTEGER, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "attention_forward": (_POINTER, _POINTER, _POINTER, _INTEGER),
    "attention_backward": (*[_POINTER] * 4, _INTEGER),
    "pick_forward": (_POINTER, _INTEGER, _INTEGER, _POINTER, _REAL, *[_POINTER] * 4),
    "pick_backward": (_POINTER, _INTEGER, _INTEGER, _POINTER, _REAL, *[_POINTER] * 5),
    "norm_forward": (_POINTER, _POINTER, _INTEGER, _INTEGER, _REAL, _POINTER, _POINTER),
    "norm_backward": (*[_POINTER] * 4, _INTEGER, _INTEGER, _POINTER, _POINTER),
    "gate_forward": (_POINTER, _POINTER, _INTEGER, _POINTER),
    "gate_backward": (*[_POINTER] * 3, _INTEGER, _POINTER, _POINTER),
    "rotate": (*[_POINTER] * 3, *[_INTEGER] * 4, _POINTER),
    "join": (_POINTER, _POINTER, _INTEGER, _POINTER),
    "part": (_POINTER, _INTEGER, _POINTER, _POINTER),
}


@cache
def load(dtype: torch.dtype) -> Library | None:
    """Return the kernels of bfloat16 or float32, built at the first use; None if unavailable or wrong."""
    loaded = library(_SOURCE, dtype)
    kernels = None if loaded is None else Library(loaded, _FUNCTIONS)
    return kernels if kernels is not None and _matches_pytorch(kernels, dtype) else None


def suits(x: torch.Tensor) -> bool:
    """Return whether there are kernels for tensors of this device and dtype."""
    return x.device.type == "cpu" and x.dtype in ROUNDING and load(x.dtype) is not None


def _floats(count: int) -> torch.Tensor:
    """Return an empty float32 tensor; torch's default dtype may differ while transformers loads a model."""
    return torch.empty(count, dtype=torch.float32)


def call(name: str, like: torch.Tensor, *arguments: Any) -> None:
    """Call the kernel of this name for the dtype of `like`."""
    kernels = load(like.dtype)
    assert kernels is not None
    kernels.call(name, *arguments)


# ---------------------------------------------------------------------- log-probabilities of tokens


def pick(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0
) -> tuple[tokens.PerPick, tokens.PerPick]:
    """(log p(y), entropy of p) in float32, as math/tokens.py: pick, without float32 copies of logits [N, V].

    The backward pass overwrites the logits with their gradient, unless they are a leaf.
    """
    if not suits(logits):
        return tokens.pick(logits, targets, temperature)
    logp, entropy = _PickKernel.apply(logits, targets, temperature)  # type: ignore[no-untyped-call]
    return logp, entropy


class _PickKernel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits, targets = logits.contiguous(), targets.contiguous()
        logp, entropy, highest, log_total = (_floats(len(logits)) for _ in range(4))
        call(
            "pick_forward",
            logits,
            logits,
            *logits.shape,
            targets,
            temperature,
            logp,
            entropy,
            highest,
            log_total,
        )
        ctx.save_for_backward(logits, targets, entropy, highest, log_total)
        ctx.temperature = temperature
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        logits, targets, *rows = ctx.saved_tensors
        d_logp, d_entropy = (grad.float().contiguous() for grad in grads)
        out = logits.clone() if logits.is_leaf and logits.requires_grad else logits
        call("pick_backward", logits, out, *out.shape, targets, ctx.temperature, *rows, d_logp, d_entropy)
        return out, None, None


# ---------------------------------------------------------------------- norms and gates


def norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """w · x / √(mean x² + ε) over the last dimension, the quotient rounded before it is multiplied."""
    out: torch.Tensor = _Norm.apply(x, weight, epsilon)  # type: ignore[no-untyped-call]
    return out


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        x = x.contiguous()
        rows, count = x.numel() // x.shape[-1], x.shape[-1]
        out, scale = torch.empty_like(x), _floats(rows)
        call("norm_forward", x, x, weight, rows, count, epsilon, out, scale)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        d_x, d_weight = torch.empty_like(x), torch.empty_like(weight)
        call("norm_backward", x, x, weight, grad.contiguous(), scale, len(scale), len(weight), d_x, d_weight)
        needs = ctx.needs_input_grad
        return d_x if needs[0] else None, d_weight if needs[1] else None, None


def gate(gates: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(g) · u, silu rounded before it is multiplied."""
    out: torch.Tensor = _Gate.apply(gates, up)  # type: ignore[no-untyped-call]
    return out


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gates: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gates, up = gates.contiguous(), up.contiguous()
        out = torch.empty_like(gates)
        call("gate_forward", up, gates, up, out.numel(), out)
        ctx.save_for_backward(gates, up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        gates, up = ctx.saved_tensors
        grads = torch.empty_like(gates), torch.empty_like(up)
        call("gate_backward", up, gates, up, grad.contiguous(), up.numel(), *grads)
        return grads


def rotate(
    query: Heads, key: Heads, cosine: Float[torch.Tensor, "R T D"], sine: Float[torch.Tensor, "R T D"]
) -> tuple[Heads, Heads]:
    """Rotary embeddings (Su et al. 2021) as transformers computes them, to the bit, and their gradients.

    q · cos + (-q₂, q₁) · sin, where q₁, q₂ are the halves of a head; and the same for the keys.
    """
    rotated: tuple[Heads, Heads] = _Rotate.apply(query, key, cosine, sine)  # type: ignore[no-untyped-call]
    return rotated


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Heads, key: Heads, cosine: torch.Tensor, sine: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cosine, sine)
        return _rotate(query, cosine, sine, back=False), _rotate(key, cosine, sine, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return *(_rotate(grad, *ctx.saved_tensors, back=True) for grad in grads), None, None


def _rotate(x: Heads, cosine: torch.Tensor, sine: torch.Tensor, *, back: bool) -> torch.Tensor:
    by_token = x.transpose(1, 2).contiguous()  # the layout that the projections return
    R, T, H, D = by_token.shape
    out = torch.empty_like(by_token)
    cosine, sine = (table.expand(R, -1, -1).contiguous() for table in (cosine, sine))
    call("rotate", x, by_token, cosine, sine, R * T, H, D, back, out)
    return out.transpose(1, 2)


@cache
def rotating(kind: Any, piece: Callable[..., tuple[Heads, Heads]] | None = None) -> Any:
    """Return a subclass of an attention that rotates its queries and keys by `piece`, or by `rotate` where
    that can."""
    original, plain = kind.forward, rotation_of(kind)

    def rotate_heads(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if args or kwargs:
            return plain(q, k, cos, sin, *args, **kwargs)
        if piece:
            return piece(q, k, cos, sin)
        alike = q.dtype == k.dtype == cos.dtype == sin.dtype
        # transformers' own function handles heads of which only a part is rotated.
        if not suits(q) or not alike or not q.shape[-1] == k.shape[-1] == cos.shape[-1]:
            return plain(q, k, cos, sin)
        return rotate(q, k, cos, sin)

    forward = FunctionType(
        original.__code__,
        original.__globals__ | {_ROTARY: rotate_heads},
        original.__name__,
        original.__defaults__,
        original.__closure__,
    )
    forward.__kwdefaults__ = original.__kwdefaults__
    return type(kind.__name__, (kind,), {"forward": forward, "replaces": kind})


def can_rotate(kind: Any, example: torch.Tensor) -> bool:
    """Return whether a class is an attention that rotates heads of this dtype and device as `rotate` does."""
    return has_rotation(kind) and suits(example) and _rotates(rotation_of(kind), example.dtype)


def has_rotation(kind: Any) -> bool:
    """Return whether a class is an attention that rotates by its file's function of q, k, cos and sin."""
    if _ROTARY not in getattr(getattr(kind.forward, "__code__", None), "co_names", ()):
        return False
    return list(inspect.signature(rotation_of(kind)).parameters)[:4] == ["q", "k", "cos", "sin"]


def rotation_of(kind: Any) -> Callable[..., tuple[Heads, Heads]]:
    """Return the function for rotations of an attention that has one."""
    function: Callable[..., tuple[Heads, Heads]] = kind.forward.__globals__[_ROTARY]
    return function


@cache
def _rotates(function: Callable[..., Any], dtype: torch.dtype) -> bool:
    """Return whether `rotate` agrees with this function of transformers on random numbers."""
    g = torch.Generator().manual_seed(0)
    shapes = (1, 2, 3, 8), (1, 1, 3, 8), (1, 3, 8), (1, 3, 8)
    numbers = [torch.randn(shape, generator=g).to(dtype) for shape in shapes]
    try:
        pairs = zip(function(*numbers), rotate(*numbers), strict=True)
        # In float32 `rotate` rounds a product and a sum once, transformers' function rounds each.
        near = 0.0 if dtype == torch.bfloat16 else 1e-6
        return all(torch.allclose(theirs, ours, rtol=near, atol=near) for theirs, ours in pairs)
    except (RuntimeError, TypeError, ValueError):  # a function with other arguments
        return False


# ---------------------------------------------------------------------- masters


def join(weight: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Return the float32 numbers whose bits are those of a bfloat16, followed by 16 zeros, plus `rest`."""
    if suits(weight):
        numbers = torch.empty_like(weight, dtype=torch.float32)
        call("join", weight, weight, rest, rest.numel(), numbers)
        return numbers
    pattern = weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return pattern.add_(rest).view(torch.float32)


def part(numbers: torch.Tensor, weight: torch.Tensor, rest: torch.Tensor) -> None:
    """Split float32 numbers into `weight`, their bfloat16 rounding, and `rest`; `numbers` is overwritten."""
    if suits(weight):
        call("part", weight, numbers, rest.numel(), weight, rest)
        return
    weight.copy_(numbers)
    rounded = weight.detach().view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    rest.copy_(numbers.view(torch.int32).sub_(rounded).clamp_(-(2**15), 2**15 - 1))


# ---------------------------------------------------------------------- comparison with PyTorch


def _matches_pytorch(kernels: Library, dtype: torch.dtype) -> bool:
    """Return whether the kernels agree with PyTorch on small examples, up to rounding."""
    g = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    x, weight = randn(7, 70), randn(70)
    normed, gated, scale = torch.empty_like(x), torch.empty_like(x), _floats(len(x))
    logp, *others = (_floats(len(x)) for _ in range(4))
    targets = torch.arange(len(x))
    kernels.call("norm_forward", x, weight, *x.shape, 1e-5, normed, scale)
    kernels.call("gate_forward", x, normed, x.numel(), gated)
    kernels.call("pick_forward", x, *x.shape, targets, 0.7, logp, *others)
    quotient = x.float() * (x.float().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    pairs = (
        (normed, weight.float() * quotient),
        (gated, torch.nn.functional.silu(x.float()) * normed.float()),
        (logp, tokens.pick(x.float(), targets, 0.7)[0]),
    )
    near = ROUNDING[dtype]
    return all(torch.allclose(got.float(), expected, rtol=near, atol=near) for got, expected in pairs)
