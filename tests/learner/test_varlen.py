"""Attention of a pack in one call (learner/varlen.py), with loops for the GPU's kernels."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM

from posttrain.learner import pieces, varlen
from posttrain.learner.forward import Net, forward
from posttrain.learner.pack import pack
from posttrain.learner.prompt_group import PromptGroup
from posttrain.learner.recompute import compile_pieces, keep_less
from posttrain.models.attention import use_layouts
from posttrain.types import Batch, Trajectory

CPU = torch.device("cpu")


@pytest.fixture
def matches(attend_by_spans: Callable[[], None]) -> Callable[..., bool]:
    """The check of the kernels on a small example, not cached."""
    attend_by_spans()
    return lambda dtype, ratio=2: varlen._matches.__wrapped__(CPU, dtype, 16, ratio)


@pytest.mark.parametrize("ratio", [1, 2, 7, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_are_used_if_they_agree_with_a_masked_softmax(
    matches: Callable[..., bool], dtype: torch.dtype, ratio: int
) -> None:
    assert matches(dtype, ratio)


def test_kernels_are_checked_with_the_ratio_of_heads_of_the_model(
    matches: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = varlen.flash_forward

    def forward_of_two(q: Any, k: Any, v: Any, *options: Any) -> Any:
        wrong = q.shape[1] != 2 * k.shape[1]
        return ahead(q, k.flip(1) if wrong else k, v, *options)

    monkeypatch.setattr(varlen, "flash_forward", forward_of_two)
    assert matches(torch.float32, 2)
    with pytest.warns(UserWarning, match="flash attention differs from a masked softmax"):
        assert not matches(torch.float32, 4)


@pytest.mark.parametrize("first", ["without gradients", "in a checkpointed layer"])
def test_the_kernels_are_checked_once_wherever_the_first_pass_is(
    attend_by_spans: Callable[[], None], monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Scores come first in most runs; a checkpointed layer computes again what its tensors are needed for."""
    attend_by_spans()
    varlen._matches.cache_clear()
    calls: list[str] = []
    agrees = varlen._agrees
    monkeypatch.setattr(varlen, "_agrees", lambda *place: calls.append(first) or agrees(*place))

    def layer(x: torch.Tensor) -> torch.Tensor:
        y = (2 * x).relu()
        assert varlen._matches(CPU, torch.bfloat16, 16, 2)
        return (y * y).sin()

    x = torch.ones(3, requires_grad=True)
    try:
        if first == "without gradients":
            with torch.no_grad():
                layer(x)
        else:
            checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False).sum().backward()
            assert x.grad is not None
    finally:
        varlen._matches.cache_clear()
    assert len(calls) == 1


