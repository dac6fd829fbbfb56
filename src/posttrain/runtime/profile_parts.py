"""Which functions of the learner and of the engine are which part of a profile.

While a profile is taken they are replaced by ones that tell the clock, and then put back: nothing of it is
there at any other time. What a call does is counted from the shapes that it is given.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from torch import nn

from posttrain.engines.native import cache, compiled_step, engine, runner
from posttrain.learner import forward, kernels, learner, optim, pack, packed_attention, passes
from posttrain.math import tokens
from posttrain.models import attention
from posttrain.process import workers
from posttrain.report.terminal import NAMES
from posttrain.runtime import online
from posttrain.runtime.profile import Clock
from posttrain.runtime.record import journal
from posttrain.samplers import rollouts, snapshots
from posttrain.verifiers import pool

Function = Callable[..., Any]
Timed = Callable[[Function], Function]
Work = tuple[int, float, float]
"""Tokens, FLOP, and bytes that are read, of one call."""
LINEAR, HEAD, ATTENTION = "linear layers", "head", "attention"
PRODUCTS = ("MmBackward0", "AddmmBackward0", "LinearBackward0")
AGAIN = 2.5
"""FLOP of attention's backward pass over those of its forward pass: five products, the scores once more among
them, for two."""


@contextmanager
def timed_parts(clock: Clock) -> Iterator[None]:
    """Within it the clock sees the learner, and the native sampler where it is in this thread.

    Sessions begin within it, as they keep some functions from their start.
    """
    with ExitStack() as stack:
        for owner, name, timed in _table(clock):
            before = inspect.getattr_static(owner, name)
            made = timed(getattr(owner, name))
            setattr(owner, name, staticmethod(made) if isinstance(before, staticmethod) else made)
            stack.callback(setattr, owner, name, before)
        yield


def _table(clock: Clock) -> list[tuple[Any, str, Timed]]:
    """(class or module, its function, what times it): of both loops, of the learner, of the sampler."""

    def part(name: str, work: Callable[..., Work] | None = None) -> Timed:
        return lambda function: _part(clock, name, function, work)

    def each(owner: Any, timed: Timed, *names: str) -> list[tuple[Any, str, Timed]]:
        return [(owner, name, timed) for name in names]

    record, judged, cached, head = part("record"), part("verdicts and replies"), part("cache"), part(HEAD)
    canary, digested, attends = part("canary"), part("digest", _fingerprint), part(ATTENTION, _attention)
    linear = partial(_linear, clock)

    def makes(function: Function) -> Function:
        return lambda model: head(function(model))

    return [
        (journal.Journal, "timed", partial(_phase, clock)),
        (journal.Journal, "log", record),
        *each(online, record, "rollout_metrics", "hacking_metrics"),
        *each(online.OnlineRun, record, "_record", "_record_searches"),
        *each(forward, part("packing"), "pack", "microbatches"),
        (forward.Net, "forward", part("forward")),
        *each(passes.Passes, part("scoring"), "score", "read"),
        (pack, "hidden_states", part("", _states)),
        (pack.Pack, "attend", partial(_attend, clock)),
        *((module, "masked_attention", attends) for module in (pack, attention, cache)),
        (packed_attention, "attention", part(ATTENTION, _spans)),
        (nn.Linear, "forward", linear),
        (forward, "output_head", makes),
        (tokens, "pick_from_hidden", part(HEAD, _picked)),
        *((own, name, head) for m in (tokens, kernels) for own, name in ((m, "pick"), (m._Pick, "backward"))),
        (torch.Tensor, "backward", part("backward")),
        (optim.OptimizedWeights, "clip", part("optimiser")),
        (optim.OptimizedWeights, "step", part("optimiser", _moments)),
        (learner, "natural_step", part("natural step")),
        (passes.Passes, "canary", canary),
        (engine.NativeEngine, "score", canary),
        (snapshots, "_score_by_decoding", canary),
        *((module, "fingerprint", digested) for module in (snapshots, runner)),
        (runner.PackedLinear, "pack", part("repacking", _packed)),
        (engine.NativeEngine, "poll", part("engine")),
        (runner.Runner, "prefill", part("prefill")),
        (runner.Runner, "decode", part("decoding")),
        (compiled_step.CompiledStep, "__call__", partial(_step, clock)),
        (runner, "hidden_states", part("", _states)),
        (runner.PackedLinear, "forward", linear),
        (runner, "output_head", makes),
        (engine, "draw", part("drawing", _drawn)),
        (engine, "uniforms", part("drawing")),
        (cache, "causal_attention", part(ATTENTION)),
        (cache, "kernel_for", partial(_compiles, part(ATTENTION, _decoded))),
        *((layout, "attend", cached) for layout in (cache.TokenLayout, cache.PromptLayout)),
        *each(cache.Cache, cached, "reserve", "place", "copy", "keep"),
        *each(pool.Pool, judged, "submit", "submit_group", "poll"),
        *each(workers.Workers, judged, "submit", "poll"),
        *each(rollouts, judged, "guarded_start", "guarded_reply"),
    ]


def _compiles(attends: Timed, function: Function) -> Function:
    """What finds a kernel, which is then timed, or finds none."""
    return lambda *heads: (kernel := function(*heads)) and attends(kernel)


def _step(clock: Clock, function: Function) -> Function:
    """A compiled decoding step, which says itself how long its products and its attention took."""

    @wraps(function)
    def timed(step: compiled_step.CompiledStep, tokens: torch.Tensor, lengths: torch.Tensor, *at: Any) -> Any:
        before = list(step.seconds)
        out = function(step, tokens, lengths, *at)
        products, attention, _ = (now - then for now, then in zip(step.seconds, before, strict=True))
        size, weights, pairs = out.element_size(), step.weights, step.pairs(lengths.tolist())
        clock.credit(LINEAR, products, 2.0 * len(tokens) * weights, float(weights * size))
        clock.credit(ATTENTION, attention, 4.0 * pairs, 2.0 * pairs * size / step.shared)
        clock.add(len(tokens))
        return out

    return timed


def _part(clock: Clock, name: str, function: Function, work: Callable[..., Work] | None) -> Function:
    """The function as a part of this name; without a name its work alone is counted."""

    @wraps(function)
    def timed(*given: Any, **named: Any) -> Any:
        depth = clock.enter(name or clock.now)
        try:
            if work:
                clock.add(*work(*given, **named))
            return function(*given, **named)
        finally:
            clock.leave(depth)

    return timed


def _phase(clock: Clock, function: Function) -> Function:
    """The journal's phases as parts, by the names that the terminal has for them."""

    @contextmanager
    def timed(self: journal.Journal, phase: str) -> Iterator[None]:
        depth = clock.enter(NAMES.get(phase, phase))
        try:
            with function(self, phase):
                yield
        finally:
            clock.leave(depth)

    return timed


