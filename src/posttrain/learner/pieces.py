"""Compile what a layer computes between its matrix products and its attention, by torch.compile.

    norm       a module's own formula                       y = f(x, w)
    gate       the inside of a gated feed-forward layer     y = act(g) · u
    rotation   the function of a model's own file           q', k' = f(q, k, cos, sin)
    pick       log p(y) and the entropy of p = softmax(z / τ), as math/tokens.py

PyTorch launches an operation for each term of a formula, and each reads and writes a tensor of all tokens. A
compiled piece is one launch or two. It saves its inputs alone, a rotation only its tables: the backward pass
computes the formula again within its own launches. With and without gradients the same compiled function
runs, so that log π_old has the bits of log π.

A piece is compiled once for a type and a width, for any number of tokens above one, which takes seconds;
PyTorch keeps what it compiled in a cache on disk. Its first results are compared with the formula's.
"""

import copy
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._dynamo
import torch._inductor.config
from jaxtyping import Float, Int
from torch import nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call, vjp

from posttrain.base.usercode import cause
from posttrain.math import tokens
from posttrain.types import UserError

BACKEND = "inductor"
_MAX_KINDS = 256
"""The most types and widths of all pieces; beyond it PyTorch would refuse to compile."""
_COMPARED_ROWS = 256
"""Rows of logits whose log-probabilities are compared with the formula."""
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Tolerance between results, of a whole tensor by its norm: a piece rounds once, a formula each term. Norms
of float64 compute in float32."""
_LEAST = 1e-6
"""Absolute tolerance of a single number, added to that."""
log = logging.getLogger(__name__)

Tensors = tuple[torch.Tensor, ...]


class _Compiled:
    """A function that returns a tuple of tensors, compiled at its first call.

    The first results of each type and width are compared with the function's own. If they differ, PyTorch
    computes the function, and a warning says so. Raises UserError if it cannot be compiled. rows: all tensors
    consist of independent rows, of which some are compared.
    """

    def __init__(self, name: str, function: Callable[..., Tensors], *, rows: bool = False) -> None:
        self._name, self._function, self._rows = name, function, rows
        self._compiled = torch.compile(function, backend=BACKEND, fullgraph=True, dynamic=False)
        self._is_right: dict[Any, bool] = {}

    def __call__(self, *args: Any) -> Tensors:
        kind = tuple((x.dtype, x.device, x.dim(), x.shape[-1]) for x in _tensors(args))
        if kind not in self._is_right:
            return self._first(kind, args)
        return self._compiled(*args) if self._is_right[kind] else self._function(*args)

    def _first(self, kind: Any, args: tuple[Any, ...]) -> Tensors:
        """Return the results for arguments of a new kind, after a comparison."""
        torch._dynamo.config.recompile_limit = _MAX_KINDS
        torch._inductor.config.compile_threads = 1  # more are processes, which import PyTorch for few kernels
        try:
            results: Tensors = self._compiled(*args)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler that is missing or fails, with anything
            inner = getattr(error, "inner_exception", error)
            raise UserError(
                "steps.compile",
                f"torch.compile fails on this machine: {cause(inner)}",
                "install a C++ compiler, on a GPU Triton too, or leave it out",
            ) from None
        part = _first_rows if self._rows else tuple
        ratio = _error(part(results), self._function(*part(args)))
        if ratio is not None:
            self._is_right[kind] = ratio <= 1
        if self._is_right.get(kind, True):
            return results
        log.warning(
            "steps.compile: PyTorch computes %s, which errs %.2g times what rounding does", self._name, ratio
        )
        return self._function(*args)


def _first_rows(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x[:_COMPARED_ROWS] if isinstance(x, torch.Tensor) else x for x in args)


def _error(results: Tensors, formulas: Tensors) -> float | None:
    """Return the largest error of a tensor, by its norm, as a multiple of what rounding allows.

    None if all tensors are 0 or not finite, which says nothing.
    """
    errors = []
    for a, b in zip(results, formulas, strict=True):
        norm, difference = (float(torch.linalg.vector_norm(x, dtype=torch.float64)) for x in (b, a - b))
        if norm and math.isfinite(norm):
            # Log-probabilities and entropies near 0 are differences of larger numbers.
            least = _LEAST * math.sqrt(b.numel()) if b.dim() == 1 else 0.0
            errors.append(difference / (_ROUNDING[b.dtype] * norm + least))
    if not errors:
        return None
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def _tensors(args: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, in order."""
    for arg in args:
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, tuple):
            yield from _tensors(arg)


