"""Adapters: a start that changes nothing, a merge that changes nothing, files that peft reads."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import PreTrainedModel

from posttrain.attention import use_layouts
from posttrain.learner.forward import forward
from posttrain.learner.learner import Learner, Steps
from posttrain.learner.lora import Lora, base, parameters, save_adapter, with_saved_adapter
from posttrain.learner.optim import Optim
from posttrain.methods.table import GRPO, SFT, build
from posttrain.types import Batch, Method

Make = Callable[..., Any]
KINDS = {
    "lora": Lora(rank=4, alpha=8),
    "rslora": Lora(rank=4, alpha=8, rslora=True),
    "dora": Lora(rank=4, alpha=8, dora=True),
    "two matrices": Lora(rank=2, targets=("q_proj", "down_proj")),
}
every_kind = pytest.mark.parametrize("kind", list(KINDS))


def taught(llama: Make, rows_of: Make, lora: Lora, updates: int = 4, **shape: Any) -> Learner:
    """A learner whose adapter has moved far."""
    learner = Learner(llama(0, **shape), SFT, optim=Optim(lr=0.05), lora=lora)
    for seed in range(updates):
        learner.update(rows_of(seed, dtype=torch.float32))
    return learner


def said(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    use_layouts(model)
    with torch.no_grad():
        return forward(model.eval(), batch, 1.0).logp


@pytest.mark.parametrize("kind", ["lora", "rslora", "two matrices"])
def test_at_the_start_it_is_the_model_bit_for_bit(kind: str, llama: Make, rows_of: Make) -> None:
    batch = rows_of(seed=1, dtype=torch.float32)
    plain, adapted = Learner(llama(0), SFT), Learner(llama(0), SFT, lora=KINDS[kind])
    assert torch.equal(plain.score(batch).logp, adapted.score(batch).logp)
    assert torch.equal(plain.score(batch).entropy, adapted.score(batch).entropy)
    before = dict(plain.weights())
    assert all(torch.equal(before[name], tensor) for name, tensor in adapted.weights())


@every_kind
def test_the_first_step_moves_b_alone_and_no_step_moves_the_model(
    kind: str, llama: Make, rows_of: Make
) -> None:
    learner = Learner(llama(0), SFT, optim=Optim(lr=0.05), lora=KINDS[kind])
    before = {n: p.detach().clone() for n, p in learner.model.named_parameters()}

    def moved() -> set[str]:
        return {n for n, p in learner.model.named_parameters() if not torch.equal(p, before[n])}

    learner.update(rows_of(seed=0, dtype=torch.float32))
    b = {n for n in before if ".lora_B." in n}
    magnitudes = {n for n in before if "lora_magnitude_vector" in n}
    assert len(b) == {"two matrices": 4}.get(kind, 14)
    assert moved() == b | magnitudes
    learner.update(rows_of(seed=1, dtype=torch.float32))
    assert moved() == b | magnitudes | {n for n in before if ".lora_A." in n}


@every_kind
@pytest.mark.parametrize("tied", [False, True])
def test_the_merged_weights_are_a_plain_model_that_says_the_same(
    kind: str, tied: bool, llama: Make, rows_of: Make
) -> None:
    learner = taught(llama, rows_of, KINDS[kind], tie_word_embeddings=tied)
    batch = rows_of(seed=9, dtype=torch.float32)
    plain = llama(1, tie_word_embeddings=tied)
    names = {n: p.shape for n, p in plain.named_parameters()}
    merged = dict(learner.weights())
    assert {n: t.shape for n, t in merged.items()} == names
    with torch.no_grad():
        for name, p in plain.named_parameters():
            p.copy_(merged[name])
    now = learner.score(batch).logp
    assert float((now - said(llama(0, tie_word_embeddings=tied), batch)).abs().max()) > 0.5
    torch.testing.assert_close(said(plain, batch), now, rtol=1e-4, atol=1e-4)


@every_kind
def test_what_is_saved_is_an_ordinary_adapter(kind: str, llama: Make, rows_of: Make, tmp_path: Path) -> None:
    learner = taught(llama, rows_of, KINDS[kind])
    batch = rows_of(seed=9, dtype=torch.float32)
    save_adapter(learner.model, tmp_path)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {p.name for p in tmp_path.iterdir()}
    loaded = PeftModel.from_pretrained(llama(0), str(tmp_path))
    torch.testing.assert_close(
        said(loaded.get_base_model(), batch), learner.score(batch).logp, rtol=1e-5, atol=1e-5
    )
    merged = with_saved_adapter(llama(0), tmp_path)
    assert not [n for n, _ in merged.named_parameters() if "lora" in n]
    torch.testing.assert_close(said(merged, batch), learner.score(batch).logp, rtol=1e-4, atol=1e-4)


def test_a_target_that_names_nothing_is_refused(llama: Make) -> None:
    with pytest.raises(ValueError, match="nothing_proj"):
        Learner(llama(0), SFT, lora=Lora(rank=2, targets=("nothing_proj",)))
    with pytest.raises(ValueError, match="rank"):
        Lora(rank=-1)
    with pytest.raises(ValueError, match="alpha"):
        Lora(rank=1, alpha=0)


@every_kind
def test_its_size_is_known_without_building_it(kind: str, llama: Make) -> None:
    model = llama(0)
    adapted = Learner(model, SFT, lora=KINDS[kind]).model
    count = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert parameters(llama(0).config, KINDS[kind]) == count


def test_nothing_of_it_is_random_but_the_start_which_the_seed_draws(llama: Make, rows_of: Make) -> None:
    model, state = llama(0), torch.get_rng_state()

    def start(seed: int) -> Learner:
        return Learner(copy.deepcopy(model), SFT, lora=KINDS["lora"], optim=Optim(lr=0.1), seed=seed)

    def trained(learner: Learner) -> torch.Tensor:
        return torch.cat([t.flatten() for t in learner.tensors()["trained"].values()])

    a, b, c = start(3), start(3), start(4)
    assert torch.equal(trained(a), trained(b))
    assert not torch.equal(trained(a), trained(c))
    for learner in (a, b):
        learner.update(rows_of(seed=0, dtype=torch.float32))
        learner.update(rows_of(seed=1, dtype=torch.float32))
    assert torch.equal(trained(a), trained(b))
    assert torch.equal(torch.get_rng_state(), state)
    assert not [m for m in a.model.modules() if isinstance(m, torch.nn.Dropout) and m.p > 0]


@pytest.mark.parametrize("lora", [Lora(), KINDS["lora"], KINDS["dora"]], ids=["copy", "lora", "dora"])
def test_the_reference_is_the_policy_as_it_began(lora: Lora, llama: Make, rows_of: Make) -> None:
    """A frozen copy, or the model without its adapter; and the policy has left it."""
    method: Method = build("grpo", {"kl_in_loss": 0.1}, horizon=8)
    reference = None if lora.rank else llama(0)
    learner = Learner(llama(0), method, optim=Optim(lr=0.05), lora=lora, reference=reference)
    batch = rows_of(seed=2, dtype=torch.float32)
    first = said(llama(0), batch)
    learner.update(batch)
    done = learner.update(batch)
    assert done.batch.logp_ref is not None
    torch.testing.assert_close(done.batch.logp_ref, first, rtol=0, atol=1e-5)
    torch.testing.assert_close(learner.score_reference(batch).logp, first, rtol=0, atol=1e-5)
    assert float((learner.score(batch).logp - first).abs().max()) > 0.1
    assert done.metrics["kl/ref"] > 1e-3
    assert base(learner.model).get_input_embeddings().weight.grad is None


def test_a_method_that_needs_a_reference_is_refused_without_one(llama: Make, rows_of: Make) -> None:
    with pytest.raises(ValueError, match="reference"):
        Learner(llama(0), build("grpo", {"kl_in_loss": 0.1}, horizon=8))
    with pytest.raises(ValueError, match="no adapter"):
        Learner(llama(0), GRPO).score_reference(rows_of(seed=0, dtype=torch.float32))


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_recomputed_activations_give_the_same_adapter(kind: str, llama: Make, rows_of: Make) -> None:
    ends = []
    for again in (False, True):
        steps = Steps(gradient_checkpointing=again)
        learner = Learner(llama(0), SFT, optim=Optim(lr=0.05), lora=KINDS[kind], steps=steps)
        for seed in range(2):
            learner.update(rows_of(seed, dtype=torch.float32))
        ends.append(learner.tensors()["trained"])
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
