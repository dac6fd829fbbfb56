"""Every causal language model of transformers: equal to its own forward pass, row by row, or refused.

A tiny random model is made of each. Packed rows of the learner and answers of the engine are compared with
transformers' eager attention in float64. What is refused is named here, with the reason that is given.
"""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from posttrain.engines.native.engine import NativeConfig, NativeEngine
from posttrain.learner import pieces, recompute
from posttrain.learner.forward import Net, forward
from posttrain.models import compiled, slices
from posttrain.models.attention import use_layouts
from posttrain.models.experts import Routers, expert_layers, stacks
from posttrain.models.loading import quiet
from posttrain.models.pretrained import DECODERS, load_model
from posttrain.types import Batch, Request, Sampling

WINDOW = {"sliding_window": 4}
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2} | WINDOW
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}
NONE = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "layer_types": None}
SIZES: dict[str, Any] = {
    name: size
    for size, names in {
        64: "max_position_embeddings n_positions vocab_size vocab_size_per_layer_input",
        48: "intermediate_size n_inner ffn_dim d_ff dff ffn_hidden_size dense_intermediate_size",
        32: "hidden_size n_embd d_model embedding_size word_embed_proj_dim",
        16: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
        "expert_ffn_hidden_size",
        12: "q_lora_rank kv_lora_rank",
        8: "head_dim kv_channels qk_nope_head_dim global_head_dim query_pre_attn_scalar "
        "hidden_size_per_layer_input",
        6: "v_head_dim",
        4: "num_hidden_layers n_layer n_layers num_layers num_attention_heads n_head n_heads num_heads "
        "attention_heads num_experts num_local_experts n_routed_experts moe_num_experts qk_rope_head_dim "
        "rotary_dim laurel_rank",
        2: "num_key_value_heads num_experts_per_tok moe_k moe_topk zero_expert_num",
        1: "n_group topk_group n_shared_experts num_shared_experts first_k_dense_replace",
        0: "num_kv_shared_layers",
    }.items()
    for name in names.split()
}
SIZES |= {"initializer_range": 0.3} | WINDOW | NONE