def _marked(tensors: Sequence[torch.Tensor], places: Sequence[int | None]) -> Tensors:
    """Return the tensors without gradients, marked where any number of tokens may come."""
    out = tuple(x.detach() for x in tensors)
    for x, place in zip(out, places, strict=True):
        if place is not None:
            torch._dynamo.maybe_mark_dynamic(x, place)
    return out


class LayerPiece:
    """A compiled function of tensors, which returns a tensor or several, and its gradient.

    places: the dimension of tokens of each input; None: the input has none. linear: the number of inputs,
    from the first, in which the function is linear, with as many outputs of their shapes. They are not saved.
    """

    def __init__(
        self, name: str, function: Callable[..., Any], places: Sequence[int | None], *, linear: int = 0
    ) -> None:
        self._function, self._places, self.linear = function, tuple(places), linear
        self._forward = _Compiled(name, self._results)
        self._backward = _Compiled(f"the gradient of {name}", self._gradients)

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """Return the function's results. Raises UserError if it cannot be compiled."""
        if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
            out: Tensors = _PieceFunction.apply(self, *inputs)  # type: ignore[no-untyped-call]
        else:
            out = self.forward(inputs)
        return out if len(out) > 1 else out[0]

    def forward(self, inputs: Tensors) -> Tensors:
        """Return the compiled results, without a gradient."""
        with torch.no_grad():
            return self._forward(*_marked(inputs, self._places))

    def backward(self, needs: tuple[bool, ...], inputs: Tensors, grads: Tensors) -> Tensors:
        """Return the compiled gradients of the inputs that need one; inputs: those that were saved."""
        grads = _marked([grad.contiguous() for grad in grads], [self._places[0]] * len(grads))
        # The derivative of a linear function is the same everywhere: it is taken at the gradients.
        inputs = (*grads[: self.linear], *_marked(inputs, self._places[self.linear :]))
        return self._backward(needs, inputs, grads)

    def _results(self, *inputs: torch.Tensor) -> Tensors:
        out = self._function(*inputs)
        return out if isinstance(out, tuple) else (out,)

    def _gradients(self, needs: tuple[bool, ...], inputs: Tensors, grads: Tensors) -> Tensors:
        def of_leaves(*leaves: torch.Tensor) -> Tensors:
            rest = iter(leaves)
            return self._results(*(next(rest) if n else x for n, x in zip(needs, inputs, strict=True)))

        gradients_of = vjp(of_leaves, *(x for n, x in zip(needs, inputs, strict=True) if n))[1]
        gradients: Tensors = gradients_of(grads)
        return gradients


