"""Reward models as transformers keeps them: the decoder of a language model, and one linear map called score.

...ForSequenceClassification   one number for a whole conversation, without a bias
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
    """The transformers class of such a model with a head called score; UserError if there is none."""
    found = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING if per_token else MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    if type(config) in found:
        chosen = found[type(config)]
        model_class: type = chosen if isinstance(chosen, type) else chosen[0]
        # Some call their head otherwise, and would load ours as a fresh one, without a word.
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
    """The configuration under which transformers loads the model as that class."""
    out = copy.deepcopy(config)
    out.architectures = [model_class.__name__]
    out.num_labels = 1
    # Sequence classification looks for the last token that is not padding, and fails without one.
    out.pad_token_id = pad
    return out


def padded(tokenizer: Any, ends: Container[int]) -> Any:
    """The tokenizer, with a pad token that no conversation ends with: its own, or else unk, bos ...

    Transformers takes the last token that is not padding for the end. With a pad that ends a turn too, it
    would read the number of another state.
    """
    named = (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id)
    others = [t for t in (*named, *tokenizer.all_special_ids) if t is not None and t not in ends]
    pad = others[0] if others else tokenizer.eos_token_id
    if pad == tokenizer.pad_token_id:
        return tokenizer
    out = copy.deepcopy(tokenizer)
    out.pad_token = tokenizer.convert_ids_to_tokens(pad)
    return out


def saved_head(path: Path) -> dict[str, torch.Tensor]:
    """The weight of a head, and its bias if there is one; empty if the model has none."""
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
    """A head's own tensors (weight, bias) under the names that transformers gives them."""
    return {f"score.{name}": tensor for name, tensor in head.items()}


def is_reward_model(names: list[Any]) -> bool:
    """Whether these architectures are those of a model with a head for scores."""
    return any(str(n).endswith(("ForSequenceClassification", "ForTokenClassification")) for n in names)
