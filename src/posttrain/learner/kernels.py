"""What a training step computes between its large products, by functions that are compiled (train.cpp).

    pick   log p(y) and the entropy of p = softmax(z / τ), whose gradients are in math/tokens.py
    norm   w · x / √(mean x² + ε)
    gate   silu(g) · u
    rotate x · cos + (-x₂, x₁) · sin of the halves x₁, x₂ of every head
    join   float32 numbers of bfloat16 and 16 bits more, and `part` takes them apart (optim.py)

and attention (packed_attention.py). PyTorch reads a dozen times, and keeps in float32, what these read once
and keep as it came. For bfloat16 and float32 on a processor, with Linux and g++; elsewhere PyTorch does all
of it. No gradient of theirs can be differentiated again.
"""

import ctypes
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
"""What transformers' attentions call, each the function of its own file."""

ROUNDING = {torch.bfloat16: 0.02, torch.float32: 1e-5}
"""How far a kernel's numbers may be from PyTorch's, relative or absolute, by what is computed in."""

_POINTER, _WHOLE, _REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "attention_forward": (_POINTER, _POINTER, _POINTER, _WHOLE),
    "attention_backward": (*[_POINTER] * 4, _WHOLE),
    "pick_forward": (_POINTER, _WHOLE, _WHOLE, _POINTER, _REAL, *[_POINTER] * 4),
    "pick_backward": (_POINTER, _WHOLE, _WHOLE, _POINTER, _REAL, *[_POINTER] * 5),
    "norm_forward": (_POINTER, _POINTER, _WHOLE, _WHOLE, _REAL, _POINTER, _POINTER),
    "norm_backward": (*[_POINTER] * 4, _WHOLE, _WHOLE, _POINTER, _POINTER),
    "gate_forward": (_POINTER, _POINTER, _WHOLE, _POINTER),
    "gate_backward": (*[_POINTER] * 3, _WHOLE, _POINTER, _POINTER),
    "rotate": (*[_POINTER] * 3, *[_WHOLE] * 4, _POINTER),
    "join": (_POINTER, _POINTER, _WHOLE, _POINTER),
    "part": (_POINTER, _WHOLE, _POINTER, _POINTER),
}


@cache
def load(dtype: torch.dtype) -> Library | None:
    """The kernels of bfloat16 or float32, built if need be; None where they cannot be had, or err."""
    found = library(_SOURCE, dtype)
    kernels = None if found is None else Library(found, _FUNCTIONS)
    return kernels if kernels is not None and _matches_pytorch(kernels, dtype) else None


def suits(x: torch.Tensor) -> bool:
    """Return whether there are kernels for numbers like these."""
    return x.device.type == "cpu" and x.dtype in ROUNDING and load(x.dtype) is not None


def _floats(count: int) -> torch.Tensor:
    """Room for numbers of 32 bits, whatever the default is: while it loads, transformers changes that."""
    return torch.empty(count, dtype=torch.float32)


def call(name: str, like: torch.Tensor, *arguments: Any) -> None:
    """Calls a function of numbers like these."""
    kernels = load(like.dtype)
    assert kernels is not None
    kernels.call(name, *arguments)


# ---------------------------------------------------------------------- what is picked of logits