def _linear(clock: Clock, function: Function) -> Function:
    """A linear layer's forward pass; and its backward pass, where there will be one."""

    @wraps(function)
    def timed(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        depth = clock.enter(HEAD if clock.now == HEAD else LINEAR)
        try:
            out: torch.Tensor = function(self, x)
            flop = 2.0 * out.numel() * x.shape[-1]
            read = float(x.shape[-1] * out.shape[-1] * x.element_size())
            clock.add(flop=flop, read=read)
            if out.grad_fn is not None and clock.now not in clock.sealed:
                _time_product(clock, clock.now, out.grad_fn, flop, read)
            return out
        finally:
            clock.leave(depth)

    return timed


def _time_product(clock: Clock, name: str, node: Any, flop: float, read: float) -> None:
    """Times what the product behind this node of the graph does in the backward pass."""
    behind = node.next_functions[0][0] if node.next_functions else None
    node = next((each for each in (node, behind) if each is not None and each.name() in PRODUCTS), None)
    if node is None:
        return
    wanted = [each is not None for each, _ in node.next_functions[-2:]]
    depths: list[int] = []

    def begin(*_: Any) -> None:
        depths.append(clock.enter(name))
        clock.add(flop=sum(wanted) * flop, read=read if wanted[0] else 0.0)

    node.register_prehook(begin)
    node.register_hook(lambda *_: clock.leave(depths.pop()))


def _attend(clock: Clock, function: Function) -> Function:
    """The learner's attention, forward and backward.

    Backward it lasts from the gradient of what it found to the first of those of query, key and value: by
    then all within has run, as what was made later goes first.
    """

    @wraps(function)
    def timed(self: pack.Pack, *heads: torch.Tensor, **named: Any) -> torch.Tensor:
        depth = clock.enter(ATTENTION)
        try:
            before = clock.open[-1].flop
            out: torch.Tensor = function(self, *heads, **named)
            flop, depths = AGAIN * (clock.open[-1].flop - before), list[int]()
        finally:
            clock.leave(depth)

        def begin(_: torch.Tensor) -> None:
            depths.append(clock.enter(ATTENTION))
            clock.add(flop=flop)

        def end(_: torch.Tensor) -> None:
            if depths:
                clock.leave(depths.pop())

        if out.requires_grad:
            out.register_hook(begin)  # type: ignore[no-untyped-call]
            for x in heads:
                if x.requires_grad:
                    x.register_hook(end)  # type: ignore[no-untyped-call]
        return out

    return timed


def _attention(query: Any, key: Any, value: Any, *_: Any, causal: bool = False, **__: Any) -> Work:
    """q kᵀ and p v, of the pairs that are computed: masked ones too, and half of a causal square."""
    R, H, T, D = query.shape
    pairs = T * (T + 1) / 2 if causal else T * key.shape[2]
    return 0, 2.0 * R * H * pairs * (D + value.shape[-1]), float(_bytes_of(key) + _bytes_of(value))


def _spans(query: Any, key: Any, value: Any, table: packed_attention.Table, *_: Any) -> Work:
    """The same of the pairs of a pack that see each other."""
    _, H, _, D = query.shape
    plain = sum(n * seen + n * (n + 1) / 2 for _, n, seen, words in table.spans.tolist() if words < 0)
    pairs = plain + int(np.bitwise_count(table.words.numpy().view(np.uint32)).sum())
    return 0, 4.0 * H * D * pairs, float(_bytes_of(key) + _bytes_of(value))


def _decoded(query: Any, key: Any, value: Any, *at: Any, window: int | None, **_: Any) -> Work:
    """The same of one new token a row, which reads its row as far as that goes."""
    _, H, _, D = query.shape
    columns = sum(min(length + 1, window or length + 1) for length in at[2].tolist())
    return 0, 4.0 * H * D * columns, float(2 * columns * key.shape[1] * D * key.element_size())


def _bytes_of(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


def _states(model: Any, fed: torch.Tensor, *_: Any) -> Work:
    return fed.numel(), 0.0, 0.0


def _picked(hidden: torch.Tensor, *_: Any, **__: Any) -> Work:
    return len(hidden), 0.0, 0.0


def _drawn(logits: torch.Tensor, sampling: Sequence[Any], *_: Any) -> Work:
    return len(sampling), 0.0, float(_bytes_of(logits))


def _packed(layer: Any, weight: torch.Tensor) -> Work:
    return 0, 0.0, float(_bytes_of(weight))


def _fingerprint(name: str, tensor: torch.Tensor) -> Work:
    return 0, 0.0, float(_bytes_of(tensor))


def _moments(trained: optim.OptimizedWeights, rate: float) -> Work:
    """Master, gradient and two moments of each weight that has a gradient."""
    return 0, 0.0, 4.0 * sum(_bytes_of(m.grad) for m in trained.masters.masters if m.grad is not None)
