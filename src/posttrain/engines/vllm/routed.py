"""Answers of a vLLM server with the experts of each token, from its endpoint for tokens (vLLM 0.32).

That of completions does not stream them. Here they come with the last part of an answer that the server has
ended, as a base64 of NumPy's file format: [tokens of prompt and answer - 1, decoder layers, experts a token].
"""

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy

from posttrain.engines.vllm.connection import NEUTRAL, config_of
from posttrain.engines.vllm.server import VllmServer
from posttrain.types import Routes

PATH = "/inference/v1/generate"
_START = "start it with --enable-return-routed-experts and VLLM_USE_V2_MODEL_RUNNER=1"


def check_routed(server: VllmServer) -> None:
    """Raise RunError if a server says that it does not return experts."""
    settings = config_of(server).get("aux_output_config")
    if settings is not None and not settings.get("enable_return_routed_experts"):
        raise server.fault(f"does not say to which experts it sends tokens: {_START}")


def body(model: str, prompt: Sequence[int], params: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a request; params: as those of a completion (`connection.completion_body`)."""
    return {
        "model": model,
        "token_ids": list(prompt),
        "sampling_params": NEUTRAL | params | {"detokenize": False},
        "stream": True,
    }


def as_completion(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a part of an answer in the form of a part of a completion, with `routed_experts`."""
    logprobs = (choice.get("logprobs") or {}).get("content") or []
    return choice | {"logprobs": {"token_logprobs": [token["logprob"] for token in logprobs]}}


def read_routes(server: VllmServer, choice: dict[str, Any], layers: Sequence[int], count: int) -> Routes:
    """Return the experts of the first `count` tokens in these decoder layers from the last part of an answer.

    Raise RunError if they are not there.
    """
    if not choice.get("routed_experts"):
        raise server.fault(f"does not say to which experts it sent the tokens of an answer: {_START}")
    with server.expecting("does not report the experts of each token"):
        array = numpy.load(io.BytesIO(base64.b64decode(choice["routed_experts"])), allow_pickle=False)
        if len(array) < count:
            raise ValueError(f"experts of {len(array)} tokens, and not of {count}")
        routes: Routes = array[:count, list(layers)].astype(numpy.int16)
        return routes