FAMILIES = (
    *("llama", "llama, yarn", "mistral", "qwen2, windows", "qwen3_moe", "gemma3_text", "gemma4, shared keys"),
    *("deepseek_v3", "gpt2", "gpt_oss", "phi3", "cohere2", "qwen3_5_text"),
)
"""What `make test` runs: kinds of layers and of positions, experts, windows, shared keys, sinks, states."""
USUAL = """
    afmoe apertus arcee aria_text bitnet cohere cohere2 cohere2_moe ctrl diffllama dots1 ernie4_5
    ernie4_5_moe exaone4 exaone_moe flex_olmo gemma gemma2 gemma3_text gemma3n_text gemma4_text
    gemma4_unified_text glm glm4 glm4_moe gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_oss granite granite_swa
    granitemoe granitemoe_swa granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3
    hyperclovax jais2 jetmoe laguna lfm2 llama mellum mimo_v2_flash minimax_m2 minimax_m3_vl_text ministral
    ministral3 mistral mixtral nanochat olmo olmo2 olmo3 olmoe persimmon phi qwen2 qwen2_moe qwen3 qwen3_moe
    seed_oss smollm3 solar_open starcoder2 vaultgemma
"""
LATENT = "axk1 deepseek_v2 deepseek_v3 glm4_moe_lite longcat_flash minicpm3 youtu"
"""Latent attention (MLA): values have another head size than queries."""
PROVEN: dict[str, dict[str, Any]] = {key: {} for key in USUAL.split()}
PROVEN |= {key: {"num_key_value_heads": 4, "head_dim": 4} for key in LATENT.split()}
PROVEN |= {key: {"pad_token_id": 0} for key in ("opt", "phi3")}
DELTA_NETS = "olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next"
"""Gated delta nets: tokens see one another through a state."""
PROVEN |= {
    key: {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    for key in DELTA_NETS.split()
}
PROVEN |= {
    "bert-generation": {"is_decoder": True},
    "cwm": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0} | MIXED,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3n, shared keys": ("gemma3n_text", {"num_kv_shared_layers": 2} | MIXED),
    "gemma4, shared keys": ("gemma4_text", {"num_kv_shared_layers": 2} | MIXED),
    "gpt2, scaled by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "qwen2, windows": ("qwen2", {"use_sliding_window": True} | MIXED),
    "qwen3, windows": ("qwen3", {"use_sliding_window": True} | MIXED),
}
STACKED = """
    afmoe aria_text axk1 cohere2_moe deepseek_v2 deepseek_v3 dots1 ernie4_5_moe exaone_moe flex_olmo glm4_moe
    glm4_moe_lite gpt_oss granitemoe granitemoe_swa granitemoeshared hunyuan_v1_moe hy_v3 laguna mellum
    mimo_v2_flash minimax_m2 minimax_m3_vl_text mixtral olmoe qwen2_moe qwen3_5_moe_text qwen3_moe qwen3_next
    solar_open
"""
"""Those whose experts are stacks, which ranks may divide, with routers that can be noted and replayed."""
CASES = {name: (name, over) for name, over in PROVEN.items()} | VARIANTS

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "doge": ({}, "mask of its own"),
    "moshi": ({}, "does not pass the keywords of its forward"),
    "nemotron": ({}, "does not pass the keywords of its forward"),
    "phimoe": ({}, "sliding windows"),
    "qwen2_moe": ({"use_sliding_window": True} | MIXED, "sliding windows"),
    "gemma3_text": ({"use_bidirectional_attention": True}, "attends to later tokens"),
    "llama4_text": ({}, "chunked_attention layers"),
    "modernbert-decoder": ({"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}, "unexpected keyword"),
    "bert": ({"is_decoder": True, "pad_token_id": 0}, "computes its logits in a way"),
    "electra": ({"is_decoder": True, "pad_token_id": 0}, "computes its logits in a way"),
    "roberta": ({"is_decoder": True, "pad_token_id": 0}, "computes its logits in a way"),
}
LIKE_BERT = """
    camembert data2vec-text ernie megatron-bert roberta-prelayernorm roc_bert xlm-roberta xlm-roberta-xl xmod
"""
"""A head like that of bert, electra and roberta, which are tried."""
OTHER_LAYERS = """
    axk2 cohere_compass_text deepseek_v32 deepseek_v4 glm_moe_dsa granitemoehybrid hy_v4 lfm2_moe minimax
    qwen4_exp qwen4_exp_text recurrent_gemma
"""
"""Take their attention from the registry, but tokens see one another through other layers too."""
COMPOSITE = """
    blt emu3 fuyu gemma3 gemma3n gemma4 gemma4_assistant gemma4_unified gemma4_unified_assistant git got_ocr2
    llama4 mllama musicgen musicgen_melody phi4_multimodal
"""
"""Made of several models. Checkpoints name a ...ForConditionalGeneration, which `load_config` refuses unless
transformers has a language model for the text alone, as of Qwen3.5."""
NOT_MADE = "dbrx"
"""This version of transformers cannot make it."""


def build(name: str, over: dict[str, Any]) -> PreTrainedModel:
    """A tiny model in float64, every parameter off its starting value, with eager attention."""
    default = CONFIG_MAPPING[name]()
    known = default.to_dict().keys() | getattr(default, "attribute_map", {}).keys()
    sizes = {key: value for key, value in SIZES.items() if key in known} | over
    torch.manual_seed(0)
    with quiet():
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**sizes), attn_implementation="eager")
    with quiet():
        model.set_experts_implementation("eager")  # the other kernels know no float64
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    return model.double().eval()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("float64")
@pytest.mark.sample(*FAMILIES)
def test_learner_and_engine_compute_what_transformers_does(
    case: str,
    rows_of: Callable[..., Batch],
    by_hand: Callable[..., tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Rows of several turns with a common beginning; answers to prompts longer than a window."""
    plain = build(*CASES[case])
    ours = copy.deepcopy(plain)
    use_layouts(ours)
    batch = rows_of(seed=2, turns=3, system=9)
    with torch.no_grad():
        wanted, got = by_hand(plain, batch, 1.0)[0], forward(Net(ours), batch, 1.0).logp
        torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-8)
        assert float(wanted.abs().sum()) > 1

        engine = NativeEngine(ours, decode=str, stop_tokens=[], config=NativeConfig(rows=3), context=60)
        prompts = [tuple((7 * t + 5 * n) % 23 for t in range(n)) for n in (2, 5, 8, 14)]
        asked = {engine.submit(Request(prompt=p, sampling=Sampling(max_new_tokens=9))): p for p in prompts}
        while engine.busy:
            for ticket, answer in engine.poll():
                tokens = [*asked[ticket], *answer.tokens]
                logits = plain(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].double()
                at = torch.arange(len(asked[ticket]) - 1, len(tokens) - 1)
                true = logits.log_softmax(-1)[at, answer.tokens]
                torch.testing.assert_close(
                    torch.tensor(answer.logp_policy).double(), true, rtol=1e-5, atol=1e-5
                )


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_equal_is_refused_by_name(name: str) -> None:
    over, why = REFUSED[name]
    model = build(name, over)
    with pytest.raises(ValueError, match=why) as caught:
        use_layouts(model)
    assert re.match(r"[A-Z]\w+ ?", str(caught.value))


def test_every_architecture_of_transformers_is_in_one_of_the_lists() -> None:
    """A new version of transformers that brings new ones has to be looked at."""
    named = (
        PROVEN.keys()
        | REFUSED.keys()
        | set().union(*(names.split() for names in (LIKE_BERT, OTHER_LAYERS, COMPOSITE, NOT_MADE)))
    )
    missing = []
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        model = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[name]]
        if (
            model._supports_attention_backend
            and not getattr(model, "_is_stateful", False)
            and name not in named
        ):
            missing.append(name)
    assert missing == []


def test_what_is_proven_is_not_refused_by_the_name_of_its_class() -> None:
    refused = [name for name in PROVEN if not MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name].endswith(DECODERS)]
    assert refused == []


def test_the_page_of_models_names_those_that_are_proven() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    listed = page.partition("## Equal to transformers")[2].partition("Among them")[0]
    assert set(re.findall(r"`([\w-]+)`", listed)) - {"model_type"} == PROVEN.keys()
    assert f"{len(PROVEN)} of them" in listed


@pytest.mark.parametrize("case", STACKED.split())
@pytest.mark.sample("qwen3_moe", "deepseek_v3", "gpt_oss", "granitemoe")
def test_routers_choose_what_they_are_given_and_note_what_experts_get(case: str) -> None:
    model, got = build(*CASES[case]), []
    for experts in stacks(model):
        experts.register_forward_pre_hook(lambda _, x: got.append(x[1].reshape(-1, x[1].shape[-1]).long()))
    routers, tokens = Routers(model, notes=True), torch.arange(1, 8)[None]

    @torch.no_grad()
    def run(given: torch.Tensor | None) -> torch.Tensor:
        got.clear()
        routers.given = given
        logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
        assert torch.equal(torch.stack(got), routers.taken().long())
        return logits

    own = run(None)
    taken = routers.taken()
    assert len(expert_layers(model)) == len(routers) == len(taken)
    assert torch.equal(run(taken), own)
    assert torch.equal(run(torch.full_like(taken, -1)), own)
    other = (taken + 1) % next(stacks(model)).num_experts
    assert not torch.equal(run(other), own)
    assert torch.equal(routers.taken(), other)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample("gpt2", "qwen3_moe", "qwen3_5_text")
def test_weights_left_in_files_are_those_of_the_whole_model(case: str, tmp_path: Path) -> None:
    """Read by rows, with the buffers, names and configuration that transformers gives; layouts take both."""
    with quiet():
        build(*CASES[case]).float().save_pretrained(tmp_path)
    whole = load_model(tmp_path, dtype=torch.bfloat16)
    unread = slices.load_model(tmp_path, dtype=torch.bfloat16, device=torch.device("cpu"))
    stand_ins, weights = dict(unread.named_parameters()), dict(whole.named_parameters())
    rows = slices.take_rows(unread)
    assert list(rows) == list(stand_ins) == list(weights)
    for name, weight in weights.items():
        middle = len(weight) // 2
        halves = [rows[name](*ends) for ends in ((0, middle), (middle, len(weight))) if ends[0] < ends[1]]
        assert torch.equal(torch.cat(halves), weight), name
        assert stand_ins[name].dtype == weight.dtype, name
    buffers = dict(unread.named_buffers())
    assert list(buffers) == [name for name, _ in whole.named_buffers()]
    assert all(torch.equal(buffers[name], buffer) for name, buffer in whole.named_buffers())
    assert unread.config.to_dict() == whole.config.to_dict()
    assert unread.generation_config.to_dict() == whole.generation_config.to_dict()
    use_layouts(whole)
    use_layouts(slices.load_model(tmp_path, dtype=torch.bfloat16, device=torch.device("cpu")))


PARTLY_TURNED = {"phi3, three quarters": ("phi3", {"pad_token_id": 0, "partial_rotary_factor": 0.75})}


@pytest.mark.parametrize("case", CASES | PARTLY_TURNED)
@pytest.mark.skipif(compiled.compiler() is None, reason="kernels need g++")
@pytest.mark.sample(*FAMILIES)
def test_kernels_of_training_change_no_model(case: str, rows_of: Callable[..., Batch]) -> None:
    """In bfloat16: as near to float32 as transformers' own layers are, gradients too."""
    check_prepared(case, rows_of)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES | PARTLY_TURNED)
def test_pieces_change_no_model(
    case: str, rows_of: Callable[..., Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced and differentiated; PyTorch runs the graphs."""
    torch._dynamo.reset()
    monkeypatch.setattr(pieces, "_pieces", {})
    monkeypatch.setattr(pieces, "BACKEND", lambda graph, example: graph)
    check_prepared(case, rows_of, compiles=True)
    torch._dynamo.reset()


def check_prepared(case: str, rows_of: Callable[..., Batch], *, compiles: bool = False) -> None:
    name, over = (CASES | PARTLY_TURNED)[case]
    heads = {} if name in LATENT.split() else {"hidden_size": 128, "head_dim": 32}
    plain = build(name, over | heads).bfloat16()
    batch = rows_of(seed=2, turns=3, system=9)
    found = {}
    for kind in ("float32", "plain", "kernels"):
        model = copy.deepcopy(plain).to(torch.float32 if kind == "float32" else torch.bfloat16)
        if kind == "kernels":
            recompute.prepare(model, [], [], checkpointing=False, twice=False, compiles=compiles)
        else:
            use_layouts(model)
        out = forward(Net(model), batch, 1.0)
        (out.logp.sum() + 0.3 * out.entropy.sum()).backward()  # type: ignore[no-untyped-call]
        grads = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
        found[kind] = out.logp.detach().float(), torch.cat(grads)
    for which in (0, 1):
        exact = found["float32"][which]
        off = {kind: float((found[kind][which] - exact).norm() / exact.norm()) for kind in found}
        assert off["kernels"] <= 3 * off["plain"] + 0.01, off
