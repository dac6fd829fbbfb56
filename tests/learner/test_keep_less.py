"""learner/recompute.py: norms and gates that keep less, with the gradients of a model that keeps all."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from posttrain.learner import kernels, packed_attention, recompute
from posttrain.learner.pack import pack, trained_states
from posttrain.learner.recompute import keep_less, recomputing
from posttrain.models.attention import use_layouts
from posttrain.models.pretrained import skeleton
from posttrain.plan.memory import Shape, activation_bytes
from posttrain.types import Batch, Trajectory

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
KINDS = {"llama": (2, 5), "qwen3": (2, 9), "gemma3_text": (2, 13), "phi3": (0, 5), "gpt2": (0, 0)}
"""Modules that are changed: feed-forward layers that are gated by two products; and, below float32, norms."""


def model_of(kind: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    shape = SHAPE | ({"n_embd": 32, "n_layer": 2, "n_head": 4} if kind == "gpt2" else {})
    shape |= {"pad_token_id": 0} if kind in ("phi3", "glm") else {}
    config = AutoConfig.for_model(kind, **shape)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # not all ones, nor zeros
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model


class Alive(TorchDispatchMode):
    """The memory of all that was computed within it and is still held."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in args if isinstance(x, torch.Tensor)}
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in given:
                self.made.append((StorageWeakRef(x.untyped_storage()), x.untyped_storage().nbytes()))
        return out

    @property
    def bytes(self) -> int:
        return sum(size for ref, size in self.made if not ref.expired())


def kept(model: Any, tokens: torch.Tensor, hooks: Any = None) -> float:
    """Bytes that a forward pass of the body keeps."""
    with hooks or nullcontext(), Alive() as alive:
        out = model(tokens, use_cache=False).last_hidden_state
    assert out.requires_grad
    return alive.bytes


def gradients(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(logits, gradients)"""
    with recomputing():
        logits = model(torch.arange(48).reshape(2, 24), use_cache=False).logits
    logits.float().logsumexp(-1).square().sum().backward()
    return logits.detach(), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_same_bits(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "suits", lambda x: False)
    plain = model_of(kind, dtype)
    ours = copy.deepcopy(plain)
    keep_less(ours)
    changed = [m for m in ours.modules() if "learner.recompute" in type(m).__module__]
    gates, norms = KINDS[kind]
    assert len(changed) == gates + norms * (dtype != torch.float32)
    for model in (ours, copy.deepcopy(ours)):  # a copy computes with its own weights
        model.zero_grad()
        logits, grads = gradients(model)
        wanted_logits, wanted = gradients(copy.deepcopy(plain))
        assert torch.equal(logits, wanted_logits)
        for name, grad in grads.items():
            assert torch.equal(grad, wanted[name]), name
        with torch.no_grad():
            assert torch.equal(model(torch.arange(4)[None]).logits, plain(torch.arange(4)[None]).logits)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_compiled_norms_and_gates_err_no_more_than_pytorch_does(kind: str) -> None:
    """Both in bfloat16, against float32; a norm of another formula (Gemma's) is left to PyTorch."""
    plain = model_of(kind, torch.bfloat16)
    if not kernels.suits(next(plain.parameters())):
        pytest.skip("NOT RUN: no kernel is compiled here, which wants Linux and g++")
    ours, exact = copy.deepcopy(plain), copy.deepcopy(plain).float()
    keep_less(ours)
    compiled = [m for m in ours.modules() if type(m).forward.__qualname__.startswith("_compiled_norm")]
    assert len(compiled) == {"llama": 5, "qwen3": 9, "gemma3_text": 0}[kind]
    (logits, grads), (_, by_pytorch), (wanted_logits, wanted) = map(gradients, (ours, plain, exact))
    assert (logits - wanted_logits).norm() / wanted_logits.norm() < 0.01
    for name, right in wanted.items():
        errors = [((found[name] - right).norm() / right.norm()).item() for found in (grads, by_pytorch)]
        assert errors[0] < 1.25 * errors[1] + 0.002, name


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text", "glm"])
def test_compiled_rotations_change_no_bit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With PyTorch's norms and gates; a rotation of another formula (GLM's pairs) is left to it as well."""
    plain = model_of(kind, torch.bfloat16)
    if not kernels.suits(next(plain.parameters())):
        pytest.skip("NOT RUN: no kernel is compiled here, which wants Linux and g++")
    monkeypatch.setattr(recompute, "_epsilon", lambda module: None)
    monkeypatch.setattr(recompute, "_is_gated", lambda module: False)
    ours = copy.deepcopy(plain)
    keep_less(ours)
    rotating = [m for m in ours.modules() if type(m).__module__ == kernels.__name__]
    assert len(rotating) == (0 if kind == "glm" else 2)
    (logits, grads), (wanted_logits, wanted) = map(gradients, (ours, plain))
    assert torch.equal(logits, wanted_logits)
    assert all(torch.equal(grad, wanted[name]) for name, grad in grads.items())


def test_less_is_kept() -> None:
    """Of a feed-forward layer two of four; of a norm what comes in alone, and nothing in float32.

    What a compiled norm gives is not kept either, but by the last one's caller.
    """
    plain = model_of("llama", torch.bfloat16).model
    ours = copy.deepcopy(plain)
    keep_less(ours)
    layers, tokens, hidden, inner = 2, torch.arange(48).reshape(2, 24), 32, 96
    gates = layers * 48 * 2 * inner * 2
    norms = (2 * layers + 1) * 48 * 4 * hidden
    given = 2 * layers * 48 * 2 * hidden if kernels.suits(plain.norm.weight) else 0
    assert kept(plain, tokens) - kept(ours, tokens, recomputing()) >= gates + norms + given
    assert not recompute._recomputations  # nothing is remembered of a pass that is over


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_is_what_a_plan_reckons_with(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without compiled norms, with which it is less."""
    monkeypatch.setattr(kernels, "suits", lambda x: False)
    shape = SHAPE | {"hidden_size": 144, "intermediate_size": 384, "num_hidden_layers": 4, "head_dim": 36}
    config = AutoConfig.for_model("llama", **shape)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).model
    keep_less(model)
    guess = activation_bytes(Shape.of(skeleton(config)), dtype.itemsize, False)
    assert guess == pytest.approx(kept(model, torch.randint(64, (1, 256)), recomputing()) / 256, rel=0.15)


