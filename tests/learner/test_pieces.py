"""learner/pieces.py: norms, gates, rotations and picks by torch.compile, against their formulas."""

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextAttention
from transformers.models.llama.modeling_llama import LlamaAttention

from posttrain.learner import kernels, pieces
from posttrain.learner.learner import Learner, Steps
from posttrain.learner.recompute import compile_pieces, keep_less, recomputing
from posttrain.math import tokens
from posttrain.methods.build import build
from posttrain.types import Batch, Trajectory, UserError

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
COMPILED = {
    "llama": (5, 2, 2),
    "qwen3": (9, 2, 2),
    "gemma3_text": (13, 2, 2),
    "glm": (5, 0, 2),
    "qwen2_moe": (5, 2, 2),
}
"""Norms, gates and rotations of each family; GLM's gate and up are one product."""


def but_first_in_full(names: Any) -> list[Any]:
    first, *others = names
    return [first, *(pytest.param(name, marks=pytest.mark.full) for name in others)]


@pytest.fixture(autouse=True)
def forgets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test compiles is gone after it."""
    monkeypatch.setattr(pieces, "_pieces", {})
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Pieces are traced and differentiated, and PyTorch runs the graphs: no C++ is compiled. Lists them."""
    graphs: list[Any] = []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph

    use(monkeypatch, backend)
    return graphs


def use(monkeypatch: pytest.MonkeyPatch, backend: Callable[..., Any] | str) -> None:
    monkeypatch.setattr(pieces, "BACKEND", backend)
    monkeypatch.setattr(pieces, "_pick_forward", pieces._Compiled("pick", pieces._pick))
    monkeypatch.setattr(pieces, "_pick_backward", pieces._Compiled("its gradient", pieces._pick_gradient))


def model_of(kind: str, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    shape = SHAPE | ({"pad_token_id": 0} if kind == "glm" else {})
    if "moe" in kind:
        shape |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape), dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # not all ones, nor zeros
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model


