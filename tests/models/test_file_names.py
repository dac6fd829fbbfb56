"""Checkpoints hold a model's tensors under the names of its own files, and are read under those in memory."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from posttrain.evaluation.changes import initial_weights
from posttrain.learner.learner import Learner
from posttrain.loop import saving
from posttrain.methods.table import SFT
from posttrain.models.file_names import FromFiles, to_files
from posttrain.models.loading import quiet, stored_buffers
from posttrain.models.pretrained import load_model
from posttrain.models.rounding import dither
from posttrain.recipe.recipe import Checkpoints
from posttrain.types import Batch, Trajectory

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = ("qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3")


def model_of(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = SIZES | ({"num_key_value_heads": 4} if family == "deepseek_v3" else {})
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))


def tensors_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) | dict(stored_buffers(model))


@pytest.mark.parametrize("family", [*EXPERTS, "llama"])
def test_names_and_bits_are_those_of_save_pretrained(family: str, tmp_path: Path) -> None:
    """Of a model that was drawn and of one that was read; and the parameters are read from them again."""
    model = model_of(family)
    for _ in range(2):
        tensors = tensors_of(model)
        model.save_pretrained(tmp_path)
        files = load_file(tmp_path / "model.safetensors")
        assert (files.keys() == tensors.keys()) == (family == "llama")
        saved = to_files(model, tensors)
        assert saved.keys() == files.keys()
        assert all(saved[name].equal(x) for name, x in files.items())
        for source in (files, tensors):  # older checkpoints had the names in memory
            back = FromFiles(model, source)
            assert back.keys() == tensors.keys()
            assert all(back[name].equal(x) for name, x in tensors.items())
        model = AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.sample("qwen3_moe", "deepseek_v3")
def test_a_checkpoint_of_experts_is_resumed_bit_for_bit(family: str, tmp_path: Path) -> None:
    batch = Batch.of(
        [Trajectory.given([5, 6, 7, 8, n], trained=[False, *[True] * 4]) for n in (9, 10)], [0, 1]
    )
    learner = Learner(model_of(family), SFT)
    learner.update(batch)
    tokenizer = SimpleNamespace(save_pretrained=lambda folder: None)
    state = {"progress": {"update": 1}}
    settings = Checkpoints(best=False)
    folder = saving.save(tmp_path, learner, tokenizer, settings, state, {}, head=None, replay=None)
    names = load_file(folder / "model" / "model.safetensors").keys()
    block, parts = "mlp", ("gate_proj", "up_proj", "down_proj")
    if family == "mixtral":
        block, parts = "block_sparse_moe", ("w1", "w2", "w3")
    assert {f"model.layers.1.{block}.experts.3.{part}.weight" for part in parts} <= names
    again = Learner(model_of(family), SFT)
    saving.restore(folder, again, {"learner": learner.state()})
    for part in (learner, again):
        part.update(batch)
    ends = [learner.tensors()["trained"], again.tensors()["trained"]]
    assert all(ends[1][name].equal(x) for name, x in ends[0].items())


@pytest.mark.parametrize("seed", [None, 0], ids=["read", "drawn"])
def test_the_start_of_a_run_has_the_names_of_its_checkpoints(seed: int | None, tmp_path: Path) -> None:
    """A bfloat16 weight is dithered under the name of its parameter, and no matrix differs before a step."""
    with quiet():
        model_of("qwen3_moe").bfloat16().save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=torch.bfloat16, init_seed=seed)
    masters = to_files(model, {name: dither(name, p.detach()) for name, p in model.named_parameters()})
    start = initial_weights(tmp_path, masters, torch.bfloat16, seed)
    assert start.keys() == masters.keys()
    assert all(torch.equal(start[name].load(), x) for name, x in masters.items())