class _PieceFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, piece: LayerPiece, *inputs: torch.Tensor) -> Tensors:
        ctx.save_for_backward(*inputs[piece.linear :])
        ctx.piece = piece
        return piece.forward(inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        needs = ctx.needs_input_grad[1:]
        gradients = iter(ctx.piece.backward(needs, ctx.saved_tensors, grads))
        return None, *(next(gradients) if need else None for need in needs)


# ---------------------------------------------------------------------- norms, gates and rotations


def norm(module: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the compiled y = f(x, w) of a module with one weight and nothing else to compute with.

    x: [..., D], w: [D].
    """
    shell = copy.deepcopy(module).to("meta")
    shell.__class__ = plain(type(module))

    def make() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        piece = LayerPiece("a norm", lambda x, w: functional_call(shell, {"weight": w}, (x,)), (0, None))
        return lambda x, w: piece(x.reshape(-1, x.shape[-1]), w).reshape(x.shape)

    return _shared(_constants(module), make)


def gate(act: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the compiled y = act(g) · u, [..., D], of an activation without weights."""

    def make() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        piece = LayerPiece("a gate", lambda gates, up: act(gates) * up, (0, 0))
        return lambda gates, up: piece(*(x.reshape(-1, x.shape[-1]) for x in (gates, up))).reshape(up.shape)

    return _shared(_constants(act), make)


def rotation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled (q', k') = f(q, k, cos, sin), of heads [R, H, T, D] and tables [R, T, D]."""
    return _shared(function, lambda: LayerPiece("a rotation", function, (2, 2, 1, 1), linear=2))


def plain(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a module before its `forward` was replaced (recompute.py, kernels.py)."""
    original: type[nn.Module] = getattr(kind, "replaces", kind)
    return original


_pieces: dict[Any, Callable[..., Any]] = {}


def _shared(key: Any, make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """Return the piece of this key, made at its first use."""
    if key not in _pieces:
        _pieces[key] = make()
    return _pieces[key]


def _constants(module: nn.Module) -> tuple[Any, ...]:
    """Return what a module without children computes by, except for its weights' numbers."""
    shapes = tuple((name, tuple(weight.shape)) for name, weight in module.named_parameters())
    public = {k: repr(v) for k, v in vars(module).items() if not k.startswith("_") and k != "training"}
    return plain(type(module)), shapes, tuple(sorted(public.items()))


# ---------------------------------------------------------------------- log-probabilities of tokens


def pick(
    logits: Float[torch.Tensor, "N V"], targets: Int[torch.Tensor, "N"], temperature: float = 1.0
) -> tuple[tokens.PerPick, tokens.PerPick]:
    """(log p(y), entropy of p) as math/tokens.py: pick, without copies of the logits in float32."""
    logp, entropy = _PickFunction.apply(logits, targets, temperature)  # type: ignore[no-untyped-call]
    return logp, entropy


class _PickFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        columns = _marked([logits.contiguous(), targets.contiguous()], [0, 0])
        logp, entropy, *others = _pick_forward(*columns, temperature)
        ctx.save_for_backward(*columns, entropy, *others)
        ctx.temperature = temperature
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        dense = [*ctx.saved_tensors, *(grad.contiguous() for grad in grads)]
        columns = _marked(dense, [0] * len(dense))
        [gradient] = _pick_backward(*columns, ctx.temperature)
        return gradient, None, None


def _pick(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> Tensors:
    """Return log p(y), the entropy, max z and log Σ e^(z - max z), [N] each."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    highest = z.amax(-1)
    picked = z.gather(-1, targets[:, None]).squeeze(-1)
    # p is 0 at the lowest float, and 0 · -inf would be no number.
    below = (z - highest[:, None]).clamp(min=torch.finfo(z.dtype).min)
    weight = below.exp()
    total = weight.sum(-1)
    log_total = total.log()
    entropy = log_total - (weight * below).sum(-1) / total
    return picked - highest - log_total, entropy, highest, log_total


def _pick_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    entropy: torch.Tensor,
    highest: torch.Tensor,
    log_total: torch.Tensor,
    d_logp: torch.Tensor,
    d_entropy: torch.Tensor,
    temperature: float,
) -> Tensors:
    """Return the gradient of the logits, ((1_y - p) d_logp - p (log p + H) d_entropy) / τ, in their type."""
    z = logits.to(highest.dtype) / temperature - highest[:, None]
    log_p = z.clamp(min=torch.finfo(z.dtype).min) - log_total[:, None]
    p = log_p.exp()
    is_target = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
    # p log p comes before its weight, which may make the lowest float infinite, and 0 · inf is no number.
    out = (is_target.to(p) - p) * d_logp[:, None] - p * (log_p + entropy[:, None]) * d_entropy[:, None]
    return ((out / temperature).to(logits.dtype),)


_pick_forward = _Compiled("a log-probability", _pick, rows=True)
_pick_backward = _Compiled("the gradient of log-probabilities", _pick_gradient, rows=True)
