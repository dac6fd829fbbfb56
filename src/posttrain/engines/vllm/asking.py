"""Requests in the form that vLLM takes, in this process or over HTTP, and the weights that it needs."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from posttrain.engines.native.draw import stream_key
from posttrain.engines.sequence import Sequence, new_sequence
from posttrain.models.file_names import FromFiles, to_files
from posttrain.models.fingerprint import NamedTensors, fingerprint
from posttrain.types import Request, Sampling

LOWEST_BIAS = -100.0
"""The lowest bias of a logit that vLLM accepts."""
LEAST_TEMPERATURE = 0.01
"""vLLM raises any lower temperature to this, except 0."""


def check_sampling(sampling: Sampling) -> None:
    """Raise ValueError if vLLM cannot draw like this, or does not report the probability of each token."""
    if sampling.filtered:
        raise ValueError("of a filtered draw vLLM does not say how likely the token was before the filters")
    if 0 < sampling.temperature < LEAST_TEMPERATURE:
        raise ValueError(f"vLLM draws at no temperature below {LEAST_TEMPERATURE} but 0")


def checked_sequence(ticket: int, request: Request, vocabulary: int, context: int) -> Sequence:
    """Return the sequence of a request.

    Raise ValueError for an empty prompt, a token outside the vocabulary, a prompt that leaves no room for the
    answer, and whatever vLLM cannot draw.
    """
    check_sampling(request.sampling)
    if request.alternatives:
        raise ValueError("the likeliest tokens (top_logprobs) come from the native engine alone")
    if len(set(request.forced)) > 1:
        raise ValueError("vLLM can be forced to repeat one token, but not to draw several different ones")
    return new_sequence(ticket, request, vocabulary, context)


def sampling_params(
    sequence: Sequence, stop_tokens: Collection[int], masked: Collection[int]
) -> dict[str, Any]:
    """Return vLLM's sampling parameters for the rest of an answer; `masked` tokens are never drawn."""
    request, length = sequence.request, len(sequence.tokens)
    key = stream_key(request.seed, f"{request.position + length}\x00{request.task}", request.sample)
    return {
        **({"logit_bias": dict.fromkeys(masked, LOWEST_BIAS)} if masked else {}),
        "max_tokens": request.sampling.max_new_tokens - length,
        "temperature": request.sampling.temperature,
        "seed": key >> 1,  # 63 bits
        "stop_token_ids": sorted(stop_tokens),
        "logprobs": 0,
    }


class ExpectedWeights:
    """Shapes and names of the weights of a model; a load must bring each one once."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        empty = {name: torch.empty(shape, device="meta") for name, shape in self.shapes.items()}
        self._names = FromFiles(model, to_files(model, empty))
        aliases: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            aliases.setdefault(id(parameter), []).append(name)
        self._aliases = {
            first: [*to_files(model, dict.fromkeys(others, empty[first]))]
            for first, *others in aliases.values()
            if others
        }
        """Further names of a weight: on a CPU vLLM stores a head that is tied to the embedding in an order of
        its own, which only a weight under the name of the head renews."""

    def to_files(self, weights: NamedTensors) -> NamedTensors:
        """Yield weights under all the names that they have in the model's files.

        Each of stacked experts is a tensor there, which vLLM and other tools read.
        """
        return self._names.to_files(
            (other, value) for name, value in weights for other in (name, *self._aliases.get(name, ()))
        )

    def fingerprints(self, files: Mapping[str, torch.Tensor]) -> Iterator[str]:
        """Yield the fingerprint of each weight from tensors under the names of the files."""
        weights = FromFiles(self.model, files)
        return (fingerprint(name, weights[name]) for name in weights if name in self.shapes)