def pick(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0
) -> tuple[tokens.PerPick, tokens.PerPick]:
    """The same as math/tokens.py: pick, in float32, of logits [N, V] of which nothing else is kept.

    The backward pass writes their gradient into their place, unless they are a leaf.
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
        logits, targets, *found = ctx.saved_tensors
        by_logp, by_entropy = (grad.float().contiguous() for grad in grads)
        out = logits.clone() if logits.is_leaf and logits.requires_grad else logits
        call("pick_backward", logits, out, *out.shape, targets, ctx.temperature, *found, by_logp, by_entropy)
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
        by_x, by_weight = torch.empty_like(x), torch.empty_like(weight)
        call(
            "norm_backward", x, x, weight, grad.contiguous(), scale, len(scale), len(weight), by_x, by_weight
        )
        wanted = ctx.needs_input_grad
        return by_x if wanted[0] else None, by_weight if wanted[1] else None, None


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

    q · cos + (-q₂, q₁) · sin, where q₁, q₂ are the halves of a head; and the same of the keys.
    """
    turned: tuple[Heads, Heads] = _Rotate.apply(query, key, cosine, sine)  # type: ignore[no-untyped-call]
    return turned


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Heads, key: Heads, cosine: torch.Tensor, sine: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cosine, sine)
        return _rotated(query, cosine, sine, back=False), _rotated(key, cosine, sine, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return *(_rotated(grad, *ctx.saved_tensors, back=True) for grad in grads), None, None


def _rotated(x: Heads, cosine: torch.Tensor, sine: torch.Tensor, *, back: bool) -> torch.Tensor:
    tokens = x.transpose(1, 2).contiguous()  # as products of matrices leave them
    R, T, H, D = tokens.shape
    out = torch.empty_like(tokens)
    cosine, sine = (each.expand(R, -1, -1).contiguous() for each in (cosine, sine))
    call("rotate", x, tokens, cosine, sine, R * T, H, D, back, out)
    return out.transpose(1, 2)


@cache
def rotating(kind: Any) -> Any:
    """The same attention, which turns its queries and keys by `rotate` where it can."""
    own, plain = kind.forward, kind.forward.__globals__[_ROTARY]

    def turn(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *more: Any, **how: Any
    ) -> Any:
        alike = q.dtype == k.dtype == cos.dtype == sin.dtype
        # Where fewer numbers of a head are turned than it has, transformers' function parts them.
        if more or how or not suits(q) or not alike or not q.shape[-1] == k.shape[-1] == cos.shape[-1]:
            return plain(q, k, cos, sin, *more, **how)
        return rotate(q, k, cos, sin)

    forward = FunctionType(
        own.__code__, own.__globals__ | {_ROTARY: turn}, own.__name__, own.__defaults__, own.__closure__
    )
    forward.__kwdefaults__ = own.__kwdefaults__
    return type(kind.__name__, (kind,), {"forward": forward})


def can_rotate(kind: Any, weights: list[torch.Tensor]) -> bool:
    """Whether this is an attention that turns queries and keys as `rotate` does."""
    if _ROTARY not in getattr(getattr(kind.forward, "__code__", None), "co_names", ()):
        return False
    return suits(weights[0]) and _rotates(kind.forward.__globals__[_ROTARY], weights[0].dtype)


@cache
def _rotates(function: Callable[..., Any], dtype: torch.dtype) -> bool:
    """Whether `rotate` computes what this function of transformers does, tried on some numbers."""
    g = torch.Generator().manual_seed(0)
    shapes = (1, 2, 3, 8), (1, 1, 3, 8), (1, 3, 8), (1, 3, 8)
    numbers = [torch.randn(shape, generator=g).to(dtype) for shape in shapes]
    try:
        pairs = zip(function(*numbers), rotate(*numbers), strict=True)
        # In float32 a product and a sum are rounded once here, and each by itself there.
        near = 0.0 if dtype == torch.bfloat16 else 1e-6
        return all(torch.allclose(theirs, ours, rtol=near, atol=near) for theirs, ours in pairs)
    except (RuntimeError, TypeError, ValueError):  # a function of other numbers
        return False


# ---------------------------------------------------------------------- masters


def join(weight: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """The float32 whose pattern is that of a bfloat16, with 16 zeros behind it, and the rest."""
    if suits(weight):
        numbers = torch.empty_like(weight, dtype=torch.float32)
        call("join", weight, weight, rest, rest.numel(), numbers)
        return numbers
    pattern = weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return pattern.add_(rest).view(torch.float32)


def part(numbers: torch.Tensor, weight: torch.Tensor, rest: torch.Tensor) -> None:
    """Puts float32 numbers, which are used up, into the bfloat16 that they round to, and the rest."""
    if suits(weight):
        call("part", weight, numbers, rest.numel(), weight, rest)
        return
    weight.copy_(numbers)
    rounded = weight.detach().view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    rest.copy_(numbers.view(torch.int32).sub_(rounded).clamp_(-(2**15), 2**15 - 1))


# ---------------------------------------------------------------------- whether they say what PyTorch says


def _matches_pytorch(kernels: Library, dtype: torch.dtype) -> bool:
    """On small examples, to rounding."""
    g = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(dtype)

    x, weight = drawn(7, 70), drawn(70)
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
    return all(torch.allclose(got.float(), wanted, rtol=near, atol=near) for got, wanted in pairs)
