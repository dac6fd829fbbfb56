"""How rotary positions are stretched in a .gguf file, which transformers does not read."""

import torch
from gguf import GGUFReader
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from posttrain.types import UserError

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of every Llama 3.1, 3.2 and 3.3; their factors differ."""


def restore_scaling(found: GGUFReader, config: PretrainedConfig, where: str) -> None:
    """Puts the scaling of rotary positions into the config, which transformers does not read of such files.

    llama.cpp keeps Llama 3's as a divisor of each frequency, and others by name: those are refused.
    """
    kind = next((field for name, field in found.fields.items() if name.endswith(".rope.scaling.type")), None)
    named = "none" if kind is None else kind.contents()
    divisors = next((x.data for x in found.tensors if x.name == "rope_freqs.weight"), None)
    if divisors is not None and (factor := float(divisors.max())) > 1:
        rope = dict(config.rope_parameters)
        config.rope_parameters = rope | LLAMA3 | {"rope_type": "llama3", "factor": factor}
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        places = torch.arange(len(scaled), dtype=torch.float64) / len(scaled)
        wanted = torch.from_numpy(divisors.copy()).double()
        if not torch.allclose(rope["rope_theta"] ** -places / scaled, wanted, rtol=1e-3):
            named = "by rope_freqs"
    if named not in ("none", "") and config.model_type != "gpt_oss":
        raise UserError(
            where,
            f"its rotary positions are scaled ({named}), which is lost on the way to safetensors",
            "take the model's safetensors",
        )
