"""Reward models as transformers stores them: the decoder of a language model, and a linear map called score.

...ForSequenceClassification   one number for a conversation, without a bias
...ForTokenClassification      one number at each token, with a bias
"""

import copy
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    PretrainedConfig,
)

from posttrain.types import UserError

WEIGHT, BIAS = "score.weight", "score.bias"


def head_class(config: PretrainedConfig, *, per_token: bool) -> type:
    """Return transformers' class for a reward model with a head called score; UserError if it has none."""
    classes = (
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING if per_token else MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    )
    if type(config) in classes:
        entry = classes[type(config)]
        model_class: type = entry if isinstance(entry, type) else entry[0]
        # A class with another name for its head would silently draw a fresh head.
        with torch.device("meta"):
            if hasattr(model_class(head_config(config, model_class, 0)), "score"):
                return model_class
    kind = "token" if per_token else "sequence"
    raise UserError(
        "model.path",
        f"transformers has no {kind} classification for {config.model_type} that could load it",
        "take a Llama, Qwen, Gemma 2 or Mistral",
    )


def head_config(config: PretrainedConfig, model_class: type, pad: int) -> PretrainedConfig:
    """Return the configuration under which transformers loads the model as that class."""
    out = copy.deepcopy(config)
    out.architectures = [model_class.__name__]
    out.num_labels = 1
    # Sequence classification reads the last token that is not padding, and fails without a pad token.
    out.pad_token_id = pad
    return out


def padded(tokenizer: Any, ends: Container[int]) -> Any:
    """Return the tokenizer with a pad token that does not end conversations: its own, or unk, bos ...

    transformers takes the last token that is not padding for the end. With a pad token that also ends turns
    it would read the number of another state.
    """
    preferred = (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id)
    candidates = [t for t in (*preferred, *tokenizer.all_special_ids) if t is not None and t not in ends]
    pad = candidates[0] if candidates else tokenizer.eos_token_id
    if pad == tokenizer.pad_token_id:
        return tokenizer
    out = copy.deepcopy(tokenizer)
    out.pad_token = tokenizer.convert_ids_to_tokens(pad)
    return out


def saved_head(path: Path) -> dict[str, torch.Tensor]:
    """Return the weight of a saved head, and its bias if it has one; empty if the model has no head."""
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            names = set(opened.keys())
            if WEIGHT not in names:
                continue
            head = {name: opened.get_tensor(name) for name in (WEIGHT, BIAS) if name in names}
        numbers = head[WEIGHT].shape[0]
        if numbers != 1:
            raise UserError(str(file), f"its head gives {numbers} numbers, and a score is one")
        return head
    return {}


def head_tensors(head: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a head's tensors (weight, bias) under transformers' names."""
    return {f"score.{name}": tensor for name, tensor in head.items()}


def is_reward_model(names: list[Any]) -> bool:
    """Return whether these architectures include one with a head for scores."""
    return any(str(n).endswith(("ForSequenceClassification", "ForTokenClassification")) for n in names)
