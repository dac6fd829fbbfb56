"""Write a model of transformers, with its tokenizer, as one GGUF file for llama.cpp and programs built on it.

Llama, Qwen 2 and Qwen 3 with a byte-level BPE tokenizer. A GGUF file holds few of a configuration's fields,
and a reader takes the others by the architecture's name: a model that differs in another field is refused.

Source: the GGUF specification of ggml-org/ggml, and llama.cpp's converter.
"""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import (
    GGML_QUANT_VERSION,
    MODEL_ARCH,
    GGMLQuantizationType,
    GGUFWriter,
    LlamaFileType,
    TokenType,
    get_tensor_name_map,
    quants,
)
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from posttrain.models.attention import key_heads_of
from posttrain.models.gguf_files import LLAMA3
from posttrain.types import UserError

TYPES: Mapping[str, tuple[GGMLQuantizationType, LlamaFileType]] = {
    "f32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
"""How matrices are stored. Vectors are float32 in every file."""
ARCHITECTURES = {"llama": MODEL_ARCH.LLAMA, "qwen2": MODEL_ARCH.QWEN2, "qwen3": MODEL_ARCH.QWEN3}
"""By the model_type of config.json."""
FREE = {
    *("_name_or_path", "architectures", "attention_dropout", "bos_token_id", "dtype", "eos_token_id"),
    *("head_dim", "initializer_range", "max_window_layers", "pad_token_id", "pretraining_tp"),
    *("transformers_version", "use_cache"),
}
"""Fields of a configuration on which logits do not depend, or which are checked in another way."""
BLOCK = 32
"""Numbers that share a scale in q8_0."""
LARGEST_F16 = 65504.0
_LAYER = re.compile(r"\.attn_([qk])\.(weight|bias)$")


def write_gguf(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    file: Path,
    kind: str,
    progress: Callable[[int, int], None] = lambda count, total: None,
) -> None:
    """Write the model and its tokenizer to a .gguf file.

    kind: a key of TYPES. A matrix whose rows are not a multiple of 32 numbers is stored as f16 instead of
    q8_0, as by llama.cpp. progress: called with the numbers of tensors that are written and of all.

    Raises UserError, which names the field, for a model or a tokenizer that the file could not describe.
    """
    config = model.config
    check_config(config)
    tensors = _tensors(model)
    eos = model.generation_config.eos_token_id if model.generation_config else None
    turn_ends = [token for token in (eos if isinstance(eos, list) else []) if token != tokenizer.eos_token_id]
    with closing(GGUFWriter(file, ARCHITECTURES[config.model_type].name.lower())) as writer:
        _add_config(writer, config, kind)
        _add_tokenizer(writer, tokenizer, config)
        if turn_ends:
            writer.add_eot_token_id(turn_ends[0])
        for name, tensor in tensors.items():
            stored, size = _type(tensor, kind), _bytes(tensor, kind)
            writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), size, stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for count, (name, tensor) in enumerate(tensors.items(), start=1):
            writer.write_tensor_data(_encoded(name, tensor, kind))
            progress(count, len(tensors))


def check_config(config: PretrainedConfig) -> None:
    """Raise UserError for a configuration that a GGUF file cannot describe."""
    kind = config.model_type
    if kind not in ARCHITECTURES:
        raise UserError("--gguf", f"{kind} is not supported", f"it writes {', '.join(ARCHITECTURES)}")
    rope = config.rope_parameters
    llama3 = kind == "llama" and rope["rope_type"] == "llama3"
    if llama3 and any(rope[key] != value for key, value in LLAMA3.items()):
        raise UserError("--gguf", f"rope_parameters = {rope} is not Llama 3's scaling", "export without it")
    stated = {
        "max_position_embeddings": config.max_position_embeddings,
        "num_hidden_layers": config.num_hidden_layers,
        "intermediate_size": config.intermediate_size,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_word_embeddings,
        "rope_parameters": rope if llama3 else {"rope_theta": rope["rope_theta"], "rope_type": "default"},
    }
    as_read, fields = type(config)(**stated).to_dict(), config.to_dict()
    for key in sorted(as_read.keys() - FREE):
        if fields.get(key) != as_read[key]:
            problem = (
                f"a file of {kind} cannot say {key} = {fields.get(key)!r}: it is read as {as_read[key]!r}"
            )
            raise UserError("--gguf", problem, "export without --gguf")