@pytest.mark.parametrize(
    "fault", ["scale", "window", "keys in another order", "gradient of the keys", "no gradient of the sink"]
)
def test_kernels_that_compute_anything_else_are_not_used(
    matches: Callable[..., bool], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    ahead, back = varlen.flash_forward, varlen.flash_backward

    def wrong_forward(q: Any, k: Any, v: Any, spans: Any, scale: float, window: int | None) -> Any:
        if fault == "scale":
            return ahead(q, k, v, spans, 2 * scale, window)
        if fault == "window":
            return ahead(q, k, v, spans, scale, window and window + 1)
        if fault == "keys in another order":
            return ahead(q, k.flip(0), v, spans, scale, window)
        out, lse, state = ahead(q, k, v, spans, scale, window)
        return out, lse - 1 if fault == "no gradient of the sink" else lse, state

    def wrong_backward(grad: Any, saved: Any, *options: Any) -> Any:
        dq, dk, dv = back(grad, saved, *options)
        return dq, dk / 2 if fault == "gradient of the keys" else dk, dv

    monkeypatch.setattr(varlen, "flash_forward", wrong_forward)
    monkeypatch.setattr(varlen, "flash_backward", wrong_backward)
    with pytest.warns(UserWarning, match="flash attention differs from a masked softmax"):
        assert not matches(torch.float32)


def test_short_answers_to_a_long_prompt_attend_by_branch(attend_by_spans: Callable[[], None]) -> None:
    attend_by_spans()
    calls: list[int] = []
    for answers in (7, 12):
        packed = pack(
            Batch.of([Trajectory.given([0] * 60 + [k] * 3, 60) for k in range(answers)], [0] * answers)
        )
        N = len(packed.tokens)
        heads = [torch.randn(1, n, N, 8) for n in (4, 2, 2)]
        options: dict[str, Any] = {"scale": 0.3, "window": None, "softcap": None}
        out = packed.attend(*heads, **options)  # type: ignore[arg-type]
        plain = replace(packed, compiled=False).attend(*heads, **options)  # type: ignore[arg-type]
        torch.testing.assert_close(out, plain)
        assert packed._span_keys is not None
        calls.append(packed._span_keys.are_few(N))
    assert calls == [True, False]


def test_a_device_without_the_kernels_falls_back() -> None:
    assert not varlen._matches.__wrapped__(CPU, torch.bfloat16, 32, 2)


def test_a_full_device_says_nothing_of_the_kernels(
    matches: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(varlen, "flash_forward", full)
    with pytest.raises(torch.OutOfMemoryError):
        matches(torch.float32)


def test_a_pass_saves_no_gathered_keys(attend_by_spans: Callable[[], None]) -> None:
    """Eight answers to a prompt of 100 tokens have 1000 keys, and the backward pass keeps 280."""
    attend_by_spans()
    group = PromptGroup(0, 100, (20,) * 8)
    spans = varlen.SpanKeys.of([group], 0, group.stop)
    assert spans.keys is not None
    assert len(spans.keys) == 100 + 8 * 120
    H, K, N, D = 4, 2, group.stop, 8
    heads = [torch.randn(1, n, N, D, requires_grad=True) for n in (H, K, K)]
    saved: list[torch.Tensor] = []
    with saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):  # type: ignore[func-returns-value]
        varlen.attention(*heads, spans, 0.3, None)  # type: ignore[arg-type]
    assert sum(x.numel() for x in saved) == 2 * H * N * D + 2 * K * N * D + H * N + 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_gradients_of_shared_keys_are_summed_in_float32(
    attend_by_spans: Callable[[], None], dtype: torch.dtype
) -> None:
    """A GPU would round the gradient of a prompt's keys once for each of 64 answers."""
    attend_by_spans()
    group = PromptGroup(0, 4, (2,) * 64)
    spans = varlen.SpanKeys.of([group], 0, group.stop)
    heads = [torch.randn(1, 1, group.stop, 8, dtype=dtype, requires_grad=True) for _ in range(3)]
    out = varlen.attention(*heads, spans, 0.3, None)  # type: ignore[arg-type]
    with Launches() as back:
        gradients = torch.autograd.grad(out.sum(), heads)
    assert [x.dtype for x in gradients] == [dtype] * 3
    assert back.dtypes["index_add_"] == {torch.promote_types(dtype, torch.float32)}


VIEWS = {"_unsafe_view", "alias", "as_strided", "detach", "expand", "permute", "select", "slice", "split"}
VIEWS |= {"squeeze", "t", "transpose", "unsqueeze", "view"}


class Launches(TorchDispatchMode):
    """Counts operations that compute something, and collects the dtypes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.dtypes: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = op(*args, **(kwargs or {})), op.overloadpacket.__name__
        if name not in VIEWS and not name.endswith(("empty", "empty_like", "empty_strided")):
            self.names[name] += 1
            dtypes = {x.dtype for x in tree_leaves(out) if isinstance(x, torch.Tensor)}
            self.dtypes[name] = self.dtypes.get(name, set()) | dtypes
        return out


def launches(model: LlamaForCausalLM, groups: int) -> list[Counter[str]]:
    """Return the operations of a pass over groups of eight answers, forward and back."""
    rows = [Trajectory.given([n] * 9 + [k] * (2 + k), 9) for n in range(groups) for k in range(8)]
    batch = Batch.of(rows, [n for n in range(groups) for _ in range(8)])
    with Launches() as ahead:
        out = forward(Net(model), batch, 1.0)
    with Launches() as back:
        out.logp.sum().backward()
    return [ahead.names, back.names]


@pytest.mark.parametrize(
    ("prepare", "most"), [(keep_less, (60, 150)), (compile_pieces, (18, 44))], ids=["plain", "compiled"]
)
def test_a_layers_operations_do_not_depend_on_the_groups(
    prepare: Callable[[LlamaForCausalLM], None],
    most: tuple[int, int],
    llama: Callable[..., LlamaForCausalLM],
    attend_by_spans: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At most 60 forward and 150 back: a GPU would wait for their launches, not for their arithmetic.

    A compiled piece counts as one.
    """

    def one(self: pieces._Compiled, *args: Any) -> tuple[torch.Tensor, ...]:
        with _disable_current_modes():
            out = self._function(*args)
        out[0].clone()
        return out

    monkeypatch.setattr(pieces._Compiled, "__call__", one)
    attend_by_spans()
    monkeypatch.setattr("posttrain.learner.kernels.suits", lambda x: False)
    # A call is one operation on a GPU.
    monkeypatch.setattr(
        varlen,
        "flash_forward",
        lambda q, *others: (torch.empty_like(q), torch.empty(q.shape[1], len(q)), torch.empty(2)),
    )
    monkeypatch.setattr(
        varlen, "flash_backward", lambda grad, saved, *others: tuple(map(torch.empty_like, saved[:3]))
    )
    counts = {}
    for groups in (2, 5):
        models = [llama(num_hidden_layers=n).bfloat16() for n in (2, 3)]
        for model in models:
            use_layouts(model)
            prepare(model)
        two, three = (launches(model, groups) for model in models)
        counts[groups] = [b - a for a, b in zip(two, three, strict=True)]
    assert counts[2] == counts[5]
    ahead, back = (sum(names.values()) + 1 for names in counts[2])  # and flash attention's own
    assert ahead <= most[0], counts[2]
    assert back <= most[1], counts[2]
