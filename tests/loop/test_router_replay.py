"""rollout.router_replay in whole runs."""

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from posttrain.engines.native.cache import Cache, PromptLayout
from posttrain.models.attention import hidden_states, use_layouts
from posttrain.models.experts import Routers
from posttrain.models.pretrained import load_model, save_pretrained


@pytest.fixture
def experts(tiny: Path, tmp_path: Path) -> Path:
    """A random model of four experts."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    save_pretrained(Qwen3MoeForCausalLM(config), tokenizer, tmp_path / "experts")
    return tmp_path / "experts"


@pytest.mark.parametrize(
    "ahead",
    [{}, pytest.param({"async": {"place": "process"}}, marks=pytest.mark.full)],
    ids=["here", "process"],
)
def test_a_run_trains_each_token_with_the_experts_of_the_sampler(
    run_cli, write, online, experts, tmp_path, updates, ahead
) -> None:
    code = tmp_path / "letters.py"
    code.write_text("def reward(response):\n    return sum(map(ord, response)) % 8 / 8\n")
    tables = {
        "model": {"path": str(experts), "dtype": "float32"},
        "verifier": {"number": None, "function": {"function": f"{code}:reward"}},
        "rollout": {"router_replay": True, "groups": 2, "group_size": 2},
        "sampling": {"max_new_tokens": 5},
        "run": {"updates": 1},
        "eval": {"limit": 0},
    }
    recipe = write(online, tables | ahead)
    said = run_cli("train", recipe, "--run-dir", tmp_path / "run", "--quiet")
    assert said.code == 0, said.err
    [(batch, norm)] = updates
    assert norm > 0
    model = load_model(experts, dtype=torch.float32)
    use_layouts(model)
    routers = Routers(model, notes=True)
    for tokens, length, routes in zip(batch.tokens, batch.length.tolist(), batch.routes, strict=True):
        layout = PromptLayout(Cache(0, 0), [tuple(tokens[:length].tolist())])
        with torch.no_grad():
            hidden_states(model, *layout.inputs(torch.device("cpu"))[:, None], layout)
        assert torch.equal(routes[: length - 1], routers.taken().transpose(0, 1)[:-1])
        assert set(routes[length - 1 :].flatten().tolist()) <= {-1}


def test_a_model_without_experts_has_nothing_to_replay(run_cli, write, online, tmp_path) -> None:
    recipe = write(online, {"rollout": {"router_replay": True}})
    said = run_cli("validate", recipe)
    assert said.code == 2
    assert "rollout.router_replay: llama has no routers whose choices can be replayed" in said.err