def _add_config(writer: GGUFWriter, config: PretrainedConfig, kind: str) -> None:
    key_heads, head = key_heads_of(config)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(key_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(TYPES[kind][1])
    writer.add_quantization_version(GGML_QUANT_VERSION)


def _add_tokenizer(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> None:
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    model = state["model"]
    added = {token["id"]: token for token in state["added_tokens"]}
    pre = _pre_tokenizer(state)
    texts = {number: text for text, number in model["vocab"].items()}
    texts |= {number: token["content"] for number, token in added.items()}
    if max(texts) >= config.vocab_size:
        problem = f"token {texts[max(texts)]!r} has no row of the embedding"
        raise UserError("--gguf", problem, "export without --gguf")
    types = [TokenType.UNUSED] * config.vocab_size
    for number in texts:
        types[number] = TokenType.NORMAL
        if number in added:
            types[number] = TokenType.CONTROL if added[number]["special"] else TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([texts.get(number, f"[PAD{number}]") for number in range(config.vocab_size)])
    writer.add_token_types(types)
    if model["merges"]:  # the writer cannot write an empty list
        writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["merges"]])
    for name, add in (
        ("bos", writer.add_bos_token_id),
        ("eos", writer.add_eos_token_id),
        ("unk", writer.add_unk_token_id),
        ("pad", writer.add_pad_token_id),
    ):
        if (number := getattr(tokenizer, f"{name}_token_id")) is not None:
            add(number)
    bos = tokenizer.bos_token_id
    writer.add_add_bos_token(bos is not None and tokenizer("x").input_ids[:1] == [bos])
    writer.add_add_space_prefix(False)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _pre_tokenizer(state: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for how a tokenizer.json splits text before its merges.

    Raises UserError if the tokenizer is not byte-level BPE, or if the rule has no name.
    """
    normalizer = (state["normalizer"] or {}).get("type")
    if state["model"]["type"] != "BPE" or normalizer not in (None, "NFC"):
        kind = f"{state['model']['type']} with the normalizer {normalizer}"
        raise UserError("--gguf", f"the tokenizer is {kind}, not byte-level BPE", "export without --gguf")
    first = state["pre_tokenizer"] or {}
    parts = first.get("pretokenizers", [first])
    last = parts[-1]
    if last.get("type") == "ByteLevel" and not last["add_prefix_space"]:
        match parts[:-1]:
            case [] if last["use_regex"]:
                return "gpt-2"
            case [{"type": "Digits", "individual_digits": True}] if last["use_regex"]:
                return "smollm"
            case [{"type": "Split", "pattern": {"Regex": rule}, "behavior": "Isolated"}]:
                for name, split in GGUF_PRE_TOKENIZER_SPLITS.items():
                    if split == rule and not last["use_regex"]:
                        return str(name)
    rules = "null" if not first else ", ".join(str(part.get("pattern", part.get("type"))) for part in parts)
    raise UserError(
        "--gguf", f"llama.cpp has no name for the tokenizer's pre_tokenizer {rules}", "export without --gguf"
    )


def _tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the model's tensors by their names in the file; UserError for one that has none."""
    config = model.config
    names = get_tensor_name_map(ARCHITECTURES[config.model_type], config.num_hidden_layers)
    tensors = {}
    for place, tensor in model.state_dict().items():
        if place == "lm_head.weight" and config.tie_word_embeddings:
            continue
        owner, _, suffix = place.rpartition(".")
        name = names.get_name(owner)
        if name is None:
            raise UserError("--gguf", f"a file of {config.model_type} has no place for {place}")
        tensors[f"{name}.{suffix}"] = tensor
    if config.model_type == "llama":
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
        for name, tensor in tensors.items():
            if match := _LAYER.search(name):
                tensors[name] = _interleaved(tensor, heads[match[1]])
        if config.rope_parameters["rope_type"] == "llama3":
            tensors["rope_freqs.weight"] = _divisors(config)
    return tensors


def _interleaved(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder the rows of each head from (first halves, second halves) to pairs, which llama.cpp rotates."""
    return x.reshape(heads, 2, x.shape[0] // heads // 2, -1).transpose(1, 2).reshape(x.shape)


def _divisors(config: PretrainedConfig) -> torch.Tensor:
    """Return what Llama 3's scaling divides each rotary frequency by, as llama.cpp stores it."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    exponents = torch.arange(len(scaled), dtype=torch.float64) / len(scaled)
    divisors: torch.Tensor = config.rope_parameters["rope_theta"] ** -exponents / scaled
    return divisors.float()


def _type(tensor: torch.Tensor, kind: str) -> GGMLQuantizationType:
    if tensor.ndim == 1:
        return GGMLQuantizationType.F32
    if kind == "q8_0" and tensor.shape[-1] % BLOCK:
        return GGMLQuantizationType.F16
    return TYPES[kind][0]


def _bytes(tensor: torch.Tensor, kind: str) -> int:
    shape = quants.quant_shape_to_byte_shape(tuple(tensor.shape), _type(tensor, kind))
    return int(np.prod(shape, dtype=np.int64))


def _encoded(name: str, tensor: torch.Tensor, kind: str) -> np.ndarray:
    numbers = tensor.detach().float().cpu().contiguous()
    stored = _type(tensor, kind)
    if stored is GGMLQuantizationType.F16 and float(numbers.abs().max()) > LARGEST_F16:
        raise UserError(
            "--gguf", f"{name} has numbers beyond float16's {LARGEST_F16:.0f}", "give --gguf bf16"
        )
    encoded: np.ndarray = quants.quantize(numbers.numpy(), stored)
    return encoded