def gradients(model: Any, length: int = 24) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(logits, gradients)"""
    with recomputing():
        logits = model((torch.arange(2 * length) % 64).reshape(2, length), use_cache=False).logits
    logits.float().logsumexp(-1).square().sum().backward()
    return logits.detach(), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("kind", but_first_in_full(COMPILED))
def test_each_family_has_the_gradients_of_its_own_formulas(kind: str, traced: list[Any]) -> None:
    """Gemma's norms add 1 to their weights, and its gate is a GELU; half of GLM's numbers are rotated."""
    exact = "moe" not in kind  # products of experts are in float32
    plain = model_of(kind, torch.float64 if exact else torch.float32)
    ours = copy.deepcopy(plain)
    compile_pieces(ours)
    made = [type(module).forward.__qualname__ for module in ours.modules()]
    rotating = [module for module in ours.modules() if type(module).__module__ == kernels.__name__]
    norms, gates, rotations = COMPILED[kind]
    assert sum(name.startswith("_compiled_norm") for name in made) == norms
    assert sum(name.startswith("_gated") for name in made) == gates
    assert len(rotating) == rotations
    (logits, grads), (wanted_logits, wanted) = map(gradients, (ours, plain))
    if kind == "llama":
        assert len(traced) == 6  # a norm, a gate, a rotation, and their gradients, whatever the layers
    graphs = len(traced)
    near, least = (1e-9, 1e-12) if exact else (1e-4, 1e-5)
    assert torch.allclose(logits, wanted_logits, rtol=near, atol=least)
    for name, grad in grads.items():
        assert (grad is None) == (wanted[name] is None), name
        assert grad is None or torch.allclose(grad, wanted[name], rtol=near, atol=least), name
    with torch.no_grad():  # an old log-probability has the bits of a new one
        again = ours(torch.arange(48).reshape(2, 24), use_cache=False).logits
    assert torch.equal(again, logits)
    gradients(ours, 9)
    assert len(traced) == graphs  # any number of tokens comes


def test_only_what_is_wanted_gets_a_gradient(traced: list[Any]) -> None:
    module = model_of("llama").model.norm
    for name in ("weight", "input"):
        weight = module.weight.detach().clone().requires_grad_(name == "weight")
        x = torch.randn(1, 7, 32, dtype=torch.float64).requires_grad_(name == "input")
        pieces.norm(module)(x, weight).sum().backward()
        assert [t.grad is not None for t in (weight, x)] == [name == "weight", name == "input"]


def test_a_piece_saves_its_inputs_alone_and_a_rotation_its_tables(traced: list[Any]) -> None:
    module = model_of("gemma3_text").model.norm
    x, heads = (torch.randn(shape, dtype=torch.float64) for shape in ((1, 7, 32), (1, 2, 7, 8)))
    table = torch.randn(1, 7, 8, dtype=torch.float64)
    rotate = pieces.rotation(kernels.rotation_of(LlamaAttention))
    for piece, inputs, kept in (
        (pieces.norm(module), (x.requires_grad_(), module.weight), (x, module.weight)),
        (rotate, (heads.requires_grad_(), heads, table, table), (table,)),
    ):
        saved = set[int]()

        def note(t: torch.Tensor, saved: set[int] = saved) -> torch.Tensor:
            saved.add(t.data_ptr())
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            piece(*inputs)
        assert saved == {t.data_ptr() for t in kept}


def test_a_model_may_be_prepared_again(traced: list[Any]) -> None:
    model = model_of("llama")
    logits = model(torch.arange(8)[None]).logits
    for prepare in (keep_less, compile_pieces, compile_pieces):
        prepare(model)
        assert torch.allclose(model(torch.arange(8)[None]).logits, logits, rtol=1e-12)


def test_norms_that_differ_in_a_constant_are_not_one_piece(traced: list[Any]) -> None:
    one, other = model_of("llama").model.norm, model_of("llama").model.norm
    x = torch.randn(1, 3, 32, dtype=torch.float64)
    for epsilon, count in ((one.variance_epsilon, 1), (0.1, 2)):
        other.variance_epsilon = epsilon
        with torch.no_grad():
            for module in (one, other):
                assert torch.allclose(pieces.norm(module)(x, module.weight), module(x))
        assert len(pieces._pieces) == count


def test_rotations_of_another_form_are_left_alone(traced: list[Any]) -> None:
    """Gemma 3n rotates queries and keys one by one."""
    assert kernels.has_rotation(LlamaAttention)
    assert not kernels.has_rotation(Gemma3nTextAttention)


def test_what_is_compiled_wrong_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use(monkeypatch, lambda graph, example: lambda *args: tuple(1.01 * x for x in graph(*args)))
    module = model_of("llama").model.norm
    piece, x = pieces.norm(module), torch.randn(1, 7, 32, dtype=torch.float64)
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.allclose(piece(x, module.weight), module(x), rtol=1e-15)
    assert [r.getMessage() for r in caplog.records] == [
        "steps.compile: PyTorch computes a norm, which errs 1e+04 times what rounding does"
    ]


def test_a_comparison_waits_for_numbers_that_say_something(traced: list[Any]) -> None:
    """Gradients of 0 are right in any case; numbers of a policy that is sure differ by rounding alone."""
    logits = torch.zeros(40, 70)
    logits[:, 3] = 20.0
    targets = torch.full((40,), 3)
    pieces.pick(logits, targets)
    assert list(pieces._pick_forward._is_right.values()) == [True]
    for weight, known in ((0.0, []), (1.0, [True])):
        leaf = logits.clone().requires_grad_()
        (weight * pieces.pick(leaf, targets)[0].sum()).backward()
        assert list(pieces._pick_backward._is_right.values()) == known


def test_without_a_compiler_the_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def backend(graph: Any, example: Any) -> Any:
        raise OSError("no g++ here")

    use(monkeypatch, backend)
    module = model_of("llama").model.norm
    with pytest.raises(
        UserError, match=r"steps.compile: torch.compile fails .*no g\+\+ here; install a C\+\+"
    ):
        pieces.norm(module)(torch.randn(1, 7, 32, dtype=torch.float64), module.weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_picks_are_the_closed_form(dtype: torch.dtype, traced: list[Any]) -> None:
    """Also of tokens that are ruled out, and with an entropy whose weight is large."""
    check_picks(dtype)


def check_picks(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(40, 70, generator=g)).to(dtype)
    logits[:, 60:] = -torch.inf
    targets = torch.randint(60, (40,), generator=g)
    weights = torch.randn(2, 40, generator=g).to(torch.promote_types(dtype, torch.float32)) * 5
    found, wanted = [logits.clone().requires_grad_() for _ in range(2)]
    outs = pieces.pick(found, targets, 0.7), tokens.pick(wanted, targets, 0.7)
    near = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    for out in outs:
        (torch.stack(out) * weights).sum().backward()
    for a, b in zip(*outs, strict=True):
        assert torch.allclose(a, b, rtol=min(near, 1e-5), atol=min(near, 1e-5))
    assert found.grad is not None
    assert wanted.grad is not None
    assert torch.allclose(found.grad, wanted.grad, rtol=near, atol=near)


@pytest.mark.skipif(kernels.load(torch.float32) is None, reason="NOT RUN: inductor wants a C++ compiler")
def test_the_real_compiler_makes_norms_and_picks() -> None:
    """By inductor, as a run does; the other tests trace alone."""
    check_picks(torch.float32)
    module = model_of("qwen3", torch.float32).model.norm
    ours, theirs = (torch.randn(1, 50, 32, generator=torch.Generator().manual_seed(2)) for _ in range(2))
    for x in (ours, theirs):
        x.requires_grad_()
    pieces.norm(module)(ours, module.weight).sin().sum().backward()
    module(theirs).sin().sum().backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)


def update_of(
    kind: str, *, routes: bool = False, **steps: Any
) -> tuple[dict[str, float], list[torch.Tensor]]:
    """Metrics and weights after an update of GRPO on random rows."""
    g = torch.Generator().manual_seed(5)
    rows = []
    for n in range(8):
        length = 12 + n
        drawn = torch.randint(64, (length,), generator=g).tolist()
        row = Trajectory.given([*range(1, 7), *drawn[6:]], trained=[False] * 6 + [True] * (length - 6))
        row.reward[-1] = float(n % 3)
        rows.append(row)
    learner = Learner(model_of(kind, torch.float32), build("grpo", {}, horizon=32), steps=Steps(**steps))
    update = learner.update(Batch.of(rows, [n // 4 for n in range(8)]))
    return update.metrics, [p.detach().clone() for p in learner.model.parameters()]


CASES = {
    "minibatches": ("gemma3_text", {"minibatches": 2, "epochs": 2}),
    "whole": ("llama", {}),
    "recomputed": ("qwen3", {"gradient_checkpointing": True}),
    "experts": ("qwen3_moe", {}),
}


def check_update(case: str) -> None:
    kind, steps = CASES[case]
    (plain, before), (compiled, after) = (update_of(kind, **steps, compile=c) for c in (False, True))
    assert plain.keys() == compiled.keys()
    for name, number in plain.items():
        assert compiled[name] == pytest.approx(number, rel=1e-5, abs=1e-5), name
    for a, b in zip(before, after, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", but_first_in_full(CASES))
def test_an_update_has_the_metrics_of_one_that_is_not_compiled(case: str, traced: list[Any]) -> None:
    check_update(case)
    assert traced


@pytest.mark.full
@pytest.mark.skipif(kernels.load(torch.float32) is None, reason="NOT RUN: inductor wants a C++ compiler")
@pytest.mark.parametrize("case", CASES)
def test_so_it_has_by_the_real_compiler(case: str) -> None:
    check_update(case)
