"""Recipes for GPUs: the estimates beside them are what the planner computes for models of these sizes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen3MoeConfig

from posttrain.models.pretrained import silent
from posttrain.plan.memory import GIB
from posttrain.plan.plan import Plan, plan_run
from posttrain.recipe import config
from posttrain.recipe.catalogue import recipes_dir

FREE = {"24gb": 23, "80gb": 79}
"""GiB that a card of this size has free when nothing else runs on it."""
QWEN: dict[str, tuple[int, int, int, int, int]] = {
    "0.5B": (896, 4864, 24, 14, 2),
    "3B": (2048, 11008, 36, 16, 2),
    "7B": (3584, 18944, 28, 28, 4),
    "32B": (5120, 27648, 64, 40, 8),
    "30B-A3B": (2048, 6144, 48, 32, 4),
}
"""Hidden and intermediate size, layers, heads, key heads of Qwen2.5, and of Qwen3 for the model of experts,
as the configurations of the Hub have them."""
NUMBER = {
    "0.5B": 494_032_768,
    "3B": 3_085_938_688,
    "7B": 7_615_616_512,
    "32B": 32_763_876_352,
    "30B-A3B": 30_532_122_624,
}
TIED = ("0.5B", "3B")
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "head_dim": 128}
RECIPES = sorted(path.stem for path in (recipes_dir() / "gpu").glob("*.toml"))


def planned(name: str, make_model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Plan, int]:
    """Return the plan of a recipe on its card, without the model's weights, and the card's free GiB."""
    card = next(card for card in FREE if card in name)
    tables = config.read(recipes_dir() / "gpu" / f"{name}.toml").tables
    size = tables["model"]["path"].partition("-")[2].removesuffix("-Instruct")
    model = make_model()
    for file in model.glob("*.safetensors"):
        file.unlink()
    own = json.loads((model / "config.json").read_text())
    ends = {key: own[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in own}
    hidden, intermediate, layers, heads, key_heads = QWEN[size]
    kind, architecture = (Qwen3MoeConfig, "Qwen3Moe") if size == "30B-A3B" else (Qwen2Config, "Qwen2")
    kind(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=152_064 if size in ("7B", "32B") else 151_936,
        tie_word_embeddings=size in TIED,
        max_position_embeddings=32_768,
        architectures=[f"{architecture}ForCausalLM"],
        **(EXPERTS if size == "30B-A3B" else {}),
        **ends,
    ).save_pretrained(model)
    data = folder / "sums.jsonl"
    data.write_text('{"question": "What is 2+3?", "answer": "It is 5.\\n#### 5"}\n' * 800)
    tables["model"] |= {"path": str(model), "dtype": "bfloat16", "device": "cuda", "random_init": True}
    for table in (tables["task"]["data"], tables["task"]["held_out"]):
        table["path"] = str(data)
        del table["subset"], table["split"]
    monkeypatch.setattr("posttrain.plan.model_info.usable_device", lambda device, _: torch.device("cuda", 0))
    monkeypatch.setattr("posttrain.plan.plan.free_memory", lambda device: FREE[card] * GIB)
    monkeypatch.setattr("posttrain.plan.plan._check_server", lambda *args, **options: None)  # none runs here
    ranks = int(name.partition("x")[0]) if "x" in name else 1
    plan = plan_run(config.from_tables(tables).recipe, silent, folder, ranks=ranks)
    assert plan.parameters == NUMBER[size]
    return plan, FREE[card]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.sample(every=2)
def test_the_estimate_beside_a_recipe_is_the_planners(name, make_model, tmp_path, monkeypatch) -> None:
    plan, free = planned(name, make_model, tmp_path, monkeypatch)
    plan.check_memory()
    rows = plan.memory.rows() | {"microbatch": f"{plan.microbatch_tokens} tokens"}
    whose = "Memory of each" if plan.ranks > 1 else "Memory"
    lines = [f"# {whose}, estimated by posttrain validate with {free} GiB free:"]
    lines += [f"#   {key:<30} {value}" for key, value in rows.items()]
    comment = "\n".join(lines)
    text = (recipes_dir() / "gpu" / f"{name}.toml").read_text()
    assert comment in text, comment
    assert plan.microbatch_tokens >= 4096
    assert "# Result: not run: needs a GPU" in text
