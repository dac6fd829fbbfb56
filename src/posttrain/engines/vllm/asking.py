"""What vLLM is asked for an answer, in this process or over HTTP, and what it is to be given as weights."""

from collections.abc import Collection
from typing import Any

from transformers import PreTrainedModel

from posttrain.engines.native.draw import stream
from posttrain.engines.sequence import Sequence, new_sequence
from posttrain.types import Request, Sampling

LOWEST_BIAS = -100.0
"""vLLM lowers a logit by no more."""
LEAST_TEMPERATURE = 0.01
"""vLLM takes it for any that is lower, but for 0."""


def check_sampling(sampling: Sampling) -> None:
    """Passes where vLLM draws so and says how likely each token was; ValueError otherwise."""
    if sampling.filtered:
        raise ValueError("of a filtered draw vLLM does not say how likely the token was before the filters")
    if 0 < sampling.temperature < LEAST_TEMPERATURE:
        raise ValueError(f"vLLM draws at no temperature below {LEAST_TEMPERATURE} but 0")


def checked_sequence(ticket: int, request: Request, vocabulary: int, context: int) -> Sequence:
    """The answer that is to be drawn.

    Raises ValueError for an empty prompt, a token outside the vocabulary, a prompt that leaves no room for
    the answer, and for what vLLM cannot draw.
    """
    check_sampling(request.sampling)
    if len(set(request.forced)) > 1:
        raise ValueError("vLLM can be told to draw one token again and again, and no other row")
    return new_sequence(ticket, request, vocabulary, context)


def wishes(sequence: Sequence, stop_tokens: Collection[int], masked: Collection[int] = ()) -> dict[str, Any]:
    """How the rest of an answer is to be drawn, in vLLM's words; `masked` tokens never are."""
    request, drawn = sequence.request, len(sequence.tokens)
    key = stream(request.seed, f"{request.position + drawn}\x00{request.task}", request.sample)
    return {
        **({"logit_bias": dict.fromkeys(masked, LOWEST_BIAS)} if masked else {}),
        "max_tokens": request.sampling.max_new_tokens - drawn,
        "temperature": request.sampling.temperature,
        "seed": key >> 1,  # of 63 bits
        "stop_token_ids": sorted(stop_tokens),
        "logprobs": 0,
    }


class Expected:
    """The weights that a model is made of: what is handed over must be these, each once."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self.names = _names(model)


def _names(model: PreTrainedModel) -> dict[str, list[str]]:
    """Of each weight all names, its own first.

    On a processor vLLM keeps a head that is tied to the embedding in an order of its own, which only a weight
    of the head's name renews.
    """
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return {names[0]: names for names in found.values()}