def test_only_what_is_wanted_gets_a_gradient() -> None:
    """Under an adapter no norm has one, and what stands below the first adapter needs none either."""
    model = model_of("llama", torch.float32)
    keep_less(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1.mlp" in name)
    _, grads = gradients(model)
    assert {name for name, grad in grads.items() if grad is not None} == {
        f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up", "down")
    }


def test_what_computes_otherwise_is_left_alone() -> None:
    model = model_of("llama", torch.float32)
    kind = type(model.model.layers[0].mlp)
    other = type("Other", (kind,), {"forward": lambda self, x: 2 * kind.forward(self, x)})
    model.model.layers[0].mlp.__class__ = other
    keep_less(model)
    assert type(model.model.layers[0].mlp) is other


def test_what_was_changed_in_place_is_kept() -> None:
    x = torch.ones(8, requires_grad=True)
    made = 2 * x
    with recomputing():
        recompute._recomputable(lambda: torch.full((8,), 2.0), made)
        made.add_(1)
        (made * made).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [12.0] * 8  # 4 (2x + 1); of what would be made again 8x


@pytest.mark.parametrize("answers", [4, 32])
def test_a_long_prompt_is_not_kept_again_for_each_of_its_answers(answers: int, monkeypatch) -> None:
    """Where branches attend one by one: bytes of a packed token must not grow with their number."""
    monkeypatch.setattr(packed_attention, "suits", lambda *_: False)
    kept = {n: _kept_a_token(n) for n in (2, answers)}
    assert kept[answers] < 1.1 * kept[2], kept


def _kept_a_token(answers: int) -> float:
    """Bytes that a forward pass of a prompt of 1000 tokens with so many answers leaves, by packed token."""
    model = model_of("llama", torch.float32)
    use_layouts(model)
    g = torch.Generator().manual_seed(0)
    prompt = torch.randint(64, (1000,), generator=g).tolist()
    rows = [
        Trajectory(
            tokens=[*prompt, *torch.randint(64, (20,), generator=g).tolist()],
            sampled=[False] * 1000 + [True] * 20,
            logp_gen=[0.0] * 1020,
            logp_policy=[0.0] * 1020,
            version=[0] * 1020,
            reward=[0.0] * 1020,
        )
        for _ in range(answers)
    ]
    packed = pack(Batch.of(rows, group=[0] * answers))
    seen: dict[int, int] = {}

    def note(x: torch.Tensor) -> torch.Tensor:
        seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        held.append(x)  # so that its place is not given to another
        return x

    held: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        out = trained_states(model, packed)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert out.requires_grad
    return sum(size for place, size in seen.items() if place not in weights) / len(packed.tokens)
