"""What transformers does not read of GGUF files: further parts of a split model, and scaled rotary positions.

    name-00001-of-00003.gguf   the configuration, the tokenizer, and the first tensors
    name-00002-of-00003.gguf   further tensors, and nothing else

transformers reads one file and draws missing tensors at random, so the parts are joined first.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from gguf import GGUFReader, GGUFValueType, GGUFWriter, Keys
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from posttrain.types import UserError

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Rotary scaling of all Llama 3.1, 3.2 and 3.3, except `factor`, which differs between models."""
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def parts_of(file: Path) -> list[Path]:
    """Return all files of the model that a GGUF file belongs to, in order; UserError if one is missing."""
    match = _PART.fullmatch(file.name)
    if match is None:
        return [file]
    parts = [
        file.with_name(f"{match[1]}-{number:05d}-of-{match[3]}.gguf")
        for number in range(1, int(match[3]) + 1)
    ]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(
            str(file),
            f"is one of {len(parts)} parts of a model, and {missing[0]}{more} is not in its directory",
            "download all parts into one directory",
        )
    return parts or [file]


def join_parts(parts: Sequence[Path], out: Path) -> None:
    """Write one GGUF file with the metadata of the first part and the tensors of all parts.

    Raises UserError if the number of tensors differs from the one in the first part's metadata.
    """
    readers = [GGUFReader(part) for part in parts]
    fields = readers[0].fields
    writer = GGUFWriter(out, arch=str(fields[Keys.General.ARCHITECTURE].contents()))
    split = {Keys.Split.LLM_KV_SPLIT_NO, Keys.Split.LLM_KV_SPLIT_COUNT, Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT}
    written_by_writer = {*split, Keys.General.ARCHITECTURE, Keys.General.ALIGNMENT}
    for key, field in fields.items():
        # The writer cannot write an empty list.
        if key.startswith("GGUF.") or key in written_by_writer or not len(field.data):
            continue
        items = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), field.types[0], items)
    tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
    expected = fields.get(Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT)
    if expected is not None and expected.contents() != len(tensors):
        raise UserError(
            str(parts[0]),
            f"the model has {expected.contents()} tensors, and its {len(parts)} parts hold {len(tensors)}",
            "download all parts of one and the same model",
        )
    for tensor in tensors.values():
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def restore_scaling(reader: GGUFReader, config: PretrainedConfig, where: str) -> None:
    """Put the scaling of rotary positions into the config.

    llama.cpp stores Llama 3's scaling as a divisor of each frequency, and other scalings by name.

    Raises UserError for other scalings than Llama 3's.
    """
    field = next((f for name, f in reader.fields.items() if name.endswith(".rope.scaling.type")), None)
    kind = "none" if field is None else field.contents()
    divisors = next((x.data for x in reader.tensors if x.name == "rope_freqs.weight"), None)
    if divisors is not None and (factor := float(divisors.max())) > 1:
        rope = dict(config.rope_parameters)
        config.rope_parameters = rope | LLAMA3 | {"rope_type": "llama3", "factor": factor}
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        exponents = torch.arange(len(scaled), dtype=torch.float64) / len(scaled)
        expected_divisors = torch.from_numpy(divisors.copy()).double()
        if not torch.allclose(rope["rope_theta"] ** -exponents / scaled, expected_divisors, rtol=1e-3):
            kind = "by rope_freqs"
    if kind not in ("none", "") and config.model_type != "gpt_oss":
        raise UserError(
            where,
            f"its rotary positions are scaled ({kind}), which is lost on the way to safetensors",
            "take the model's safetensors",
        )
